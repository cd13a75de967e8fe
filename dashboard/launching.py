"""Launches studies: each as `ppo-tuner run` in a process of its own, which outlives this server.

No shell, fixed arguments, a study file that was checked, below the folder that the server was started in. Only what
was started here is ever ended from here.
"""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

import tuner
from dashboard import access, data
from ppo_core.errors import ConfigError, StoreError, StudyError, nearest
from ppo_core.task import BUILT_IN
from tuner.environment import READ_ONLY_VARIABLE, RUNS_FOLDER, STORAGE_VARIABLE, STUDY_FILE, TOKEN_VARIABLE
from tuner.results import read_study
from tuner.spec import StudySpec

MOST_TRIALS = 2_000
"""Of a study that is launched from here."""
MOST_BUDGET = 200
"""In trials of full length, of a study that is launched from here and says no number of trials. A trial that a strategy
pauses has cost a tenth of one at least, so this many start no more than `MOST_TRIALS`."""
MOST_WORKERS = 64
"""Of a study that is launched from here."""
MOST_AT_ONCE = 4
"""Controllers that were launched from here and live."""
MOST_FILES = 200
"""Study files that are offered."""
STUDIES_FOLDER = "studies"
TAIL_BYTES = 8_000


@dataclass(frozen=True)
class Launched:
    """One controller that was started here."""

    key: str
    """Of the confirmation that started it."""
    study: str
    pid: int
    log: Path
    """Where its output goes."""
    process: "subprocess.Popen[bytes]"

    @property
    def status(self) -> int | None:
        """Its exit status; None while it lives."""
        return self.process.poll()

    def tail(self) -> str:
        """Return the end of its output."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                return file.read().decode("utf-8", errors="replace")
        except OSError as error:
            return f"({self.log} cannot be read: {error.strerror})"


class Launcher:
    """What this server started. There is one per process: see `launcher`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launched: list[Launched] = []

    def all(self) -> list[Launched]:
        """Return what was started here, the latest first."""
        with self._lock:
            return list(reversed(self._launched))

    def launch_file(self, text: str, *, storage: str, token: str, key: str, workers: int = 1) -> Launched:
        """Start the study of a file below the server's folder; under the same `key` it is started once.

        Raises:
            NotPermitted: the token is missing or wrong, the dashboard is read-only, or other machines can reach it.
            ConfigError: the file lies elsewhere or is not a study's, or a cap is exceeded.
            StudyError: the study runs already.
        """
        access.require_launch(token)
        path = allowed_path(text)
        spec = StudySpec.load(path)
        with self._lock:
            return self._found(key) or self._start(spec, str(path), storage, key, workers)

    def launch_form(
        self, content: Mapping[str, Any], *, storage: str, token: str, key: str, workers: int = 1
    ) -> Launched:
        """Write a new study's file to its folder below runs/ and start it; under the same `key` it is started once.

        Raises:
            NotPermitted, ConfigError: as `launch_file`; or there is a study or a file of that name already.
            StudyError: the folder is that of a study in another store.
        """
        access.require_launch(token)
        spec = checked_form(content, storage)
        with self._lock:
            found = self._found(key)
            if found is not None:
                return found
            _require_new(spec.name, storage)
            self._require_room(spec, storage, workers)
            path = _written(spec, content)
            try:
                return self._start(spec, str(path), storage, key, workers)
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def launch_stored(self, name: str, *, storage: str, token: str, key: str, workers: int = 1) -> Launched:
        """Start a stored study again; under the same `key` it is started once.

        Raises:
            NotPermitted, ConfigError, StudyError: as `launch_file`; or a folder of that name holds another study.
        """
        access.require_launch(token)
        view = read_study(data.open_store(storage), name)
        if (Path(name) / STUDY_FILE).exists() or Path(name).is_file() or name.endswith(".toml"):
            raise ConfigError(f'"{name}" is a file or folder here, too; launch its study file instead')
        with self._lock:
            return self._found(key) or self._start(view.spec, view.row.name, storage, key, workers)

    def stop(self, key: str, *, token: str, at_once: bool = False) -> Launched:
        """Tell a controller that was started here to stop cleanly, or kill it `at_once`.

        Raises:
            NotPermitted: as `launch_file`.
            StudyError: nothing was started under this key, or it has ended.
        """
        access.require_launch(token)
        with self._lock:
            found = self._found(key)
            if found is None:
                raise StudyError("that run was not started by this server; end it with the order stop")
            if found.status is not None:  # else its id is still its own: nobody but this process collects its status
                raise StudyError(f'the run of study "{found.study}" (process {found.pid}) has ended already')
            if at_once:
                os.killpg(found.pid, signal.SIGKILL)  # of its own group; its workers end when it does
            else:
                os.kill(found.pid, signal.SIGTERM)
            return found

    def _found(self, key: str) -> Launched | None:
        return next((launched for launched in self._launched if launched.key == key), None)

    def _require_room(self, spec: StudySpec, storage: str, workers: int) -> None:
        if spec.trials is not None and spec.trials > MOST_TRIALS:
            raise ConfigError(f"trials = {spec.trials} is not allowed from here; expected at most {MOST_TRIALS}")
        if spec.trials is None and spec.budget is not None and spec.budget > MOST_BUDGET:
            raise ConfigError(
                f"budget = {spec.budget:g} without trials is not allowed from here; expected at most {MOST_BUDGET}, "
                f"which start up to {MOST_TRIALS} trials"
            )
        if not 1 <= workers <= MOST_WORKERS:
            raise ConfigError(f"workers = {workers} is not allowed from here; expected 1 to {MOST_WORKERS}")
        living = [launched for launched in self._launched if launched.status is None]
        if any(launched.study == spec.name for launched in living) or _is_held(spec.name, storage):
            raise StudyError(f'study "{spec.name}" is running already')
        if len(living) >= MOST_AT_ONCE:
            names = ", ".join(launched.study for launched in living)
            raise ConfigError(f"at most {MOST_AT_ONCE} studies run at the same time from here; running: {names}")

    def _start(self, spec: StudySpec, argument: str, storage: str, key: str, workers: int) -> Launched:
        self._require_room(spec, storage, workers)
        log = RUNS_FOLDER.absolute() / spec.name / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{key[:8]}.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("xb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tuner.cli.main", "run", argument, "--workers", str(workers)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(storage),
                    start_new_session=True,
                )
        except OSError as error:
            raise StoreError(f"cannot start study {spec.name}: {error.filename}: {error.strerror}") from error
        launched = Launched(key, spec.name, process.pid, log, process)
        self._launched.append(launched)
        return launched


