"""Recorded runs: what runs of a task's search space reported, step by step, in one Parquet file. No torch.

A row of the file is a step; what belongs to the run stands in each of its rows. The study that the runs are of,
and what the recording was made with, are JSON in the file's metadata.
"""

import itertools
import json
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.report import StepReport
from tuner.judge.guard import GuardState, check_step
from tuner.judge.scoring import Evaluations, is_finite, trial_value
from tuner.study.spec import StudySpec
from tuner.study.status import Reason

Kind = Literal["random", "near-top", "seed"]
"""How a run came to be: drawn from the whole space, or another one's repeat on another seed. The runs `near-top`, from
the region where a surrogate had predicted the best, were drawn by an earlier version."""
Cause = Literal["regular", "early", "watch"]
"""Why an evaluation was made: by the trial's cadence, after 5% of the episodes, or by the budget's watch."""
CAUSES: tuple[Cause, ...] = get_args(Cause)
REGULAR: tuple[Cause, ...] = ("regular",)
"""Why a trainer evaluates by itself."""
OF_A_TRIAL: tuple[Cause, ...] = ("regular", "watch")
"""The evaluations that every trial has."""

DATA = Path(__file__).parents[1] / "data"
"""Where the recordings lie, a file for each task."""


@dataclass(frozen=True)
class RecordedEvaluation:
    """One evaluation on all eval prompts, of the policy as it was after a step's update."""

    causes: tuple[Cause, ...]
    """Every reason that there was for it."""
    metrics: Mapping[str, float]
    """`eval/*`."""
    cpu_seconds: float
    """Of step 0: 0 where its process had evaluated the SFT policy before."""


@dataclass(frozen=True)
class RecordedStep:
    """One step of a run."""

    step: int
    episode: int
    metrics: Mapping[str, float]
    """What the guard reads, but for `eval/*`."""
    cpu_seconds: float
    """Of training: without the evaluation."""
    evaluation: RecordedEvaluation | None

    def evaluation_for(self, causes: Collection[Cause]) -> RecordedEvaluation | None:
        """Return the step's evaluation if it was made for one of `causes`."""
        found = self.evaluation
        return found if found is not None and not set(causes).isdisjoint(found.causes) else None

    def report(self, causes: Collection[Cause] = CAUSES) -> StepReport:
        """Return the step's report, with its evaluation if it was made for one of `causes`."""
        found = self.evaluation_for(causes)
        return StepReport(self.step, self.episode, {**self.metrics, **({} if found is None else found.metrics)})


@dataclass(frozen=True)
class RecordedRun:
    """One run, never ended by the guard."""

    name: str
    """Unique in its recording."""
    kind: Kind
    number: int
    """Counts the runs of its kind; a repeat has the number of the run that it repeats."""
    seed: int
    params: Mapping[str, HyperValue]
    """The searched values alone, as the sampler proposes them."""
    config: Mapping[str, HyperValue]
    steps: tuple[RecordedStep, ...]
    """From step 0, the SFT policy's evaluation."""
    stopped: str
    """Why it came to no end: what it raised, or which metric was not finite; empty where it ran to the end."""
    weight: float
    """How many runs of a random search it stands for; 0 for a repeat."""
    repeats: str
    """The name of the run that it repeats on another seed."""

    def rows(self, causes: Collection[Cause] = OF_A_TRIAL) -> Evaluations:
        """Return the evaluations that were made for one of `causes` as a store does."""
        return [
            {"step": step.step, "episode": step.episode, **found.metrics}
            for step in self.steps
            if (found := step.evaluation_for(causes)) is not None
        ]

    def best_within(self, kl_budget: float) -> float | None:
        """Return the highest eval reward within the budget, or None if there is none."""
        return trial_value(self.rows(), kl_budget).value

    def value_at_end(self) -> float | None:
        """Return the mean eval reward of the last two regular evaluations."""
        return mean_at_end(self.rows(REGULAR), "eval/reward")

    @property
    def total_episodes(self) -> int:
        """Of the whole run, had it come to its end."""
        return PPOConfig.from_dict(self.config).whole_episodes()

    @property
    def cpu_seconds(self) -> float:
        """Of training and all evaluations."""
        return sum(s.cpu_seconds + (s.evaluation.cpu_seconds if s.evaluation else 0.0) for s in self.steps)


def guarded(run: RecordedRun, spec: StudySpec) -> tuple[list[StepReport], Reason | None]:
    """Return a run's reports as a study would have had them, up to where the guard ends it, and why it does."""
    seen, state, reason, total = list[StepReport](), GuardState(), None, run.total_episodes
    for step in run.steps:
        seen.append(step.report(OF_A_TRIAL))
        state, reason = check_step(spec.guard, state, seen[-1], total, spec.kl_budget)
        if reason is not None:
            break
    return seen, reason


