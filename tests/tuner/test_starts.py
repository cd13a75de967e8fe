"""The starts of a search: what a file may say of them, where they move, and what is run of them, and when."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ppo_core.config.declare import Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import ConfigError, StudyError
from tests.tuner import quick_study
from tests.tuner.trial_rows import trial_row
from tuner.control.events import StudyStarted
from tuner.control.orders import enqueued_params
from tuner.control.run import run_study
from tuner.search.propose import as_read
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin
from tuner.study.trial_tables import RECIPES, clip_to_space

SEARCH = {
    "learning_rate": {"low": 1e-5, "high": 1e-3},
    "batch_size": {"low": 32, "high": 128},
    "num_ppo_epochs": {"low": 1, "high": 3},
    "kl_coef": "advised",
    "kl_target": {"low": 2, "high": 8},
}
FAST = {"label": "fast", "learning_rate": 5e-4, "kl_target": 4}


def spec(**changes: Any) -> StudySpec:
    base = {"name": "mine", "task": "reviews", "trials": 9, "fixed": {"gamma": 0.9}, "search": SEARCH}
    return StudySpec.from_dict({**base, **changes}, "s.toml")


def quick(**changes: Any) -> StudySpec:
    return quick_study.quick_spec(**{"trials": 4, **changes})


def notes(folder: Path, study: StudySpec, **keywords: Any) -> tuple[str, ...]:
    """Run a study and return what it was told at its start."""
    _, events = quick_study.run(folder, study, workers=1, **keywords)
    return next(event for event in events if isinstance(event, StudyStarted)).notes


def listed(rows: list[TrialRow]) -> list[tuple[int, str, float]]:
    return [(row.number, row.label, row.config["learning_rate"]) for row in rows if row.origin is Origin.LISTED]  # type: ignore[misc]


# What a file says


def test_tables_come_first_then_recipes_in_their_order() -> None:
    study = spec(start=[FAST, {"kl_coef": 0.2}], warm_start=["stiennon", "trl"])
    assert [start.label for start in study.starts] == ["fast", "", "stiennon", "trl"]
    assert study.params_with(study.starts[0].params) == {
        "learning_rate": 5e-4, "batch_size": 64, "num_ppo_epochs": 4, "kl_coef": 0.05, "kl_target": 4.0,
    }  # fmt: skip
    config = study.config(study.params_with(study.starts[2].params))
    assert (config.learning_rate, config.batch_size, config.num_ppo_epochs, config.kl_coef) == (1.5e-5, 128, 3, 0.05)
    assert config.gamma == 0.9  # the study's, whatever the recipe says


def test_values_move_to_the_nearest_in_range_beside_the_original() -> None:
    search = {
        "learning_rate": Range(1e-5, 1e-3, "log"), "batch_size": Range(32, 128, "log2"),
        "num_ppo_epochs": Range(1, 3), "lam": Range(0.9, 0.97),
    }  # fmt: skip
    values = {"learning_rate": 3e-6, "batch_size": 100, "num_ppo_epochs": 4, "lam": 0.95, "gamma": 0.5}
    start = clip_to_space(values, search, "mine")
    assert start.params == {"learning_rate": 1e-5, "batch_size": 128, "num_ppo_epochs": 3, "lam": 0.95}
    assert [type(value) for value in start.params.values()] == [float, int, int, float]
    assert start.original == {name: values[name] for name in search}
    assert start.title == "mine: learning_rate 3e-06 moved to 1e-05 and 2 more"
    assert start.moves[1:] == ["batch_size 100 moved to 128", "num_ppo_epochs 4 moved to 3"]


def test_a_start_has_the_nearest_number_of_a_list_or_one_of_the_choices() -> None:
    lists: dict[str, Any] = {"lam": [0.9, 0.95, 1.0], "lr_scheduler_type": ["linear", "cosine"]}
    study = spec(search=lists, start=[{"lam": 0.93, "lr_scheduler_type": "cosine"}], warm_start=["openrlhf"])
    assert [start.params for start in study.starts] == [{"lr_scheduler_type": "cosine", "lam": 0.95}, {"lam": 1.0}]
    assert study.starts[0].moves == ["lam 0.93 moved to 0.95"]
    with pytest.raises(ConfigError, match=r"start 0\.lr_scheduler_type = .* is not allowed; expected one of"):
        spec(search=lists, start=[{"lr_scheduler_type": "constant"}])


def test_every_recipe_holds_what_may_be_searched_and_states_its_source() -> None:
    for name, recipe in RECIPES.items():
        assert re.search(r"\b20\d\d\b", recipe.source), name
        for key, value in recipe.values.items():
            assert HYPERPARAMETERS[key].kind in (int, float) and HYPERPARAMETERS[key].coerce(value) == value
        assert f"`{name}`" in (quick_study.ROOT / "docs" / "studies.md").read_text()
    assert RECIPES["trl"].values["learning_rate"] == 3e-6 and RECIPES["instructgpt"].values["mini_batch_size"] == 64


def test_what_would_repeat_a_trial_is_left_out_and_a_note_says_so() -> None:
    study = spec(start=[{"learning_rate": 1.0}, {"learning_rate": 2e-4}, {"learning_rate": 0.5}], trials=2)
    assert [start.params for start in study.starts] == [{"learning_rate": 1e-3}]
    moved_one, reference, again = study.notes
    assert moved_one == "the start learning_rate = 0.001: learning_rate 1 moved to 0.001"
    assert reference.endswith("is left out: in this study it is the same as trial 0, the reference")
    assert again.endswith("is left out: in this study it is the same as the start learning_rate = 0.001")
    assert spec(start=[FAST], trials=1).notes == ("trials = 1 leaves room for 0 of 1 start",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 3}, "start = 3 is not allowed; expected [[start]] tables, one per start"),
        ({"start": [3]}, "start 0 = 3 is not allowed; expected a table of key = value lines"),
        ({"start": [{}, {"gamma": 0.8}]}, "start 1.gamma: it is also in [fixed]; remove it from one of them"),
        ({"start": [{"kl_coeff": 1}]}, 'start 0: unknown hyperparameter "kl_coeff"; did you mean "kl_coef"?'),
        ({"warm_start": "trl"}, "warm_start = 'trl' is not allowed; expected a list of names such as [\"trl\"]"),
        ({"warm_start": ["study:a b"]}, "warm_start: study:NAME with NAME = 'a b' is not allowed; expected letters, digits"),
        ({"warm_start": ["study:mine"]}, 'warm_start: "study:mine" is this study; name an earlier one'),
        ({"search": None, "trial": [{}], "start": [{}]}, "start has no effect beside [[trial]] tables"),
        ({"search": None, "trial": [{}], "warm_start": ["trl"]}, "warm_start has no effect beside [[trial]] tables"),
    ],
)  # fmt: skip
def test_a_mistake_gives_one_line_that_names_it(changes: dict[str, Any], message: str) -> None:
    base = {"name": "mine", "task": "reviews", "trials": 9, "fixed": {"gamma": 0.9}, "search": SEARCH, **changes}
    table = {
        key: value for key, value in base.items() if value is not None and not ("trial" in base and key == "trials")
    }
    with pytest.raises(ConfigError) as raised:
        StudySpec.from_dict(table, "s.toml")
    assert str(raised.value).startswith(f"s.toml: {message}")
    assert "\n" not in str(raised.value)


def test_a_stored_study_is_read_back_equal() -> None:
    study = spec(start=[FAST], warm_start=["trl", "study:earlier"])
    assert study.warm_start == ("trl", "study:earlier")
    assert StudySpec.from_dict(json.loads(json.dumps(study.to_dict())), "stored") == study


# Where each trial keeps its own pace

PACED = {"search": {"kl_step": "advised", "cliprange": "advised"}}


def test_a_start_may_set_a_rate_and_beta_where_each_trial_keeps_its_pace() -> None:
    study = spec(**PACED, start=[{"learning_rate": 3e-3}, {"kl_coef": 0.2, "cliprange": 0.5}, {"cliprange": 0.1}])
    params = [study.params_with(start.params) for start in study.starts]
    assert params[0] == {"cliprange": 0.2, "learning_rate": 3e-3}
    assert params[1] == {"cliprange": 0.3, "kl_coef": 0.2, "kl_target": None}
    assert params[2] == {"cliprange": 0.1, "kl_step": pytest.approx(1 / 30)}
    assert study.notes == ("the start kl_coef = 0.2, cliprange = 0.3: cliprange 0.5 moved to 0.3",)
    configs = [study.config(one) for one in params]
    assert [config.keeps_kl_step for config in configs] == [False, False, True]
    assert [(config.learning_rate, config.kl_coef) for config in configs[:2]] == [
        (3e-3, pytest.approx(0.2 / 12**0.5)), (2e-4, 0.2)
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"start 0\.lam: it is not searched; a start may set: .*learning_rate, kl_coef"
    ):
        spec(**PACED, start=[{"lam": 0.9}])
    always = spec(**PACED, fixed={"lr_controller": "kl_step"}, start=[{"learning_rate": 3e-3}])
    assert always.params_with(always.starts[0].params).keys() == {"learning_rate", "kl_step", "cliprange"}


@pytest.mark.parametrize("where", ["search", "fixed", "neither"])
def test_a_start_that_states_beta_alone_has_it_fixed(where: str) -> None:
    target = {"search": {"low": 3, "high": 5}, "fixed": 4.5}
    paced = {"search": {"kl_step": "advised", "cliprange": "advised"}, "fixed": {"gamma": 0.9}}
    if where != "neither":
        paced[where] = {**paced[where], "kl_target": target[where]}
    starts = [{"kl_coef": 0.2}, {"kl_coef": 0.3, "learning_rate": 1e-4}, {"kl_coef": 0.2, "kl_controller": "adaptive"}]
    starts += [{"kl_coef": 0.1, "kl_horizon": 500}, {"learning_rate": 3e-4}]
    study = spec(**paced, start=starts)
    targets = [study.config(study.params_with(start.params)).kl_target for start in study.starts]
    moved = study.config(study.reference_params()).kl_target
    assert moved is not None and targets == [None, None, moved, moved, moved]
    queued = enqueued_params(study, [], {"kl_coef": 0.2})
    assert (study.config(queued).kl_target, study.config(queued).kl_coef) == (None, 0.2)
    own = [enqueued_params(study, [], {"kl_coef": 0.2, "kl_target": 3.5}), enqueued_params(study, [], {"gamma": 0.8})]
    assert [study.config(one).kl_target for one in own] == [3.5, moved]
    row = trial_row(1, origin=Origin.LISTED, config=study.config(queued).to_dict(), params=queued, value=2.0)
    assert as_read(study, [row])[0].state.name == "FAIL", "the sampler is not told of it"


def test_of_a_recipe_only_what_is_searched_is_taken() -> None:
    """Not its rate and β: the trial finds its own."""
    study = spec(**PACED, warm_start=["openrlhf", "instructgpt"])
    assert study.starts == () and study.notes[0].endswith("is the same as trial 0, the reference")
    study = spec(search={"kl_step": "advised", "lam": "advised"}, warm_start=["openrlhf", "instructgpt"])
    (start,) = study.starts
    assert study.config(study.params_with(start.params)).keeps_kl_step and start.params == {"lam": 0.9999}
    assert study.notes == (
        'start "openrlhf": lam 1 moved to 0.9999',
        'start "instructgpt" is left out: it states nothing that is searched',
    )


# What is run


def test_starts_are_run_after_the_reference_and_before_what_is_proposed(tmp_path: Path) -> None:
    told = notes(tmp_path, quick(start=[{"label": "low", "learning_rate": 1e-6}], warm_start=["stiennon"]))
    rows = quick_study.rows(tmp_path)
    assert [row.origin for row in rows] == [Origin.REFERENCE, Origin.LISTED, Origin.LISTED, Origin.SAMPLED]
    assert listed(rows) == [(1, "low: learning_rate 1e-06 moved to 1e-05", 1e-5), (2, "stiennon", 1.5e-5)]
    assert rows[1].params == {"learning_rate": 1e-5, "cliprange": 0.2}
    assert told == ('start "low": learning_rate 1e-06 moved to 1e-05',)
    assert notes(tmp_path, quick(start=[{"label": "low", "learning_rate": 1e-6}], warm_start=["stiennon"])) == told
    assert len(quick_study.rows(tmp_path)) == 4


# Earlier studies


def test_the_best_trial_of_an_earlier_study_is_a_start_for_good(tmp_path: Path) -> None:
    quick_study.run(tmp_path, quick(name="small", start=[{"learning_rate": 2.2e-4}], trials=2))
    high = {"search": {"learning_rate": {"low": 1e-5, "high": 2e-4}}, "warm_start": ["study:small", "stiennon"]}
    assert notes(tmp_path, quick(**high, trials=1)) == (
        'start "study:small trial 1": learning_rate 0.00022 moved to 0.0002',
        "trials = 1 leaves room for 0 of 2 starts",
    )
    better = [{"learning_rate": 2.2e-4}, {"learning_rate": 2.4e-4}]
    quick_study.run(tmp_path, quick(name="small", start=better, trials=3))
    assert [row.value for row in quick_study.rows(tmp_path, "small")[1:]] == [
        pytest.approx(1 + 8.8**0.5), pytest.approx(1 + 9.6**0.5)
    ]  # fmt: skip
    notes(tmp_path, quick(**high, trials=2))
    label = "study:small trial 1: learning_rate 0.00022 moved to 0.0002"
    assert listed(quick_study.rows(tmp_path)) == [(1, label, 2e-4)]
    wider = {"learning_rate": {"low": 1e-5, "high": 1e-3}}
    notes(tmp_path, quick(search=wider, warm_start=["study:small", "stiennon"], trials=4))
    assert listed(quick_study.rows(tmp_path)) == [(1, label, 2e-4), (2, "stiennon", 1.5e-5)]


def test_a_rate_that_only_began_a_search_of_the_rate_is_not_taken(tmp_path: Path) -> None:
    quick_study.run(tmp_path, quick(name="small", search={"kl_step": "advised"}, fixed={"cliprange": 0.1}, trials=1))
    notes(tmp_path, quick(warm_start=["study:small"], trials=2))
    (start,) = StudySpec.from_dict(quick_study.stored_spec(tmp_path), "stored").starts
    assert start.params == {"cliprange": 0.1}


@pytest.mark.parametrize(
    ("earlier", "message"),
    [
        ("smal", 'warm_start "study:smal": no study "smal" in .*; did you mean "small"'),
        ("small", 'warm_start "study:small": study "small" has no best trial: none is within its KL budget of 0.1 nats'),
    ],
)  # fmt: skip
def test_an_earlier_study_that_is_not_there_or_has_no_best_trial(tmp_path: Path, earlier: str, message: str) -> None:
    quick_study.run(tmp_path, quick(name="small", trials=1, kl={"budget": 0.1, "limit": 100}))
    with pytest.raises(StudyError, match=message) as raised:
        quick_study.run(tmp_path, quick(warm_start=[f"study:{earlier}"]))
    assert "\n" not in str(raised.value)
    with pytest.raises(StudyError, match='no study "quick"'):
        quick_study.rows(tmp_path)


# Changes between runs


def test_starts_that_have_not_run_may_change_with_a_note(tmp_path: Path) -> None:
    first = {"label": "first", "learning_rate": 2e-5}
    notes(tmp_path, quick(start=[first, {"label": "second", "learning_rate": 3e-5}], trials=2))
    told = notes(tmp_path, quick(start=[{"label": "third", "learning_rate": 4e-5}, first], warm_start=["stiennon"]))
    assert told == (
        "trials: 4, was 2",
        'start "second" will not run any more',
        'start "third" will run: learning_rate = 4e-05',
        'start "stiennon" will run: learning_rate = 1.5e-05, cliprange = 0.2',
    )
    assert [label for _, label, _ in listed(quick_study.rows(tmp_path))] == ["first", "third", "stiennon"]


@pytest.mark.parametrize("now", [[], [{"label": "first", "learning_rate": 3e-5}]])
def test_one_that_has_run_may_neither_change_nor_go(tmp_path: Path, now: list[dict[str, Any]]) -> None:
    notes(tmp_path, quick(start=[{"label": "first", "learning_rate": 2e-5}], trials=2))
    with pytest.raises(ConfigError) as raised:
        notes(tmp_path, quick(start=now))
    assert str(raised.value) == (
        'study "quick" has trials already: start "first" has run, and the file no longer has it unchanged; give '
        "the study another name"
    )


def test_the_rate_of_a_start_that_has_run_may_not_change(tmp_path: Path) -> None:
    paced = {"search": {"kl_step": "advised", "cliprange": "advised"}, "trials": 2}
    notes(tmp_path, quick(**paced, start=[{"label": "fast", "learning_rate": 1e-3}]))
    notes(tmp_path, quick(**paced, start=[{"label": "fast", "learning_rate": 1e-3}]))
    with pytest.raises(ConfigError, match='start "fast" has run, and the file no longer has it unchanged'):
        notes(tmp_path, quick(**paced, start=[{"label": "fast", "learning_rate": 2e-3}]))


def test_a_run_by_name_goes_on_with_the_stored_starts(tmp_path: Path) -> None:
    study = quick(start=[{"learning_rate": 2e-5}], warm_start=["stiennon"], trials=2)
    notes(tmp_path, study)
    stored = StudySpec.from_dict(quick_study.stored_spec(tmp_path), "stored")
    assert stored.warm_start == () and [start.source for start in stored.starts] == ["", "stiennon"]
    run_study(
        stored, storage=quick_study.storage(tmp_path), runs_folder=tmp_path / "runs", from_file=False, trials=3,
        on_event=lambda event: None,
    )  # fmt: skip
    assert [rate for _, _, rate in listed(quick_study.rows(tmp_path))] == [2e-5, 1.5e-5]
