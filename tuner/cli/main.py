"""`ppo-tuner`: the command line. Importing it loads neither torch nor transformers nor pandas."""

import pkgutil
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ppo_core import __version__
from ppo_core.cli import command_line
from ppo_core.cli.arguments import MAX_PROMPT_TOKENS, HyperparameterParser
from ppo_core.cli.command_line import EXIT_INTERRUPTED, EXIT_OK, Parser, positive, positive_int, refuse_unknown
from ppo_core.errors import ConfigError, nearest
from ppo_core.output import without_secrets
from ppo_core.report import DEVICES
from tuner.cli import arguments as kinds
from tuner.cli.arguments import LOCAL, RAY, RAY_CLIENT, STORAGE_HELP, budget, duration, engine, gpus, trial_number
from tuner.confirm.plan import DEFAULT_SEEDS, DEFAULT_TOP
from tuner.environment import PROG, to_copy
from tuner.exchange import FORMATS, TRAINERS
from tuner.judge.best import RULE
from tuner.study.status import CHANGEABLE_SETTINGS, ORDER_KINDS
from tuner.study.worker_settings import WORKER_SETTINGS


@dataclass(frozen=True)
class Command:
    """A command: what it does, and the function of `tuner.cli` that does it, as `module:function`."""

    does: str
    path: str
    epilog: str | None = None


