"""Studies of the quick trainer: run here, or in a process of their own that a test may kill.

`python -m tests.tuner.quick_study FOLDER SPEC.json KEYWORDS.json` prints a line for each event.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import tomli_w

import tuner.control.controller
from tests.processes import end_family
from tuner.confirm.plan import Plan
from tuner.control.events import Event, StudyWarned, TrialEnded, TrialStarted, TrialStepped
from tuner.control.retry import RetryPolicy
from tuner.control.run import run_study
from tuner.store import Order, Store, TrialRow
from tuner.store.connect import Database
from tuner.study.spec import StudySpec

MODULE = "tests.tuner.quick_trainer"
NAME = "quick"
ROOT = Path(__file__).parents[2]
STORAGE_VARIABLE = "QUICK_STORAGE"
CLOCK_VARIABLE = "QUICK_CLOCK"
"""Seconds by which the wall clock of a controller is off."""
KILL_VARIABLE = "QUICK_KILL"
"""A controller kills itself right after so many writes to its store."""
HOST_VARIABLE = "QUICK_HOST"
"""The name of the host that a controller takes itself to be on."""


def quick_table(trainer: str = "factory", **changes: Any) -> dict[str, Any]:
    """Return a study of 6 random trials of 10 steps, of which trial 5 leaves the KL limit; none depends on another."""
    table: dict[str, Any] = {
        "name": NAME,
        "task": f"{MODULE}:TASK",
        "trainer": f"{MODULE}:{trainer}",
        "trials": 6,
        "stop_early": False,
        "seed": 5,
        "search": {"learning_rate": "advised", "cliprange": {"low": 0.1, "high": 0.3}},
        "sampler": {"name": "random"},
    }
    return table | changes


def quick_spec(trainer: str = "factory", **changes: Any) -> StudySpec:
    """Return `quick_table` as a study."""
    return StudySpec.from_dict(quick_table(trainer, **changes), "test")


def write_study(path: Path, trainer: str = "factory", **changes: Any) -> None:
    """Write `quick_table` as a study file."""
    path.write_text(tomli_w.dumps(quick_table(trainer, **changes)))


def storage(folder: Path) -> str:
    """Return where the tests in `folder` keep their store, unless the environment names another."""
    return os.environ.get(STORAGE_VARIABLE) or f"sqlite:///{folder / 'store.db'}"


def opened(folder: Path) -> closing[Store]:
    """Open the store of the tests in `folder`, and close it in the end."""
    return closing(Store.open(storage(folder)))


def placed(folder: Path, kind: str, trial: int | None = None, **arguments: Any) -> Order:
    """Place an order by a connection of its own."""
    with opened(folder) as store:
        return store.place_order(store.study(NAME), kind, trial, arguments)


def run(folder: Path, spec: StudySpec, **keywords: Any) -> tuple[bool, list[Event]]:
    """Run a study in this process; return whether it finished, and what it told."""
    events: list[Event] = []
    finished = run_study(
        spec,
        storage=storage(folder),
        runs_folder=folder / "runs",
        **({"workers": 2, "on_event": events.append} | keywords),
    )
    return finished, events


def rows(folder: Path, name: str = NAME) -> list[TrialRow]:
    """Return the study's trials."""
    with opened(folder) as store:
        return store.trials(store.study(name))


def stored_spec(folder: Path, name: str = NAME) -> dict[str, Any]:
    """Return the study as it is stored."""
    with opened(folder) as store:
        return store.study(name).spec


def curves(folder: Path, name: str = NAME) -> dict[int, list[tuple[Any, ...]]]:
    """Return all that each trial reported, by number: equal for equal runs."""
    metrics = ("objective/kl_exact", "objective/scores", "eval/reward", "eval/kl")
    with opened(folder) as store:
        numbers = {row.id: row.number for row in store.trials(store.study(name))}
        found: dict[int, list[tuple[Any, ...]]] = {number: [] for number in numbers.values()}
        for step in store.steps(numbers, metrics):
            values = (step["step"], step["episode"], *(step[metric] for metric in metrics))
            found[numbers[step["trial_id"]]].append(values)
        for sample in store.samples(numbers):
            found[numbers[sample["trial_id"]]].append((sample["step"], sample["response"], sample["reward"]))
        return found