@dataclass(frozen=True)
class Recording:
    """The recorded runs of one task."""

    study: Mapping[str, Any]
    """The study whose space, seed, threads, KL budget and KL limit they are of: what `StudySpec.to_dict` returned."""
    runs: tuple[RecordedRun, ...]
    provenance: tuple[Mapping[str, Any], ...]
    """What made it: an entry for each commit, command, machine or version of a library."""

    @property
    def spec(self) -> StudySpec:
        """The study."""
        return StudySpec.from_dict(self.study, "recording")


# The file.


def file_of(task: str) -> Path:
    """Return where a task's recording lies."""
    return DATA / f"{task}.parquet"


_METADATA = b"ppo_tuner_recording"
_OF_RUN = ("kind", "number", "seed", "weight", "repeats", "stopped")
"""The columns that hold a run as it is."""
_OTHERS = {"run", "params", "config", "step", "episode", "cpu_seconds", "eval_causes", "eval_cpu_seconds"}
_UNREAD = ("eval_rewards", "eval_kls")
"""Columns of older recordings."""


def mean_at_end(evaluations: Evaluations, metric: str) -> float | None:
    """Return a metric's mean over a run's last two evaluations with a finite reward, the SFT policy's left out."""
    last = [row[metric] for row in evaluations if row["step"] > 0 and is_finite(row["eval/reward"])][-2:]
    return statistics.fmean(last) if last else None


def write(path: Path, recording: Recording) -> None:
    """Write the recording, so that whoever reads `path` finds the old file or the whole new one.

    Two processes must not write the same file at once.
    """
    part = path.with_name(f".{path.name}.part")
    metadata = {"study": recording.study, "provenance": recording.provenance}
    rows = [row for run in recording.runs for row in _rows(run)]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain.from_iterable(rows))}
    table = pa.table(columns).replace_schema_metadata({_METADATA: json.dumps(metadata, sort_keys=True).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, part, compression="zstd", compression_level=19)
    part.replace(path)


def read(path: Path) -> Recording:
    """Return the recording of a file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if not path.exists():
        raise ConfigError(
            f"{path.name}: no such recording; make it with: python benchmarks/search.py record {path.stem}"
        )
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise ConfigError(f"{path.name} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    metadata = (table.schema.metadata or {}).get(_METADATA)
    if metadata is None:
        raise ConfigError(f"{path.name} is not a recording: its metadata says nothing of a study")
    about = json.loads(metadata)
    return Recording(about["study"], tuple(_runs(table)), tuple(about["provenance"]))


def _rows(run: RecordedRun) -> Iterator[dict[str, Any]]:
    of_run = {name: getattr(run, name) for name in _OF_RUN}
    of_run |= {"run": run.name, "params": json.dumps(dict(run.params)), "config": json.dumps(dict(run.config))}
    for step in run.steps:
        row = {**of_run, "step": step.step, "episode": step.episode, "cpu_seconds": step.cpu_seconds, **_numbers(step)}
        if step.evaluation is not None:
            row["eval_causes"] = list(step.evaluation.causes)
            row["eval_cpu_seconds"] = step.evaluation.cpu_seconds
        yield row


def _numbers(step: RecordedStep) -> Mapping[str, float]:
    return step.metrics if step.evaluation is None else {**step.metrics, **step.evaluation.metrics}


def _runs(table: pa.Table) -> Iterator[RecordedRun]:
    """Yield the runs of a table, in which the steps of each stand together and in order."""
    columns = {name: table.column(name).to_pylist() for name in table.column_names if name not in _UNREAD}
    metrics = [name for name in columns if name not in _OTHERS and name not in _OF_RUN]
    for name, found in itertools.groupby(range(len(table)), key=columns["run"].__getitem__):
        places = list(found)
        yield RecordedRun(
            name=name,
            params=json.loads(columns["params"][places[0]]),
            config=json.loads(columns["config"][places[0]]),
            steps=tuple(_step(columns, metrics, place) for place in places),
            **{name: columns[name][places[0]] for name in _OF_RUN},
        )


def _step(columns: Mapping[str, Sequence[Any]], metrics: Sequence[str], row: int) -> RecordedStep:
    numbers = {name: columns[name][row] for name in metrics if columns[name][row] is not None}
    evaluated = {name: value for name, value in numbers.items() if name.startswith("eval/")}
    causes = columns["eval_causes"][row]
    evaluation = None
    if causes is not None:
        evaluation = RecordedEvaluation(tuple(causes), evaluated, columns["eval_cpu_seconds"][row])
    trained = {name: value for name, value in numbers.items() if name not in evaluated}
    return RecordedStep(columns["step"][row], columns["episode"][row], trained, columns["cpu_seconds"][row], evaluation)
