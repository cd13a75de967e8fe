"""A study in a storage of Optuna's own, for optuna-dashboard and Optuna's command line. No torch.

All trials are added through Optuna's public interface, in order, so they keep their numbers. One that has not ended is
RUNNING. One that has is as the sampler reads it (see `tuner.search.optuna_trials`; those that are not the search's own
are FAIL), except that Optuna's best trial, the COMPLETE one of the highest value whose constraints are at most 0, must
be ours. So of the search's own trials each that is eligible as our best is COMPLETE with such a constraint, however it
ended, and each other COMPLETE one has a constraint over 0. Optuna names another one still if a fork is the best, if
second readings chose another than the highest value, or if several share that: the user attribute `best_trial` is ours.

Intermediate values are the eval reward by episode. Optuna has one series per trial, so the eval KL by episode is the
user attribute `eval_kl`; origin, status, reason and differences from the reference are user attributes, too.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from ppo_core.config.declare import HyperValue
from ppo_core.errors import ConfigError, PPOTunerError, StoreError
from tuner.judge.best import best_trial
from tuner.search.optuna_trials import OptunaReport, frozen, to_optuna
from tuner.store import Store, TrialRow, schema
from tuner.store.connect import file_of
from tuner.study import space
from tuner.study.space import Encoded
from tuner.study.spec import StudySpec
from tuner.study.status import Role
from tuner.study.trial_tables import ListedTrial

BEST = "best_trial"
_LOCK_SECONDS = 60
_LEAST_VIOLATION = 1e-9
_EVALUATION = ("eval/reward", "eval/kl")


def export_to_optuna(store: Store, name: str, output: str, *, replace: bool = False) -> tuple[str, list[TrialRow]]:
    """Write the study `name` to Optuna's storage `output`; return its URL without a password, and the trials.

    Raises:
        StudyError: there is no such study in the store; the message names the nearest.
        ConfigError: a study of that name is in the storage already, and not to be replaced.
        StoreError: one of the two failed.
    """
    study = store.study(name)
    spec = StudySpec.from_stored(study.spec, f'study "{study.name}"')
    rows, reference = store.trials(study), reference_config(spec)
    evaluations: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for evaluation in store.steps([row.id for row in rows], _EVALUATION, evaluations_only=True):
        evaluations[evaluation["trial_id"]].append(evaluation)
    best = best_trial(rows, spec.kl_budget)
    storage = open_storage(output)
    url = schema.redacted(storage.engine.url)
    try:
        with _one_line(url):
            if name in optuna.get_all_study_names(storage):
                if not replace:
                    raise ConfigError(
                        f'{url} holds a study "{name}" already; replace it with --force, or name another place with -o'
                    )
                optuna.delete_study(study_name=name, storage=storage)
            exported = optuna.create_study(study_name=name, storage=storage, direction="maximize")
            exported.add_trials([as_optuna(row, spec, reference, evaluations[row.id]) for row in rows])
            exported.set_user_attr(BEST, None if best is None else best.number)
    finally:
        storage.engine.dispose()
    return url, rows


def open_storage(output: str) -> RDBStorage:
    """Open the Optuna storage at a file or URL, creating it if there is none.

    Raises:
        StoreError: it cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = schema.parse_url(output)
    if (path := file_of(url)) is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder of {path}: {error.strerror or error}") from error
    is_sqlite = url.get_backend_name() == "sqlite"
    options = {"connect_args": {"timeout": _LOCK_SECONDS}} if is_sqlite else {"pool_pre_ping": True}
    template = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    with _one_line(schema.redacted(url)):
        return RDBStorage(template, engine_kwargs=options)


@contextmanager
def _one_line(url: str) -> Iterator[None]:
    """Turn any error of an Optuna storage into a one-line StoreError."""
    try:
        yield
    except PPOTunerError:
        raise
    except Exception as error:
        root = error.__cause__ or error
        lines = str(getattr(root, "orig", None) or root).strip().splitlines() or [type(root).__name__]
        raise StoreError(f"Optuna's storage {url} failed: {lines[0]}") from error


def reference_config(spec: StudySpec) -> dict[str, HyperValue]:
    """Return the configuration to compare with: the reference's, or the fixed values if trials are listed."""
    return spec.config(spec.reference_params()).to_dict()


def as_optuna(
    row: TrialRow, spec: StudySpec, reference: Mapping[str, HyperValue], evaluations: Sequence[Mapping[str, Any]]
) -> FrozenTrial:
    encoded = _listed_for_people(spec.listed, row.params) if spec.listed else space.for_people(spec.search, row.params)
    trial = frozen(_report(row, spec), encoded)
    trial.datetime_start = datetime.fromtimestamp(row.started_at)
    trial.datetime_complete = datetime.fromtimestamp(row.ended_at or row.started_at) if row.status.is_final else None
    trial.intermediate_values = {
        each["episode"]: each["eval/reward"] for each in evaluations if each["eval/reward"] is not None
    }
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
            **{name: getattr(row, name) for name in ("value_se", "kl", "episodes", "seconds")},
        }
    trial.user_attrs = {name: value for name, value in attributes.items() if value is not None}
    return trial


def _listed_for_people(listed: Sequence[ListedTrial], params: Mapping[str, HyperValue]) -> Encoded:
    """Return a listed trial's params, each one of the listed values: Optuna wants the same choices in all trials."""
    choices = {name: tuple(dict.fromkeys(t.params[name] for t in listed if name in t.params)) for name in params}
    kept = {name: value for name, value in params.items() if value in choices[name]}
    return kept, {name: CategoricalDistribution(choices[name]) for name in kept}


def _report(row: TrialRow, spec: StudySpec) -> OptunaReport:
    if not row.status.is_final:
        return OptunaReport(TrialState.RUNNING)
    seen = to_optuna(row, spec)
    if row.informs_sampler and best_trial([row], spec.kl_budget) is not None:
        return replace(seen, state=TrialState.COMPLETE)
    if seen.state is TrialState.COMPLETE:
        return OptunaReport(seen.state, seen.value, max(seen.constraint or 0.0, _LEAST_VIOLATION))
    return seen
