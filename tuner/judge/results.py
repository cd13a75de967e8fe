"""Read a study for people and machines: the best trial, sources of values, and the JSON shapes.

The JSON shapes are stable: keys are added, never renamed or removed. A number that is not finite or was not measured
is `null`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ppo_core import checkpoint
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.config.kl_budget import Point
from ppo_core.metrics import METRICS
from tuner.judge import forks, scoring
from tuner.judge.best import best_trial, is_reread, standing
from tuner.judge.paired import Difference, improvement, reward_difference
from tuner.store import OnTest, Order, Store, StudyRow, TrialRow
from tuner.study.rules import blame_of
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Role, Status

State = Literal["running", "paused", "finished", "unfinished"]
UNREADABLE = "not readable"
"""State in `list` of a study whose stored spec cannot be read."""
SCALE_FREE = ("num_ppo_epochs", "cliprange", "cliprange_value", "gamma", "vf_coef", "kl_coef")
"""Hyperparameters that do not depend on model size, whose defaults are TRL's."""
Source = Literal["searched", "listed", "enqueued", "forked", "study", "task", "TRL", "default"]


@dataclass(frozen=True)
class Measured:
    """A mean, and its standard error if known."""

    mean: float
    se: float | None = None


@dataclass(frozen=True)
class StudyView:
    """A study as stored, with its spec and trials."""

    row: StudyRow
    spec: StudySpec
    trials: tuple[TrialRow, ...]
    """Trials of the search, and those that people added."""
    confirming: tuple[TrialRow, ...] = ()
    """Its confirming runs (see `tuner.confirm.plan`)."""

    @property
    def state(self) -> State:
        """`running`: a controller is alive; `paused`: one may be, and waits for an order to resume; `finished`: its
        search has ended; `unfinished`: the next run resumes.
        """
        if self.row.paused_at is not None:
            return "paused"
        if self.row.has_controller:
            return "running"
        return "unfinished" if self.row.finished_at is None else "finished"

    @property
    def ended(self) -> int:
        """Number of trials that have ended; may exceed a total that was lowered since."""
        return self.tally.ended

    @cached_property
    def tally(self) -> scoring.Tally:
        return scoring.tally((*self.trials, *self.confirming), self.spec)

    @property
    def is_own_budget(self) -> bool:
        """True under the study's own KL budget, and not another one (see `under_budget`)."""
        return bool(self.spec.kl_budget == self.row.spec["kl"]["budget"])

    def best(self) -> TrialRow | None:
        """Return the best trial under the study's KL budget (see `tuner.judge.best`), or None."""
        return best_trial(self.trials, self.spec.kl_budget)


def under_budget(store: Store, view: StudyView, kl_budget: float) -> StudyView:
    """Return a study with its trials valued under another KL budget, from their stored evaluations."""
    spec = replace(view.spec, kl_budget=kl_budget)
    judged = {row.number: row for row in scoring.judged_again(store, view.trials, spec)}
    return replace(view, spec=spec, trials=tuple(judged.get(row.number, row) for row in view.trials))


def read_study(store: Store, name: str) -> StudyView:
    row = store.study(name)
    return as_view(row, store.trials(row))


def as_view(row: StudyRow, trials: Sequence[TrialRow]) -> StudyView:
    """Combine a study and its trials; ConfigError if its stored spec is of another version."""
    spec = StudySpec.from_stored(row.spec, f'study "{row.name}"')
    searched = tuple(trial for trial in trials if trial.role is not Role.CONFIRM)
    return StudyView(row, spec, searched, tuple(trial for trial in trials if trial.role is Role.CONFIRM))


def sft_reading(store: Store, trial: TrialRow) -> Measured | None:
    """Return the SFT policy's eval reward: the trial's evaluation at step 0, before any update."""
    first = next((row for row in scoring.evaluations_of(store, trial) if row["step"] == 0), None)
    return None if first is None else Measured(first["eval/reward"], first["eval/reward_se"])


def value_kl(store: Store, trial: TrialRow) -> Measured | None:
    """Return the eval KL at the trial's value, in nats per response: the mean of both readings if it was read twice."""
    if trial.kl is None:
        return None
    if is_reread(trial) and (stands := standing(trial)) is not None:
        return Measured(stands.kl, trial.reread_kl_se)
    errors = {row["step"]: row["eval/kl_se"] for row in scoring.evaluations_of(store, trial)}
    return Measured(trial.kl, errors.get(trial.value_step))


def on_test(store: Store, view: StudyView, trial: TrialRow) -> OnTest | str:
    """Return the test result of the best trial's checkpoint, or why there is none, as a clause."""
    checkpoint = forks.value_checkpoint(store, view.row, trial)
    result = None if checkpoint is None else store.on_test(trial.id, checkpoint.step)
    if result is not None:
        return result if result.why_not is None else result.why_not
    if checkpoint is None or isinstance(checkpoint.where, str):
        return "the checkpoint is not kept here"
    if not view.is_own_budget:
        return "only the answer under the study's own KL budget is"
    return "the study is not finished" if view.row.finished_at is None else "the study's next run does that"


