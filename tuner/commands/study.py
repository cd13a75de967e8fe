"""The commands that run a study: demo and run."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import resources
from pathlib import Path

from ppo_core import output
from ppo_core.errors import ConfigError, nearest
from ppo_core.run.command_line import EXIT_INTERRUPTED
from tuner import checkpoint_place, results, study_file
from tuner.commands import report, storage
from tuner.commands.arguments import to_copy
from tuner.commands.progress import StudyProgress
from tuner.controller import run_study
from tuner.engines.local import cores
from tuner.events import StudyStopped
from tuner.results import read_study
from tuner.spec import StudySpec
from tuner.store import Store
from tuner.store.opening import file_of as store_file
from tuner.store.schema import parse_url, redacted
from tuner.trial_files import Keeping

DEMO_STUDY = "reviews.toml"
STUDY_FILE = "study.toml"
"""Of a folder that is given to `run`."""
DEMO_WORKERS = 2
"""Where the machine has as many cores."""


def demo(args: argparse.Namespace) -> int:
    """Run the study that ships with the package, or go on with it."""
    with resources.as_file(resources.files("studies") / DEMO_STUDY) as path:
        spec = StudySpec.load(path)
    if args.workers is None:
        args.workers = min(DEMO_WORKERS, cores())
    return _run(spec, args, ["demo"], is_file=True)


def run(args: argparse.Namespace) -> int:
    """Run the study of a file, of a folder that holds one, or a stored one of that name, or go on with it."""
    file = _file(args.study)
    spec = _stored_spec(args.study, storage.location(args.storage)) if file is None else StudySpec.load(file)
    return _run(spec, args, ["run", args.study], is_file=file is not None)


def _file(given: str) -> Path | None:
    """Return the study file that `run` was given, as itself or by its folder; None: the name of a stored study."""
    path = Path(given)
    if not path.is_dir():
        return path if path.suffix == ".toml" or path.exists() or not _is_name(given) else None
    if (path / STUDY_FILE).exists():
        return path / STUDY_FILE
    if not _is_name(given):
        raise ConfigError(f"the folder {path} has no {STUDY_FILE}")
    return None


def _is_name(given: str) -> bool:
    """Return whether this may be a study's name, and not only a path."""
    pattern, _ = study_file.NAME
    return pattern.fullmatch(given) is not None


def _stored_spec(name: str, where: str) -> StudySpec:
    """Return the stored study's spec; ConfigError where there is none, and so neither a file nor a study."""
    path = store_file(parse_url(where))
    if path is not None and not path.exists():
        raise ConfigError(_unknown(name, f"there is no store at {path} yet", ()))
    with closing(Store.open(where)) as store:
        names = [row.name for row in store.studies()]
        if name not in names:
            holds = ", ".join(names) or "no study yet"
            raise ConfigError(_unknown(name, f"{redacted(store.url)} holds: {holds}", names))
        return StudySpec.from_dict(store.study(name).spec, f'study "{name}" in the store')


def _unknown(name: str, stored: str, names: Sequence[str]) -> str:
    """Return why `name` is no study to run: where it was looked for, and the nearest file or stored study."""
    here = Path.cwd()
    file = f"the folder {name} has no {STUDY_FILE}" if Path(name).is_dir() else f"there is no file {here / name}"
    files = [path.name for path in sorted(here.glob("*.toml"))]
    folders = [path.parent.name for path in sorted(here.glob(f"*/{STUDY_FILE}"))]
    return (
        f'"{name}" is neither a study file nor a stored study: {file}, and {stored}'
        f"{nearest(name, [*names, *files, *folders])}"
    )


def _run(spec: StudySpec, args: argparse.Namespace, command: list[str], *, is_file: bool) -> int:
    """Run the study with its progress shown, print its outcome, and return the exit status."""
    where = storage.location(args.storage)
    if args.checkpoints is not None:
        checkpoint_place.open(args.checkpoints)  # before anything is made for what is no place
    with StudyProgress(output.console(sys.stderr if args.json else sys.stdout)) as progress:
        run_study(
            spec,
            storage=where,
            runs_folder=storage.RUNS_FOLDER,
            workers=args.workers,
            gpus=args.gpus or (),
            keeping=Keeping(args.checkpoints, args.max_disk),
            is_file=is_file,
            trials=args.trials,
            timeout=args.timeout,
            checkpoint_seconds=args.checkpoint_seconds,
            on_event=progress,
        )
    status = _print_result(spec.name, where, args.json)
    if progress.stopped is None:
        return status
    total = ["--trials", str(args.trials)] if args.trials else []
    every = [] if args.checkpoint_seconds is None else ["--checkpoint-seconds", f"{args.checkpoint_seconds:g}"]
    go_on = to_copy([*command, *total, *every, *storage.flags(where)])
    _tell_stop(progress.stopped, go_on)
    return 0 if progress.stopped.is_deliberate else EXIT_INTERRUPTED


def _print_result(name: str, where: str, as_json: bool) -> int:
    """Print the trials, and the outcome of a study that has them all; return the exit status of that outcome."""
    store = Store.open(where)
    try:
        view = read_study(store, name)
        if as_json:
            print(output.dumps(results.study_data(view)))
        else:
            out = output.console()
            report.print_trials(out, view)
            if view.state == "finished":
                report.print_outcome(out, store, view, where)
        return report.exit_status(view)
    finally:
        store.close()


def _tell_stop(stopped: StudyStopped, go_on: str) -> None:
    print(
        f"ppo-tuner: {output.plain(stopped.why)}: {stopped.finished} of {stopped.total} trials ended; "
        f"go on with: {go_on}",
        file=sys.stderr,
    )
