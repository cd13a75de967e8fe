"""A study in a storage of Optuna's: the same numbers, states, values and best trial, and it opens in Optuna's tools."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial

from ppo_core.config.declare import HyperValue
from ppo_core.errors import ConfigError
from tests.tuner import made_study, stores
from tests.tuner.exported import enrich
from tests.tuner.invoke import Invoke, one_error
from tests.tuner.trial_rows import make_spec, pruned, running, trial_row
from tuner.exchange.optuna import as_optuna, export_to_optuna, open_storage, reference_config
from tuner.judge.best import best_trial
from tuner.store import Outcome, Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Role, Status

SPEC = make_spec()
CONFIG = reference_config(SPEC)
REFERENCE: dict[str, HyperValue] = {**SPEC.reference_params(), "num_ppo_epochs": 2}
ADAPTIVE: dict[str, HyperValue] = {**REFERENCE, "kl_target": 6.0, "vf_coef": 0.75}
ROWS = [
    trial_row(0, origin=Origin.REFERENCE, params=REFERENCE, value=1.5, kl=8.0, value_step=4),
    trial_row(1, params=ADAPTIVE, value=2.0, kl=0.0, value_step=0),
    pruned(2, "nonfinite", params=REFERENCE, value=2.5, kl=9.0, value_step=2, episodes=640),
    trial_row(3, params=ADAPTIVE, status=Status.FAILED, value=None, kl=None, reason=Reason("error", "lost")),
    trial_row(4, params=ADAPTIVE, value=1.75, kl=9.0, value_step=4, config={**CONFIG, "lam": 0.5}),
    trial_row(5, params=ADAPTIVE, status=Status.STOPPED, value=1.25, kl=0.0, value_step=0, label="mine"),
    trial_row(
        6, params=REFERENCE, origin=Origin.FORKED, role=Role.FORK, parent=4, fork_step=7, value=1.6, kl=9.5,
        value_step=9,
    ),
    trial_row(7, params=REFERENCE, status=Status.STOPPED, value=None, kl=None),
    running(8, ADAPTIVE),
]  # fmt: skip
EXPECTED = [
    (0, "COMPLETE", 1.5),
    (1, "COMPLETE", 2.0),
    (2, "PRUNED", 2.5),
    (3, "FAIL", None),
    (4, "COMPLETE", 1.75),
    (5, "PRUNED", 1.25),
    (6, "FAIL", None),
    (7, "PRUNED", None),
    (8, "RUNNING", None),
]
MADE = ["COMPLETE", "COMPLETE", "COMPLETE", "COMPLETE", "COMPLETE", "PRUNED", "FAIL", "RUNNING"]
"""Of the hand-made study; trials 3 and 4 ended early with a checkpoint within the budget, trial 5 without."""


def shown(rows: Sequence[TrialRow], spec: StudySpec = SPEC) -> optuna.Study:
    """Return a study in memory of what is written of these rows."""
    study = optuna.create_study(direction="maximize")
    study.add_trials([as_optuna(row, spec, reference_config(spec), ()) for row in rows])
    return study


def told(study: optuna.Study) -> list[tuple[int, str, float | None]]:
    return [(trial.number, trial.state.name, trial.value) for trial in study.trials]


# What Optuna is told of a trial


def test_numbers_states_and_values_are_those_of_the_table() -> None:
    study = shown(ROWS)
    assert told(study) == EXPECTED
    assert study.best_trial.number == 4  # trial 1 is the SFT policy, and trial 2 broke
    reference, adaptive = study.trials[:2]
    assert (reference.params, adaptive.params) == (REFERENCE, ADAPTIVE)
    assert reference.distributions["vf_coef"] == FloatDistribution(0.1, 1.0)
    assert reference.distributions["batch_size"] == IntDistribution(32, 128, log=True)
    assert study.trials[2].constraints == {"kl": 1.0}
    assert study.trials[6].constraints == {}
    assert study.trials[2].user_attrs["rule"] == "nonfinite" and study.trials[5].user_attrs["label"] == "mine"
    assert study.trials[4].user_attrs["config"] == {"lam": 0.5}, "what no parameter says"
    assert reference.duration is not None and reference.duration.total_seconds() == 10.0


def completed(number: int, value: float | None, kl: float | None) -> TrialRow:
    return trial_row(number, params=REFERENCE, value=value, kl=kl, value_step=4)


BEST = {
    "within": [completed(0, 1.0, 5.0), completed(1, 2.0, 9.0)],
    "on the budget": [completed(0, 1.0, 5.0), completed(1, 2.0, 10.0)],
    "stopped": [completed(0, 1.0, 5.0), replace(completed(1, 2.0, 9.0), status=Status.STOPPED)],
    "pruned": [completed(0, 1.0, 5.0), pruned(1, params=REFERENCE, value=2.0, value_step=2)],
    "broken": [completed(0, 1.0, 5.0), pruned(1, "nonfinite", params=REFERENCE, value=2.0, value_step=2)],
    "the SFT policy": [completed(0, 1.0, 5.0), replace(completed(1, 2.0, 0.0), value_step=0)],
    "never evaluated": [completed(0, 1.0, 5.0), completed(1, None, None)],
    "KL below zero": [completed(0, 1.0, 5.0), completed(1, 2.0, -1e-7)],
    "none": [replace(completed(0, 1.0, 0.0), value_step=0), completed(1, None, None)],
}


@pytest.mark.parametrize("rows", BEST.values(), ids=list(BEST))
def test_optunas_best_trial_is_ours(rows: list[TrialRow]) -> None:
    ours, study = best_trial(rows, SPEC.kl_budget), shown(rows)
    if ours is None:
        with pytest.raises(ValueError, match="No feasible trials"):
            _ = study.best_trial
    else:
        assert study.best_trial.number == ours.number


def test_of_listed_trials_each_value_is_one_of_those_listed() -> None:
    listed = [{"lam": 0.9}, {"lam": 0.95, "value_model": "separate"}]
    spec = StudySpec.from_dict({"name": "mine", "task": "reviews", "trial": listed}, "spec")
    rows = [trial_row(number, params=dict(trial.params)) for number, trial in enumerate(spec.listed)]
    added = {"lam": 0.5, "gamma": 0.9}  # Optuna lets no later trial bring new choices
    rows.append(trial_row(2, origin=Origin.ENQUEUED, params=added, config=spec.config(added).to_dict()))
    study = shown(rows, spec)
    assert [trial.params for trial in study.trials] == [*listed, {}]
    assert study.trials[2].user_attrs["config"] == added


# A whole study


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The hand-made study, whose last trial runs."""
    made = made_study.make(tmp_path / "made.db")
    yield made
    made.close()


