"""A study that this process holds: its lease, its folder, and Optuna's copy of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ppo_core.errors import ConfigError, StoreError
from tuner import trial_folder
from tuner.events import StudyWarned, Tell
from tuner.projection import Mirror
from tuner.spec import StudySpec
from tuner.store import Lease, Store, StudyRow, TrialRow


@dataclass(frozen=True)
class OpenStudy:
    """A study that this controller holds. Make it with `open_study`."""

    store: Store
    lease: Lease
    row: StudyRow
    spec: StudySpec
    folder: Path
    """Where its trials' folders are."""

    def trials(self) -> list[TrialRow]:
        """Return its trials by number."""
        return self.store.trials(self.row)

    def trial_folder(self, number: int) -> Path:
        """Return where a trial's checkpoints are."""
        return self.folder / str(number)

    def finished(self) -> int:
        """Return how many of its trials have ended."""
        return sum(row.status.is_final for row in self.trials() if row.number < self.spec.trials)

    def ended(self) -> int:
        """Return how many trials have ended, those beyond a total that was lowered since too."""
        return sum(row.status.is_final for row in self.trials())

    @property
    def is_finished(self) -> bool:
        """Whether it has all its trials."""
        return self.finished() == self.spec.trials


@contextmanager
def open_study(store: Store, spec: StudySpec, folder: Path) -> Iterator[OpenStudy]:
    """Hold the study of `spec`, made first where there is none, and its folder.

    Raises:
        StudyError: another controller holds it.
        StoreError: the store or the folder cannot be used.
    """
    store.create_study(spec.name, spec.to_dict())
    lease = store.acquire(spec.name)
    try:
        with trial_folder.held_folder(folder):
            yield OpenStudy(store, lease, store.study(spec.name), spec, folder)
    finally:
        store.release(lease)


def settle(study: OpenStudy) -> Iterator[str]:
    """Make the given spec the study's, and the folder its own; yield what the user should know of it.

    Raises:
        ConfigError: the study has trials under a spec that the given one must not be mixed with.
    """
    if study.trials():
        stored = StudySpec.from_dict(study.row.spec, f'study "{study.row.name}" in the store')
        changes = study.spec.changes_to(stored)
        if changes.refused:
            raise ConfigError(f'study "{study.row.name}" has trials already: {"; ".join(changes.refused)}')
        yield from changes.told
    study.store.update_spec(study.lease, study.spec.to_dict())
    trial_folder.claim(study.folder, study.row)


class MirrorKeeper:
    """Keeps Optuna's copy of a study up to date. One that cannot be written is told of once, and stops nothing."""

    def __init__(self, study: OpenStudy, tell: Tell) -> None:
        self._spec = study.spec
        self._tell = tell
        self._mirror: Mirror | None = Mirror(study.store.url, study.spec.name)

    def update(self, rows: Sequence[TrialRow]) -> None:
        """Write the finished trials that the copy lacks."""
        if self._mirror is None:
            return
        try:
            self._mirror.update(rows, self._spec)
        except StoreError as error:
            self.close()
            self._tell(StudyWarned(str(error)))

    def close(self) -> None:
        """Give back the connections."""
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
