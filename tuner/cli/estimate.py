"""`ppo-tuner estimate`: the memory, disk and time that a run or a study takes, before it is started."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ppo_core import output
from ppo_core.checkpoint import size
from ppo_core.cli.arguments import HyperparameterParser, hyperparameters_of, layered
from ppo_core.cli.command_line import EXIT_ERROR, EXIT_OK, refuse_unknown
from ppo_core.cli.training import seconds_left
from ppo_core.config import checks
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import BUILT_IN
from ppo_core.data.task_file import FOLDER_FILES, get_task
from ppo_core.errors import ConfigError, StoreError, TaskError, nearest
from ppo_core.output import amount
from ppo_core.report import DEVICES, iteration_seconds, require_device
from tuner.cli import storage
from tuner.cli.arguments import STORAGE_HELP
from tuner.cli.render import new_table
from tuner.engine.local import busy_line
from tuner.environment import PROG, RUNS_FOLDER, STUDY_FILE, existing
from tuner.files.disk import Disk, disk, search_line
from tuner.study.spec import PPO_TRAINER, StudySpec

if TYPE_CHECKING:
    from ppo_core.models.estimate import Estimate
    from ppo_core.models.memory import Room


@dataclass(frozen=True)
class _Request:
    """The run or study to estimate."""

    task: str
    device: str
    configs: Mapping[str, PPOConfig]
    """Configurations by description; a study is estimated by its largest."""
    spec: StudySpec | None = None


def _request(args: argparse.Namespace) -> _Request:
    values = hyperparameters_of(vars(args))
    spec = _study(args.what, args.storage)
    device = require_device(args.device or ("auto" if spec is None else spec.device), "--device")
    if spec is None:
        task = get_task(args.what)
        return _Request(task.name, device, {"run": layered(task.reference, {}, values)})
    if values:
        raise ConfigError(
            f"a study states its own values, so it does not take {', '.join(f'--{name}' for name in values)}"
        )
    if spec.trainer != PPO_TRAINER:
        raise ConfigError(f'study "{spec.name}" has a trainer of its own, {spec.trainer}; what that takes is not known')
    if spec.shards_weights:
        raise ConfigError(f'study "{spec.name}" shards its weights (use_fsdp); what that takes is not predicted')
    return _Request(spec.task, device, spec.configs_of_one_process(), spec)


@dataclass(frozen=True)
class _Prediction:
    """The predicted use of memory and disk."""

    estimates: Mapping[str, "Estimate"]
    """Estimates, keyed by the configuration's description."""
    name: str
    """Description of the largest one."""
    config: PPOConfig
    """The largest one, with gradient checkpointing decided."""
    side_by_side: int
    """Number of such runs that fit into the memory together."""
    disk: Disk
    problems: list[str]
    """Lines on what does not fit."""

    @property
    def largest(self) -> "Estimate":
        return self.estimates[self.name]


def estimate(argv: Sequence[str]) -> int:
    """Print what a run or a study takes; return 1 if it does not fit into memory or on the disk."""
    parser = build_parser()
    args, rest = parser.parse_known_args(list(argv))
    refuse_unknown(parser, rest)
    request = _request(args)
    from ppo_core.models.load import resolve_device
    from ppo_core.models.memory import room

    place = room(resolve_device(request.device))
    prediction = None
    try:
        prediction = _predict(request, place)
    except TaskError:
        if not args.measure:
            raise
    name, config = next(iter(request.configs.items()))
    if prediction is not None:
        name, config = prediction.name, prediction.config
    busy = busy_line()  # before it adds to the load itself
    measured = _measure(config, request.task, request.device) if args.measure else None
    if args.json:
        print(output.dumps(_data(prediction, name, place, measured)))
    else:
        out = output.console()
        if prediction is not None:
            _print(out, request, prediction, place)
        if measured is not None:
            out.print(_measured_line(measured, prediction), soft_wrap=True)
            if busy is not None:
                out.print(busy, soft_wrap=True)
            if request.spec is not None:
                seconds = measured["iteration_seconds"], measured["evaluation_seconds"]
                disk_use = "" if prediction is None else f"; checkpoints of up to {size(prediction.disk.most)}"
                out.print(search_line(request.spec, *seconds) + disk_use, soft_wrap=True)
        for line in prediction.problems if prediction is not None else ():
            print(f"{PROG}: {line}")
    return EXIT_ERROR if prediction is not None and prediction.problems else EXIT_OK


def _predict(request: _Request, place: "Room") -> _Prediction:
    """Predict without loading the models; TaskError if that is not possible for the task's models."""
    from ppo_core.models import fits
    from ppo_core.models.estimate import Estimator

    task = get_task(request.task)
    estimator = Estimator(task, task.prepare(None), place)
    configs = {name: fits.settled(config, place, estimator) for name, config in request.configs.items()}
    estimates = {name: estimator(config) for name, config in configs.items()}
    name = max(estimates, key=lambda name: estimates[name].peak)
    largest = estimates[name]
    space = disk(largest.checkpoint, largest.model, request.spec, shutil.disk_usage(existing(RUNS_FOLDER)).free)
    memory_problem = fits.why_not(configs[name], place, estimator)
    problems = [] if memory_problem is None else [memory_problem]
    if space.most > space.free:
        problems.append(
            f"checkpoints of up to {size(space.most)} do not fit into the {size(space.free)} that are free; LoRA "
            "(use_peft) has small ones"
        )
    side_by_side = place.total // fits.predicted(largest, place)
    return _Prediction(estimates, name, configs[name], side_by_side, space, problems)


