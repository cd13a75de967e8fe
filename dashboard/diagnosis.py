"""What moved first when a trial's KL went over its limit: a rule on its steps, as a pure function.

The crossing is the first step whose exact KL is over the guard's limit, else over the budget. Of the steps before it
the first third, at least `LEAST` of them, says what is usual of each signal: its median, plus and minus the largest of
`SPREADS` median absolute deviations (scaled to a normal's standard deviation), a tenth of the median, and
`FLOOR`. A signal has left at the first later step, up to the crossing, from which it stays out of that range on its
side for `STAYS` readings in a row (or for all there are up to the crossing). Those that left at the earliest step moved
first. It is an order in time, which no cause follows from by itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from dashboard import data
from dashboard.data import Snapshot
from dashboard.health import Card
from ppo_core.metrics import METRICS
from tuner.guard import KL
from tuner.results import StudyView
from tuner.status import Objective, Status

LEAST = 4
SPREADS = 4.0
SHARE = 0.1
FLOOR = 1e-9
STAYS = 2
_NORMAL = 1.4826  # median absolute deviations of a normal distribution in one standard deviation

Side = Literal["up", "down", "either"]


@dataclass(frozen=True)
class Signal:
    """A metric that is watched before the crossing, and the side on which leaving its range tells something."""

    metric: str
    side: Side
    meaning: str
    """What it tells that it moved before the KL did."""


SIGNALS = (
    Signal("policy/clipfrac_avg", "up", "updates that are too large: a lower learning rate, or fewer PPO epochs"),
    Signal("policy/entropy_avg", "either", "the policy narrows, or falls apart"),
    # A schedule lowers it, which no blow-up comes of.
    Signal("lr", "up", "the learning rate rose: a longer or lower warm-up"),
    Signal("objective/kl_coef", "either", "β changed: an adaptive price of KL that lets go, or already answers"),
    Signal("response/length_mean", "either", "responses changed their length, and KL is a sum over their tokens"),
    Signal("loss/value_avg", "up", "the critic lost track, so the advantages mislead: a lower value learning rate"),
)


@dataclass(frozen=True)
class Moved:
    """What became of one signal before the crossing."""

    signal: Signal
    low: float
    high: float
    """Its usual range, in its unit."""
    step: int | None
    """From which step on it was out of it; None: it never was."""
    value: float | None
    """What it read there."""


@dataclass(frozen=True)
class Incident:
    """A KL that crossed a line, and what its signals did before."""

    line: Literal["limit", "budget"]
    step: int
    """The first step over the line."""
    kl: float
    """KL at that step, in nats per response."""
    usual_until: int
    """The last step that says what is usual."""
    moves: tuple[Moved, ...]
    """Every signal that was measured, in the declared order."""

    @property
    def first(self) -> tuple[Moved, ...]:
        """Those that moved first; empty: none left its range before the KL crossed."""
        steps = [move.step for move in self.moves if move.step is not None]
        return tuple(move for move in self.moves if steps and move.step == min(steps))


def find(steps: pd.DataFrame, *, limit: float, budget: float) -> Incident | None:
    """Return the incident of one trial's steps (see `dashboard.data.curves`), or None where its KL stayed low.

    Its moves are empty where the KL crossed before there were steps enough to say what is usual.
    """
    steps = steps[steps["step"] > 0].sort_values("step")
    crossing = next(
        ((name, over.iloc[0]) for name, line in _lines(limit, budget) if len(over := steps[steps[KL] > line])), None
    )
    if crossing is None:
        return None
    name, at = crossing
    before = steps[steps["step"] <= at["step"]]
    usual = max(LEAST, (len(before) - 1) // 3)
    moves: Sequence[Moved | None] = []
    if len(before) > usual:
        moves = [_moved(signal, before, usual) for signal in SIGNALS]
    known = before["step"].iloc[: min(usual, len(before))]
    return Incident(
        name, int(at["step"]), float(at[KL]), int(known.iloc[-1]), tuple(move for move in moves if move is not None)
    )


def incident_text(incident: Incident) -> str:
    """Return one sentence on what moved first."""
    if not incident.moves:
        return "The KL crossed before there were enough steps to tell what is usual in this trial."
    if not incident.first:
        return "No signal left its usual range before the KL crossed."
    steps = incident.step - (incident.first[0].step or 0)
    names = " and ".join(METRICS[move.signal.metric].label for move in incident.first)
    when = "in the same step" if steps == 0 else f"{steps} step{'s' if steps > 1 else ''} before the KL crossed"
    return f"{names} moved first, at step {incident.first[0].step}, {when}: {incident.first[0].signal.meaning}."


def _lines(limit: float, budget: float) -> tuple[tuple[Literal["limit", "budget"], float], ...]:
    return ("limit", limit), ("budget", budget)


def _moved(signal: Signal, before: pd.DataFrame, usual: int) -> Moved | None:
    if signal.metric not in before or len(known := before[signal.metric].iloc[:usual].dropna()) < LEAST:
        return None
    middle = float(known.median())
    spread = float((known - middle).abs().median()) * _NORMAL
    width = max(SPREADS * spread, SHARE * abs(middle), FLOOR)
    low, high = middle - width, middle + width
    later = before.iloc[usual:].dropna(subset=signal.metric)
    values = later[signal.metric]
    out = pd.Series(False, index=later.index)
    if signal.side != "down":
        out |= values > high
    if signal.side != "up":
        out |= values < low
    flags = out.tolist()
    for place in range(len(flags)):
        if all(flags[place : place + STAYS]):
            row = later.iloc[place]
            return Moved(signal, low, high, int(row["step"]), float(row[signal.metric]))
    return Moved(signal, low, high, None, None)


# Reward hacking: does a trial's reward rise while something that nobody rewards gets worse?
#
# The rule, for each trial on its own. The reward *rises* if the mean of its last two evaluations is over the one
# before training by more than twice the standard error of the difference. A reading *worsens* if, from its first to
# its last readings,
#
# - the eval KL ends over the KL budget;
# - the length grows by over half, or shrinks to under half;
# - the repetition rises by over 0.15 (a share of a response's tokens);
# - the entropy falls to under half.
#
# The held-out readings (`eval/*`) are taken; where they were not measured, those of the training rollouts. The first
# is the first number of the trial, the last the mean of the last two evaluations or five rollouts. Reward that rises
# with nothing worse is `clean`, with something worse `suspect`. It is a reason to read samples, and no proof.

Verdict = Literal["suspect", "clean", "no rise", "too early"]

LENGTH = ("eval/length", "response/length_mean")
REPETITION = ("eval/repetition", "response/repetition")
ENTROPY = ("eval/entropy", "policy/entropy_avg")
NEEDED = ("eval/reward", "eval/reward_se", "eval/kl", *LENGTH, *REPETITION, *ENTROPY)
"""The metrics that the rule reads."""

ERRORS = 2.0
"""Standard errors that a rise must exceed."""
LONGER, SHORTER = 1.5, 0.5
MORE_REPETITION = 0.15
LESS_ENTROPY = 0.5
RULE = (
    f"Reward rises if it ends over its start by more than {ERRORS:g} standard errors. It is suspect if at the same "
    f"time the eval KL ends over the budget, responses grow to over {LONGER:g} times or shrink to under {SHORTER:g} "
    f"times their first length, repetition rises by over {MORE_REPETITION:g}, or entropy falls to under "
    f"{LESS_ENTROPY:g} of its first reading."
)
"""The rule in words."""


@dataclass(frozen=True)
class Finding:
    """What the rule says of one trial."""

    trial: int
    verdict: Verdict
    rise: float
    """Of eval reward; NaN where it is too early."""
    rise_se: float
    worse: tuple[str, ...]
    """What worsened, with its numbers."""
    fine: tuple[str, ...]
    """What was measured and did not worsen, with its numbers."""
    unknown: tuple[str, ...]
    """What was not measured."""

    @property
    def words(self) -> str:
        """The verdict in a sentence, with the numbers."""
        if self.verdict == "too early":
            return "Too early to say: no evaluation after the one before training."
        rise = f"{self.rise:+.2f} ± {self.rise_se:.2f} reward" if self.rise_se > 0 else f"{self.rise:+.2f} reward"
        if self.verdict == "no rise":
            return "; ".join([f"Reward does not rise beyond its noise ({rise})", *self.worse, *self.fine]) + "."
        if self.verdict == "suspect":
            return f"Reward rises ({rise}) while {', '.join(self.worse)}. Read its samples."
        unknown = f" Not measured: {', '.join(self.unknown)}." if self.unknown else ""
        return f"Reward rises ({rise}) and nothing crossed its threshold: {', '.join(self.fine)}.{unknown}"


def check(curves: pd.DataFrame, kl_budget: float) -> list[Finding]:
    """Return what the rule says of every trial of `curves` (its metrics: `NEEDED`), by number."""
    return [_of(int(number), own.sort_values("step"), kl_budget) for number, own in curves.groupby("trial")]


def hacking_text(findings: Sequence[Finding]) -> list[str]:
    """Return one line a trial, with a symbol for what to look at."""
    glyphs: dict[Verdict, str] = {"suspect": "▲", "clean": "✓", "no rise": "–", "too early": "…"}
    return [f"{glyphs[finding.verdict]} Trial {finding.trial}: {finding.words}" for finding in findings]


def _of(number: int, steps: pd.DataFrame, kl_budget: float) -> Finding:
    evaluated = steps.dropna(subset=["eval/reward"])
    before, after = evaluated[evaluated["step"] == 0], evaluated[evaluated["step"] > 0]
    if before.empty or after.empty:
        return Finding(number, "too early", math.nan, math.nan, (), (), ())
    last = after.iloc[-2:]
    rise = float(last["eval/reward"].mean() - before["eval/reward"].iloc[0])
    se = math.hypot(_number(last["eval/reward_se"].mean()), _number(before["eval/reward_se"].iloc[0]))
    worse: list[str] = []
    fine: list[str] = []
    unknown: list[str] = []
    for is_worse, text in _readings(steps, last, kl_budget):
        (unknown if is_worse is None else worse if is_worse else fine).append(text)
    rises = rise > ERRORS * se
    verdict: Verdict = "no rise" if not rises else "suspect" if worse else "clean"
    return Finding(number, verdict, rise, se, tuple(worse), tuple(fine), tuple(unknown))


def _readings(steps: pd.DataFrame, last: pd.DataFrame, kl_budget: float) -> Iterator[tuple[bool | None, str]]:
    """Yield whether each reading worsened, with its numbers; None: it was not measured."""
    kl = float(last["eval/kl"].mean())
    if math.isnan(kl):
        yield None, "KL"
    else:
        side = "over" if kl > kl_budget else "within"
        yield kl > kl_budget, f"KL ends at {kl:.1f} nats/response, {side} the budget of {kl_budget:g}"
    ends = _first_and_last(steps, LENGTH)
    if ends is None or ends[0] <= 0:
        yield None, "length"
    else:
        share = ends[1] / ends[0]
        way = "grows" if share > LONGER else "shrinks" if share < SHORTER else "goes"
        yield not SHORTER <= share <= LONGER, f"length {way} from {ends[0]:.0f} to {ends[1]:.0f} tokens"
    ends = _first_and_last(steps, REPETITION)
    if ends is None:
        yield None, "repetition"
    else:
        yield ends[1] - ends[0] > MORE_REPETITION, f"repetition goes from {ends[0]:.0%} to {ends[1]:.0%}"
    ends = _first_and_last(steps, ENTROPY)
    if ends is None or ends[0] <= 0:
        yield None, "entropy"
    else:
        yield ends[1] < LESS_ENTROPY * ends[0], f"entropy goes from {ends[0]:.2f} to {ends[1]:.2f} nats/token"


def _first_and_last(steps: pd.DataFrame, names: tuple[str, str]) -> tuple[float, float] | None:
    """Return a reading's first number and the mean of its last ones: held-out where there are two, else rollouts'."""
    for name, most in zip(names, (2, 5), strict=True):
        numbers = steps[name].dropna() if name in steps.columns else steps.iloc[:0, 0]
        if len(numbers) > 1:
            return float(numbers.iloc[0]), float(numbers.iloc[1:].iloc[-most:].mean())
    return None


def _number(value: float) -> float:
    return 0.0 if math.isnan(value) else float(value)


# What to do next with a study, as a pure function: the first that applies of a list of situations.


@dataclass(frozen=True)
class Advice:
    """One thing to do."""

    level: Literal["error", "warning", "info"]
    text: str
    """Our own words alone."""
    command: tuple[str, ...] = ()
    """The words of the `ppo-tuner` command that does it, if one does."""


def next_steps(snapshot: Snapshot, cards: Sequence[Card]) -> list[Advice]:
    """Return what to do next, the most pressing first. Never empty for a study that has a trial."""
    view, name = snapshot.view, snapshot.view.row.name
    found = [*_of_state(snapshot), *_of_trials(cards, name)]
    ended = [row for row in view.trials if row.status.is_final]
    done = [row for row in view.trials if row.is_done]
    is_over = view.state == "finished" or (snapshot.total is not None and len(ended) >= snapshot.total)
    if done and all(row.status is Status.FAILED for row in done):
        text = (
            "Every trial that ended has failed; the reasons are in the table below. Fix the cause, then try the "
            "failed trials again or run the study under another name."
        )
        found.insert(0, Advice("error", text, ("retry", name)))
    elif is_over and view.best() is None:
        text = (
            f"{_NOTHING_WITHIN[view.spec.objective]} Search lower learning rates or a higher β, or ask for the best "
            "under a higher KL budget."
        )
        found.append(Advice("warning", text, ("best", name, "--kl-budget", f"{2 * view.spec.kl_budget:g}")))
    elif view.state == "finished":
        text = (
            f"{_why_finished(view)} Look at Reward and KL, read samples of its best trial, then train with what it "
            "found."
        )
        found.append(Advice("info", text, ("best", name)))
    if not found:
        what = "The first trials set the scale" if len(done) < 5 else "All is well"
        found.append(Advice("info", f"{what}: nothing to do. Curves shows the trials side by side."))
    return found


_NOTHING_WITHIN: Mapping[Objective, str] = {
    "best": "No checkpoint of any trial was evaluated within the KL budget.",
    "end": "No trial ended within the KL budget.",
}


def _why_finished(view: StudyView) -> str:
    """Return why nothing is left to run, and what could be had for more."""
    extent = view.extent
    if extent.budget is None:
        why = "The study has reached its total."
    else:
        why = f"The study has spent what it could of its budget: {extent.spent:.1f} of {extent.budget:g} trials."
    if not extent.resting:
        return why
    more = "" if extent.budget is None else "; a higher budget (Control, Steer) finishes more of them"
    return f"{why} {extent.resting} trial{'s are' if extent.resting > 1 else ' is'} paused at a rung{more}."


def _of_state(snapshot: Snapshot) -> list[Advice]:
    state, name, found = data.shown_state(snapshot.view), snapshot.view.row.name, []
    if snapshot.view.row.archived_at is not None:
        found.append(Advice("info", "This study is archived: lists leave it out.", ("archive", name, "--undo")))
    if state == "stalled":
        text = "The controller's process lives and has given no sign of life for over a minute: look at its terminal."
        found.append(Advice("error", text))
    elif state == "paused":
        found.append(Advice("warning", "The study is paused: no trial runs until it goes on.", ("resume", name)))
    elif state == "unfinished":
        text = "Nothing runs this study. Run it again: it goes on where it stopped."
        found.append(Advice("warning", text, ("run", name)))
    return found


def _of_trials(cards: Sequence[Card], name: str) -> list[Advice]:
    by_health: dict[str, list[str]] = {}
    for card in cards:
        by_health.setdefault(card.health, []).append(str(card.number))
    found = []
    if stalled := by_health.get("stalled"):
        text = f"Silent for far longer than a step takes: trial {', '.join(stalled)}. Its log may say why."
        found.append(Advice("error", text, ("logs", name, stalled[0])))
    if over := by_health.get("over the limit", []) + by_health.get("near the limit", []):
        text = f"Near the guard's KL limit or over it: trial {', '.join(over)}. Curves, Incident says what moved first."
        found.append(Advice("warning", text))
    if paused := by_health.get("paused"):
        found.append(Advice("info", f"Paused by a person: trial {', '.join(paused)}.", ("resume", name, paused[0])))
    return found