@dataclass(frozen=True)
class FrontPoint:
    """A checkpoint kept because it is the study's best for some KL budget."""

    trial: int
    step: int
    episode: int
    reward: Measured
    kl: Measured
    """In nats per response."""
    budget: float
    """Lowest budget that it fits: KL + one standard error, in nats per response."""
    path: Path


def front(store: Store, view: StudyView) -> list[FrontPoint]:
    """Return the checkpoints of the study's front that are kept here, by rising KL and reward."""

    def path_of(point: Point) -> Path | str:
        return forks.find(view.row, point.trial, point.step)

    fronts = scoring.own_fronts(store, view.trials)
    kept_points = scoring.kept_of_front(fronts, lambda point: isinstance(path_of(point), Path))
    numbers = {point.trial for point in kept_points}
    evaluations = scoring.evaluations_by_trial(store, [row for row in view.trials if row.number in numbers])
    points = []
    for point in kept_points:
        row = next(row for row in evaluations[point.trial] if row["step"] == point.step)
        reward, kl = (Measured(row[f"eval/{name}"], row[f"eval/{name}_se"]) for name in ("reward", "kl"))
        path = path_of(point)
        if isinstance(path, Path):
            points.append(FrontPoint(point.trial, point.step, row["episode"], reward, kl, point.bound, path))
    return points


def kl_prunings(trials: Sequence[TrialRow]) -> dict[str, list[int]]:
    """Return the trials that the guard pruned for too much KL, by rule."""
    by_rule: dict[str, list[int]] = {}
    for trial in trials:
        if trial.status is Status.PRUNED and trial.reason is not None and blame_of(trial.reason) == "kl":
            by_rule.setdefault(trial.reason.rule, []).append(trial.number)
    return by_rule


@dataclass(frozen=True)
class Costs:
    """Cost of a study so far, in device-seconds: a worker's seconds on its device."""

    seconds: float
    evaluations: float
    """The part of them spent on evaluations."""
    by: Mapping[str, tuple[int, float]]
    """Trials and seconds by the trials' outcome, in words."""

    @property
    def text(self) -> str:
        """One line for people."""
        parts = [f"{seconds:.0f} in {count} {what}" for what, (count, seconds) in self.by.items()]
        return f"Spent: {self.seconds:.0f} device-seconds ({', '.join(parts)}); {self.evaluations:.0f} for evaluations."


def spent(store: Store, view: StudyView) -> Costs:
    seconds = defaultdict[str, list[float]](list)
    for trial in view.trials:
        seconds[trial.shown_status].append(trial.seconds)
    by = {status: (len(each), sum(each)) for status, each in seconds.items()}
    rows = store.steps([trial.id for trial in view.trials], ("time/evaluate",), evaluations_only=True)
    evaluations = sum(row["time/evaluate"] or 0.0 for row in rows) + sum(t.reread_seconds or 0.0 for t in view.trials)
    return Costs(sum(trial.seconds for trial in view.trials), evaluations, by)


def value_sources(trial: TrialRow, spec: StudySpec, trials: Sequence[TrialRow] = ()) -> dict[str, Source]:
    """Return the source of each value of a trial's configuration, by hyperparameter.

    Where `trials` hold the one that it was forked from or confirms, a value that is unchanged has that one's source.

    `searched` by the sampler; `listed` for this trial, this start of a search, or the baseline; `enqueued` by a person;
    changed in a fork (`forked`); set by the `study`; the `task`'s own reference; one of `TRL`'s values that do not
    depend on the model's size; or another declared `default`.
    """
    parent = next((row for row in trials if row.number == trial.parent), None)
    if parent is not None:
        before = value_sources(parent, spec, trials)
        changed: Source = "forked" if trial.role is Role.FORK else "study"
        return {
            name: before[name] if name in before and trial.config[name] == parent.config[name] else changed
            for name in HYPERPARAMETERS
            if name in trial.config
        }
    reference = spec.declared.reference
    usual = reference_sources(spec)
    trial_0 = spec.reference_params()

    def source(name: str, value: HyperValue) -> Source:
        if trial.origin is Origin.REFERENCE:
            if name in usual:
                return usual[name]
        elif name in trial.params:
            if spec.listed or trial.origin is Origin.LISTED:
                return "listed"
            if trial.origin not in (Origin.ENQUEUED, Origin.BASELINE):
                return "searched"
            is_usual = name in usual and trial.params[name] == trial_0.get(name)
            return usual[name] if is_usual else "enqueued" if trial.origin is Origin.ENQUEUED else "listed"
        if name in spec.fixed or name == "seed":
            return "study"
        if name in reference and value == reference[name]:
            return "task"
        if value != HYPERPARAMETERS[name].default:
            return "study"
        return "TRL" if name in SCALE_FREE else "default"

    return {name: source(name, trial.config[name]) for name in HYPERPARAMETERS if name in trial.config}


