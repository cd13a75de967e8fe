"""A study held by this process, with its lease and its folder."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ppo_core.errors import ConfigError, PPOTunerError, StoreError
from tuner.control.overrides import at_run
from tuner.judge.scoring import judged_again
from tuner.search.choose import counting_trials
from tuner.store import Lease, Store, StudyRow, TrialRow
from tuner.study import folder as study_folder
from tuner.study.spec import SpecChanges, StudySpec
from tuner.study.starts import best_of, settle
from tuner.study.status import Origin


@dataclass
class OpenStudy:
    """A study that this controller holds; see `open_study`."""

    store: Store
    lease: Lease
    row: StudyRow
    spec: StudySpec
    """Current; orders may change it."""
    folder: Path
    """Parent of the trials' folders."""
    rows: list[TrialRow]
    """Its trials by number, as the store holds them."""
    last_order: int
    """Highest id of the orders placed before this run; 0: none."""

    def trial_folder(self, number: int) -> Path:
        """Return the folder of a trial's checkpoints."""
        return self.folder / str(number)

    def refresh(self, number: int) -> TrialRow:
        """Reload a trial's row from the store."""
        return self.put(self.store.trial(self.row, number))

    def put(self, row: TrialRow) -> TrialRow:
        """Replace or append a trial's row, and return it."""
        self.rows[row.number : row.number + 1] = [row]
        return row


@contextmanager
def open_study(store: Store, spec: StudySpec, folder: Path) -> Iterator[OpenStudy]:
    """Take the study of `spec`, created if missing, and its folder.

    The folder's lock is taken first, so a live controller here keeps it, even if a clock or a host's name is wrong. A
    refusal changes nothing, and leaves no newly created study in the store.

    Raises:
        StudyError: another controller holds it, or its folder is on another host.
        StoreError: the store or the folder cannot be used.
    """
    known = next((row for row in store.studies() if row.name == spec.name), None)
    if known is not None:
        store.require_free(known.name)  # its error names who runs it; the lock's cannot
        study_folder.require_seen(folder, known)
    with study_folder.held_folder(folder):
        row = store.create_study(spec.name, spec.to_dict())
        last_order = store.last_order(row)
        lease = store.acquire(spec.name)
        try:
            row = store.study(spec.name)
            yield OpenStudy(store, lease, row, spec, folder, store.trials(row), last_order)
        except PPOTunerError:
            if known is None and store.study(spec.name).folder is None:  # `reconcile` notes the folder
                store.delete_study(lease)
            raise
        finally:
            with suppress(StoreError):  # if the store is gone for good, the lease expires
                store.release(lease)


def reconcile(study: OpenStudy, flags: Mapping[str, float], *, from_file: bool) -> Iterator[str]:
    """Record the given spec and the folder as the study's; yield notes for the user.

    Args:
        study: The study; its spec becomes that of this run.
        flags: Values of `--trials` and `--budget`, if given.
        from_file: True if the given spec is a study file's, and not the stored one.

    Raises:
        ConfigError: the study has trials under a spec that the given one must not be mixed with.
        StudyError: an earlier study that it is to start from does not exist, or has no best trial.
    """
    study.spec, record, notes = at_run(study.spec, study.row.overrides or {}, from_file=from_file, flags=flags)
    yield from notes
    stored = None
    if study.rows:
        stored = StudySpec.from_dict(study.row.spec, f'study "{study.row.name}" in the store')
    ran = sum(row.origin is Origin.LISTED for row in counting_trials(study.rows))
    changes = SpecChanges() if stored is None else study.spec.changes_to(stored)
    study.spec, notes, refused = settle(study.spec, stored, ran, partial(best_of, study.store))
    refused = [*changes.refused, *refused]
    if refused:
        raise ConfigError(f'study "{study.row.name}" has trials already: {"; ".join(refused)}')
    yield from (*changes.allowed, *notes)
    study_folder.claim(study.folder, study.row)  # it may refuse, so nothing is written before
    has_new_budget = stored is not None and stored.kl_budget != study.spec.kl_budget
    judged = judged_again(study.store, study.rows, study.spec) if has_new_budget else []
    folder = str(study.folder.absolute())
    study.store.update_study(study.lease, judged, spec=study.spec.to_dict(), folder=folder, overrides=record)
    study.row = replace(study.row, overrides=record)
    if judged:
        study.rows = study.store.trials(study.row)
