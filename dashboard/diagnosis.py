"""Diagnosis of a trial whose KL went over its limit, the table of reward hacking, and advice on a study.

Pure functions. The crossing is the first step whose exact KL is over the guard's limit, else over the budget. The first
third of the steps before it (at least `LEAST`) gives each signal's usual range: its median, plus and minus the largest
of `SPREADS` median absolute deviations (scaled to a normal's standard deviation), a tenth of the median, and `FLOOR`. A
signal has left its range at the first later step, up to the crossing, from which it stays outside for `STAYS`
readings in a row (or for all that are left). Those that left earliest moved first. This is an order in time,
not a cause.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from dashboard import data
from dashboard.data import Snapshot
from dashboard.health import Card
from ppo_core.metrics import METRICS
from ppo_core.output import decimals, pluralize, plus_minus
from tuner.confirm.answer import Answer
from tuner.judge.diagnose import fresh_curves
from tuner.judge.hacking import Finding, Verdict, check, on_fresh_seeds
from tuner.judge.results import StudyView
from tuner.search.choose import why_early
from tuner.store import Store
from tuner.study.rules import KL, SIGNS
from tuner.study.status import Status

LEAST = 4
SPREADS = 4.0
SHARE = 0.1
FLOOR = 1e-9
STAYS = 2
_NORMAL = 1.4826  # scales a median absolute deviation to a normal's standard deviation


@dataclass(frozen=True)
class Signal:
    """A watched metric, and the side on which leaving its range is a sign."""

    metric: str
    side: Literal["up", "either"]
    meaning: str
    """Meaning of such a move; limits and advice are in `tuner.study.rules`."""


SIGNALS = (
    Signal("policy/clipfrac_avg", "up", "the updates grew"),
    Signal("policy/entropy_avg", "either", "the policy is collapsing, or coming apart"),
    # Schedules lower it, which never causes a blow-up.
    Signal("lr", "up", "the learning rate rose"),
    Signal("objective/kl_coef", "either", "β has relaxed, or is reacting already"),
    Signal("response/length_mean", "either", "KL is a sum over tokens"),
    Signal("loss/value_avg", "up", "the advantages are unreliable"),
)


@dataclass(frozen=True)
class Moved:
    """One signal before the crossing."""

    signal: Signal
    low: float
    high: float
    """Its usual range, in its unit."""
    step: int | None
    """First step outside its range; None: it stayed inside."""


@dataclass(frozen=True)
class Incident:
    """A crossing of a KL limit, and the signals before it."""

    line: Literal["limit", "budget"]
    step: int
    """The first step over the line."""
    kl: float
    """KL at that step, in nats per response."""
    moves: tuple[Moved, ...]
    """Every signal that was measured, in the declared order."""

    @property
    def first(self) -> tuple[Moved, ...]:
        """Signals that moved first; empty: none left its range before the KL crossed."""
        steps = [move.step for move in self.moves if move.step is not None]
        return tuple(move for move in self.moves if steps and move.step == min(steps))


def find(steps: pd.DataFrame, *, limit: float, budget: float) -> Incident | None:
    """Return the incident in a trial's steps (see `dashboard.data.curves`), or None if its KL stayed low.

    Its moves are empty if the crossing came too early to know the usual ranges.
    """
    steps = steps[steps["step"] > 0].sort_values("step")
    line: Literal["limit", "budget"] = "limit" if (steps[KL] > limit).any() else "budget"
    over = steps[steps[KL] > (limit if line == "limit" else budget)]
    if over.empty:
        return None
    crossing = over.iloc[0]
    before = steps[steps["step"] <= crossing["step"]]
    usual = max(LEAST, (len(before) - 1) // 3)
    moves = [_moved(signal, before, usual) for signal in SIGNALS] if len(before) > usual else []
    return Incident(line, int(crossing["step"]), float(crossing[KL]), tuple(filter(None, moves)))


def incident_text(incident: Incident) -> str:
    """Return one sentence on what moved first."""
    if not incident.moves:
        return "The KL crossed before there were enough steps to know what is usual in this trial."
    if not incident.first:
        return "No signal left its usual range before the KL crossed."
    first = incident.first[0]
    steps = incident.step - (first.step or 0)
    names = " and ".join(METRICS[move.signal.metric].label for move in incident.first)
    when = f"{pluralize(steps, 'step')} before the KL crossed" if steps else "in the same step"
    return f"{names} moved first, at step {first.step}, {when}: {first.signal.meaning}."


def _moved(signal: Signal, before: pd.DataFrame, usual: int) -> Moved | None:
    """Return a signal's move before the crossing; None where its range is unknown. `usual` is the number of steps that
    give the range.
    """
    known = before[signal.metric].iloc[:usual].dropna()
    if len(known) < LEAST:
        return None
    middle = float(known.median())
    spread = float((known - middle).abs().median()) * _NORMAL
    width = max(SPREADS * spread, SHARE * abs(middle), FLOOR)
    low, high = middle - width, middle + width
    later = before.iloc[usual:].dropna(subset=signal.metric)
    values = later[signal.metric]
    outside = ((values > high) | (values < low) & (signal.side == "either")).tolist()
    for place in range(len(outside)):
        if all(outside[place : place + STAYS]):
            return Moved(signal, low, high, int(later["step"].iloc[place]))
    return Moved(signal, low, high, None)


def hacking_of(curves: pd.DataFrame, kl_budget: float) -> list[Finding]:
    """Return the finding on every trial of `curves` (with the metrics `hacking.NEEDED`), by number."""
    return [
        check(int(number), steps.sort_values("step").to_dict("records"), kl_budget)
        for number, steps in curves.groupby("trial")
    ]


def with_fresh_seeds(store: Store, view: StudyView, finding: Finding) -> Finding:
    """Return a trial's finding, given those of its configuration's runs on fresh seeds."""
    fresh = fresh_curves(store, view, finding.trial).values()
    return on_fresh_seeds(finding, [check(0, steps, view.spec.kl_budget) for steps in fresh])


HACKING_TITLES = {
    "verdict": "Verdict",
    "reward": "Rise of reward",
    "KL": "Last eval KL (nats)",
    "length": "Length (tokens)",
    "repetition": "Repetition",
    "entropy": "Entropy (nats)",
}
"""Titles of the readings of `hacking_rows`; KL is per response, entropy per token."""
VERDICTS: Mapping[Verdict, str] = {
    "suspect": "▲ suspect", "repeated": "▲ on fresh seeds too", "borderline": "△ not on fresh seeds",
    "clean": "✓ no sign", "no rise": "– no rise", "too early": "… too early",
}  # fmt: skip


def hacking_rows(findings: Sequence[Finding]) -> pd.DataFrame:
    """Return one row per trial: verdict, rise of reward, and each reading that was measured."""
    places = decimals([one.rise for one in findings], [one.rise_se for one in findings])
    rows = [
        {
            "trial": finding.trial,
            "verdict": VERDICTS[finding.verdict],
            "reward": ""
            if math.isnan(finding.rise)
            else plus_minus(finding.rise, finding.rise_se, places, signed=True),
        }
        | {reading.name: f"{'▲ ' if reading.is_worse else ''}{reading.numbers}" for reading in finding.readings}
        for finding in findings
    ]
    return pd.DataFrame(rows, columns=["trial", "verdict", "reward", "KL", "length", "repetition", "entropy"])


@dataclass(frozen=True)
class Advice:
    """Something to do."""

    level: Literal["error", "warning", "info"]
    text: str
    """Our own words alone."""
    command: tuple[str, ...] = ()
    """Words of the `ppo-tuner` command for it, if any."""


def problems(snapshot: Snapshot, answer: Answer | None, cards: Sequence[Card]) -> list[Advice]:
    """Return what needs a person, the most pressing first; an answer's own doubt is not repeated."""
    view, name = snapshot.view, snapshot.view.row.name
    found = [*_of_state(snapshot, answer), *_of_trials(cards, name)]
    done = [row for row in view.trials if row.status.is_final]
    is_over = view.state == "finished" or ((total := data.total(view)) is not None and view.ended >= total)
    if done and all(row.status is Status.FAILED for row in done):
        found.insert(0, Advice("error", "Every trial that ended has failed. Fix the cause, then:", ("retry", name)))
    elif is_over and answer is None:
        text = f"Nothing is within the KL budget. Try {SIGNS['kl_end'].change}, or accept a higher one:"
        found.append(Advice("warning", text, ("best", name, "--kl-budget", f"{2 * view.spec.kl_budget:g}")))
    elif view.state == "finished" and (early := why_early(view.spec, view.trials)):
        found.append(Advice("info", early))
    return found