def reference_sources(spec: StudySpec) -> dict[str, Source]:
    """Return the source of trial 0's value of each fixed or searched hyperparameter, by name."""
    values = spec.reference_params()
    sources: dict[str, Source] = dict.fromkeys(spec.fixed, "study")
    for name in spec.search:
        is_ours = values.get(name) != HYPERPARAMETERS[name].default  # a share of its budget or length
        sources[name] = "task" if name in spec.declared.reference else "study" if is_ours else "TRL"
    return sources


def differences(trials: Sequence[TrialRow]) -> dict[str, list[HyperValue]]:
    """Return the hyperparameters in which the trials differ, each with one value per trial."""
    table = {name: [trial.config.get(name) for trial in trials] for name in HYPERPARAMETERS}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def study_summary(view: StudyView) -> dict[str, Any]:
    """Return one object of `list`."""
    best = view.best()
    return {
        "name": view.row.name,
        "task": view.spec.task,
        "state": view.state,
        "trials": view.tally.total,
        "budget": view.spec.budget,
        "spent": view.tally.spent,
        "finished": view.ended,
        "best": None if best is None else best.number,
        "best_value": None if best is None else best.value,
        "best_value_se": None if best is None else best.value_se,
        "best_kl": None if best is None else best.kl,
        "kl_budget": view.spec.kl_budget,
        "created_at": view.row.created_at,
        "finished_at": view.row.finished_at,
    }


def study_data(view: StudyView) -> dict[str, Any]:
    """Return the object of `show STUDY`: its summary and spec, every trial, and the runs that confirm some of them."""
    return study_summary(view) | {
        "trials": [trial_data(trial) for trial in view.trials],
        "confirming": [trial_data(trial) for trial in view.confirming],
        "total": view.tally.total,
        "spec": view.row.spec,
        "seconds": sum(trial.seconds for trial in view.trials),
    }


def trial_data(trial: TrialRow) -> dict[str, Any]:
    return _without(asdict(trial), "id", "study_id", "is_interrupted") | {"status": trial.shown_status}


def order_data(order: Order) -> dict[str, Any]:
    return _without(asdict(order), "study_id", "key")


def trial_detail(store: Store, study: StudyRow, trial: TrialRow) -> dict[str, Any]:
    """Return the object of `show STUDY TRIAL`: the trial with every step's metrics (a task's own too) and samples."""
    own_metrics = store.own_metrics(trial.id)
    steps = [row | own_metrics[row["step"]] for row in store.steps([trial.id], list(METRICS))]
    samples = store.samples([trial.id], with_tokens=True)
    kept = [
        {"step": checkpoint.step_of(path), "episode": episode, "path": str(path.absolute())}
        for episode, path in forks.kept_by_episode(study, trial.number).items()
    ]
    return trial_data(trial) | {
        "steps": [_without(row, "trial_id") for row in steps],
        "samples": [_without(row, "trial_id") for row in samples],
        "checkpoints": kept,
    }


def front_data(store: Store, view: StudyView) -> list[dict[str, Any]]:
    """Return the items of `front` for JSON."""
    return [
        {
            **{name: getattr(point, name) for name in ("trial", "step", "episode", "budget")},
            **with_error("reward", point.reward),
            **with_error("kl", point.kl),
            "path": str(point.path.absolute()),
        }
        for point in front(store, view)
    ]


def best_data(store: Store, view: StudyView, trial: TrialRow) -> dict[str, Any]:
    """Return the object of `best`: the trial, the budget and the improvement on the SFT policy."""
    test = on_test(store, view, trial)
    return trial_data(trial) | {
        "study": view.row.name,
        "kl_budget": view.spec.kl_budget,
        **with_error("kl", value_kl(store, trial)),
        **with_error("sft_reward", sft_reading(store, trial)),
        **with_error("improvement", improvement(store, trial)),
        "ends_within_budget": scoring.ends_within(trial, view.spec),
        "test": None if isinstance(test, str) else asdict(test),
        "test_why_not": test if isinstance(test, str) else None,
    }


def comparison_data(store: Store, view: StudyView, trials: Sequence[TrialRow]) -> dict[str, Any]:
    """Return the object of `compare`: the trials, and by hyperparameter the differing values in their order."""
    first, *others = trials
    over_first = [reward_difference(store, first, trial) for trial in others]
    return {
        "study": view.row.name,
        "trials": [trial_data(trial) for trial in trials],
        "differences": differences(trials),
        "over_first": [None if difference is None else asdict(difference) for difference in over_first],
    }


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def with_error(name: str, measured: Measured | Difference | None) -> dict[str, float | None]:
    """Return a mean and its standard error under two keys; None for what is not known."""
    mean, error = (None, None) if measured is None else (measured.mean, measured.se)
    return {name: mean, f"{name}_se": error}
