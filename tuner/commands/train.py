"""The command that trains once: `ppo-tuner train`, with a flag for every declared hyperparameter."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from transformers import HfArgumentParser
from transformers.utils.logging import disable_progress_bar

from ppo_core import checkpoint
from ppo_core.declaration import HyperValue
from ppo_core.errors import CheckpointError, ConfigError, PPOTunerError
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig
from ppo_core.hyperparameters.rules import cautions
from ppo_core.report import DEVICES, StepReport, Trainer, require_device
from ppo_core.task import BUILT_IN, get_task
from tuner import render, results
from tuner.commands import storage, train_config
from tuner.commands.arguments import EXIT_INTERRUPTED, STORAGE_HELP, Parser, refuse_unknown, to_copy, trial_number
from tuner.spec import PPO_TRAINER
from tuner.stop_signals import StopRequest, stop_requests
from tuner.store import Store
from tuner.trial import import_factory

DEFAULT_TASK = "reviews"
OUT_OF_MEMORY = (
    "out of memory; lower per_device_train_batch_size or local_rollout_forward_batch_size, which change nothing else, "
    "or response_length"
)
KEPT_CHECKPOINTS = 2
"""While it runs: the newest, and one before it in case that one is damaged."""

CHECKPOINTS, CONFIG_FILE, STEPS_FILE, MODEL = "checkpoints", "ppo_config.json", "steps.jsonl", "model"
"""What the output folder holds."""


class PPOParser(Parser, HfArgumentParser):
    """Flags from the declarations of `PPOConfig`, as TRL's scripts have them."""


@dataclass(frozen=True)
class Run:
    """One training run: what is trained, and where it is written."""

    task: str
    config: PPOConfig
    device: str
    output: Path
    resume_from: Path | None = None


def train(argv: Sequence[str]) -> int:
    """Train once, and return the exit status."""
    parser = build_parser()
    args, rest = parser.parse_known_args(list(argv))
    refuse_unknown(parser, rest)
    run = _new_run(args) if args.resume is None else _resumed_run(args)
    out = render.console(sys.stderr if args.json else sys.stdout)
    with stop_requests() as stop:
        stop.on_request = _tell_stop
        try:
            reports, finished = _train(run, out, stop)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise PPOTunerError(OUT_OF_MEMORY) from error
    if not finished:
        print(f"ppo-tuner: {stop.why}; go on with: {to_copy(['train', '--resume', str(run.output)])}", file=sys.stderr)
        return EXIT_INTERRUPTED
    out.print(f"saved the model in {run.output / MODEL}")
    if args.json:
        print(results.dumps(_data(run, reports)))
    return 0


def build_parser() -> PPOParser:
    """Return the parser of `train`: its own flags, and one for each hyperparameter."""
    parser = PPOParser(
        cast(Any, PPOConfig),
        prog="ppo-tuner train",
        usage="ppo-tuner train [--task TASK] [--config FILE | --from STUDY TRIAL] [--output DIR] "
        "[--HYPERPARAMETER X ...]",
        allow_abbrev=False,
        description="Train once with PPO. Each value comes from its flag, else from --config or --from, else from the "
        "task's reference, else from its declared default. Flags may be written with _ or -.",
    )
    for action in parser._actions:
        if action.dest in HYPERPARAMETERS:
            _use_declaration(action)
    own = parser.add_argument_group("the run")
    own.add_argument("--task", help=f"one of {', '.join(BUILT_IN)} (default: --from's task, else {DEFAULT_TASK})")
    own.add_argument("--device", help=f"{' or '.join(DEVICES)} (default: auto)")
    start = own.add_mutually_exclusive_group()
    start.add_argument("--config", metavar="FILE", type=Path, help="a JSON, YAML or TOML file of hyperparameters")
    start.add_argument("--from", metavar=("STUDY", "TRIAL"), dest="trial", nargs=2, help="a trial's configuration")
    start.add_argument(
        "--resume", metavar="DIR", type=Path, help="go on with an interrupted run in its --output folder"
    )
    own.add_argument(
        "--output", metavar="DIR", type=Path, help="an empty or new folder (default: one below runs/train)"
    )
    own.add_argument("--storage", metavar="URL", help=STORAGE_HELP)
    own.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")
    return parser


def _use_declaration(action: argparse.Action) -> None:
    """Let the declaration check the value, and leave out of the result what was not given."""
    declared = HYPERPARAMETERS[action.dest]
    action.type, action.choices, action.default, action.metavar = None, None, argparse.SUPPRESS, "X"
    allowed = declared.allowed.replace("%", "%%")
    action.help = f"{action.help} [{allowed}; default: {render.short(declared.default, 6)}]"


