"""A study in a storage of Optuna's own, for optuna-dashboard and Optuna's command line. No torch.

It is written through Optuna's public interface alone. Optuna numbers trials in the order in which they are added, so
every trial of ours is added, in order, and has the same number there. A trial that has not ended is RUNNING. One that
has ended is what the sampler gets of it (the table in `tuner.scoring`; what is not the search's own is FAIL), with
one difference, made so that Optuna's best trial is ours. Optuna's `best_trial` is the COMPLETE trial of the highest
value whose constraints are all at most 0. Ours is the best of the trials that completed or were stopped by a person,
and whose KL is known to be within the budget. So of the search's own trials

- each that is eligible as our best one is COMPLETE with a constraint of at most 0, also where a person stopped it;
- each other COMPLETE one has a constraint over 0, also where its KL was never evaluated.

In two cases Optuna names another trial: where a fork is the best one, and where several have the best value, of which
ours has the lowest KL. The study's user attribute `best_trial` is always the number of ours.

Intermediate values are the eval reward by episode. Optuna has one series a trial, so the eval KL by episode is the user
attribute `eval_kl`; origin, status, reason and what the configuration differs in are user attributes, too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError, PPOTunerError, StoreError, StudyError
from tuner import space, study_file
from tuner.best import best_trial
from tuner.scoring import Told, frozen, to_optuna
from tuner.spec import StudySpec
from tuner.status import Role
from tuner.store import KnownTrials, Store, StudyRow, TrialRow, schema

MARK = "ppo_tuner"
"""The user attribute of a study of Optuna's that says which study of ours it is, and under which ranges and KL budget
its trials were written."""
BEST = "best_trial"
JOURNALS = (".journal", ".log")
"""How the name of a file ends that is to be Optuna's journal, and not an SQLite database."""
_LOCK_SECONDS = 60
_LEAST_VIOLATION = 1e-9
_EVALUATION = ("eval/reward", "eval/kl")


@dataclass(frozen=True)
class OptunaStorage:
    """A storage of Optuna's."""

    storage: BaseStorage
    url: str
    """As Optuna's tools take it, with its password hidden."""


class OptunaExport:
    """A study's export to a storage of Optuna's. Each `update` adds what is new. Make it with `open_export`."""

    def __init__(self, store: Store, place: OptunaStorage, study: optuna.Study, name: str) -> None:
        self.place = place
        self.trials: list[TrialRow] = []
        """As they were written last, by number."""
        self.is_over = False
        """Whether the study had ended when they were: it was finished, and no controller held it."""
        self._store, self._study, self._name = store, study, name
        self._known = KnownTrials()

    def update(self) -> list[TrialRow]:
        """Write the trials that are new or have not ended there, and return those that had ended by now.

        Raises:
            StudyError: the study is gone, or what was written before is no longer true of it.
            StoreError: our store, or Optuna's storage, failed.
        """
        study = self._store.study(self._name)
        spec = StudySpec.from_dict(study.spec, f'study "{study.name}"')
        rows = self._store.trials(study, self._known)
        reference = reference_config(spec)
        with _one_line(self.place.url):
            self._require_mark(study, spec)
            there = self._study.get_trials(deepcopy=False)
        self._require_same(there, rows)
        fresh = [row for row in rows if row.number >= len(there) or not there[row.number].state.is_finished()]
        evaluations = _evaluations(self._store, fresh)
        trials = {row.number: as_optuna(row, spec, reference, evaluations.get(row.id, ())) for row in fresh}
        best = best_trial(rows, spec.kl_budget, spec.objective)
        with _one_line(self.place.url):
            for number, trial in trials.items():
                if number >= len(there):
                    self._study.add_trial(trial)
                else:
                    self._bring_up(there[number], trial)
            self._name_best(None if best is None else best.number)
        self.trials = rows
        self.is_over = study.finished_at is not None and not study.is_held
        return [row for row in fresh if row.status.is_final]

    def _name_best(self, number: int | None) -> None:
        if self._study.user_attrs.get(BEST) != number:
            self._study.set_user_attr(BEST, number)

    def _require_mark(self, study: StudyRow, spec: StudySpec) -> None:
        found, wanted = self._study.user_attrs.get(MARK), mark(study, spec)
        if found == wanted:
            return
        if not isinstance(found, dict) or any(found.get(key) != wanted[key] for key in ("study", "created_at")):
            raise StudyError(
                f'{self.place.url} holds another study "{study.name}"; name another place with -o, or replace that '
                "study with --force"
            )
        raise StudyError(
            f'study "{study.name}" has other ranges or another KL budget than when {self.place.url} was written; '
            "write it again with --force"
        )

    def _require_same(self, there: Sequence[FrozenTrial], rows: Sequence[TrialRow]) -> None:
        """Raise StudyError where Optuna holds a trial that we do not, or that has not ended as it says."""
        for trial in there:
            row = rows[trial.number] if trial.number < len(rows) else None
            if row is None or not _is_true_of(trial, row):
                raise StudyError(
                    f"trial {trial.number} in {self.place.url} is not trial {trial.number} of the study: it was tried "
                    "again since, or changed there; write the study again with --force"
                )

    def _bring_up(self, old: FrozenTrial, new: FrozenTrial) -> None:
        """Make a RUNNING trial what it is now: its state comes last, so that what is cut off is done again."""
        storage = self.place.storage
        study_id = storage.get_study_id_from_name(self._name)
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, old.number)
        for step, value in new.intermediate_values.items():
            if old.intermediate_values.get(step) != value:
                storage.set_trial_intermediate_value(trial_id, step, value)
        for key, value in new.user_attrs.items():
            if old.user_attrs.get(key) != value:
                storage.set_trial_user_attr(trial_id, key, value)
        for key, value in new.system_attrs.items():  # the constraint
            storage.set_trial_system_attr(trial_id, key, value)
        if new.state.is_finished():
            storage.set_trial_state_values(trial_id, new.state, new.values)


