"""`ppo-tuner estimate`: the memory, time and disk that a run or a study takes, by one iteration of it."""

import multiprocessing
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ppo_core import output
from ppo_core.checkpoint import size
from ppo_core.cli.arguments import HyperparameterParser, hyperparameters_of, layered
from ppo_core.cli.command_line import EXIT_ERROR, EXIT_OK, refuse_unknown
from ppo_core.cli.training import seconds_left
from ppo_core.config import checks
from ppo_core.config.hyperparameters import PPOConfig, cautions
from ppo_core.config.lookup import user_path
from ppo_core.data.task import BUILT_IN, Task
from ppo_core.errors import ConfigError, OutOfMemory, StoreError, TaskError, nearest
from ppo_core.loading.task_file import FOLDER_FILES, get_task
from ppo_core.output import amount
from ppo_core.report import DEVICES, require_device
from tuner.cli.arguments import STORAGE_HELP
from tuner.control.needs import Disk, configs_of_one_process, disk, search_line, shards_weights
from tuner.engine.local import busy_line
from tuner.environment import PROG, RUNS_FOLDER, STUDY_FILE, existing
from tuner.store import opened
from tuner.study.spec import PPO_TRAINER, StudySpec

if TYPE_CHECKING:
    from ppo_core.loading.fits import Least
    from ppo_core.models.memory import Room


def _configs(spec: StudySpec | None, task: Task, values: Mapping[str, Any]) -> Mapping[str, PPOConfig]:
    """Return the configurations to estimate by description: of a run with flags `values`, or a study's largest."""
    if spec is None:
        return {"run": layered(task.reference, {}, values)}
    if values:
        raise ConfigError(
            f"a study states its own values, so it does not take {', '.join(f'--{name}' for name in values)}"
        )
    if spec.trainer != PPO_TRAINER:
        raise ConfigError(f'study "{spec.name}" uses its own trainer, {spec.trainer}, whose cost cannot be estimated')
    if shards_weights(spec):
        raise ConfigError(f'study "{spec.name}" shards its weights (use_fsdp); what that takes is not measured')
    return configs_of_one_process(spec)


LOADING, SAMPLING, LEARNING = "loading", "sampling and scoring", "learning"


@dataclass(frozen=True)
class _Measured:
    """Cost of one evaluation and one iteration in a process of its own."""

    peak: int
    """Bytes, of the whole process on its device."""
    phase: str
    """The phase in which the peak was reached."""
    lower: dict[str, Any]
    """The setting that lowers the peak at the least cost, with its value."""
    evaluation_seconds: float
    iteration_seconds: float
    run_seconds: float
    checkpoint: int
    """Bytes of a checkpoint."""
    model: int
    """Bytes of a saved model."""


def estimate(argv: Sequence[str]) -> int:
    """Run one iteration and print what it took; return 1 if the memory or the disk is too small."""
    parser = build_parser()
    args, rest = parser.parse_known_args(list(argv))
    refuse_unknown(parser, rest)
    spec = _study(args.what, args.storage)
    device = require_device(args.device or ("auto" if spec is None else spec.device), "--device")
    task = get_task(args.what if spec is None else spec.task)
    configs = _configs(spec, task, hyperparameters_of(vars(args)))
    from ppo_core.loading import fits, ready
    from ppo_core.loading.load import resolve_device
    from ppo_core.models.memory import room

    assets, wanted = task.prepare(None), list(configs.values())
    notes = list(ready.require_ready(wanted, task, assets))
    found = fits.largest(wanted, task, assets, device)
    name = next(name for name, config in configs.items() if found is None or config == found[0].config)
    busy = busy_line()  # before it adds to the load itself
    out = output.console()
    if found is not None and not args.json:
        out.print(fits.line(*found), soft_wrap=True)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
            measured = processes.submit(_measure, configs[name], task.name, device).result()
    except BrokenProcessPool as error:  # the system ends what takes too much
        changes = _lower(configs[name], LEARNING) | _lower(configs[name], SAMPLING)
        raise OutOfMemory(
            f"the measuring process was killed, probably because it ran out of memory; try {_words(changes)}"
        ) from error
    place, free = room(resolve_device(device)), shutil.disk_usage(existing(RUNS_FOLDER)).free
    space = disk(measured.checkpoint, measured.model, spec, free, measured.run_seconds)
    if args.json:
        print(output.dumps(_data(name, found and found[0], measured, place, space)))
    else:
        title = f"{output.plain(task.name) if spec is None else spec.name}, {name}"
        for line in _lines(spec, title, measured, place):
            out.print(line, soft_wrap=True)
        out.print(space.line, soft_wrap=True)
        for line in filter(None, (*notes, *cautions(configs[name]), busy)):
            out.print(line, soft_wrap=True)
    if space.most > space.free:
        print(
            f"{PROG}: checkpoints need up to {size(space.most)}, and only {size(space.free)} of disk space is "
            f"free; with LoRA (use_peft) they are small",
            file=sys.stderr,
        )
    return EXIT_ERROR if space.most > space.free else EXIT_OK


