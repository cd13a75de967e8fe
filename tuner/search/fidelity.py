"""Fidelity of a comparison: all trials at their rung, or all at their end, never mixed.

A value at a tenth of the episodes says less than one at the end of a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ppo_core.metrics import METRICS
from ppo_core.output import counted
from tuner.search.choose import SHARE
from tuner.store import TrialRow
from tuner.study.spec import StudySpec

_KL = METRICS["eval/kl"]


@dataclass(frozen=True)
class RungPause:
    """A pause of a trial by the strategy."""

    episode: int
    score: float | None
    """Its screening score, from 0 to 1; None: no KL could be read."""


def rung_pauses(rows: Iterable[TrialRow]) -> dict[int, RungPause]:
    """Return the pauses at rungs by trial number."""
    return {row.number: RungPause(row.rung_episode, row.rung_score) for row in rows if row.rung_episode is not None}


@dataclass(frozen=True)
class Fidelity:
    """A point at which trials are compared."""

    at_rung: bool
    """True for the rung, False for the end."""
    name: str
    reward: str
    """Axis title of the reward."""
    kl: str
    """Axis title of the KL."""
    short: tuple[str, str]
    """Short names of both, the KL first."""
    doc: str
    """Description of the numbers, in a sentence."""


_RUNG = Fidelity(
    True,
    "at screening",
    "Eval reward at screening",
    f"Eval KL at screening ({_KL.unit})",
    ("KL at screening", "Reward at screening"),
    "All trials that were screened, with their evaluations there, whether finished or not.",
)
_END = Fidelity(
    False,
    "at their end",
    "Eval reward of the best checkpoint",
    f"Eval KL at the end ({_KL.unit})",
    ("KL at the end", "Value"),
    "The reward is that of a trial's best checkpoint within the KL budget, the KL that of its last evaluation.",
)


def offered(spec: StudySpec) -> list[Fidelity]:
    """Return a study's fidelities: the rung, if its strategy pauses trials, and the end."""
    if not spec.pauses_trials:
        return [_END]
    left_out = "Trials that were not promoted are left out, since they have no end value. "
    return [_RUNG, replace(_END, doc=left_out + _END.doc)]


def read(
    rows: Sequence[TrialRow], at: Fidelity, evaluated: Mapping[tuple[int, int], tuple[float, float]]
) -> tuple[TrialRow, ...]:
    """Return the trials that reached a fidelity, with their `value` and `kl` there.

    `evaluated` maps a trial's number and episode to eval reward and eval KL.
    """
    if not at.at_rung:
        return tuple(replace(row, kl=row.end_kl) for row in rows if row.status.is_final)
    trials = []
    for row in rows:
        if row.rung_episode is not None:
            reward, kl = evaluated.get((row.number, row.rung_episode), (None, None))
            trials.append(replace(row, value=reward, value_se=None, kl=kl))
    return tuple(trials)


def read_where(rows: Sequence[TrialRow], at: Fidelity, spec: StudySpec) -> str:
    """Return at which share of episodes trials were screened; empty for the end, or if no trial reached it."""
    shares = [
        row.rung_episode / int(row.config["total_episodes"] or spec.total_episodes)
        for row in rows
        if row.rung_episode is not None
    ]
    if not at.at_rung or not shares:
        return ""
    least, most, rung = (f"{share:.0%}" for share in (min(shares), max(shares), SHARE))
    place = least if least == most else f"{least} to {most}"
    why = f" Screening is at {rung}, rounded up to whole iterations, and to two at least."
    before = sum(row.status.is_final and row.rung_episode is None for row in rows)
    others = f" {counted(before, 'other')} ended before it." if before else ""
    whose = "its" if len(shares) == 1 else "their"
    return f"{counted(len(shares), 'trial')} read at {place} of {whose} episodes.{'' if place == rung else why}{others}"
