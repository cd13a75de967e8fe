"""`ppo-tuner train` and `new-task`. `train` is `python -m ppo_core` with a guard and `--from`."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from ppo_core import checkpoint, output
from ppo_core.cli import training
from ppo_core.cli.arguments import DEFAULT_SAVE_SECONDS, UNSET, RunParser, description, hyperparameters_of
from ppo_core.cli.command_line import EXIT_OK, refuse_unknown
from ppo_core.cli.new_run import Start, in_words_of_flags
from ppo_core.cli.run_folder import ConfirmedReading, Run, RunOrigin
from ppo_core.cli.training import Program
from ppo_core.config.hyperparameters import FEW_ITERATIONS
from ppo_core.data.prompts import PromptSource
from ppo_core.distributed import rank_zero
from ppo_core.errors import ConfigError, PPOTunerError, TaskError
from ppo_core.loading.task_file import KL_LIMIT, Preparation, get_task
from ppo_core.output import params_line
from ppo_core.report import DEVICES, require_device
from ppo_core.tasks import skeleton
from tuner.cli.arguments import STORAGE_HELP, trial_number
from tuner.confirm.result import confirmations
from tuner.environment import PROG, STUDY_FILE, shortened, to_copy
from tuner.exchange.trackers import SEVERAL_AT_ONCE
from tuner.judge import forks, results
from tuner.judge.guard import Guard
from tuner.judge.results import StudyView
from tuner.store import Store, TrialRow, opened
from tuner.study.rules import GuardSettings
from tuner.study.status import Role


def _guard(run: Run, kl_budget: float) -> Guard:
    """Return the guard of a run: its study's, whatever budget its best checkpoint has, or with the default rules, as a
    study of the task would have it.
    """
    default = get_task(run.task).kl_limit if run.kl_budget is None else KL_LIMIT * kl_budget
    extra = {} if run.resume_from is None else checkpoint.read_manifest(run.resume_from)["extra"]
    settings = GuardSettings.from_dict(run.guard.get("rules", {}), run.guard.get("limit", default), "guard")
    return Guard(settings, run.guard.get("budget", kl_budget), extra)


def _further(run: Run) -> str | None:
    """Return the commands of a study of the run's task, or None: it comes from a study, or its task is not a file.

    Its trials are as the run was, but at least so long that they can come to their KL target.
    """
    file = Path(get_task(run.task).name)
    if run.origin is not None or file.suffix != ".toml":
        return None
    given = dict(run.given)
    if run.config.num_iterations() < FEW_ITERATIONS:
        given["total_episodes"] = FEW_ITERATIONS * run.config.batch_sizes(1).batch_size
    if file.with_name(STUDY_FILE).exists():
        fixed = params_line({key: value for key, value in given.items() if key != "seed"})
        also = f" (put the settings of this run into its [fixed] table: {fixed})" if fixed else ""
        return to_copy(["run", str(shortened(file.with_name(STUDY_FILE)))]) + also
    parts = get_task(run.task).prepare
    if not isinstance(parts, Preparation) or file.parent != run.output.resolve():
        return None
    prompts = parts.prompts
    plain = PromptSource(prompts.path, column=prompts.column, max_prompt_tokens=prompts.max_prompt_tokens)
    if prompts != plain:  # new-task has no flags for more
        return None
    name = f"{run.output.resolve().name}-study"
    words = ["new-task", name, "--policy", parts.policy]
    for part in parts.rewards:
        words += ["--reward", part.where]
    words += ["--prompts", prompts.path]
    if prompts.column is not None:
        words += ["--prompt_column", prompts.column]
    if prompts.max_prompt_tokens != PromptSource.max_prompt_tokens:
        words += ["--max_prompt_tokens", str(prompts.max_prompt_tokens)]
    if run.kl_budget is not None:
        words += ["--kl_budget", f"{run.kl_budget:g}"]
    if run.device != DEVICES[0]:
        words += ["--device", run.device]
    for key, value in {"response_length": run.config.response_length, **given}.items():
        words += [f"--{key}", UNSET[0] if value is None else str(value)]
    running = ["run", name]
    for tracker in run.report_to:
        running += ["--report_to", tracker] if tracker in SEVERAL_AT_ONCE else []
    if run.save_every_seconds != DEFAULT_SAVE_SECONDS:
        running += ["--checkpoint-seconds", f"{run.save_every_seconds:g}"]
    return f"{to_copy(words)} && {to_copy(running)}"


PROGRAM = Program(PROG, lambda words: to_copy(["train", *words]), _guard, _further)


def train(argv: Sequence[str]) -> int:
    """Train once, and return the exit status."""
    parser = build_parser()
    return rank_zero.drive(lambda: _train(parser, argv))


def _train(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    args, rest = parser.parse_known_args(list(argv))
    refuse_unknown(parser, rest)
    start = None
    if args.trial is not None:
        start = rank_zero.on_rank_zero(lambda: _start(args.storage, *args.trial))
        _require_same_task(args, start)
    return training.train(args, argv, PROGRAM, start)


def build_parser() -> RunParser:
    """Return the parser of `train`: that of `python -m ppo_core`, with flags that name a trial and its store."""
    parser = RunParser(
        f"{PROG} train",
        f"{PROG} train [--task TASK | --policy MODEL --reward R --prompts DATA] [--config FILE | --from STUDY TRIAL] "
        "[--output DIR] [--HYPERPARAMETER X ...]",
        description("--config or --from"),
    )
    parser.starts.add_argument(
        "--from",
        metavar=("STUDY", "TRIAL"),
        dest="trial",
        nargs=2,
        help="a trial's task, configuration, number of threads and device; a fork begins with its parent's values",
    )
    parser.run.add_argument("--storage", metavar="URL", help=STORAGE_HELP)
    return parser


def _start(given_storage: str | None, study: str, number: str) -> Start:
    """Return a trial's task, configuration, threads and device, and the values that a fork had before."""
    try:
        wanted = trial_number(number)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--from {study} {number}: {error}") from None
    with opened(given_storage) as store:
        view = results.read_study(store, study)
        trial = store.trial(view.row, wanted)
        origin = _origin(store, view, trial)
    spec = view.spec
    return Start(
        task=spec.task,
        values=dict(trial.config),
        threads=trial.threads,
        name=f"{study}-{number}",
        kl_budget=spec.kl_budget,
        device=spec.device,
        origin=origin,
        stages=forks.stages((*view.trials, *view.confirming), trial),
        guard={"limit": spec.kl_limit, "budget": spec.first_budget, "rules": spec.guard.to_dict()},
        digests=view.row.digests or {},
    )


