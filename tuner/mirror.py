"""A copy of a study in Optuna's own tables, beside ours in the same database, for Optuna's own tools. No torch.

optuna-dashboard and Optuna's command line read it; nothing of ours does. Numbers and values are those of our rows.

| our status                        | Optuna state                                            |
|-----------------------------------|---------------------------------------------------------|
| waiting, running, paused          | none yet; RUNNING once a trial of a higher number ended |
| completed or stopped, with value  | COMPLETE                                                |
| completed, without value; failed  | FAIL                                                    |
| pruned; stopped, without value    | PRUNED                                                  |

Here a stopped trial is COMPLETE, since Optuna ranks only those, and a fork is a trial like others; to the sampler
(`tuner.search.sampler`) a stopped one is PRUNED, and a fork nothing. The constraint is the sampler's, except that it is
at most 0 just where the trial is eligible as the best one (`tuner.scoring`). So Optuna's best trial has our best
trial's value. Which one of several with that very value it is, Optuna leaves open; ours is the one with the lowest KL.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL, Connection

from ppo_core.errors import StoreError
from tuner import optuna_tables, space, study_file
from tuner.best import ELIGIBLE, best_trial
from tuner.optuna_tables import Stored
from tuner.scoring import Told, frozen, is_finite, violation
from tuner.spec import StudySpec
from tuner.status import Status
from tuner.store import TrialRow, schema
from tuner.study_file import ListedTrial

_MARK = "copy_of"
"""The user attribute by which a study of Optuna's is known to be our copy. It names the study: Optuna's dashboard
renames a study by copying it with its attributes, and what a user makes of a copy is the user's."""
_LEAST_VIOLATION = 1e-9


@dataclass(frozen=True)
class _Copy:
    """The copy as a mirror left it."""

    study_id: int
    spec: StudySpec
    ids: tuple[int, ...]
    """The ids of its trials, by number."""
    unfinished: frozenset[int]
    """The numbers of those that have not ended."""


class Mirror:
    """The copy of one study. Each call writes one transaction, so that no one ever sees half a trial."""

    def __init__(self, storage_url: str | URL, study_name: str) -> None:
        self._url = schema.parse_url(storage_url) if isinstance(storage_url, str) else storage_url
        self._name = study_name
        self._mark = f'PPO Tuner\'s study "{study_name}"'
        self._storage: RDBStorage | None = None
        self._copy: _Copy | None = None

    def update(self, rows: Sequence[TrialRow], spec: StudySpec) -> None:
        """Make the copy that of `rows`, all trials of the study by number, up to the last one that has ended.

        The first call compares the whole copy with them; later ones look only at the trials that had not ended.
        A copy that is damaged, or was made of other trials, ranges or another budget is made anew under new ids, since
        Optuna's tools remember ended trials by theirs.

        Raises:
            StoreError: it could not be written. Our own tables are not touched, so the study can go on.
        """
        copy = self._copy
        if copy is not None and _made_under(copy.spec) == _made_under(spec):
            ended = [n for n in (*copy.unfinished, *range(len(copy.ids), len(rows))) if rows[n].status.is_final]
            self._change(lambda connection: self._brought_up(connection, copy, rows, ended))
        else:
            self._change(lambda connection: self._compared(connection, rows, spec))

    def delete(self) -> None:
        """Remove the copy, if there is one; a study of that name that is not a copy of ours stays.

        Raises:
            StoreError: it could not be removed.
        """
        self._change(self._deleted)

    def close(self) -> None:
        """Give back the connections."""
        if self._storage is not None:
            self._storage.engine.dispose()
            self._storage = None

    def _change(self, work: Callable[[Connection], _Copy | None]) -> None:
        """Do `work`, which returns what it left, in one transaction. After a failure nothing is known of the copy."""
        self._copy = None
        try:
            if self._storage is None:
                self._storage = optuna_tables.open_storage(self._url)
            with self._storage.engine.begin() as connection:
                copy = work(connection)
            self._copy = copy
        except StoreError:
            raise
        except Exception as error:  # whatever fails in tables that are not ours must not end the study
            root = error.__cause__ or error
            why = str(getattr(root, "orig", None) or root).strip().splitlines() or [type(root).__name__]
            raise StoreError(f"{self._described()} could not be written: {why[0]}") from error

    def _brought_up(self, connection: Connection, copy: _Copy, rows: Sequence[TrialRow], ended: Sequence[int]) -> _Copy:
        """Write the trials that have ended since, and what lies before them; compare all if it is not as it was."""
        last = optuna_tables.last_trial(connection, copy.study_id)
        as_left = (copy.ids[-1], len(copy.ids) - 1) if copy.ids else None
        if self._find(connection) != copy.study_id or last != as_left:
            return self._compared(connection, rows, copy.spec)
        count = len(copy.ids)
        in_place = {copy.ids[n]: _stored(rows[n], copy.spec) for n in ended if n < count}
        added = {n: _stored(rows[n], copy.spec) for n in range(count, max(ended, default=-1) + 1)}
        optuna_tables.replace_trials(connection, in_place)
        ids = optuna_tables.add_trials(connection, copy.study_id, added)
        unfinished = (copy.unfinished | added.keys()) - set(ended)
        return replace(copy, ids=copy.ids + tuple(ids[n] for n in added), unfinished=unfinished)

    def _compared(self, connection: Connection, rows: Sequence[TrialRow], spec: StudySpec) -> _Copy:
        """Write what a copy lacks of which nothing is known, or make it anew."""
        wanted = {row.number: _stored(row, spec) for row in _up_to_last_ended(rows)}
        old = self._find(connection)
        if old is None and optuna_tables.find_study(connection, self._name) is not None:
            raise StoreError(f"{self._described()} was not written: Optuna's tables hold another study of that name")
        copied = [] if old is None else list(optuna_tables.stored_trials(connection, old))
        ended_since = _ended_since(copied, wanted)
        optuna_tables.delete_orphans(connection)
        if old is None or ended_since is None:
            study_id, ids = self._made_anew(connection, old, wanted)
        else:
            study_id, ids = old, {number: trial_id for trial_id, number, _ in copied}
            optuna_tables.replace_trials(connection, ended_since)
            lacking = {number: stored for number, stored in wanted.items() if number not in ids}
            ids |= optuna_tables.add_trials(connection, study_id, lacking)
        unfinished = frozenset(n for n, stored in wanted.items() if stored.state is TrialState.RUNNING)
        return _Copy(study_id, spec, tuple(ids[number] for number in wanted), unfinished)

    def _made_anew(
        self, connection: Connection, old: int | None, wanted: Mapping[int, Stored]
    ) -> tuple[int, dict[int, int]]:
        """Return the id of a new copy and those of its trials; the old one keeps its own until it is written."""
        if old is not None:
            optuna_tables.rename_study(connection, old, f"{self._name} (replaced {old})")
        study_id = optuna_tables.create_study(connection, self._name, {_MARK: self._mark})
        ids = optuna_tables.add_trials(connection, study_id, wanted)
        if old is not None:
            optuna_tables.delete_study(connection, old)
        return study_id, ids

    def _deleted(self, connection: Connection) -> None:
        study_id = self._find(connection)
        if study_id is not None:
            optuna_tables.delete_study(connection, study_id)

    def _find(self, connection: Connection) -> int | None:
        """Return the id of the copy, or None where there is none."""
        study_id = optuna_tables.find_study(connection, self._name)
        is_ours = study_id is not None and optuna_tables.study_attrs(connection, study_id).get(_MARK) == self._mark
        return study_id if is_ours else None

    def _described(self) -> str:
        return f'the copy of study "{self._name}" for Optuna\'s own tools'


