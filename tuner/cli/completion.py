"""Completion in bash, zsh and fish: `ppo-tuner completion SHELL` prints the shell's script, argcomplete answers it.

At each Tab the shell runs `ppo-tuner` with `_ARGCOMPLETE` set; studies and trials are read from the store then.
"""

import argparse
import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import PPOTunerError
from tuner.cli import storage
from tuner.environment import PROG
from tuner.exchange import TRAINERS

OWN_PARSERS = ("train", "estimate")
"""Commands whose parsers, with a flag for each hyperparameter, are built only where they are needed."""

Completer = Callable[..., Iterable[str]]


def print_script(args: argparse.Namespace) -> int:
    """Print the script that a shell reads when it starts."""
    from argcomplete.shell_integration import shellcode

    print(shellcode([PROG], shell=args.shell))
    return 0


def answer(parser: argparse.ArgumentParser) -> None:
    """Write what may follow the shell's line, and exit; `parser` is the whole command line's."""
    import argcomplete

    line = os.environ.get("COMP_LINE", "").split()
    for commands in parser._actions:
        if isinstance(commands, argparse._SubParsersAction):
            for name in set(OWN_PARSERS) & set(line):
                module = importlib.import_module(f"tuner.cli.{name}")
                commands._name_parser_map[name] = module.build_parser()
            for name, command in commands._name_parser_map.items():
                for action in command._actions:
                    action.completer = _completer(name, action)  # where argcomplete looks
    argcomplete.autocomplete(parser, always_complete_options=False)  # flags after a dash alone


def _completer(command: str, action: argparse.Action) -> Completer | None:
    """Return what completes an argument; None: its choices, else file names."""
    if action.metavar == "STUDY" or action.metavar == ("STUDY", "TRIAL"):
        return _studies_and_files if command == "run" else _studies
    if action.metavar == "TRIAL":
        return _trials
    if action.metavar == "TASK" or (command == "estimate" and not action.option_strings):
        return _tasks
    if command == "export" and action.dest == "to":
        return lambda **_: TRAINERS
    if action.dest in HYPERPARAMETERS and action.option_strings:
        return lambda **_: HYPERPARAMETERS[action.dest].choices
    return None


def _studies(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the names of the store's studies; none where the store cannot be read."""
    try:
        with storage.opened(getattr(parsed_args, "storage", None)) as store:
            return [row.name for row in store.studies()]
    except PPOTunerError:
        return []


def _trials(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the numbers of the named study's trials."""
    try:
        with storage.opened(getattr(parsed_args, "storage", None)) as store:
            return [str(row.number) for row in store.trials(store.study(parsed_args.study))]
    except PPOTunerError:
        return []


def _studies_and_files(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    return [*_studies(parsed_args), *_files(prefix, (".toml",))]


def _tasks(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the built-in tasks and files of tasks; for `estimate` the store's studies, too."""
    from ppo_core.data.task import BUILT_IN

    studies = _studies(parsed_args) if hasattr(parsed_args, "what") else []
    return [*BUILT_IN, *studies, *_files(prefix, (".toml", ".py"))]


def _files(prefix: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files with these suffixes, and the folders, whose paths begin with `prefix`."""
    folder, slash, name = prefix.rpartition("/")
    try:
        there = [path for path in Path(f"{folder}{slash}" or ".").iterdir() if path.name.startswith(name)]
    except OSError:
        return []
    files = [f"{folder}{slash}{path.name}" for path in there if path.suffix in suffixes]
    return files + [f"{folder}{slash}{path.name}/" for path in there if path.is_dir()]
