"""A study's trials at experiment trackers: a run each, called STUDY/trial-N, in a group of the study's."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from ppo_core.cli.run_folder import TRACKERS
from ppo_core.cli.trackers import TrackedRun, Tracker
from ppo_core.config.hyperparameters import PPOConfig
from tuner.control import events
from tuner.store import TrialRow
from tuner.study.spec import StudySpec

SEVERAL_AT_ONCE = ("tensorboard", "trackio", "wandb")
"""The trackers that keep several runs of one process apart."""
END_SECONDS = 60.0  # time that a study waits in the end for what trackers still have to send


class StudyTrackers:
    """Passes events on to `emit` and, in a thread of its own, to trackers; one that fails is dropped with a warning."""

    _spec: StudySpec
    """Set by StudyStarted, the first event."""

    def __init__(self, names: Sequence[str], runs_folder: Path, emit: events.Emit) -> None:
        self._names, self._runs_folder, self._emit = list(names), runs_folder, emit
        self._events: SimpleQueue[events.Event | None] = SimpleQueue()
        self._warnings: SimpleQueue[str] = SimpleQueue()
        self._thread = Thread(target=self._work, name="trackers", daemon=True)
        self._runs: dict[tuple[str, int], Tracker] = {}  # runs keyed by tracker and trial; used by the thread alone

    def __enter__(self) -> "StudyTrackers":
        if self._names:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._events.put(None)
            self._thread.join(END_SECONDS)
            if self._thread.is_alive():
                self._warnings.put(f"trackers have not sent everything after {END_SECONDS:.0f} s")
        self._tell()

    def __call__(self, event: events.Event) -> None:
        self._emit(event)
        if self._thread.is_alive():
            self._events.put(event)
        self._tell()

    def _tell(self) -> None:
        while not self._warnings.empty():
            self._emit(events.StudyWarned(self._warnings.get()))

    def _work(self) -> None:
        from accelerate import PartialState  # takes seconds to import

        PartialState()  # accelerate's trackers ask it which process they are in
        active = list(self._names)
        while active:
            event = self._events.get()
            for name in list(active):
                try:
                    self._report(name, event)
                except Exception as error:  # whatever the tracker's own library raises
                    active.remove(name)
                    self._warnings.put(f"tracker {name} gets nothing more of this run: {error}")
            if event is None:
                return

    def _report(self, name: str, event: events.Event | None) -> None:
        match event:
            case None:
                for key in [key for key in self._runs if key[0] == name]:
                    self._runs.pop(key).finish()
            case events.StudyStarted(spec):
                self._spec = spec
            case events.TrialStarted(row, resumed_step):
                self._finish(name, row)
                self._start(name, row, 0 if resumed_step is None else resumed_step + 1)
            case events.TrialStepped(number, report):
                self._runs[name, number].log(report)
            case events.TrialSetAside(row):
                self._finish(name, row)
            case events.TrialEnded(row):
                step = row.episodes // PPOConfig.from_dict(row.config).batch_sizes(1).batch_size
                if (name, row.number) not in self._runs:  # it ended while it was paused
                    self._start(name, row, step + 1)
                reason = None if row.reason is None else f"{row.reason.rule}: {row.reason.message}"
                result = {"status": str(row.status), "reason": reason, "value": row.value, "kl": row.kl}
                known = {key: value for key, value in (result | {"step": row.value_step}).items() if value is not None}
                self._runs[name, row.number].log_values({f"trial/{key}": value for key, value in known.items()}, step)
                self._finish(name, row)

    def _start(self, name: str, row: TrialRow, first_step: int) -> None:
        study = self._spec.name
        trial = f"trial-{row.number}"
        run = TrackedRun(
            name=f"{study}/{trial}",
            id=uuid.uuid5(uuid.NAMESPACE_URL, f"{study}/{trial}/{row.started_at}").hex,
            folder=self._runs_folder / study / TRACKERS / trial,
            configuration={"task": self._spec.task, "origin": str(row.origin), "role": str(row.role), **row.config},
            is_new=row.attempts <= 1,
            first_step=first_step,
            group=study,
        )
        self._runs[name, row.number] = Tracker(name, run)

    def _finish(self, name: str, row: TrialRow) -> None:
        run = self._runs.pop((name, row.number), None)
        if run is not None:
            run.finish()