def _new_run(args: argparse.Namespace) -> Run:
    """Return the run that the flags describe, with its output folder made."""
    given: dict[str, HyperValue] = {}
    task = name = args.task or DEFAULT_TASK
    if args.trial is not None:
        study, number = args.trial
        found_task, given = _read_trial(storage.location(args.storage), study, number)
        task, name = args.task or found_task, f"{study}-{number}"
    elif args.config is not None:
        given = train_config.from_file(args.config)
    config = train_config.layered(get_task(task).reference, given, train_config.from_flags(vars(args)))
    folder = f"{name.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = Run(
        task,
        config,
        require_device(args.device or "auto", "--device"),
        args.output or storage.RUNS_FOLDER / "train" / folder,
    )
    _make_output(run.output)
    return run


def _read_trial(where: str, study: str, number: str) -> tuple[str, dict[str, HyperValue]]:
    """Return a trial's task and configuration."""
    try:
        wanted = trial_number(number)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--from {study} {number}: {error}") from None
    store = Store.open(where)
    try:
        view = results.read_study(store, study)
        return view.spec.task, dict(store.trial(view.row, wanted).config)
    finally:
        store.close()


def _make_output(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--output {folder} is not empty; name another folder")
    except OSError as error:
        raise ConfigError(f"--output {folder} cannot be written: {error.strerror}") from error


def _resumed_run(args: argparse.Namespace) -> Run:
    own = {"--task": args.task, "--device": args.device, "--output": args.output}
    given = [flag for flag, value in own.items() if value] + [f"--{n}" for n in HYPERPARAMETERS if n in args]
    if given:
        raise ConfigError(f"--resume goes on with the run as it was, so it takes no {', '.join(given)}")
    newest = checkpoint.latest(args.resume / CHECKPOINTS)
    if newest is None:
        raise CheckpointError(f"{args.resume} holds no checkpoint of an interrupted run")
    saved = checkpoint.verify(newest)["extra"]
    config = PPOConfig.from_dict(saved["config"], str(newest))
    _keep_steps(args.resume / STEPS_FILE, saved["step"])
    return Run(saved["task"], config, saved["device"], args.resume, newest)


def _keep_steps(path: Path, last: int) -> None:
    """Drop the recorded steps after `last`, which will be made again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= last]
    path.write_text("".join(kept), encoding="utf-8")


def _train(run: Run, out: Console, stop: StopRequest) -> tuple[list[StepReport], bool]:
    """Train, record and show each step, and save the model; return the reports, and whether it came to its end."""
    _announce(run, out)
    disable_progress_bar()  # its bars for loading weights would run into our lines
    get_task(run.task).prepare(_Preparation(out))
    factory = import_factory(PPO_TRAINER)
    trainer = factory(run.config, run.task, device=run.device, resume_from=run.resume_from)
    (run.output / CONFIG_FILE).write_text(results.dumps(run.config.to_dict()) + "\n", encoding="utf-8")
    last, reports = run.config.num_iterations(), []
    for report in trainer:
        reports.append(report)
        _record(run.output / STEPS_FILE, report)
        out.print(render.report_line(report, last), soft_wrap=True)
        stops = stop.why is not None and report.step < last
        if stops or (report.is_evaluation and 0 < report.step < last):
            _save_checkpoint(run, trainer, report.step)
        if stops:
            return reports, False
    trainer.save_model(run.output / MODEL)
    shutil.rmtree(run.output / CHECKPOINTS, ignore_errors=True)
    return reports, True


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, without its import


def _save_checkpoint(run: Run, trainer: Trainer, step: int) -> None:
    extra = {"task": run.task, "device": run.device, "config": run.config.to_dict(), "step": step}
    trainer.save(checkpoint.step_folder(run.output / CHECKPOINTS, step), extra=extra)
    checkpoint.prune(run.output / CHECKPOINTS, KEPT_CHECKPOINTS)


def _announce(run: Run, out: Console) -> None:
    changed = {n: v for n, v in run.config.to_dict().items() if v != HYPERPARAMETERS[n].default}
    out.print(f"task {run.task}, {run.config.num_iterations()} iterations, output {run.output}", soft_wrap=True)
    out.print(f"other than the defaults: {render.params_line(changed)}", soft_wrap=True)
    for line in cautions(run.config):
        out.print(f"note: {line}", soft_wrap=True)
    if run.resume_from is not None:
        out.print(f"going on from {run.resume_from}", soft_wrap=True)


class _Preparation:
    """Tells each part of a task's preparation once."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._told = ""

    def __call__(self, what: str, share: float) -> None:
        if what != self._told:
            self._told = what
            self._out.print(f"preparing: {what}")


def _step_data(report: StepReport) -> dict[str, Any]:
    return {"step": report.step, "episode": report.episode, **report.metrics}


def _record(path: Path, report: StepReport) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(results.dumps(_step_data(report), indent=None) + "\n")


def _data(run: Run, reports: Sequence[StepReport]) -> dict[str, Any]:
    return {
        "task": run.task,
        "output": str(run.output),
        "model": str(run.output / MODEL),
        "config": run.config.to_dict(),
        "steps": [_step_data(report) for report in reports],
    }


def _tell_stop() -> None:
    # In a signal's handler the stream may be in the middle of another line's writing: write past it.
    os.write(2, b"\nppo-tuner: saving a checkpoint after this step (again: end at once)\n")