def _made_under(spec: StudySpec) -> tuple[object, ...]:
    return spec.search, spec.listed, spec.kl_budget


def _up_to_last_ended(rows: Sequence[TrialRow]) -> Sequence[TrialRow]:
    ended = [row.number for row in rows if row.status.is_final]
    return rows[: ended[-1] + 1] if ended else []


def _ended_since(copied: Sequence[tuple[int, int, Stored]], wanted: dict[int, Stored]) -> dict[int, Stored] | None:
    """Return, by id, what has become of trials that had not ended; None where the copy is of something else."""
    if [number for _, number, _ in copied] != list(range(len(copied))) or len(copied) > len(wanted):
        return None
    changed = {trial_id: wanted[number] for trial_id, number, stored in copied if stored != wanted[number]}
    had_ended = any(trial_id in changed and stored.state is not TrialState.RUNNING for trial_id, _, stored in copied)
    return None if had_ended else changed


def _stored(row: TrialRow, spec: StudySpec) -> Stored:
    return optuna_tables.stored_form(for_people(row, spec))


def for_people(row: TrialRow, spec: StudySpec) -> FrozenTrial:
    """Return a trial as Optuna's own tools show it."""
    if spec.listed:  # with its own values, where it is none of those listed
        encoded = study_file.for_people((*spec.listed, ListedTrial(row.params)), row.params)
    else:
        encoded = space.for_people(spec.search, row.params)
    trial = frozen(_told(row, spec), encoded, row.episodes)
    attrs: dict[str, object] = {"origin": row.origin, "label": row.label or None}
    attrs |= {"forked_from": row.parent, "fork_step": row.fork_step}
    trial.datetime_start = datetime.fromtimestamp(row.started_at)
    trial.datetime_complete = None
    if row.status.is_final:
        attrs |= {
            "status": row.status,
            "rule": row.reason.rule if row.reason else None,
            "reason": row.reason.message if row.reason else None,
            "kl": row.kl,
            "value_se": row.value_se,
            "seconds": row.seconds,
        }
        trial.datetime_complete = datetime.fromtimestamp(row.ended_at or row.started_at)
    trial.user_attrs = {name: value for name, value in attrs.items() if value is not None}
    return trial


def _told(row: TrialRow, spec: StudySpec) -> Told:
    """Return a trial's state, value and constraint by the table above."""
    if not row.status.is_final:
        return Told(TrialState.RUNNING)
    value = row.value if is_finite(row.value) else None
    if row.status is Status.FAILED or (row.status is Status.COMPLETED and value is None):
        return Told(TrialState.FAIL)
    constraint = violation(row.kl, spec.kl_budget, row.reason)
    if row.status not in ELIGIBLE or value is None:
        return Told(TrialState.PRUNED, value, constraint)
    is_eligible = best_trial([row], spec.kl_budget) is not None
    constraint = min(constraint, 0.0) if is_eligible else max(constraint, _LEAST_VIOLATION)
    return Told(TrialState.COMPLETE, value, constraint)