_RUN_EPILOG = "If a study of that name exists, it resumes; a finished one prints its result."
_ORDER_EPILOG = "If nothing runs the study, the order waits, and is carried out once when it runs again."
GROUPS: Mapping[str, Mapping[str, Command]] = {
    "Search": {
        "demo": Command("tune PPO on the built-in task reviews (about five minutes on two cores)", "run:demo",
            _RUN_EPILOG),
        "run": Command("run the study of a TOML file, or resume it", "run:run", _RUN_EPILOG),
        "confirm": Command("run a study's best configurations again on fresh seeds, and say which to launch",
            "run:confirm",
            "Each run's checkpoint is chosen on the eval prompts, as in the search, and evaluated once on the test "
            "ones. Run it again to resume it; a larger --top or --seeds adds runs."),
        "import-config": Command("print a configuration of TRL's PPO as the baseline of a study", "import_config:run",
            "The [baseline] table (with --for-study also a [fixed] table) goes to stdout, to be appended to a "
            "study file. stderr says how each key was handled."),
    },
    "Train": {
        "train": Command("train once, with your own configuration or one that a study found", "train:train"),
        "new-task": Command("write a folder with a working task of your own to start from", "train:new_task",
            "The folder holds a task that runs unchanged (policy, reward and prompts) and a study of it. If you "
            "pass --reward and --prompts, they are checked and used where they are, not copied. "
            "Hyperparameters go into the task's [reference]."),
        "estimate": Command("run one iteration and report the memory, time and disk that a run or study needs",
            "estimate:estimate"),
        "doctor": Command("check that this machine has what runs need", "doctor:doctor",
            "Nothing is written. Exit status 1: something required is broken."),
    },
    "Look": {
        "dashboard": Command("serve the dashboard on this machine and print its link", "dashboard:dashboard"),
        "list": Command("list the studies of a store", "read:studies"),
        "show": Command("show a study, or one of its trials with curves and samples", "read:show"),
        "compare": Command("show where trials differ in settings and outcome", "read:compare"),
        "best": Command("show which trial to launch within a KL budget", "read:best",
            "After a confirmation, this is the configuration that the fresh seeds chose. Otherwise, and under another "
            f"KL budget, it is the best trial of the search. {RULE} "
            "Exit status 1: no trial is within the budget."),
        "diagnose": Command("show what is wrong with a trial, and the change to try next", "read:diagnose"),
        "importance": Command("show which hyperparameters mattered, and how sure that is", "read:importance",
            "It is based on the reward of each trial's best checkpoint within the KL budget, and its KL at the end."),
        "logs": Command("print what a trial wrote while it ran", "read:logs",
            "The file is runs/STUDY/TRIAL/log.txt; tail -f follows it."),
    },
    "Steer": {kind.name: Command(kind.doc, "steer:place", _ORDER_EPILOG) for kind in ORDER_KINDS.values()},
    "Export and manage": {
        "report": Command("write a study as one HTML file, to mail or attach", "manage:report",
            "The file needs no network: it holds its charts, and opens in any browser."),
        "export": Command("write a study as plain files or for Optuna's tools, or a configuration for another trainer",
            "manage:export",
            "With --to, TRIAL defaults to the one that a confirmation recommends, else the study's best. Values that "
            "the trainer has no key for are listed."),
        "copy": Command("copy a study to another store", "manage:copy",
            "Its checkpoints stay where they are; the command says what that means for resuming the copy."),
        "delete": Command("delete a study with its checkpoints", "manage:delete"),
    },
}  # fmt: skip
"""The commands by purpose, as the help and the reference list them."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
RESUMABLE = ("demo", "run", "confirm")  # commands that resume when run again after an interruption


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done; 1: it failed; 2: a mistake in the command line, a study, a task or a value; 130: interrupted;
    141: the reader of the output ended.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return command_line.run(PROG, lambda: _run_command(arguments))


def _run_command(arguments: list[str]) -> int:
    for text in arguments:  # Python passes bytes that are not UTF-8 as lone surrogates
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{text!a} is not allowed; expected text in UTF-8")
    first = arguments[0] if arguments else ""
    command = next((text for text in arguments if text in COMMANDS), None)
    if command is not None and first.startswith("--") and first not in ("--help", "--version"):
        words = [without_secrets(argument) for argument in arguments]
        words.remove(command)
        raise ConfigError(f"flags come after the command: {to_copy([command, *words])}")
    name = next((text for text in arguments if not text.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        raise ConfigError(f'unknown command "{name}"; available: {", ".join(COMMANDS)}{nearest(name, COMMANDS)}')
    if first in ("train", "estimate"):  # these have their own parsers, with a flag per hyperparameter
        return _function(first)(arguments[1:])
    parser, commands = build_parser()
    args, rest = parser.parse_known_args(arguments)
    refuse_unknown(commands[args.command] if args.command else parser, rest)
    if args.command is None:
        parser.print_help()
        return EXIT_OK
    args.typed = to_copy([without_secrets(argument) for argument in arguments])
    try:
        return _function(args.command)(args)
    except KeyboardInterrupt:
        if args.command not in RESUMABLE:
            raise
        print(f"{PROG}: interrupted; to resume: {args.typed}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _function(name: str) -> Callable[..., int]:
    return cast(Callable[..., int], pkgutil.resolve_name(f"tuner.cli.{COMMANDS[name].path}"))


class _Overview(Parser):
    """The main parser, whose help lists the commands in groups."""

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


class _CommandParser(HyperparameterParser):
    def value(
        self, flag: str, metavar: str | None, kind: Callable[[str], Any], meaning: str, default: Any = None
    ) -> None:
        self.add_argument(flag, metavar=metavar, type=kind, help=meaning, default=default)

    def switch(self, flag: str, meaning: str) -> None:
        self.add_argument(flag, action="store_true", help=meaning)

    def study(self, meaning: str = "a study's name") -> None:
        self.add_argument("study", metavar="STUDY", help=meaning)

    def trial(self, *, is_required: bool = True, meaning: str = "a trial's number") -> None:
        nargs = None if is_required else "?"
        self.add_argument("trial", metavar="TRIAL", nargs=nargs, type=trial_number, help=meaning)


def build_parser() -> tuple[Parser, dict[str, _CommandParser]]:
    """Return the parser of the command line, and each command's own by name."""
    parser = _Overview(
        prog=PROG,
        allow_abbrev=False,
        description="Find the PPO configuration with the highest reward within a KL budget, and see why others failed.",
        epilog=f"{PROG} COMMAND --help says more. Start with: {PROG} demo",
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_CommandParser)
    commands = {
        name: subparsers.add_parser(
            name,
            help=command.does,
            description=command.does[0].upper() + command.does[1:] + ".",
            epilog=command.epilog,
            allow_abbrev=False,
        )
        for name, command in COMMANDS.items()
    }
    _add_search_arguments(commands)
    _add_looking_arguments(commands)
    _add_order_arguments(commands)
    _add_managing_arguments(commands)
    new_task = commands["new-task"]
    new_task.add_argument("name", metavar="NAME", help="a new or empty folder; its name is the task's")
    policy = "the SFT policy's folder or hub id (default: the policy of the built-in task arithmetic)"
    new_task.value("--policy", "MODEL", str, policy)
    new_task.add_argument("--reward", metavar="R", action="append", help="your reward, as in `train`; needs --prompts")
    new_task.value("--prompts", "DATA", str, "your prompts, as in `train`; needs --reward (default: the example, sums)")
    new_task.value("--prompt_column", "C", str, "the prompts' column (default: found by its name)")
    new_task.value("--max_prompt_tokens", "N", positive_int, MAX_PROMPT_TOKENS)
    new_task.value("--kl_budget", "NATS", positive, "in nats per response (default: 10; for the example, 1.5)")
    new_task.value("--device", "D", str, f"the study's: {' or '.join(DEVICES)} (default: auto)")
    new_task.add_hyperparameters()
    for name in ("list", "show", "compare", "best", "diagnose", "importance", *ORDER_KINDS, "doctor"):
        commands[name].switch("--json", "print JSON on stdout")
    commands["doctor"].switch("--train", "also train a tiny policy on three tasks with known answers (a minute)")
    for name in COMMANDS.keys() - {"import-config", "train", "new-task", "estimate"}:
        commands[name].value("--storage", "URL", str, STORAGE_HELP)
    return parser, commands


