"""A run's output folder: its files, and how an interrupted run is resumed from them. Never imports torch.

run.json           the run's settings; once it is finished, also how it ended
ppo_config.json    its hyperparameters, as `--config` reads them; for a run in stages, those of the last one
task.toml          its task, where that was given by its parts
steps.jsonl        one line of metrics per step
samples.jsonl      one line per sample of each evaluation
checkpoints/       while it runs
trackers/          files of trackers that write on this machine
model/             the trained model
best_model/        the model of the best checkpoint within the KL budget, unless that is the end
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ppo_core import checkpoint
from ppo_core.cli.ending import Ending
from ppo_core.cli.trackers import TrackedRun
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.stages import Stage, described
from ppo_core.errors import CheckpointError, ConfigError
from ppo_core.output import dumps
from ppo_core.report import StepReport

RUN_FILE, CONFIG_FILE, TASK_FILE = "run.json", "ppo_config.json", "task.toml"
STEPS_FILE, SAMPLES_FILE = "steps.jsonl", "samples.jsonl"
CHECKPOINTS, TRACKERS, MODEL, BEST_MODEL = "checkpoints", "trackers", "model", "best_model"

_FORMAT = 2
_NOT_STORED = ("output", "resume_from", "first_step")
"""Fields of a run that follow from its folder's content."""
_OF_SAMPLE = ("prompt_index", "prompt", "response", "reward", "parts", "kl", "length")


@dataclass(frozen=True)
class ConfirmedReading:
    """A configuration's confirmed results on the test prompts, as its study states them.

    Means over the seeds; `reward_low` and `reward_high` end a 95% t-interval, which one seed does not have.
    """

    total_episodes: int
    """The length that it was confirmed at."""
    seeds: int
    prompts: int
    reward: float
    reward_low: float | None
    reward_high: float | None
    kl: float | None
    """In nats per response."""


@dataclass(frozen=True)
class RunOrigin:
    """The study's trial that a run's configuration comes from."""

    study: str
    trial: int
    confirmed: tuple[ConfirmedReading, ...] = ()
    """One result per length; empty: not confirmed."""
    changed: tuple[str, ...] = ()
    """Values that the run changes, apart from length and seed."""

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "RunOrigin":
        """Read an origin from `run.json`."""
        readings = tuple(ConfirmedReading(**reading) for reading in stored["confirmed"])
        return cls(stored["study"], stored["trial"], readings, tuple(stored["changed"]))


@dataclass(frozen=True)
class HubRepo:
    """A model repository on the hub."""

    id: str
    """`user/name`; of one that is yet to be created also a name alone, or empty for that of the run's folder."""
    private: bool | None = None
    """None: the user's or the organisation's default."""


