"""A run's output folder: what it holds, and how an interrupted run is found in it again. Never imports torch.

run.json           what the run is; says at last that it is finished, and how it ended
ppo_config.json    its hyperparameters, as `--config` reads them; of a run in stages those of the last one
task.toml          its task, where that was given by its parts
steps.jsonl        one line of metrics a step
samples.jsonl      one line a sample of each evaluation
checkpoints/       while it runs
trackers/          what trackers write on this machine
model/             what was trained
best_model/        the best checkpoint's model, where the end is worse or over the KL budget
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ppo_core import checkpoint
from ppo_core.cli.hub import HubRepo
from ppo_core.cli.trackers import TrackedRun
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import Stay, course, is_within
from ppo_core.config.stages import Stage, described
from ppo_core.errors import CheckpointError, ConfigError
from ppo_core.output import KL_UNIT, dumps, plus_minus, short
from ppo_core.report import StepReport

# A run's ending: compared with its start, its KL budget and its best checkpoint. Never imports torch.


@dataclass(frozen=True)
class EvalReading:
    """Readings of one evaluation; a number that was not finite is NaN."""

    step: int
    episode: int
    reward: float
    reward_se: float
    kl: float
    """In nats per response."""
    kl_se: float = 0.0

    @classmethod
    def of(cls, step: Mapping[str, Any]) -> "EvalReading":
        """Return the evaluation in a line of `steps.jsonl`."""
        numbers = (step.get(name) for name in ("eval/reward", "eval/reward_se", "eval/kl", "eval/kl_se"))
        reward, se, kl, kl_se = (math.nan if number is None else float(number) for number in numbers)
        errors = (0.0 if math.isnan(error) else error for error in (se, kl_se))
        return cls(step["step"], step["episode"], reward, next(errors), kl, next(errors))

    def is_within(self, kl_budget: float) -> bool:
        """Return True if it is within the budget; see `ppo_core.config.kl_budget`."""
        return is_within(self.kl, self.kl_se, kl_budget)

    @property
    def kl_text(self) -> str:
        """Its KL in words, with the standard error if known."""
        return f"{plus_minus(self.kl, self.kl_se)} {KL_UNIT}"

    @property
    def text(self) -> str:
        """`reward 1.971 ± 0.031, KL 5.56 ± 0.12 nats/response`."""
        return f"reward {plus_minus(self.reward, self.reward_se)}, KL {self.kl_text}"


@dataclass(frozen=True)
class Ending:
    """The report on a run that has ended."""

    kl_budget: float
    note: str | None = None
    """One line on a problem of the trained policy, or None."""
    best: EvalReading | None = None
    """Evaluation of a kept checkpoint that is better than the end, and whose model is saved, too; or None."""
    kl_course: str | None = None
    """One line on when KL left the budget or came back; None: it never left."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to the value of `ending` in `run.json`."""
        return asdict(self)


def judge(steps: Sequence[Mapping[str, Any]], kl_budget: float, checkpoint_step: int | None) -> Ending:
    """Return how a run ended.

    Args:
        steps: Its lines of metrics.
        kl_budget: In nats per response.
        checkpoint_step: The step of the best kept checkpoint within the budget; None if there is none.
    """
    readings = [EvalReading.of(step) for step in steps if "eval/reward" in step]
    if not readings:
        return Ending(kl_budget)
    kl_course = _kl_course(readings, kl_budget)
    start, end = readings[0], readings[-1]
    best = next((reading for reading in readings if reading.step == checkpoint_step), None)
    within = end.is_within(kl_budget) and math.isfinite(end.reward)
    wrong = [*_budget_problem(end, kl_budget), *_fall(start, end)]
    margin = 0.0 if wrong else _error(best or end, end)
    if best is not None and within and best.reward <= end.reward + margin:
        best = None
    if best is None and not wrong:
        return Ending(kl_budget, kl_course=kl_course)
    return Ending(kl_budget, _note(wrong, start, end, best, within), best, kl_course)


def _kl_course(readings: Sequence[EvalReading], kl_budget: float) -> str | None:
    stays = [Stay(one.step, one.episode, one.is_within(kl_budget)) for one in readings if math.isfinite(one.kl)]
    found = course(stays)
    if found is None:
        return None
    left, back = found
    budget = f"the budget of {short(kl_budget)} {KL_UNIT}"
    if back is None:
        return f"KL left {budget} for good at step {left.step} (episode {left.episode})"
    return (
        f"KL was over {budget} at step {left.step} (episode {left.episode}), and stayed within it from step "
        f"{back.step} (episode {back.episode})"
    )


def _budget_problem(end: EvalReading, kl_budget: float) -> list[str]:
    if not (math.isfinite(end.kl) and math.isfinite(end.reward)):
        return ["its last evaluation is not finite"]
    if end.is_within(kl_budget):
        return []
    error = " with its standard error" if end.kl <= kl_budget else ""
    return [f"its KL of {end.kl_text} is{error} over the budget of {short(kl_budget)}"]


def _fall(start: EvalReading, end: EvalReading) -> list[str]:
    fell = end.reward < start.reward - 2 * _error(start, end)
    return [f"its reward of {_reward(end)} is below the start's {_reward(start)}"] if fell else []


def _note(wrong: Sequence[str], start: EvalReading, end: EvalReading, best: EvalReading | None, within: bool) -> str:
    what = " and ".join(wrong) or f"its reward of {_reward(end)} was higher before"
    if best is None:
        lack = "no better checkpoint was kept" if within else "no checkpoint was within the budget"
        return f"be careful with the trained policy: {what}; {lack}"
    lower = f", which is below the start's {_reward(start)}, too" if _fall(start, best) else ""
    found = f"the best within the budget is that of episode {best.episode}: {best.text}{lower}"
    return f"the trained policy is not the best of this run: {what}; {found}"