def _measure(config: PPOConfig, task: str, device: str) -> _Measured:
    """Measure the SFT policy's evaluation and an iteration; nothing is saved."""
    from ppo_core.models.memory import peak_mib, room
    from ppo_core.trainer import collect, learn, ppo_trainer, score

    trainer = ppo_trainer(config, task, device=device)
    where, state = trainer.network.policy.device, trainer.state
    peaks = {LOADING: peak_mib(where)}
    baseline = next(iter(trainer))
    start = time.perf_counter()
    rollouts = collect(state, trainer.models, trainer.generator)
    experience, metrics = score(state, trainer.models, rollouts)
    peaks[SAMPLING] = peak_mib(where)
    learn(state, experience, metrics["objective/kl_exact"])
    iteration, evaluation = time.perf_counter() - start, baseline.metrics["time/evaluate"]
    peaks[LEARNING] = peak_mib(where)
    phase = next(phase for phase, peak in peaks.items() if peak >= _SAME * peaks[LEARNING])
    return _Measured(
        round(peaks[LEARNING] * 2**20) + (room(where).process if where.type == "cuda" else 0),
        phase,
        _lower(config, phase),
        evaluation,
        iteration,
        evaluation + seconds_left(config, 0, config.num_iterations(), iteration, evaluation),
        trainer.checkpoint_bytes(),
        sum(p.nbytes for p in trainer.network.policy_parameters()),
    )


_SAME = 0.99
"""Share of the peak from which on a phase has reached it: later ones add crumbs."""


def _lower(config: PPOConfig, phase: str) -> dict[str, Any]:
    """Return the setting that lowers a phase's peak: one that costs time alone, if any is left."""
    sizes = config.batch_sizes(world_size=1)
    rows, sampled = sizes.per_device_train_batch_size, min(config.local_rollout_forward_batch_size, sizes.batch_size)
    if phase == LEARNING and rows > 1 and config.gradient_accumulation_steps is None:
        fewer = (count for count in reversed(range(1, rows)) if sizes.local_mini_batch_size % count == 0)
        return {"per_device_train_batch_size": next(fewer)}
    if phase == LEARNING and not config.gradient_checkpointing:
        return {"gradient_checkpointing": True}
    if phase == SAMPLING and sampled > 1:
        return {"local_rollout_forward_batch_size": sampled // 2}
    if not config.use_peft:
        return {"use_peft": True}
    return {"response_length": config.response_length // 2} if phase != LOADING else {"load_in_4bit": True}


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {output.short(value)}" for name, value in changes.items())


def build_parser() -> HyperparameterParser:
    """Return the parser of `estimate`."""
    parser = HyperparameterParser(
        prog=f"{PROG} estimate",
        usage=f"{PROG} estimate TASK|STUDY [--json] [--HYPERPARAMETER X ...]",
        description="Run one evaluation and one iteration of a task, or of the largest trial of a study, in a process "
        "of its own, and print their peak memory and time, which setting lowers the peak, and the disk. Exit status 1: "
        "it does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "what",
        metavar="TASK|STUDY",
        help=f"a task ({', '.join(BUILT_IN)}, module:attribute, or a path to its file or folder), or a study's TOML "
        "file or a stored study's name",
    )
    parser.add_argument("--device", metavar="D", help=f"{' or '.join(DEVICES)} (default: auto, or the study's)")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--storage", metavar="URL", help=STORAGE_HELP)
    parser.add_hyperparameters()
    return parser


def _study(what: str, where: str | None) -> StudySpec | None:
    """Return the study of a file, a folder or the store; None: a task is meant."""
    path = user_path(what)
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
    with suppress(StoreError), opened(where) as store:  # no store, no studies
        names = [row.name for row in store.studies()]
        if what in names and what not in BUILT_IN:
            return StudySpec.from_stored(store.study(what).spec, f'study "{what}" in the store')
    if what in BUILT_IN:
        return None
    known = list(dict.fromkeys([*BUILT_IN, *names]))
    raise TaskError(
        f'"{what}" is neither a task nor a stored study; available: {", ".join(known)}{nearest(what, known)}'
    )


def _lines(spec: StudySpec | None, title: str, measured: _Measured, place: "Room") -> list[str]:
    if spec is not None and spec.gpus_per_trial > 1:
        title += f", each of {spec.gpus_per_trial} processes"
    lines = [
        f"{title}: a peak of {amount(measured.peak)}, reached while {measured.phase}; to lower it: "
        f"{_words(measured.lower)}",
        f"{measured.iteration_seconds:.1f} s per iteration, {measured.evaluation_seconds:.1f} s per evaluation, so "
        f"{output.duration(measured.run_seconds)} for the run",
    ]
    if spec is not None:
        lines.append(search_line(spec, measured.iteration_seconds, measured.evaluation_seconds))
        lines.append(f"trials side by side: {place.total // measured.peak}, as far as memory goes")
    return lines


def _data(name: str, least: "Least | None", measured: _Measured, place: "Room", space: Disk) -> dict[str, Any]:
    return {
        "largest": name,
        "least": least and dict(least.parts),
        "measured": asdict(measured),
        "room": asdict(place),
        "side_by_side": place.total // measured.peak,
        "disk": asdict(space),
        "fits": space.most <= space.free,
    }