def _add_search_arguments(commands: Mapping[str, _CommandParser]) -> None:
    demo, run, confirm, import_config = (commands[name] for name in GROUPS["Search"])
    run.study("a study's TOML file or its folder, or a stored study's name")
    for parser in (demo, run):
        parser.value("--trials", "N", positive_int, "the most trials that the study may start")
        parser.value("--budget", "N", budget, CHANGEABLE_SETTINGS["budget"])
        parser.switch("--whole-budget", "spend the whole budget, even where another trial promises hardly any gain")
    confirm.study("a finished study's name")
    top = f"how many of the best configurations, beside the reference and the baseline (default: up to {DEFAULT_TOP})"
    confirm.value("--top", "N", positive_int, top)
    confirm.value("--seeds", "N", positive_int, f"seeds per configuration (default: {DEFAULT_SEEDS})", DEFAULT_SEEDS)
    length = "the runs' length, such as that of the launch (default: the study's)"
    confirm.value("--total_episodes", "N", positive_int, length)
    confirm.switch("--show", "run nothing: print what was confirmed so far")
    for parser in (demo, run, confirm):
        _add_worker_flags(parser)
    import_config.add_argument("file", metavar="FILE", help="YAML, JSON or TOML")
    text = "also print the values that this study does not search, as its [fixed] table"
    import_config.value("--for-study", "STUDY.toml", str, text)