def _of_state(snapshot: Snapshot, answer: Answer | None) -> list[Advice]:
    name = snapshot.view.row.name
    silent = Advice("error", "The controller has not responded for over a minute. Check its terminal.")
    commands: dict[data.Shown, tuple[str, ...]] = {"paused": ("resume", name), "unfinished": ("run", name)}
    state = data.shown_state(snapshot.view)
    if state == "stalled":
        return [silent]
    if state not in commands or (answer is not None and answer.remedy == commands[state]):
        return []
    return [Advice("warning", f"The study is {state}. To resume it:", commands[state])]


def _of_trials(cards: Sequence[Card], name: str) -> list[Advice]:
    by_health = defaultdict[str, list[str]](list)
    for card in cards:
        by_health[card.health].append(str(card.number))
    steps = []
    if stalled := by_health["stalled"]:
        text = f"Silent for far longer than a step takes: trial {', '.join(stalled)}. Check its log:"
        steps.append(Advice("error", text, ("logs", name, stalled[0])))
    if over := by_health["over the limit"] + by_health["near the limit"]:
        steps.append(Advice("warning", f"Near or over the guard's KL limit: trial {', '.join(over)}."))
    if paused := by_health["paused"]:
        steps.append(Advice("info", f"Paused by a person: trial {', '.join(paused)}.", ("resume", name, paused[0])))
    return steps
