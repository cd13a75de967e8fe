"""What the strategies choose, said plainly: each answer goes through all trials. The tests hold the real ones to it."""

import heapq
import math
import statistics
from collections.abc import Sequence

from optuna.trial import TrialState

from ppo_core.hyperparameters import PPOConfig
from tuner.scoring import to_optuna
from tuner.search import matching
from tuner.spec import StudySpec
from tuner.status import Origin, PausedBy, Status
from tuner.store import TrialRow
from tuner.strategies import FINISH_SHARE, EarlyCut, rung_episodes

Rows = Sequence[TrialRow]


def counted(rows: Rows) -> list[TrialRow]:
    return [row for row in rows if row.counts]


def asked(rows: Rows, total: int | None) -> list[TrialRow]:
    beyond = set() if total is None else {row.number for row in counted(rows)[total:]}
    return [row for row in rows if row.number not in beyond]


def choice(rows: Rows, spec: StudySpec, busy: Sequence[int]) -> int | str | matching.Match | None:
    """Return the number of the trial to run, "new", what is to be run at another β, or None."""
    opened = [row for row in asked(rows, spec.trials) if row.status in (Status.RUNNING, Status.WAITING)]
    for row in sorted(opened, key=lambda row: (row.status is Status.WAITING, row.number)):
        if row.number not in busy:
            return row.number
    found = match(rows, spec)
    if found is not None:
        return found
    number = promoted(rows, spec)
    if number is None:
        return "new" if may_start(rows, spec) else None
    is_room = has_room(rows, spec) and left(rows, spec) >= spec.total_episodes
    return (from_the_start(rows, rows[number], spec) if is_room else None) or number


def is_finished(rows: Rows, spec: StudySpec) -> bool:
    if not all(row.is_done for row in asked(rows, spec.trials)):
        return False
    return match(rows, spec) is None and promoted(rows, spec) is None and not may_start(rows, spec)


def has_room(rows: Rows, spec: StudySpec) -> bool:
    return spec.trials is None or len(counted(rows)) < spec.trials


def left(rows: Rows, spec: StudySpec) -> float:
    if spec.budget is None:
        return math.inf
    promised = sum(row.episodes if row.is_done else next_stop(row, spec) for row in counted(rows))
    return spec.budget * spec.total_episodes - promised


def next_stop(row: TrialRow, spec: StudySpec) -> int:
    config = PPOConfig.from_dict(row.config)
    is_whole = not row.counts or row.origin in (Origin.REFERENCE, Origin.MATCHED) or row.rung > 0
    rung = None if is_whole or spec.strategy == "full" else rung_episodes(config, EarlyCut.share)
    return config.whole_episodes() if rung is None else rung


def whole(row: TrialRow) -> int:
    return PPOConfig.from_dict(row.config).whole_episodes() - row.episodes


def may_start(rows: Rows, spec: StudySpec) -> bool:
    if not has_room(rows, spec):
        return False
    if spec.strategy == "full":
        return left(rows, spec) >= spec.total_episodes
    if spec.budget is None or not counted(rows):
        return True
    rung = EarlyCut.share * spec.total_episodes
    rest = spec.total_episodes - rung
    finishes = max(1, math.floor(FINISH_SHARE * spec.budget * spec.total_episodes / rest))
    return left(rows, spec) - rung >= finishes * rest - 1e-9


def waiting(rows: Rows, spec: StudySpec) -> list[TrialRow]:
    matched = {matching.alike(row, spec) for row in counted(rows) if row.origin is Origin.MATCHED} - {()}
    return [row for row in counted(rows) if row.is_resting and matching.alike(row, spec) not in matched]


def usual(rows: Rows) -> float:
    values = [row.value for row in rows if row.teaches and row.status is Status.COMPLETED and row.value is not None]
    return statistics.median(values) if values else math.inf


def ranked(rows: Rows, most: float) -> list[TrialRow]:
    return sorted(rows, key=lambda row: order(row, row.rung_score, most))


def order(row: TrialRow, score: float | None, most: float) -> tuple[float, float, int, int]:
    first = math.inf if score is None else -min(score, most)
    return first, math.inf if row.value is None else -row.value, int(row.config["num_ppo_epochs"] or 0), row.number


def promotable(rows: Rows, spec: StudySpec) -> list[int]:
    return [row.number for row in ranked(waiting(rows, spec), usual(rows))]


def promoted(rows: Rows, spec: StudySpec) -> int | None:
    if spec.strategy == "full":
        return None
    row = due(rows, spec)
    if row is not None and whole(row) <= left(rows, spec):
        return row.number
    is_open = spec.budget is not None or not any(row.rung for row in counted(rows))
    if may_start(rows, spec) or not is_open:
        return None
    fitting = [row for row in waiting(rows, spec) if whole(row) <= left(rows, spec)]
    return ranked(fitting, usual(rows))[0].number if fitting else None