def _measure(config: PPOConfig, task: str, device: str) -> dict[str, float]:
    """Measure the SFT policy's evaluation and a run's first iteration; nothing is saved.

    The peak is the rise of memory over this process's earlier use, in bytes; on a GPU, the most that was allocated.
    """
    from ppo_core.models.memory import peak_mib, resident
    from ppo_core.trainer import ppo_trainer

    before = resident()
    trainer = ppo_trainer(config, task, device=device)
    reports = iter(trainer)
    baseline, first = next(reports), next(reports)
    where = trainer.network.policy.device
    evaluation, iteration = baseline.metrics["time/evaluate"], iteration_seconds(first)
    return {
        "peak": round(peak_mib(where) * 2**20) - (0 if where.type == "cuda" else before),
        "evaluation_seconds": evaluation,
        "iteration_seconds": iteration,
        "run_seconds": evaluation + seconds_left(config, 0, config.num_iterations(), iteration, evaluation),
    }


def build_parser() -> HyperparameterParser:
    """Return the parser of `estimate`."""
    parser = HyperparameterParser(
        prog=f"{PROG} estimate",
        usage=f"{PROG} estimate TASK|STUDY [--measure] [--json] [--HYPERPARAMETER X ...]",
        description="Estimate the memory and disk of a run of a task, or of the largest trial of a study, before "
        "anything is loaded. Exit status 1: it does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "what",
        metavar="TASK|STUDY",
        help=f"a task ({', '.join(BUILT_IN)}, module:attribute, or a path to its file or folder), or a study's TOML "
        "file or a stored study's name",
    )
    parser.add_argument("--measure", action="store_true", help="load it, run one iteration, and print what that took")
    parser.add_argument("--device", metavar="D", help=f"{' or '.join(DEVICES)} (default: auto, or the study's)")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--storage", metavar="URL", help=STORAGE_HELP)
    parser.add_hyperparameters()
    return parser


def _study(what: str, where: str | None) -> StudySpec | None:
    """Return the study of a file, a folder or the store; None: a task is meant."""
    path = Path(what).expanduser()
    if path.is_dir():
        is_study = (path / STUDY_FILE).exists() and not any((path / name).exists() for name in FOLDER_FILES)
        return StudySpec.load(path / STUDY_FILE) if is_study else None
    if path.suffix == ".toml" and path.is_file():
        content = checks.read_toml(path, "file")
        is_study = "task" in content and bool({"name", "search", "trial", "trials"} & set(content))
        return StudySpec.load(path) if is_study else None
    if ":" in what or path.suffix or "/" in what:
        return None
    names: list[str] = []
    with suppress(StoreError), storage.opened(where) as store:  # no store, no studies
        names = [row.name for row in store.studies()]
        if what in names and what not in BUILT_IN:
            return StudySpec.from_dict(store.study(what).spec, f'study "{what}" in the store')
    if what in BUILT_IN:
        return None
    known = list(dict.fromkeys([*BUILT_IN, *names]))
    raise TaskError(
        f'"{what}" is neither a task nor a stored study; available: {", ".join(known)}{nearest(what, known)}'
    )


def _print(out: Console, request: _Request, prediction: _Prediction, place: "Room") -> None:
    from ppo_core.models import fits

    largest, spec = prediction.largest, request.spec
    title = f"{output.plain(request.task) if spec is None else spec.name}, {prediction.name}"
    if spec is not None and spec.gpus_per_trial > 1:
        title += f", each of {spec.gpus_per_trial} processes"
    table = new_table("memory", "part", "size", title=title, right=("size",))
    always = {**largest.held, "the process itself": place.process}
    for phase, parts in {"always": always, **largest.phases}.items():
        for part, count in parts.items():
            if amount(count) != amount(0):  # tiny parts are only in the JSON
                table.add_row(phase, part, amount(count))
    out.print(table)
    for name, each in prediction.estimates.items():
        if name != prediction.name:
            out.print(f"{name}: {amount(fits.predicted(each, place))}", soft_wrap=True)
    out.print(fits.line(largest, place), soft_wrap=True)
    if spec is not None:
        out.print(f"trials side by side: {prediction.side_by_side}, as far as memory goes", soft_wrap=True)
    out.print(prediction.disk.line, soft_wrap=True)


def _measured_line(measured: Mapping[str, float], prediction: _Prediction | None) -> str:
    comparison = "; nothing can be predicted"
    if prediction is not None:
        peak = prediction.largest.peak
        comparison = f", predicted {amount(peak)} ({peak / measured['peak'] - 1:+.0%})"
    return (
        f"measured: a peak of {amount(measured['peak'])} over what the process held before{comparison}; "
        f"{measured['iteration_seconds']:.1f} s per iteration, {measured['evaluation_seconds']:.1f} s per evaluation, "
        f"so {output.duration(measured['run_seconds'])} for the run"
    )


def _data(
    prediction: _Prediction | None, name: str, place: "Room", measured: Mapping[str, float] | None
) -> dict[str, Any]:
    from ppo_core.models.estimate import ERROR

    largest = None if prediction is None else prediction.largest
    return {
        "largest": name,
        "held": largest and largest.held,
        "phases": largest and largest.phases,
        "peak": largest and largest.peak,
        "peaks": {name: each.peak for name, each in prediction.estimates.items()} if prediction else {},
        "error": ERROR,
        "room": asdict(place),
        "side_by_side": prediction and prediction.side_by_side,
        "disk": prediction and asdict(prediction.disk),
        "fits": prediction and not prediction.problems,
        "wrong": prediction.problems if prediction else [],
        "measured": measured,
    }