def _origin(store: Store, view: StudyView, trial: TrialRow) -> RunOrigin:
    number = trial.number if trial.role is not Role.CONFIRM or trial.parent is None else trial.parent
    readings = []
    for run in confirmations(store, view):
        for one in run.configurations:
            if one.trial.number == number and (reward := one.reward) is not None:
                ends, kl = (reward.low, reward.high), None if one.kl is None else one.kl.mean
                readings.append(ConfirmedReading(run.total_episodes, reward.n, run.prompts, reward.mean, *ends, kl))
    return RunOrigin(view.row.name, number, tuple(readings))


def _require_same_task(args: argparse.Namespace, start: Start) -> None:
    """Raise ConfigError for flags that give another task than the trial's, for which its values were found."""
    given = [f"--{name}" for name in ("task", "policy", "reward", "prompts") if getattr(args, name) is not None]
    # A file's task may be named by other paths.
    if given and (given != ["--task"] or get_task(args.task).name != get_task(start.task).name):
        raise ConfigError(
            f"--from {shlex.join(args.trial)} trains on the trial's task, {start.task}, so it takes no "
            f"{', '.join(given)}"
        )


def new_task(args: argparse.Namespace) -> int:
    """Write a task's folder, and say what to run next."""
    folder = Path(args.name)
    try:
        with in_words_of_flags(str(folder)):
            names = skeleton.write(
                folder,
                args.policy or skeleton.DEFAULT_POLICY,
                rewards=args.reward or (),
                prompts=args.prompts,
                prompt_column=args.prompt_column,
                max_prompt_tokens=args.max_prompt_tokens,
                kl_budget=args.kl_budget,
                hyperparameters=hyperparameters_of(vars(args)),
                device=None if args.device is None else require_device(args.device, "--device"),
                progress=lambda what, share: print(f"preparing:  {output.plain(what)}"),
            )
    except PPOTunerError:
        raise
    except OSError as error:  # it names a generated file
        raise TaskError(f"the task's folder {folder} cannot be written: {error.strerror or error}") from error
    print(f"wrote {folder}: {', '.join(names)}")
    note = skeleton.example_note(get_task(str(folder)))
    if note is not None:
        print(f"first:      {note}")
    print(f"train once: {to_copy(['train', '--task', str(folder)])}")
    print(f"tune:       {to_copy(['run', str(folder / STUDY_FILE)])}")
    return EXIT_OK