@functools.cache
def launcher() -> Launcher:
    """Return this process's launcher."""
    return Launcher()


def study_files() -> list[str]:
    """Return the study files that can be launched, as paths from the server's folder on."""
    root = Path.cwd()
    found = (path for path in _toml_files(root) if _is_study(path))
    return [str(path.relative_to(root)) for _, path in zip(range(MOST_FILES), found, strict=False)]


def allowed_path(text: str) -> Path:
    """Return where a file or folder really is that may be used: below the folder that the server was started in.

    Raises:
        ConfigError: it lies elsewhere, by itself or behind a link, or there is none.
    """
    root = Path.cwd().resolve()
    try:
        path = (root / text).resolve()
    except (OSError, ValueError, RuntimeError):
        raise ConfigError(f"{text!r} is not a path") from None
    if not path.is_relative_to(root):
        raise ConfigError(f"{text!r} is not allowed; expected a path below {root}")
    if not path.exists():
        raise ConfigError(f"{path} not found{nearest(text, study_files())}")
    return path


def allowed_task(text: str, known: Collection[str]) -> str:
    """Return the task that a form names: built in, one of `known`, or a file or folder below the server's folder.

    Raises:
        ConfigError: it is none of them.
    """
    if text in BUILT_IN or text in known:
        return text
    if ":" in text:
        raise ConfigError(f"task = {text!r} is not allowed here; write a study file for it, and launch that")
    return str(allowed_path(text))


def known_tasks(storage: str) -> list[str]:
    """Return the tasks of the studies in the store."""
    store = None if data.is_missing(storage) else data.open_store(storage)
    return [] if store is None else sorted({str(study.spec.get("task", "")) for study in store.studies()})


def checked_form(content: Mapping[str, Any], storage: str) -> StudySpec:
    """Return the study of a form's content. Its task is code: ask for the right to launch first.

    Raises:
        ConfigError: something is not allowed; the message names it.
    """
    if "trainer" in content:
        raise ConfigError("the form cannot choose a trainer; write a study file for it, and launch that")
    task = allowed_task(str(content.get("task", "")), known_tasks(storage))
    return StudySpec.from_dict({**content, "task": task}, "the form")


def _toml_files(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("*.toml"))
    yield from sorted((root / STUDIES_FOLDER).rglob("*.toml"))
    yield from sorted((root / RUNS_FOLDER).glob(f"*/{STUDY_FILE}"))


def _is_study(path: Path) -> bool:
    """Return whether a file reads as a study's and lies where it seems to."""
    try:
        content = tomllib.loads(allowed_path(str(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # also what is not allowed, no text or no TOML
        return False
    return "name" in content and "task" in content


def _require_new(name: str, storage: str) -> None:
    if data.stored(name, storage) is not None:
        raise ConfigError(f'study "{name}" already exists; give this one another name')
    folder = RUNS_FOLDER / name
    if (folder / "study.json").exists():
        raise StudyError(f"{folder} is the folder of a study in another store; give this one another name")
    if (folder / STUDY_FILE).exists():
        raise ConfigError(f"{folder / STUDY_FILE} already exists; launch it, or give this study another name")


def _written(spec: StudySpec, content: Mapping[str, Any]) -> Path:
    """Write a form's study file, and return it once it reads as the study that was checked."""
    path = RUNS_FOLDER.absolute() / spec.name / STUDY_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            tomli_w.dump({**content, "task": spec.task}, file)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    if StudySpec.load(path) != spec:
        path.unlink()
        raise ConfigError(f'the study "{spec.name}" cannot be written to a file as it is')
    return path


def _is_held(name: str, storage: str) -> bool:
    study = data.stored(name, storage)
    return study is not None and study.is_held


def _environment(storage: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (TOKEN_VARIABLE, READ_ONLY_VARIABLE)}
    # A checkout may be used without being installed.
    places = [str(Path(tuner.__file__).parents[1]), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {STORAGE_VARIABLE: storage, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(places)}
