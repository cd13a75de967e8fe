"""Where trials are read when they are compared: at one rung or at their end, and never both at once.

A trial that the strategy paused at a tenth of its episodes has a value, too, which says less than one of a whole run.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ppo_core.errors import ConfigError
from ppo_core.hyperparameters import PPOConfig
from ppo_core.metrics import METRICS
from ppo_core.output import counted
from tuner.spec import StudySpec
from tuner.store import TrialRow
from tuner.strategies import Asha, EarlyCut, rung_episodes

_KL = METRICS["eval/kl"]

SHARES: Mapping[str, tuple[float, ...]] = {one.name: one.shares for one in (EarlyCut, Asha)}
"""Of a trial's episodes, where each strategy that pauses trials has its rungs."""


@dataclass(frozen=True)
class Rest:
    """A pause of a trial by the strategy."""

    episode: int
    score: float | None
    """Its rung score, in reward; None: nothing could be read."""


def rests(rows: Iterable[TrialRow], spec: StudySpec) -> dict[int, tuple[Rest, ...]]:
    """Return where the strategy paused trials, by number, the first rung first; those never paused are left out."""
    shares, found = SHARES.get(spec.strategy, ()), {}
    for row in rows:
        with suppress(ConfigError):  # a configuration of another version
            episodes = _rungs(row, shares) if row.rung_scores else ()
            found[row.number] = tuple(Rest(*rest) for rest in zip(episodes, row.rung_scores, strict=False))
    return {number: its for number, its in found.items() if its}


def _rests_at(rung: int, rows: Iterable[TrialRow], spec: StudySpec) -> dict[int, Rest]:
    """Return where the strategy paused trials at one rung, by number; those that did not reach it are left out."""
    return {number: its[rung] for number, its in rests(rows, spec).items() if len(its) > rung}


def _rungs(row: TrialRow, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the episodes at a trial's rungs; two that fall together are one."""
    config = PPOConfig.from_dict(row.config)
    every = (rung_episodes(config, share) for share in shares)
    return tuple(dict.fromkeys(episode for episode in every if episode is not None))


# Where trials are read.


@dataclass(frozen=True)
class Fidelity:
    """One of the places where trials can be read."""

    rung: int | None
    """Its index; None: at their end."""
    name: str
    reward: str
    """What is read of the reward, for an axis."""
    kl: str
    """What is read of the KL, for an axis."""
    short: tuple[str, str]
    """Both in a word or three, the KL first."""
    doc: str
    """What the numbers are, in a sentence."""


def offered(spec: StudySpec) -> list[Fidelity]:
    """Return where a study's trials can be read: at each rung of its strategy, and at their end."""
    shares = SHARES.get(spec.strategy, ())
    rungs = [
        Fidelity(
            rung,
            "at their rung" if len(shares) == 1 else f"at rung {rung + 1}",
            "Rung score (reward)",
            f"Eval KL at the rung ({_KL.unit})",
            ("KL at the rung", "Rung score"),
            "All trials that reached the rung, with their values there, whether finished or not. The reward is the "
            "rung score, by which the strategy ranks them.",
        )
        for rung in range(len(shares))
    ]
    return [*rungs, _best_at_end(rungs) if spec.objective == "best" else _end(rungs)]


def _best_at_end(rungs: Sequence[Fidelity]) -> Fidelity:
    note = "The reward is that of a trial's best checkpoint within the KL budget, the KL that of its last evaluation."
    title, kl = "Eval reward of the best checkpoint", f"Eval KL at the end ({_KL.unit})"
    return Fidelity(None, "at their end", title, kl, ("KL at the end", "Best reward"), _left_out(rungs) + note)


def _end(rungs: Sequence[Fidelity]) -> Fidelity:
    note, short = "Reward and KL are the means of a trial's last two evaluations.", ("Eval KL", "Eval reward")
    return Fidelity(None, "at their end", METRICS["eval/reward"].title, _KL.title, short, _left_out(rungs) + note)


def _left_out(rungs: Sequence[Fidelity]) -> str:
    return "Trials that are paused at a rung are left out, since they have no end value. " if rungs else ""


def read(
    rows: Sequence[TrialRow], at: Fidelity, kls: Mapping[tuple[int, int], float], spec: StudySpec
) -> tuple[TrialRow, ...]:
    """Return the trials that came to a place, with the `value` and `kl` that they read there.

    `kls` are the study's evaluations: eval KL by a trial's number and the episode.
    """
    if at.rung is None:
        ended = (row for row in rows if row.status.is_final)
        return tuple(replace(row, kl=row.end_kl) if spec.objective == "best" else row for row in ended)
    its = _rests_at(at.rung, rows, spec)
    return tuple(
        replace(row, value=its[row.number].score, value_se=None, kl=kls.get((row.number, its[row.number].episode)))
        for row in rows
        if row.number in its
    )


def read_where(rows: Sequence[TrialRow], at: Fidelity, spec: StudySpec) -> str:
    """Return a sentence on the part of their episodes at which trials were read; empty: at their end, or none was."""
    if at.rung is None:
        return ""
    total = {row.number: int(row.config["total_episodes"] or spec.total_episodes) for row in rows}
    its = _rests_at(at.rung, rows, spec)
    shares = {f"{rest.episode / total[number]:.0%}": rest.episode / total[number] for number, rest in its.items()}
    if not shares:
        return ""
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    where, named = least if least == most else f"{least} to {most}", f"{SHARES[spec.strategy][at.rung]:.0%}"
    why = (
        ""
        if where == named
        else f" The rung is at {named}, rounded up to whole iterations and never before a trial's second."
    )
    return f"{counted(len(its), 'trial')} read at {where} of {'its' if len(its) == 1 else 'their'} episodes.{why}"
