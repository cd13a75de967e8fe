"""A study held by this process: its lease, its folder, and its spec, by what file, flags, orders and trials say.

Settled starts are stored in place of the names in `warm_start`: no new range or best trial changes one that has run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppo_core.config.hyperparameters import PPOConfig, inert
from ppo_core.errors import ConfigError, PPOTunerError, StoreError, StudyError
from ppo_core.loading.digest import changes
from ppo_core.output import nats
from tuner.control.changes import at_run, continuing, spec_changes
from tuner.files import folder as study_folder
from tuner.judge.results import read_study
from tuner.judge.scoring import judged_again
from tuner.search.choose import counting_trials
from tuner.store import Lease, Store, StudyRow, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin
from tuner.study.study_file import OF_A_SCHEDULE
from tuner.study.trial_tables import STUDY, ListedTrial, clip_to_space


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
    unstored: Mapping[str, Any] | None = None
    """Columns that this run changes, until `accept` stores them with the spec."""

    def trial_folder(self, number: int) -> Path:
        return self.folder / str(number)

    def job(self, row: TrialRow) -> dict[str, Any]:
        """Return what every job of a trial states (see `TrialJob`)."""
        spec, of_row = self.spec, {name: getattr(row, name) for name in ("number", "config", "threads")}
        of_study = {name: getattr(spec, name) for name in ("task", "trainer", "device")}
        return {**of_row, **of_study, "folder": self.trial_folder(row.number), "ranks": spec.gpus_per_trial}

    def refresh(self, number: int) -> TrialRow:
        return self.put(self.store.trial(self.row, number))

    def put(self, row: TrialRow) -> TrialRow:
        """Replace or append a trial's row, and return it."""
        self.rows[row.number : row.number + 1] = [row]
        return row


@contextmanager
def open_study(store: Store, spec: StudySpec, folder: Path) -> Iterator[OpenStudy]:
    """Take the study of `spec`, created if missing, and its folder: `folder`, unless its checkpoints are elsewhere.

    The folder's lock comes first: a live controller keeps it whatever a clock says. A refusal leaves nothing behind.

    Raises:
        StudyError: another controller holds it, or its folder is on another host.
        StoreError: the store or the folder cannot be used.
    """
    known = next((row for row in store.studies() if row.name == spec.name), None)
    if known is not None:
        store.require_free(known.name)  # its error names who runs it; the lock's cannot
        if not study_folder.is_of(folder, known):  # as where it is resumed from another working folder
            folder = study_folder.own_folder(known) or folder
        study_folder.require_seen(folder, known)
    with study_folder.held_folder(folder):
        row = store.create_study(spec.name, spec.to_dict())
        last_order = store.last_order(row)
        lease = store.acquire(spec.name)
        try:
            row = store.study(spec.name)
            yield OpenStudy(store, lease, row, spec, folder, store.trials(row), last_order)
        except PPOTunerError:
            if known is None and not store.trials(row):
                store.delete_study(lease)
            raise
        finally:
            with suppress(StoreError):  # if the store is gone for good, the lease expires
                store.release(lease)


def reconcile(study: OpenStudy, flags: Mapping[str, float | str], *, from_file: bool) -> Iterator[str]:
    """Take the given spec and the folder as the study's, which `accept` stores; yield notes for the user.

    `flags` are those of `--trials` and `--budget`; `from_file`: the spec is a study file's, not the stored one.

    Raises:
        ConfigError: the study has trials under a spec that the given one must not be mixed with.
        StudyError: an earlier study that it is to start from does not exist, or has no best trial.
    """
    overrides = study.row.overrides or {}
    study.spec, record, notes = at_run(study.spec, overrides, study.store, flags, from_file=from_file)
    yield from notes
    stored = None
    if study.rows:
        stored = StudySpec.from_stored(study.row.spec, f'study "{study.row.name}" in the store')
        study.spec = continuing(study.spec, stored)
    ran = sum(row.origin is Origin.LISTED for row in counting_trials(study.rows))
    differences = spec_changes(stored or study.spec, study.spec)
    study.spec, notes, refused = _settle_starts(study.store, study.spec, stored, ran)
    refused = [*differences.refused, *refused]
    if refused:
        raise ConfigError(f'study "{study.row.name}" has trials already: {"; ".join(refused)}')
    yield from (*differences.allowed, *notes)
    study_folder.claim(study.folder, study.row)  # it may refuse, so nothing is written before
    study.store.update_study(study.lease, folder=str(study.folder.absolute()))
    study.unstored = {"overrides": record}


