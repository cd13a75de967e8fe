"""`ppo-tuner estimate`: how much memory, disk and time a run or a study takes, before it is started."""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ppo_core import checkpoint, output
from ppo_core.cli import config_file
from ppo_core.cli.arguments import HyperparameterParser, hyperparameters_of
from ppo_core.cli.command_line import EXIT_ERROR, EXIT_OK, import_from_working_folder, refuse_unknown
from ppo_core.cli.training import seconds_left
from ppo_core.config import declare
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import BUILT_IN
from ppo_core.data.task_file import FOLDER_FILES, get_task
from ppo_core.errors import ConfigError, StoreError, TaskError, nearest
from ppo_core.output import amount
from ppo_core.report import DEVICES, iteration_seconds, require_device
from tuner.cli import storage
from tuner.cli.arguments import STORAGE_HELP
from tuner.cli.render import new_table
from tuner.environment import PROG, RUNS_FOLDER, STUDY_FILE, existing
from tuner.files.disk import Disk, disk, search_line
from tuner.study.spec import PPO_TRAINER, StudySpec

if TYPE_CHECKING:
    from ppo_core.models.estimate import Estimate
    from ppo_core.models.memory import Room


def estimate(argv: Sequence[str]) -> int:
    """Print what a run or a study takes; return 1 where it does not fit into memory or on the disk."""
    parser = build_parser()
    args, rest = parser.parse_known_args(list(argv))
    refuse_unknown(parser, rest)
    import_from_working_folder()
    asked = _asked(args)
    from ppo_core.models import fits
    from ppo_core.models.estimate import Estimator
    from ppo_core.models.load import resolve_device
    from ppo_core.models.memory import room

    device = resolve_device(asked.device)
    task = get_task(asked.task)
    place = room(device)
    assets = task.prepare(None)
    configs = dict(asked.configs)
    found: dict[str, Estimate] = {}
    wrong: list[str] = []
    try:
        estimator = Estimator(task, assets, place)
        configs = {name: fits.settled(config, place, estimator) for name, config in configs.items()}
        found = {name: estimator(config) for name, config in configs.items()}
    except TaskError:
        if not args.measure:
            raise
    worst = max(found or configs, key=lambda name: found[name].peak if found else 0)
    measured = _measure(configs[worst], task.name, asked.device) if args.measure else None
    space = asked.disk(found[worst]) if found else None
    if space is not None:
        wrong = [line for line in (fits.why_not(configs[worst], place, estimator), _no_disk(space)) if line is not None]
    if args.json:
        print(output.dumps(_data(found, worst, place, space, wrong, measured)))
    else:
        out = output.console()
        if space is not None:
            _print(out, asked, found, worst, place, space)
        if measured is not None:
            out.print(_measured_line(measured, found.get(worst)), soft_wrap=True)
            if asked.spec is not None:
                seconds = measured["iteration_seconds"], measured["evaluation_seconds"]
                on_disk = "" if space is None else f"; checkpoints of up to {checkpoint.size(space.most)}"
                out.print(search_line(asked.spec, *seconds) + on_disk, soft_wrap=True)
        for line in wrong:
            print(f"{PROG}: {line}")
    return EXIT_ERROR if wrong else EXIT_OK


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


@dataclass(frozen=True)
class _Asked:
    """The run or study to estimate."""

    task: str
    device: str
    configs: Mapping[str, PPOConfig]
    """Configurations by description; a study is estimated by its largest."""
    spec: StudySpec | None = None

    def disk(self, largest: "Estimate") -> Disk:
        """Return the disk space of checkpoints, and what is free."""
        return disk(largest.checkpoint, largest.model, self.spec, shutil.disk_usage(existing(RUNS_FOLDER)).free)


def _asked(args: argparse.Namespace) -> _Asked:
    values = hyperparameters_of(vars(args))
    spec = _study(args.what, args.storage)
    device = require_device(args.device or ("auto" if spec is None else spec.device), "--device")
    if spec is None:
        task = get_task(args.what)
        return _Asked(task.name, device, {"run": config_file.layered(task.reference, {}, values)})
    if values:
        raise ConfigError(
            f"a study states its own values, so it does not take {', '.join(f'--{name}' for name in values)}"
        )
    if spec.trainer != PPO_TRAINER:
        raise ConfigError(f'study "{spec.name}" has a trainer of its own, {spec.trainer}; what that takes is not known')
    if spec.shards_weights:
        raise ConfigError(f'study "{spec.name}" shards its weights (use_fsdp); what that takes is not predicted')
    return _Asked(spec.task, device, spec.configs_of_one_process(), spec)