def _add_worker_flags(parser: _CommandParser) -> None:
    parser.value("--timeout", "T", duration, "stop after this time, such as 90 (seconds), 10m or 2h")
    parser.value("--workers", "K", positive_int, "trials at the same time")
    parser.value("--gpus", "LIST", gpus, "GPUs such as 0,1: one worker per GPU (sets CUDA_VISIBLE_DEVICES)")
    sharing = "trials at the same time on each GPU, which they share (default: 1)"
    parser.value("--trials-per-gpu", "K", positive_int, sharing, 1)
    engines = (
        f"{LOCAL} (default): processes on this machine; {RAY}: the cluster of RAY_ADDRESS, or one started here; "
        f"{RAY_CLIENT}HOST:10001: that cluster"
    )
    parser.value("--engine", "ENGINE", engine, engines, LOCAL)
    interval = f"{WORKER_SETTINGS['checkpoint_seconds']['doc']} (default: the study's)"
    parser.value("--checkpoint-seconds", "S", float, interval)
    tracking = "send each trial to tensorboard, wandb or trackio, grouped by study (default: none); may be repeated"
    parser.add_argument("--report_to", metavar="TRACKER", action="append", help=tracking)
    parser.switch("--json", "print the result as JSON; progress goes to stderr")


def _add_looking_arguments(commands: Mapping[str, _CommandParser]) -> None:
    dashboard, _, show, compare, best, diagnose, importance, logs = (commands[name] for name in GROUPS["Look"])
    for parser in (show, compare, best, diagnose, importance, logs):
        parser.study()
    show.trial(is_required=False)
    several = "at least two; differences are from the first"
    compare.add_argument("trials", metavar="TRIAL", nargs="+", type=trial_number, help=several)
    best.value("--kl-budget", "X", positive, "nats per response (default: the study's budget)")
    diagnose.trial()
    logs.trial()
    dashboard.value("--port", None, positive_int, "port on 127.0.0.1 (default: 8501, or the next free)")
    dashboard.switch("--read-only", "view only: all actions are disabled")


def _add_order_arguments(commands: Mapping[str, _CommandParser]) -> None:
    for kind in ORDER_KINDS.values():
        commands[kind.name].study()
        if kind.trial != "none":
            commands[kind.name].trial(is_required=kind.trial == "needed")
    for name in ("enqueue", "fork"):
        commands[name].add_argument("--set", metavar="NAME=VALUE", nargs="+", action="extend", help="changed values")
        commands[name].value("--label", "TEXT", str, "what to call the new trial")
    commands["fork"].value("--at", "EPISODE", positive_int, "episode of a kept checkpoint (default: the latest)")
    change = commands["set"]
    change.value("--trials", "N", positive_int, CHANGEABLE_SETTINGS["trials"])
    change.value("--budget", "N", budget, CHANGEABLE_SETTINGS["budget"])
    change.value("--workers", "K", positive_int, CHANGEABLE_SETTINGS["workers"])
    change.value("--kl-budget", "X", positive, CHANGEABLE_SETTINGS["kl_budget"])


def _add_managing_arguments(commands: Mapping[str, _CommandParser]) -> None:
    report, export, copy, delete = (commands[name] for name in GROUPS["Export and manage"])
    for parser in (report, export, copy, delete):
        parser.study()
    report.add_argument("-o", "--output", metavar="FILE", help="(default: STUDY-report.html)")
    report.switch("--force", "replace an existing file")
    export.trial(is_required=False, meaning="a trial's number, for --to")
    either = export.add_mutually_exclusive_group(required=True)
    whole, one = (
        f"export the whole study as one of {', '.join(FORMATS)}",
        f"a configuration for one of {', '.join(TRAINERS)}",
    )
    either.add_argument("--format", metavar="FORMAT", choices=FORMATS, help=whole)
    either.add_argument("--to", metavar="TRAINER", type=kinds.trainer, help=one)
    place = "a new folder (default: STUDY-export); for optuna an SQLite file or a database URL (default: "
    place += "STUDY.optuna.db); with --to a new file (default: stdout)"
    export.add_argument("-o", "--output", metavar="PLACE", help=place)
    export.switch("--force", "replace an older export there")
    copy.add_argument("--to", metavar="URL", required=True, help="the other store; created if it does not exist")
    copy.value("--name", "NEW", str, "the copy's name (default: the study's)")
    delete.switch("--yes", "do not ask")
    delete.switch("--keep-files", "leave the folder of checkpoints")


if __name__ == "__main__":
    sys.exit(main())