@dataclass(frozen=True)
class Run:
    """One training run: its settings and its folder."""

    task: str
    config: PPOConfig
    device: str
    output: Path
    threads: int | None
    """CPU threads; None: torch's choice, recorded for resuming."""
    report_to: tuple[str, ...]
    run_name: str
    tracker_id: str
    """The run's identity at trackers, the same after resuming."""
    save_every_episodes: int | None
    save_every_seconds: float
    command: str
    resume_from: Path | None = None
    first_step: int = 0
    """The next step."""
    kl_budget: float | None = None
    """Highest eval KL + one standard error of its best checkpoint, in nats per response; None: the task's."""
    stop_at_episode: int | None = None
    """Ends with the iteration that reaches this episode; None: at its full length."""
    hub: HubRepo | None = None
    origin: RunOrigin | None = None
    """None: the configuration does not come from a study."""
    stages: tuple[Stage, ...] = ()
    """Stages before `config` takes effect, if the trial is a fork. Empty: it holds from the start."""
    given: Mapping[str, HyperValue] = field(default_factory=dict)
    """Hyperparameters of the flags and the config file."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """A study's KL limit and first budget (`limit`, `budget`, in nats per response) and `[guard]` table (`rules`);
    empty: not from a study."""

    @property
    def configs(self) -> list[PPOConfig]:
        """Configs of all stages, in order; the last is `config`."""
        return [*(stage.config for stage in self.stages), self.config]

    @property
    def stages_text(self) -> str | None:
        """Values by stage (see `ppo_core.config.stages.described`); None: the same all the way."""
        if not self.stages or self.origin is None:
            return None
        return described(self.stages, self.config, self.origin.trial)

    @property
    def last_step(self) -> int:
        """The step that it ends with."""
        whole = self.config.num_iterations()
        if self.stop_at_episode is None:
            return whole
        return min(whole, math.ceil(self.stop_at_episode / self.config.batch_sizes(1).batch_size))

    @property
    def model(self) -> Path:
        """The folder of the trained model: transformers' or PEFT's format, with a model card."""
        return self.output / MODEL

    @property
    def best_model(self) -> Path:
        """The folder of the best checkpoint's model; not there where the end is the best (see `Ending.best`)."""
        return self.output / BEST_MODEL

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, deleted once the model is written."""
        return self.output / CHECKPOINTS

    @property
    def tracked(self) -> TrackedRun:
        """The run as trackers know it."""
        values = {"task": self.task, "device": self.device, "threads": self.threads, **self.config.to_dict()}
        folder = self.output / TRACKERS / self.run_name
        return TrackedRun(self.run_name, self.tracker_id, folder, values, self.first_step == 0, self.first_step)

    @property
    def steps(self) -> Path:
        """The file with one line of JSON per step (see `record`)."""
        return self.output / STEPS_FILE


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make a new run's folder; it is removed again if the run ends before its first step.

    Raises ConfigError if it is not empty, or cannot be written.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--output {folder} is not empty; name another folder")
    except OSError as error:
        raise ConfigError(f"--output {folder} cannot be written: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if not (folder / STEPS_FILE).exists():
            for name in (RUN_FILE, CONFIG_FILE, TASK_FILE):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / TRACKERS, ignore_errors=True)
            with suppress(OSError):  # another process created a file meanwhile
                for path in new_folders:
                    path.rmdir()
        raise


def write(run: Run, ending: Ending | None = None) -> None:
    """Write `run.json`, for resuming, and the hyperparameters; with an ending, the run is finished."""
    _replace(run.output / CONFIG_FILE, dumps(run.config.to_dict()) + "\n")
    stored = {name: value for name, value in asdict(run).items() if name not in _NOT_STORED}
    end = {"finished": ending is not None, "ending": None if ending is None else asdict(ending)}
    _replace(run.output / RUN_FILE, dumps({"format": _FORMAT, **end, **stored}) + "\n")


def resumed(folder: Path) -> Run:
    """Return an interrupted run, ready to resume from its newest undamaged checkpoint or from its start.

    Later steps and damaged checkpoints are removed; the run makes them again. Raises CheckpointError if the folder
    holds no run, or one that is finished.
    """
    stored = _stored(folder)
    newest = checkpoint.latest(folder / CHECKPOINTS)
    step = -1 if newest is None else checkpoint.step_of(newest)
    for path in checkpoint.complete(folder / CHECKPOINTS):
        if checkpoint.step_of(path) > step:
            checkpoint.remove(path)
    for name in (STEPS_FILE, SAMPLES_FILE):
        _keep_steps(folder / name, step)
    values = {field.name: stored[field.name] for field in fields(Run) if field.name not in _NOT_STORED}
    values["config"] = PPOConfig.from_dict(stored["config"], str(folder / RUN_FILE))
    values["report_to"] = tuple(stored["report_to"])
    values["hub"] = HubRepo(**stored["hub"]) if stored["hub"] else None
    values["origin"] = RunOrigin.of(stored["origin"]) if stored["origin"] else None
    values["stages"] = tuple(Stage(**stage) for stage in stored["stages"])
    return Run(output=folder, resume_from=newest, first_step=step + 1, **values)


def step_data(report: StepReport) -> dict[str, Any]:
    """Return a step's line in `steps.jsonl`: `step`, `episode`, and its metrics by name."""
    return {"step": report.step, "episode": report.episode, **report.metrics}


def record(run: Run, report: StepReport) -> None:
    """Append a step's line to `steps.jsonl`, its samples' to `samples.jsonl`; numbers not finite become null."""
    position = {"step": report.step, "episode": report.episode}
    samples = [position | {name: getattr(sample, name) for name in _OF_SAMPLE} for sample in report.samples]
    for path, lines in ((run.steps, [step_data(report)]), (run.output / SAMPLES_FILE, samples)):
        if lines:
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(dumps(line, indent=None) + "\n" for line in lines)


def recorded(run: Run) -> Sequence[dict[str, Any]]:
    """Return all steps' lines, including those before an interruption."""
    return [json.loads(line) for line in run.steps.read_text(encoding="utf-8").splitlines()]


def sample_pair(run: Run, step: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return what the SFT policy and the one of a step answered to the first eval prompt, or None."""
    path = run.output / SAMPLES_FILE
    if step == 0 or not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    first = {line["step"]: line for line in reversed(lines)}
    return (first[0], first[step]) if {0, step} <= first.keys() else None


def _stored(folder: Path) -> dict[str, Any]:
    path = folder / RUN_FILE
    wanted = {"finished", *(field.name for field in fields(Run))} - set(_NOT_STORED)
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_known = stored["format"] == _FORMAT and stored.keys() >= wanted
    except OSError:
        raise CheckpointError(f"{folder} is not a run's folder: it has no {RUN_FILE}") from None
    except (ValueError, TypeError, KeyError):
        is_known = False
    if not is_known:
        raise CheckpointError(f"{path} is damaged, or of another version of this program")
    if stored["finished"]:
        raise CheckpointError(f"{folder} holds a finished run; its model is in {folder / MODEL}")
    return stored


def _keep_steps(path: Path, last: int) -> None:
    """Drop recorded lines after step `last`, and an incomplete last line."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # responses may contain other line separators
    _replace(path, "".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= last))


def _replace(path: Path, text: str) -> None:
    """Write atomically."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