def accept(study: OpenStudy, digests: Mapping[str, str] | None = None, **values: Any) -> None:
    """Store the spec as this run has it, with further columns of the study; before, nothing of it is stored.

    `digests` are those of its task (`ppo_core.loading.digest`); None: no trial runs.

    Raises:
        ConfigError: the study's trials ran on another task.
    """
    changed = [] if digests is None else changed_task(study, digests)
    if changed:
        raise ConfigError(
            f'study "{study.row.name}" has trials already, and its task has changed: {"; ".join(changed)}; '
            "give the study another name"
        )
    has_new_budget = study.row.spec["kl"]["budget"] != study.spec.kl_budget
    judged = judged_again(study.store, study.rows, study.spec) if has_new_budget else []
    values = {**values, **(study.unstored or {}), **({} if digests is None else {"digests": dict(digests)})}
    study.store.update_study(study.lease, judged, spec=study.spec.to_dict(), **values)
    study.unstored, study.row = None, study.store.study(study.row.name)
    if judged:
        study.rows = study.store.trials(study.row)


def changed_task(study: OpenStudy, digests: Mapping[str, str]) -> list[str]:
    """Return what differs in a task from that of the study's trials, a line each."""
    return changes(study.row.digests, digests) if study.rows and study.row.digests else []


def _settle_starts(
    store: Store, spec: StudySpec, stored: StudySpec | None, ran: int
) -> tuple[StudySpec, list[str], list[str]]:
    """Return the study with all starts settled, changes in those still to run, and forbidden changes, one line each."""
    before = () if stored is None else stored.starts
    done, known = before[:ran], {start.source: start for start in before}
    asked = [*spec.starts, *(start for start, _ in spec.dropped)]
    names = spec.warm_start
    for name in names:
        if name.startswith(STUDY):
            old = known.get(name)
            asked.append(
                clip_to_space(old.original, spec.search, old.label, source=name) if old else _best_of(store, spec, name)
            )
    asked.sort(key=lambda start: names.index(start.source) if start.source in names else -1)
    gone = [start for start in done if not any(_is_same(start, other, spec) for other in asked)]
    new = [start for start in asked if not any(_is_same(start, other, spec) for other in done)]
    settled = replace(spec.with_starts(done, new), warm_start=())
    refused = [
        f"{start.name} has run, and the file no longer has it unchanged; give the study another name" for start in gone
    ]
    pending, to_run = before[ran:], settled.starts[ran:]
    notes = [f"{start.name} will not run any more" for start in pending if start not in to_run]
    notes += [f"{start.name} will run: {start.text}" for start in to_run if start not in pending]
    return settled, [] if stored is None else notes, refused


def _is_same(one: ListedTrial, other: ListedTrial, spec: StudySpec) -> bool:
    if one.source or other.source:
        return one.source == other.source
    names = {*spec.search, *OF_A_SCHEDULE}
    values, others = (
        {name: value for name, value in start.original.items() if name in names} for start in (one, other)
    )
    return one.label == other.label and values == others


def _best_of(store: Store, spec: StudySpec, name: str) -> ListedTrial:
    """Return the best trial of `study:NAME`, moved into the ranges of `spec`, without values that did nothing in it."""
    study = name.removeprefix(STUDY)
    try:
        view = read_study(store, study)
    except StudyError as error:
        raise StudyError(f'warm_start "{name}": {error}') from None
    best = view.best()
    if best is None:
        budget = f"its KL budget of {nats(view.spec.kl_budget)}"
        raise StudyError(f'warm_start "{name}": study "{study}" has no best trial: none is within {budget}')
    config = PPOConfig.from_dict(best.config)
    sizes = config.batch_sizes(world_size=1)
    values = config.to_dict() | {
        name: getattr(sizes, name) for name in ("batch_size", "mini_batch_size", "num_mini_batches")
    }
    values = {key: value for key, value in values.items() if inert(key, config.to_dict()) is None}
    return clip_to_space(values, spec.search, f"{name} trial {best.number}", source=name)