def _error(one: EvalReading, other: EvalReading) -> float:
    """Return an upper bound of the difference's standard error; both were measured on the same prompts."""
    return math.hypot(one.reward_se, other.reward_se)


def _reward(reading: EvalReading) -> str:
    return plus_minus(reading.reward, reading.reward_se)


# The run's folder.

RUN_FILE, CONFIG_FILE, TASK_FILE = "run.json", "ppo_config.json", "task.toml"
STEPS_FILE, SAMPLES_FILE = "steps.jsonl", "samples.jsonl"
CHECKPOINTS, TRACKERS, MODEL, BEST_MODEL = "checkpoints", "trackers", "model", "best_model"

_FORMAT = 2
_STORED = ("task", "device", "threads", "report_to", "run_name", "tracker_id", "save_every_episodes",
           "save_every_seconds", "command")  # fmt: skip
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
        readings = tuple(ConfirmedReading(**one) for one in stored["confirmed"])
        return cls(stored["study"], stored["trial"], readings, tuple(stored["changed"]))


@dataclass(frozen=True)
class Run:
    """One training run: what is trained, and where it is written."""

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
    """The command line that started it."""
    resume_from: Path | None = None
    first_step: int = 0
    """The next step."""
    kl_budget: float | None = None
    """Highest eval KL + one standard error of its best checkpoint, in nats per response; None: the task's."""
    stop_at_episode: int | None = None
    """Ends with the iteration that reaches this episode; None: at its full length."""
    hub: HubRepo | None = None
    """Hub repository that gets the trained model; None: none."""
    origin: RunOrigin | None = None
    """None: the configuration does not come from a study."""
    stages: tuple[Stage, ...] = ()
    """Stages before `config` takes effect, if the trial is a fork. Empty: it holds from the start."""

    @property
    def configs(self) -> list[PPOConfig]:
        """Episodes of all its stages."""
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
        """The folder of the best checkpoint's model; there only where the end is worse (see `Ending.best`)."""
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
        """The file with a line of JSON a step (see `record`)."""
        return self.output / STEPS_FILE


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make a new run's folder; it is removed again if the run ends before its first step.

    Raises:
        ConfigError: it is not empty, or cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
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
                for path in made:
                    path.rmdir()
        raise


def write(run: Run, ending: Ending | None = None) -> None:
    """Write `run.json`, for resuming, and the hyperparameters; with an ending, the run is finished."""
    _replace(run.output / CONFIG_FILE, dumps(run.config.to_dict()) + "\n")
    stored = {name: getattr(run, name) for name in _STORED}
    stored |= {"kl_budget": run.kl_budget, "stop_at_episode": run.stop_at_episode}
    stored |= {name: None if (one := getattr(run, name)) is None else asdict(one) for name in ("hub", "origin")}
    stored |= {"stages": [asdict(stage) for stage in run.stages]}
    stored |= {"ending": None if ending is None else ending.to_dict()}
    content = {"format": _FORMAT, "finished": ending is not None, **stored, "config": run.config.to_dict()}
    _replace(run.output / RUN_FILE, dumps(content) + "\n")


def resumed(folder: Path) -> Run:
    """Return an interrupted run, ready to resume from its newest undamaged checkpoint or from its start.

    Later steps and damaged checkpoints are removed; they will be made again.

    Raises:
        CheckpointError: the folder holds no run, or one that is finished.
    """
    stored = _stored(folder)
    newest = checkpoint.latest(folder / CHECKPOINTS)
    step = -1 if newest is None else checkpoint.step_of(newest)
    for path in checkpoint.complete(folder / CHECKPOINTS):
        if checkpoint.step_of(path) > step:
            checkpoint.remove(path)
    for name in (STEPS_FILE, SAMPLES_FILE):
        _keep_steps(folder / name, step)
    config = PPOConfig.from_dict(stored["config"], str(folder / RUN_FILE))
    values = {name: stored[name] for name in _STORED}
    values["report_to"] = tuple(values["report_to"])
    values |= {name: stored.get(name) for name in ("kl_budget", "stop_at_episode")}  # missing in older runs
    values["hub"] = HubRepo(**stored["hub"]) if stored.get("hub") else None
    values["origin"] = RunOrigin.of(stored["origin"]) if stored.get("origin") else None
    values["stages"] = tuple(Stage(**stage) for stage in stored.get("stages", ()))
    return Run(config=config, output=folder, resume_from=newest, first_step=step + 1, **values)


def with_threads(run: Run, threads: int) -> Run:
    """Return the run with its actual thread count."""
    return replace(run, threads=threads)


def step_data(report: StepReport) -> dict[str, Any]:
    """Return a step's line in `steps.jsonl`: `step`, `episode`, and its metrics by name."""
    return {"step": report.step, "episode": report.episode, **report.metrics}


def record(run: Run, report: StepReport) -> None:
    """Append a step's line to `steps.jsonl`, its samples' to `samples.jsonl`; numbers not finite become null."""
    at = {"step": report.step, "episode": report.episode}
    samples = [at | {name: getattr(one, name) for name in _OF_SAMPLE} for one in report.samples]
    for path, lines in ((run.steps, [step_data(report)]), (run.output / SAMPLES_FILE, samples)):
        if lines:
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(dumps(line, indent=None) + "\n" for line in lines)


def recorded(run: Run) -> Sequence[dict[str, Any]]:
    """Return all steps' lines, including those before an interruption."""
    return [json.loads(line) for line in run.steps.read_text(encoding="utf-8").splitlines()]


def _stored(folder: Path) -> dict[str, Any]:
    path = folder / RUN_FILE
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_known = stored["format"] == _FORMAT and all(name in stored for name in (*_STORED, "config", "finished"))
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