@contextmanager
def open_export(
    store: Store, name: str, output: str, *, replace: bool = False, go_on: bool = False
) -> Iterator[OptunaExport]:
    """Give the export of the study `name` to a storage of Optuna's: a file or a URL, made if there is none.

    Args:
        store: Our store.
        name: The study's name, in the storage too.
        output: An SQLite file, a journal file (its name ends as `JOURNALS` says), or the URL of a database.
        replace: Whether a study of that name there is deleted first.
        go_on: Whether to continue a study there that an earlier export of the same study wrote.

    Raises:
        StudyError: there is no such study in the store.
        ConfigError: a study of that name is in the storage already.
        StoreError: the storage cannot be used.
    """
    study = store.study(name)  # tells the nearest name if there is none of this one
    spec = StudySpec.from_dict(study.spec, f'study "{study.name}"')
    place = open_place(output)
    try:
        with _one_line(place.url):
            is_there = name in optuna.get_all_study_names(place.storage)
            if is_there and replace:
                optuna.delete_study(study_name=name, storage=place.storage)
            elif is_there and not go_on:
                raise ConfigError(
                    f'{place.url} holds a study "{name}" already; replace it with --force, add to it with --follow, '
                    "or name another place with -o"
                )
            if is_there and not replace:
                there = optuna.load_study(study_name=name, storage=place.storage)
            else:
                there = optuna.create_study(study_name=name, storage=place.storage, direction="maximize")
                there.set_user_attr(MARK, mark(study, spec))
        yield OptunaExport(store, place, there, name)
    finally:
        if isinstance(place.storage, RDBStorage):
            place.storage.engine.dispose()


def open_place(output: str) -> OptunaStorage:
    """Return the storage of Optuna's at a file or URL, made if there is none.

    Raises:
        StoreError: it cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if "://" not in output:
        try:
            Path(output).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder of {output}: {error.strerror or error}") from error
    if "://" not in output and Path(output).suffix in JOURNALS:
        with _one_line(output):
            if not _may_be_journal(Path(output)):
                raise StoreError(f"{output} is not a journal of Optuna's; name another place with -o")
            return OptunaStorage(JournalStorage(JournalFileBackend(output)), output)
    url = schema.parse_url(output)
    is_sqlite = url.get_backend_name() == "sqlite"
    options = {"connect_args": {"timeout": _LOCK_SECONDS}} if is_sqlite else {"pool_pre_ping": True}
    template = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    with _one_line(schema.redacted(url)):
        return OptunaStorage(RDBStorage(template, engine_kwargs=options), schema.redacted(url))


def _may_be_journal(path: Path) -> bool:
    """Return whether a file is new, empty or a journal of Optuna's, which appends to any file."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        try:
            return "op_code" in json.loads(file.readline())
        except (ValueError, TypeError):
            return False


@contextmanager
def _one_line(url: str) -> Iterator[None]:
    """Raise what fails in a storage of Optuna's, whatever kind of error each raises, as a StoreError of one line."""
    try:
        yield
    except PPOTunerError:
        raise
    except Exception as error:
        root = error.__cause__ or error
        lines = str(getattr(root, "orig", None) or root).strip().splitlines() or [type(root).__name__]
        raise StoreError(f"Optuna's storage {url} failed: {lines[0]}") from error


