"""Studies that list their trials: what a file may say, what is run, and what people are shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_core.errors import ConfigError
from tests.tuner import quick_study
from tuner.control.changes import spec_changes
from tuner.control.events import StudyStarted
from tuner.control.orders import enqueued_params
from tuner.study.spec import StudySpec
from tuner.study.trial_tables import ListedTrial

BETAS: list[dict[str, Any]] = [
    {"label": "low", "kl_coef": "1e-2"},
    {"kl_coef": 0.3, "advantage_estimator": "rloo", "num_generations": 2},
    {"label": "to a target", "kl_target": 6, "kl_horizon": 200},
]


def content(**changes: Any) -> dict[str, Any]:
    base = {"name": "mine", "task": "reviews", "fixed": {"gamma": 0.9}, "trial": BETAS}
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def spec(**changes: Any) -> StudySpec:
    return StudySpec.from_dict(content(**changes), "s.toml")


def test_listed_values_are_typed_and_over_the_tasks_reference() -> None:
    study = spec()
    assert study.trials == 3 and study.search == {}
    assert study.listed[0] == ListedTrial({"kl_coef": 0.01}, "low")
    assert [trial.label for trial in study.listed] == ["low", "", "to a target"]
    low, grouped, adaptive = (study.config(trial.params) for trial in study.listed)
    assert (low.kl_coef, low.gamma, low.learning_rate) == (0.01, 0.9, 2e-4)  # the task's reference rate
    assert (grouped.advantage_estimator, grouped.num_generations) == ("rloo", 2)
    assert (adaptive.kl_target, adaptive.kl_horizon, adaptive.kl_coef) == (6.0, 200, 0.05)


def test_a_stored_study_is_read_back_equal() -> None:
    study = spec(trials=3)
    assert StudySpec.from_dict(json.loads(json.dumps(study.to_dict())), "stored") == study == spec()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 4}, "trials = 4 is not allowed beside [[trial]] tables: leave it out, or list as many"),
        ({"search": {"kl_coef": "advised"}}, "search has no effect beside [[trial]] tables; remove one of them"),
        ({"trial": []}, "trial = [] is not allowed; expected [[trial]] tables, one per trial"),
        ({"trial": [3]}, "trial 0 = 3 is not allowed; expected a table of key = value lines"),
        ({"trial": [{}, {"kl_coeff": 1}]}, 'trial 1: unknown hyperparameter "kl_coeff"; did you mean "kl_coef"?'),
        ({"trial": [{"seed": 3}]}, "trial 0.seed: the seed is set at the top of the file"),
        ({"trial": [{"gamma": 0.8}]}, "trial 0.gamma: it is also in [fixed]; remove it from one of them"),
        ({"trial": [{}, {"lam": 1}, {"lam": 1, "label": "b"}]}, "trial 2 lists the same values as trial 1"),
        ({"trial": [{}, {"mini_batch_size": 48}]}, "trial 1: mini_batch_size = 48 does not divide batch_size"),
        ({"trial": [{"advantage_estimator": "rloo"}]}, "trial 0: num_generations = 1 is not allowed with adv"),
    ],
)  # fmt: skip
def test_a_mistake_gives_one_line_that_names_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec(**changes)
    assert str(raised.value).startswith(f"s.toml: {message}")
    assert "\n" not in str(raised.value)


def test_a_study_may_list_more_trials_later_and_change_none() -> None:
    longer = spec(trial=[*BETAS, {"kl_coef": 0.5}])
    assert spec_changes(spec(), longer).refused == []
    assert spec_changes(spec(), longer).allowed == ["trials: 4, was 3"]
    (changed,) = spec_changes(spec(), spec(trial=[{"kl_coef": 0.2}, *BETAS[1:]])).refused
    assert changed.startswith(
        "trial 0: {'kl_coef': 0.2}, was {'label': 'low', 'kl_coef': 0.01}; give the study another"
    )
    (shorter,) = spec_changes(spec(), spec(trial=BETAS[:2])).refused
    assert shorter.startswith("trial 2: not listed, was {'label': 'to a target'")
    searching = spec(trial=None, trials=3, search={"kl_coef": "advised"})
    assert spec_changes(searching, spec()).refused == ["trials: listed, were searched; give the study another name"]


def test_they_run_in_order_with_nothing_added_or_proposed(tmp_path: Path) -> None:
    rates = [{"learning_rate": rate} for rate in (2e-4, 9e-4, 1e-4)]
    table = quick_study.quick_spec().to_dict() | {"trial": rates, "trials": 3}
    study = StudySpec.from_dict({key: table[key] for key in table if key not in ("search", "sampler")}, "test")
    finished, events = quick_study.run(tmp_path, study, workers=1)
    assert finished
    assert next(event for event in events if isinstance(event, StudyStarted)).spec == study
    rows = quick_study.rows(tmp_path)
    assert [(row.number, row.origin, row.params) for row in rows] == [(n, "listed", rates[n]) for n in range(3)]
    assert [row.config["learning_rate"] for row in rows] == [2e-4, 9e-4, 1e-4]
    assert [row.kl for row in rows][::2] == [pytest.approx(8.0), pytest.approx(4.0)]
    rates.append({"learning_rate": 3e-4})
    longer = StudySpec.from_dict({**study.to_dict(), "trials": 4, "trial": rates}, "test")
    finished, _ = quick_study.run(tmp_path, longer, workers=1)
    assert finished and len(quick_study.rows(tmp_path)) == 4


def test_what_an_enqueued_trial_leaves_out_is_the_studys_own() -> None:
    study = spec()
    params = enqueued_params(study, [], {"lam": 0.9})
    assert params == {"lam": 0.9} and study.config(params).kl_coef == 0.05, "trial 0's is 0.01"