def export(store: Store, output: str, *, replace: bool = False) -> optuna.Study:
    """Write the hand-made study and return it as another process of Optuna's loads it."""
    export_to_optuna(store, "made", output, replace=replace)
    return loaded(output)


def loaded(output: str) -> optuna.Study:
    return optuna.load_study(study_name="made", storage=open_storage(output))


@pytest.fixture(params=["file", pytest.param("postgresql", marks=pytest.mark.postgres)])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of storage."""
    from_file = request.param == "file"
    return str(tmp_path / "new" / "{made}.optuna.db") if from_file else stores.empty("postgresql", tmp_path)


def test_a_study_is_the_same_there(store: Store, output: str) -> None:
    study = export(store, output)
    rows = store.trials(store.study("made"))
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert [trial.state.name for trial in study.trials] == MADE
    for row, trial in zip(rows, study.trials, strict=True):
        assert (trial.number, trial.user_attrs["status"]) == (row.number, row.status)
        assert trial.datetime_start is not None and trial.datetime_start.timestamp() == pytest.approx(row.started_at)
        if trial.state.name in ("COMPLETE", "PRUNED"):
            assert trial.value == row.value
    assert study.best_trial.number == study.user_attrs["best_trial"] == 2
    assert study.trials[1].intermediate_values == {0: 0.25, 128: 2.95, 256: 3.0}
    assert study.trials[1].user_attrs["eval_kl"] == {"0": 0.0, "128": 12.5, "256": 12.5}


def test_a_fork_has_its_number_and_teaches_nothing(store: Store, tmp_path: Path) -> None:
    enrich(store)  # makes the last trial a fork
    end(store, 7, 9.0)
    study = export(store, str(tmp_path / "o.db"))
    fork = study.trials[7]
    assert (fork.state.name, fork.value, fork.user_attrs["value"]) == ("FAIL", None, 9.0)
    assert fork.user_attrs["origin"] == "forked"
    assert (study.best_trial.number, study.user_attrs["best_trial"]) == (2, 7)  # ours may be a fork


def end(store: Store, number: int, value: float) -> None:
    """Complete a trial of the hand-made study."""
    lease = store.acquire("made")
    trial = store.trial(store.study("made"), number)
    store.finish_trial(lease, trial.id, Outcome(Status.COMPLETED, None, value, 0.1, 9.0, -0.1, value_step=4))
    store.release(lease)


def without_id(trial: FrozenTrial) -> dict[str, Any]:
    """Return all of a trial but its id, and when Optuna was told of its end."""
    return {name: value for name, value in vars(trial).items() if name not in ("_trial_id", "datetime_complete")}


# Refused


def test_a_study_that_is_there_is_refused_or_replaced(store: Store, output: str) -> None:
    before = [without_id(trial) for trial in export(store, output).trials]
    with pytest.raises(ConfigError, match=r'holds a study "made" already; .*--force.*-o'):
        export(store, output)
    end(store, 7, 1.0)
    after = [without_id(trial) for trial in export(store, output, replace=True).trials]
    assert after[:7] == before[:7] and after[7] != before[7]


# The command


@pytest.mark.usefixtures("made")
def test_the_command_writes_a_file_and_says_how_to_open_it(ppo_tuner: Invoke, own_folder: Path) -> None:
    status, out, err = ppo_tuner("export", "made", "--format", "optuna")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "wrote sqlite:///made.optuna.db: 8 trials, 1 of them not ended",
        "open it: optuna-dashboard sqlite:///made.optuna.db",
    ]
    status, out, err = ppo_tuner("export", "made", "--format", "optuna")
    assert (status, out) == (2, "") and "--force" in one_error(err)
    assert [path.name for path in own_folder.glob("*.optuna*")] == ["made.optuna.db"]