# What is written


def mark(study: StudyRow, spec: StudySpec) -> dict[str, Any]:
    """Return what tells an export of this study from others, and one that is out of date: Optuna lets no ended trial
    change, and all ranges of one hyperparameter must be of one kind.
    """
    stored = spec.to_dict()
    under = {"search": stored.get("search"), "trial": stored.get("trial"), "kl_budget": spec.kl_budget}
    return {"study": study.name, "created_at": study.created_at, **under}


def reference_config(spec: StudySpec) -> dict[str, HyperValue]:
    """Return the configuration that those of trials are compared with: the reference trial's, or of a study that lists
    its trials the one without any trial's own values.
    """
    return spec.config(spec.reference_params()).to_dict()


def as_optuna(
    row: TrialRow,
    spec: StudySpec,
    reference: Mapping[str, HyperValue],
    evaluations: Sequence[Mapping[str, Any]],
) -> FrozenTrial:
    """Return a trial as Optuna's tools show it.

    Args:
        row: The trial.
        spec: Its study.
        reference: See `reference_config`.
        evaluations: Rows of `episode`, `eval/reward` and `eval/kl`, as `Store.steps` returns them.
    """
    if spec.listed:
        encoded = study_file.for_people(spec.listed, row.params)
    else:
        encoded = space.for_people(spec.search, row.params)
    trial = frozen(_told(row, spec), encoded)
    trial.datetime_start = datetime.fromtimestamp(row.started_at)
    trial.datetime_complete = None
    if row.status.is_final:
        trial.datetime_complete = datetime.fromtimestamp(row.ended_at or row.started_at)
    rewards = {each["episode"]: each["eval/reward"] for each in evaluations}
    trial.intermediate_values = {episode: value for episode, value in rewards.items() if value is not None}
    differing = {name: value for name, value in row.config.items() if value != reference.get(name)}
    attributes: dict[str, Any] = {
        "origin": str(row.origin),
        "status": str(row.status),
        "label": row.label or None,
        "forked_from": row.parent if row.role is Role.FORK else None,
        "confirms": row.parent if row.role is Role.CONFIRM else None,
        "fork_step": row.fork_step,
        "config": differing or None,
        "eval_kl": {str(each["episode"]): each["eval/kl"] for each in evaluations} or None,
    }
    if row.status.is_final:
        attributes |= {
            "rule": row.reason.rule if row.reason else None,
            "reason": row.reason.message if row.reason else None,
            "value": row.value if trial.value is None else None,
            "value_se": row.value_se,
            "kl": row.kl,
            "episodes": row.episodes,
            "seconds": row.seconds,
            "ended_at": _ended_at(row),
        }
    trial.user_attrs = {name: value for name, value in attributes.items() if value is not None}
    return trial


def _told(row: TrialRow, spec: StudySpec) -> Told:
    """Return a trial's state, value and constraint; see the top of this file."""
    if not row.status.is_final:
        return Told(TrialState.RUNNING)
    seen = to_optuna(row, spec)
    if row.teaches and best_trial([row], spec.kl_budget, spec.objective) is not None:
        return Told(TrialState.COMPLETE, seen.value, min(seen.constraint or 0.0, 0.0))
    if seen.state is TrialState.COMPLETE:
        return Told(seen.state, seen.value, max(seen.constraint or 0.0, _LEAST_VIOLATION))
    return seen


def _is_true_of(trial: FrozenTrial, row: TrialRow) -> bool:
    """Return whether Optuna holds a trial of ours, and how it ended, or that it has not."""
    if trial.state.is_finished() and trial.user_attrs.get("ended_at") != _ended_at(row):
        return False
    return bool(trial.user_attrs.get("origin") == row.origin)


def _ended_at(row: TrialRow) -> str | None:
    """Return when a trial ended, in UTC. Of one that was RUNNING Optuna keeps the time when its end was reported."""
    return None if row.ended_at is None else datetime.fromtimestamp(row.ended_at, UTC).isoformat()


def _evaluations(store: Store, rows: Sequence[TrialRow]) -> dict[int, list[dict[str, Any]]]:
    """Return the trials' evaluations by the row's id."""
    found: dict[int, list[dict[str, Any]]] = {}
    for each in store.steps([row.id for row in rows], _EVALUATION, evaluations_only=True):
        found.setdefault(each["trial_id"], []).append(each)
    return found