def due(rows: Rows, spec: StudySpec) -> TrialRow | None:
    came = [row for row in counted(rows) if row.rung_scores]
    here = waiting(rows, spec)
    rest = sum(row.is_resting for row in counted(rows))
    went = sum(row.rung > 0 for row in counted(rows)) + rest - len(here)
    is_due = bool(here) and len(came) // EarlyCut.one_in > went
    return ranked(here, usual(rows))[0] if is_due else None


# Another β


def match(rows: Rows, spec: StudySpec) -> matching.Match | None:
    budget = left(rows, spec) / spec.total_episodes
    if not matching.is_matching(spec) or not has_room(rows, spec) or budget < 1:
        return None
    groups: dict[matching.Alike, list[TrialRow]] = {}
    for row in counted(rows):
        if row.config["kl_target"] is None and not row.is_resting:
            groups.setdefault(matching.alike(row, spec), []).append(row)
    found = [one for runs in groups.values() if (one := matching._matched(runs, spec)) is not None]
    if not found and budget < 2:
        return closer(rows, list(groups.values()), spec)
    return min(found, key=lambda one: matching._order(rows[one.trial]), default=None)


def closer(rows: Rows, groups: Sequence[list[TrialRow]], spec: StudySpec) -> matching.Match | None:
    valued = [row for row in counted(rows) if row.status is Status.COMPLETED and row.value is not None]
    best = max(valued, key=lambda row: (row.value, -row.number), default=None)
    runs = next((runs for runs in groups if best in runs), [])
    goal = math.log(matching.LAST_GOAL * spec.kl_budget)
    known = sorted(matching._points(runs), key=lambda point: (point[0] is not best, abs(point[2] - goal)))
    if not known or len(known) < len(runs) or known[0][0] is not best:
        return None
    return matching._at(goal, known, spec) if matching.LAST_WINDOW < goal - known[0][2] <= matching.REACH else None


def from_the_start(rows: Rows, row: TrialRow, spec: StudySpec) -> matching.Match | None:
    if not matching.is_matching(spec) or not matching.alike(row, spec):
        return None
    goal = math.log(matching.GOAL * spec.kl_budget)
    fixed = [one for one in counted(rows) if one.config["kl_target"] is None]
    known = sorted((abs(kl - goal), beta + (kl - goal) / matching.SLOPE) for _, beta, kl in matching._points(fixed))
    near = [beta for distance, beta in known[: matching.NEAREST] if distance <= matching.REACH]
    if not near:
        return None
    suits = min(max(math.exp(statistics.median(near)), spec.search["kl_coef"].low), spec.search["kl_coef"].high)
    is_fixed, own = row.config["kl_target"] is None, math.log(float(str(row.config["kl_coef"])))
    if is_fixed and abs(math.log(suits) - own) * matching.SLOPE <= matching.WINDOW:
        return None
    params = {name: value for name, value in row.params.items() if name not in matching.ADAPTIVE_ONLY}
    control = {"kl_control": "fixed"} if "kl_control" in params else {}
    return matching.Match(row.number, {**params, **control, "kl_coef": suits})


# What a sampler reads


def read(rows: Rows, spec: StudySpec, most: int, best: int) -> list[tuple[int, TrialState, float | None]]:
    """Return the trials that a sampler reads: number, state and value."""
    told = [(row.number, *state_and_value(row, rows, spec)) for row in rows]
    if len(told) <= most:
        return told
    older, latest = told[: best - most], told[best - most :]
    feasible = {row.number for row in rows if (to_optuna(row, spec).constraint or 0.0) <= 0}
    valued = [one for one in older if one[1] is TrialState.COMPLETE]
    chosen = heapq.nlargest(best, valued, key=lambda one: (one[0] in feasible, one[2]))
    return sorted(chosen + [one for one in older if one[1] is TrialState.RUNNING]) + latest


def state_and_value(row: TrialRow, rows: Rows, spec: StudySpec) -> tuple[TrialState, float | None]:
    told = to_optuna(row, spec)
    if told.value is None:
        return told.state, None
    is_predicted = row.paused_by is PausedBy.STRATEGY and row.rung_score is not None
    return TrialState.COMPLETE, told.value + (gain(rows, len(row.rung_scores) - 1) if is_predicted else 0.0)


def gain(rows: Rows, rung: int) -> float:
    gains = [
        row.value - score
        for row in rows
        if row.teaches and row.status is Status.COMPLETED and row.value is not None
        for score in row.rung_scores[rung : rung + 1]
        if score is not None
    ]
    return statistics.median(gains) if gains else 0.0