def _study(what: str, where: str | None) -> StudySpec | None:
    """Return the study of a file, a folder or the store; None: a task is meant."""
    path = Path(what).expanduser()
    if path.is_dir():
        is_study = (path / STUDY_FILE).exists() and not any((path / name).exists() for name in FOLDER_FILES)
        return StudySpec.load(path / STUDY_FILE) if is_study else None
    if path.suffix == ".toml" and path.is_file():
        content = declare.read_toml(path, "file")
        is_study = "task" in content and bool({"name", "search", "trial", "trials"} & set(content))
        return StudySpec.load(path) if is_study else None
    if ":" in what or path.suffix or "/" in what:
        return None
    names: list[str] = []
    with suppress(StoreError), storage.opened(where) as store:  # no store, no studies
        names = [row.name for row in store.studies()]
        if what in names and what in BUILT_IN:
            note = f'"{what}" is the task here; for the stored study of that name, give its file'
            print(f"{PROG}: {note}", file=sys.stderr)
        elif what in names:
            return StudySpec.from_dict(store.study(what).spec, f'study "{what}" in the store')
    if what in BUILT_IN:
        return None
    there = list(dict.fromkeys([*BUILT_IN, *names]))
    raise TaskError(
        f'"{what}" is neither a task nor a stored study; available: {", ".join(there)}{nearest(what, there)}'
    )


def _no_disk(space: Disk) -> str | None:
    if space.most <= space.free:
        return None
    return (
        f"checkpoints of up to {checkpoint.size(space.most)} do not fit into the {checkpoint.size(space.free)} that "
        "are free; LoRA (use_peft) has small ones"
    )


def _print(
    out: Console, asked: _Asked, found: Mapping[str, "Estimate"], worst: str, place: "Room", space: Disk
) -> None:
    from ppo_core.models import fits

    largest = found[worst]
    title = f"{output.plain(asked.task)}, {worst}" if asked.spec is None else f"{asked.spec.name}, {worst}"
    if asked.spec is not None and asked.spec.gpus_per_trial > 1:
        title += f", each of {asked.spec.gpus_per_trial} processes"
    table = new_table("memory", "part", "size", title=title, right=("size",))
    always = {**largest.held, "the process itself": place.process}
    for moment, parts in {"always": always, **largest.moments}.items():
        for part, count in parts.items():
            if amount(count) != amount(0):  # tiny parts are only in the JSON
                table.add_row(moment, part, amount(count))
    out.print(table)
    for name, each in found.items():
        if name != worst:
            out.print(f"{name}: {amount(fits.predicted(each, place))}", soft_wrap=True)
    out.print(fits.line(largest, place), soft_wrap=True)
    if asked.spec is not None:
        count = place.total // fits.predicted(largest, place)
        out.print(f"trials side by side: {count}, as far as memory goes", soft_wrap=True)
    out.print(space.line, soft_wrap=True)


def _measured_line(measured: Mapping[str, float], predicted: "Estimate | None") -> str:
    beside = "; nothing can be predicted"
    if predicted is not None:
        beside = f", predicted {amount(predicted.peak)} ({predicted.peak / measured['peak'] - 1:+.0%})"
    return (
        f"measured: a peak of {amount(measured['peak'])} over what the process held before{beside}; "
        f"{measured['iteration_seconds']:.1f} s an iteration, {measured['evaluation_seconds']:.1f} s an evaluation, so "
        f"{output.duration(measured['run_seconds'])} for the run"
    )


def _data(
    found: Mapping[str, "Estimate"],
    worst: str,
    place: "Room",
    space: Disk | None,
    wrong: Sequence[str],
    measured: Mapping[str, float] | None,
) -> dict[str, Any]:
    from ppo_core.models.estimate import ERROR
    from ppo_core.models.fits import predicted

    largest = found.get(worst)
    return {
        "largest": worst,
        "held": largest and dict(largest.held),
        "moments": largest and {name: dict(parts) for name, parts in largest.moments.items()},
        "peak": largest and largest.peak,
        "peaks": {name: each.peak for name, each in found.items()},
        "error": ERROR,
        "room": asdict(place),
        "side_by_side": largest and place.total // predicted(largest, place),
        "disk": space and asdict(space),
        "fits": not wrong if found else None,
        "wrong": list(wrong),
        "measured": measured,
    }
