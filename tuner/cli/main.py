"""`ppo-tuner`: the command line. Importing it loads neither torch nor transformers nor pandas."""

import importlib
import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ppo_core import __version__, output
from ppo_core.cli.command_line import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_PIPE,
    Parser,
    import_from_working_folder,
    positive_int,
    refuse_unknown,
    status_of,
)
from ppo_core.errors import OUT_OF_MEMORY, ConfigError, PPOTunerError, is_out_of_memory, nearest
from tuner.cli.arguments import (
    LOCAL,
    RAY,
    RAY_CLIENT,
    STORAGE_HELP,
    budget,
    checkpoint_seconds,
    duration,
    engine,
    gpus,
    kl_budget,
    port,
    trainer,
    trial_number,
)
from tuner.confirm.plan import DEFAULT_SEEDS, DEFAULT_TOP
from tuner.engine.protocol import WORKER_SETTINGS
from tuner.environment import PROG, to_copy
from tuner.exchange import FORMATS, TRAINERS
from tuner.judge.best import RULE
from tuner.study.status import CHANGEABLE_SETTINGS, ORDER_KINDS


@dataclass(frozen=True)
class Command:
    """A command: what it does, and which function of `tuner.cli` does it."""

    does: str
    module: str
    function: str


GROUPS: Mapping[str, Mapping[str, Command]] = {
    "Search": {
        "demo": Command("tune PPO on the built-in task reviews (about five minutes on two cores)", "run", "demo"),
        "run": Command("run the study of a TOML file, or resume it", "run", "run"),
        "confirm": Command(
            "run a study's best configurations again on fresh seeds, and say which to launch", "run", "confirm"
        ),
        "import-config": Command(
            "print a configuration of TRL's PPO, OpenRLHF or verl as the start of a study", "import_config", "run"
        ),
    },
    "Train": {
        "train": Command("train once, with your own configuration or one that a study found", "train", "train"),
        "new-task": Command("write a folder with a working task of your own to start from", "train", "new_task"),
        "estimate": Command(
            "estimate the memory and disk of a run or a study before it starts; with --measure also its time",
            "estimate",
            "estimate",
        ),
        "doctor": Command("check that this machine has what runs need", "doctor", "doctor"),
    },
    "Look": {
        "dashboard": Command("open the dashboard", "dashboard", "dashboard"),
        "list": Command("list the studies of a store", "read", "studies"),
        "show": Command("show a study, or one of its trials with curves and samples", "read", "show"),
        "compare": Command("show where trials differ in settings and outcome", "read", "compare"),
        "best": Command("show the best trial within a KL budget", "read", "best"),
        "diagnose": Command("show what is wrong with a trial, and the change to try next", "evidence", "diagnose"),
        "importance": Command("show which hyperparameters mattered, and how sure that is", "evidence", "importance"),
        "logs": Command("print what a trial wrote while it ran", "read", "logs"),
    },
    "Steer": {kind.name: Command(kind.doc, "steer", "place") for kind in ORDER_KINDS.values()},
    "Export and manage": {
        "report": Command("write a study as one HTML file, to mail or attach", "html_report", "write"),
        "export": Command(
            "write a study as plain files or for Optuna's tools, or a configuration for another trainer",
            "manage",
            "export",
        ),
        "copy": Command("copy a study to another store", "manage", "copy"),
        "delete": Command("delete a study with its checkpoints", "manage", "delete"),
    },
}
"""The commands by purpose, as the help and the reference list them."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
"""Every command by name."""
READING = ("list", "show", "compare", "best", "diagnose", "importance")
"""Commands that show what is stored, on request as JSON."""
UPKEEP = ("export", "copy", "delete")
"""Commands that manage studies."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done; 1: it failed; 2: a mistake in the command line, a study, a task or a value; 130: interrupted;
    141: what read the output ended.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    import_from_working_folder()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # so that printing "β" cannot fail in an old locale
    try:
        status = _run_command(arguments)
        sys.stdout.flush()
        return status
    except PPOTunerError as error:
        _tell(f"error: {_one_line(str(error))}")
        return status_of(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _tell(f"error: {OUT_OF_MEMORY}")
        return EXIT_ERROR
    except BrokenPipeError:
        output.discard(sys.stdout)
        return EXIT_PIPE
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        _tell(f"error: {error.filename}: {error.strerror}")
        return EXIT_ERROR
    except KeyboardInterrupt:
        goes_on = arguments[:1] in (["demo"], ["run"], ["confirm"])
        _tell(f"interrupted; to resume: {to_copy(_without_secrets(arguments))}" if goes_on else "interrupted")
        return EXIT_INTERRUPTED


def _run_command(arguments: list[str]) -> int:
    for text in arguments:
        if not _is_text(text):
            raise ConfigError(f"{text!a} is not allowed; expected text in UTF-8")
    name = next((text for text in arguments if not text.startswith("-")), None)
    first, known = arguments[:1], [text for text in arguments if text in COMMANDS]
    if known and first[0].startswith("--") and first[0] not in ("--help", "--version"):
        words = _without_secrets(arguments)
        words.remove(known[0])
        raise ConfigError(f"flags come after the command: {to_copy([known[0], *words])}")
    if name is not None and name not in COMMANDS:
        raise ConfigError(f'unknown command "{name}"; available: {", ".join(COMMANDS)}{nearest(name, COMMANDS)}')
    if arguments[:1] in (["train"], ["estimate"]):  # these have their own parsers, with a flag per hyperparameter
        return _function(arguments[0])(arguments[1:])
    parser, commands = build_parser()
    args, rest = parser.parse_known_args(arguments)
    refuse_unknown(commands[args.command] if args.command else parser, rest)
    if args.command is None:
        parser.print_help()
        return 0
    return _function(args.command)(args)


def _is_text(argument: str) -> bool:
    """Return whether a store can hold an argument: Python passes on bytes that are not UTF-8 as lone surrogates."""
    return "\0" not in argument and not any("\ud800" <= character <= "\udfff" for character in argument)


def _function(name: str) -> Callable[..., int]:
    """Return a command's function, importing only its module."""
    command = COMMANDS[name]
    function: Callable[..., int] = getattr(importlib.import_module(f"tuner.cli.{command.module}"), command.function)
    return function


class _Overview(Parser):
    """Lists the commands in groups in its help."""

    def format_help(self) -> str:
        width = min(100, shutil.get_terminal_size().columns) - 2
        indent = " " * (max(map(len, COMMANDS)) + 4)
        lines = [f"usage: {PROG} COMMAND ...", "", *textwrap.wrap(self.description or "", width)]
        for title, commands in GROUPS.items():
            lines += ["", f"{title}:"]
            for name, command in commands.items():
                first = f"  {name}".ljust(len(indent))
                lines += textwrap.wrap(command.does, width, initial_indent=first, subsequent_indent=indent)
        lines += ["", f"{PROG} --version prints the version. {self.epilog}", ""]
        return "\n".join(lines)


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command line, and each command's own by name."""
    parser = _Overview(
        prog=PROG,
        allow_abbrev=False,
        description="Find the PPO configuration with the highest reward within a KL budget, and see why others failed.",
        epilog=f"{PROG} COMMAND --help says more. Start with: {PROG} demo",
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    commands = {
        name: subparsers.add_parser(name, help=does, description=does[0].upper() + does[1:] + ".", allow_abbrev=False)
        for name, does in ((name, command.does) for name, command in COMMANDS.items())
    }
    _add_run_flags(commands["demo"])
    commands["run"].add_argument(
        "study", metavar="STUDY", help="a study's TOML file or its folder, or a stored study's name"
    )
    _add_run_flags(commands["run"])
    _add_confirm_arguments(commands["confirm"])
    _add_new_task_arguments(commands["new-task"])
    commands["doctor"].epilog = "Nothing is written. Exit status 1: something required is broken."
    commands["doctor"].add_argument("--json", action="store_true", help="print JSON on stdout")
    _add_import_arguments(commands["import-config"])
    _add_reading_arguments(commands)
    _add_order_arguments(commands)
    _add_upkeep_arguments(commands)
    commands["dashboard"].add_argument("--port", type=port, help="port on 127.0.0.1 (default: 8501, or the next free)")
    commands["dashboard"].add_argument("--read-only", action="store_true", help="view only: all actions are disabled")
    commands["dashboard"].add_argument("--open", action="store_true", help="open it in the browser")
    for name in (
        *READING,
        "report",
        "logs",
        "dashboard",
        *ORDER_KINDS,
        "doctor",
        *UPKEEP,
    ):
        _add_storage(commands[name])
    return parser, commands


def _add_run_flags(parser: Parser) -> None:
    parser.epilog = "If a study of that name exists, it resumes; a finished one prints its result."
    parser.add_argument("--trials", metavar="N", type=positive_int, help="the most trials that the study may start")
    parser.add_argument("--budget", metavar="N", type=budget, help=CHANGEABLE_SETTINGS["budget"])
    _add_worker_flags(parser)


def _add_confirm_arguments(parser: Parser) -> None:
    parser.epilog = (
        "Each run's checkpoint is chosen on the eval prompts, as in the search, and evaluated once on the test ones. "
        "Run it again to resume it; a larger --top or --seeds adds runs."
    )
    parser.add_argument("study", metavar="STUDY", help="a finished study's name")
    parser.add_argument(
        "--top",
        metavar="N",
        type=positive_int,
        help=f"how many of the best configurations, beside the reference (default: up to {DEFAULT_TOP})",
    )
    parser.add_argument(
        "--seeds",
        metavar="N",
        type=positive_int,
        default=DEFAULT_SEEDS,
        help=f"runs of each (default: {DEFAULT_SEEDS})",
    )
    parser.add_argument(
        "--total-episodes",
        metavar="N",
        type=positive_int,
        help="the runs' length, such as that of the launch (default: the study's)",
    )
    parser.add_argument("--show", action="store_true", help="run nothing: print what was confirmed so far")
    _add_worker_flags(parser)


def _add_worker_flags(parser: Parser) -> None:
    parser.add_argument(
        "--timeout", metavar="T", type=duration, help="stop after this time, such as 90 (seconds), 10m or 2h"
    )
    parser.add_argument("--workers", metavar="K", type=positive_int, help="trials at the same time")
    parser.add_argument(
        "--gpus", metavar="LIST", type=gpus, help="GPUs such as 0,1: one worker per GPU (sets CUDA_VISIBLE_DEVICES)"
    )
    parser.add_argument(
        "--trials-per-gpu",
        metavar="K",
        type=positive_int,
        default=1,
        help="trials at the same time on each GPU, which they share (default: 1)",
    )
    parser.add_argument(
        "--engine",
        metavar="ENGINE",
        type=engine,
        default=LOCAL,
        help=f"{LOCAL} (default): processes on this machine; {RAY}: the cluster of RAY_ADDRESS, or one started here; "
        f"{RAY_CLIENT}HOST:10001: that cluster",
    )
    parser.add_argument(
        "--checkpoint-seconds",
        metavar="S",
        type=checkpoint_seconds,
        help=f"{WORKER_SETTINGS['checkpoint_seconds']['doc']} (default: the study's)",
    )
    parser.add_argument(
        "--report_to",
        "--report-to",
        metavar="TRACKER",
        action="append",
        help="send each trial to tensorboard, wandb or trackio, grouped by study (default: none); may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")
    _add_storage(parser)


def _add_new_task_arguments(parser: Parser) -> None:
    parser.epilog = "The folder holds a task that runs unchanged: policy, reward and prompts, and a study of it."
    parser.add_argument("name", metavar="NAME", help="a new or empty folder; its name is the task's")
    parser.add_argument(
        "--policy",
        metavar="MODEL",
        help="the SFT policy's folder or hub id (default: the policy of the built-in task arithmetic)",
    )


def _add_import_arguments(parser: Parser) -> None:
    parser.epilog = (
        "The [[start]] table goes to stdout, to append to a study file. What became of each key goes to stderr."
    )
    parser.add_argument("file", metavar="FILE", help="YAML, JSON or TOML")
    parser.add_argument(
        "--for-study",
        metavar="STUDY.toml",
        help="print only what this study searches, moved into its ranges",
    )


def _add_reading_arguments(commands: dict[str, Parser]) -> None:
    for name in ("show", "compare", "best", "diagnose", "importance", "report", "logs"):
        commands[name].add_argument("study", metavar="STUDY", help="a study's name")
    commands["show"].add_argument("trial", metavar="TRIAL", nargs="?", type=trial_number, help="a trial's number")
    commands["show"].add_argument("--all", action="store_true", help="list all trials and orders, however many")
    commands["diagnose"].add_argument("trial", metavar="TRIAL", type=trial_number, help="a trial's number")
    commands["compare"].add_argument(
        "trials", metavar="TRIAL", nargs="+", type=trial_number, help="at least two; differences are from the first"
    )
    commands["best"].add_argument(
        "--kl-budget", metavar="X", type=kl_budget, help="nats per response (default: the study's budget)"
    )
    commands[
        "importance"
    ].epilog = "Trials are compared at screening if the study's strategy pauses trials, else at their ends."
    commands["report"].epilog = "The file needs no network: it holds its charts, and opens in any browser."
    commands["report"].add_argument("-o", "--output", metavar="FILE", help="(default: STUDY-report.html)")
    commands["report"].add_argument("--force", action="store_true", help="replace an existing file")
    commands["logs"].add_argument("trial", metavar="TRIAL", type=trial_number, help="a trial's number")
    commands["logs"].add_argument("-f", "--follow", action="store_true", help="keep printing until the trial ends")
    commands["logs"].add_argument("-n", "--lines", metavar="N", type=positive_int, help="only its last lines")
    commands["best"].epilog = f"{RULE} Exit status 1: no trial is within the budget."
    for name in READING:
        commands[name].add_argument("--json", action="store_true", help="print JSON on stdout")


def _add_order_arguments(commands: dict[str, Parser]) -> None:
    for kind in ORDER_KINDS.values():
        parser = commands[kind.name]
        parser.epilog = "If nothing runs the study, the order waits, and is carried out once when it runs again."
        parser.add_argument("study", metavar="STUDY", help="a study's name")
        if kind.trial != "none":
            nargs = "?" if kind.trial == "allowed" else None
            parser.add_argument("trial", metavar="TRIAL", nargs=nargs, type=trial_number, help="a trial's number")
    for name in ("enqueue", "fork"):
        commands[name].add_argument("--set", metavar="NAME=VALUE", nargs="+", action="extend", help="changed values")
        commands[name].add_argument("--label", metavar="TEXT", help="what to call the new trial")
    commands["fork"].add_argument(
        "--at", metavar="EPISODE", type=positive_int, help="episode of a kept checkpoint (default: the latest)"
    )
    commands["set"].add_argument("--trials", metavar="N", type=positive_int, help=CHANGEABLE_SETTINGS["trials"])
    commands["set"].add_argument("--budget", metavar="N", type=budget, help=CHANGEABLE_SETTINGS["budget"])
    commands["set"].add_argument("--workers", metavar="K", type=positive_int, help=CHANGEABLE_SETTINGS["workers"])
    commands["set"].add_argument("--kl-budget", metavar="X", type=kl_budget, help=CHANGEABLE_SETTINGS["kl_budget"])
    for name in ORDER_KINDS:
        commands[name].add_argument("--json", action="store_true", help="print JSON on stdout")


def _add_upkeep_arguments(commands: dict[str, Parser]) -> None:
    export = commands["export"]
    for name in UPKEEP:
        commands[name].add_argument("study", metavar="STUDY", help="a study's name")
    export.epilog = (
        "With --to, TRIAL defaults to the one that a confirmation recommends, else the study's best. Values that the "
        "trainer has no key for are listed."
    )
    export.add_argument("trial", metavar="TRIAL", nargs="?", type=trial_number, help="a trial's number, for --to")
    what = export.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--format", metavar="FORMAT", choices=FORMATS, help=f"export the whole study as one of {', '.join(FORMATS)}"
    )
    what.add_argument(
        "--to", metavar="TRAINER", type=trainer, help=f"one configuration to launch: one of {', '.join(TRAINERS)}"
    )
    export.add_argument(
        "-o",
        "--output",
        metavar="PLACE",
        help="a new folder (default: STUDY-export); for optuna an SQLite file or a "
        "database URL (default: STUDY.optuna.db); with --to a new file (default: stdout)",
    )
    export.add_argument("--force", action="store_true", help="replace an older export there")
    copy = commands["copy"]
    copy.epilog = "Its checkpoints stay where they are; the command says what that means for resuming the copy."
    copy.add_argument("--to", metavar="URL", required=True, help="the other store; created if it does not exist")
    copy.add_argument("--name", metavar="NEW", help="the copy's name (default: the study's)")
    commands["delete"].add_argument("--yes", action="store_true", help="do not ask")
    commands["delete"].add_argument("--keep-files", action="store_true", help="leave the folder of checkpoints")


def _add_storage(parser: Parser) -> None:
    parser.add_argument("--storage", metavar="URL", help=STORAGE_HELP)


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    from ppo_core.output import without_secrets

    return [without_secrets(argument) for argument in arguments]


def _tell(message: str) -> None:
    print(f"{PROG}: {message}", file=sys.stderr)


def _one_line(message: str) -> str:
    from ppo_core.output import plain

    return plain(" ".join(message.split()))


if __name__ == "__main__":
    sys.exit(main())