def outcomes(folder: Path, name: str = NAME) -> list[tuple[Any, ...]]:
    """Return how each trial ended: equal for equal runs."""
    return [
        (r.number, r.status, r.reason, r.params, r.value, r.kl, r.violation, r.episodes) for r in rows(folder, name)
    ]


class Controller:
    """A study's controller in a process of its own, as a user starts one; `role` tells several apart."""

    def __init__(
        self,
        folder: Path,
        spec: StudySpec,
        *,
        role: str = "first",
        clock: float = 0.0,
        host: str = "",
        cwd: Path = ROOT,
        **keywords: Any,
    ) -> None:
        arguments = [json.dumps(spec.to_dict()), json.dumps({"workers": 2} | keywords)]
        self.errors = folder / f"stderr-{role}.txt"
        self.lines: list[str] = []
        self.workers_seen: list[psutil.Process] = []
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.tuner.quick_study", str(folder), *arguments],
                cwd=cwd,
                env=os.environ | {"QUICK_FOLDER": str(folder), CLOCK_VARIABLE: str(clock), HOST_VARIABLE: host},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def read_until(self, wanted: Callable[[str], bool], times: int = 1) -> str:
        """Read its lines until one is wanted for the last of `times`; the test's time limit is the deadline."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            times -= wanted(self.lines[-1])
            if times == 0:
                return self.lines[-1]
        raise AssertionError(f"the controller ended; it said {self.lines[-5:]} and {self.errors.read_text()}")

    def workers(self) -> list[psutil.Process]:
        """Return its worker processes that live."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # one that is dead and not buried yet is among them
                found += [child] if "ppo-tuner worker" in " ".join(child.cmdline()) else []
        return found

    def kill(self) -> None:
        """Kill it as the kernel does."""
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Wait for its end, return its exit status."""
        assert self.process.stdout is not None
        self.lines += [line.strip() for line in self.process.stdout]
        return self.process.wait()


@contextmanager
def controller(folder: Path, spec: StudySpec, **keywords: Any) -> Iterator[Controller]:
    """Start a controller and see that nothing of it outlives the test."""
    started = Controller(folder, spec, **keywords)
    try:
        yield started
    finally:
        end_family(started.process)


def _describe(event: Event) -> str:
    match event:
        case TrialStepped():
            return f"TrialStepped {event.number} {event.report.step}"
        case TrialStarted():
            return f"TrialStarted {event.row.number} {event.resumed_step}"
        case TrialEnded():
            return f"TrialEnded {event.row.number}"
        case StudyWarned():
            return f"StudyWarned {event.message}"
    return type(event).__name__


def _die_after(writes: int) -> None:
    """Have this process killed as the kernel does right after so many writes to its store."""
    change, done = Database._change, 0

    def counted(self: Database, *arguments: Any, **keywords: Any) -> Any:
        nonlocal done
        result = change(self, *arguments, **keywords)
        done += 1
        if done == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Database._change = counted  # type: ignore[method-assign]


def main(folder: Path, spec: StudySpec, keywords: dict[str, Any]) -> int:
    """Run the study; the exit status is 0 where it finished, else 3."""
    right, off = time.time, float(os.environ.get(CLOCK_VARIABLE, "0"))
    time.time = lambda: right() + off  # what reads the wall clock here reads a wrong one
    host = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    socket.gethostname = lambda: host
    if KILL_VARIABLE in os.environ:
        _die_after(int(os.environ[KILL_VARIABLE]))
    tuner.control.retry.OUTAGE = RetryPolicy(0.05, 0.2)
    plan, address = (keywords.pop(name, None) for name in ("plan", "ray"))
    with ExitStack() as stack:
        if address is not None:
            from tuner.engine.ray import RayEngine
            from tuner.engine.ray_cluster import RayCluster

            cluster = stack.enter_context(RayCluster(address))
            keywords |= {"make_engine": partial(RayEngine, cluster), "threads_per_trial": cluster.threads_per_trial}
        finished = run_study(
            spec,
            storage=storage(folder),
            runs_folder=folder / "runs",
            plan=None if plan is None else Plan(**plan),
            on_event=lambda event: print(_describe(event), flush=True),
            **keywords,
        )
    return 0 if finished else 3


if __name__ == "__main__":
    where, spec_text, keywords_text = sys.argv[1:]
    sys.exit(main(Path(where), StudySpec.from_dict(json.loads(spec_text), "test"), json.loads(keywords_text)))
