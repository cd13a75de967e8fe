"""The baseline of a study: the user's present configuration, run beside the search and never told to the sampler."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from ppo_core.errors import ConfigError
from tests.tuner import quick_study
from tests.tuner.quick_study import opened, quick_spec
from tests.tuner.trial_rows import make_spec, trial_row
from tuner.cli.run import _confirmed_by_rest
from tuner.confirm.answer import Gain, study_answer
from tuner.confirm.plan import Plan, always_confirmed, cost_line, missing
from tuner.control.needs import extreme_configs
from tuner.judge.results import StudyView, read_study, value_sources
from tuner.search.choose import choose, is_exhausted, tried
from tuner.search.propose import as_read, new_trial, propose
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Role, Status

PACED = {
    "name": "mine", "task": "reviews", "budget": 9, "kl": {"budget": 6.0}, "fixed": {"value_model": "shared"},
    "search": dict.fromkeys(("kl_step", "kl_target", "batch_size", "mini_batch_size"), "advised"),
}  # fmt: skip
TRL = {"learning_rate": 3e-6, "kl_coef": 0.05}
MOVES = ("lr_controller", "learning_rate", "kl_coef", "kl_target", "normalize_kl_coef")


def spec(baseline: Any = TRL, **changes: Any) -> StudySpec:
    return StudySpec.from_dict({**PACED, "baseline": baseline, **changes}, "s.toml")


def moves(study: StudySpec) -> tuple[Any, ...]:
    config = study.config(study.baseline_params()).to_dict()
    return tuple(config[name] for name in MOVES)


# What a file says


def test_it_has_its_own_rate_and_beta_and_what_it_leaves_out_is_trial_0s() -> None:
    study = spec()
    assert study.baseline_params() == {
        "learning_rate": 3e-6, "kl_coef": 0.05, "lr_controller": "schedule", "kl_target": None,
        "batch_size": 64, "mini_batch_size": 16,
    }  # fmt: skip
    assert moves(study) == ("schedule", 3e-6, 0.05, None, False)
    assert study.config(study.reference_params()).lr_controller == "kl_step"
    assert moves(spec({"learning_rate": 3e-6})) == (
        "schedule", 3e-6, pytest.approx(0.2 / 12**0.5), pytest.approx(4.8), True
    )  # fmt: skip
    assert moves(spec({"kl_coef": 0.1, "kl_target": 5.0})) == ("schedule", 2e-4, 0.1, 5.0, False)
    assert moves(spec({"num_ppo_epochs": 1}))[0] == "kl_step", "without a rate or β it keeps its pace"
    always = spec({**TRL, "value_model": "separate"}, fixed={"lr_controller": "kl_step", "value_model": "shared"})
    assert moves(always) == ("schedule", 3e-6, 0.05, None, False)
    assert always.config(always.baseline_params()).value_model == "separate", "its own, whatever is fixed"
    spreads = spec(fixed={"normalize_kl_coef": True}, search={"learning_rate": "advised", "kl_coef": "advised"})
    assert moves(spreads) == ("schedule", 3e-6, 0.05, None, False), "in reward"
    assert spreads.baseline_params().keys() == {"learning_rate", "kl_coef", "kl_target", "normalize_kl_coef"}


def test_a_stored_study_is_read_back_equal_and_counts_it_among_the_largest() -> None:
    study = spec({**TRL, "batch_size": 512})
    assert StudySpec.from_stored(
        json.loads(json.dumps(study.to_dict())), "stored"
    ) == study and study.baseline == {**TRL, "batch_size": 512}  # fmt: skip
    assert extreme_configs(study)["the baseline"].batch_size == 512
    assert "baseline" not in StudySpec.from_dict(PACED, "s.toml").to_dict()
    same = spec(start=[{"batch_size": 32}, {"learning_rate": 1e-5}], baseline={"batch_size": 32}, trials=2)
    assert [(start.params, other) for start, other in same.dropped] == [({"batch_size": 32}, "trial 1, the baseline")]
    assert same.notes[-1] == "trials = 2 leaves room for 0 of 1 start"


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ({}, "baseline: it states nothing, so it is the same as trial 0, the reference"),
        ({"batch_size": 64}, "baseline: it is the same as trial 0, the reference"),
        ({"learning_rat": 1}, 'baseline: unknown hyperparameter "learning_rat"; did you mean "learning_rate"?'),
        ({"learning_rate": -1}, "baseline.learning_rate = -1 is not allowed"),
        ({"batch_size": 48, "mini_batch_size": 32}, "baseline: mini_batch_size = 32 does not divide batch_size = 48"),
        ({"batch_size": 32, "mini_batch_size": 64}, "baseline.mini_batch_size = 64 is not allowed; expected at most"),
        ({"total_episodes": 640}, "baseline.total_episodes: it is the same in all trials of a study"),
        (3, "baseline = 3 is not allowed; expected a table"),
    ],
)
def test_a_mistake_gives_one_line_that_names_it(baseline: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec(baseline)
    assert str(raised.value).startswith(f"s.toml: {message}") and "\n" not in str(raised.value)


def test_a_study_that_lists_its_trials_has_none() -> None:
    listed = {"name": "mine", "task": "reviews", "trial": [{"lam": 0.9}], "baseline": TRL}
    with pytest.raises(ConfigError, match=r"baseline has no effect beside \[\[trial\]\] tables"):
        StudySpec.from_dict(listed, "s.toml")


# What is run: KL ends at 4e4 times the rate, and the reward is 1 + sqrt(KL)

QUICK: dict[str, Any] = {"trials": 5, "baseline": {"learning_rate": 2e-4, "num_ppo_epochs": 2}}


def test_it_runs_whole_as_trial_1_and_the_sampler_is_not_told_it(tmp_path: Path) -> None:
    study = quick_spec(**QUICK, start=[{"learning_rate": 1.5e-4}], sampler={"name": "tpe", "startup_trials": 2})
    assert quick_study.run(tmp_path, study, workers=1)[0]
    rows = quick_study.rows(tmp_path)
    assert [row.origin for row in rows] == [
        Origin.REFERENCE, Origin.BASELINE, Origin.LISTED, Origin.SAMPLED, Origin.SAMPLED
    ]  # fmt: skip
    assert [(row.status, row.episodes) for row in rows[:3]] == [(Status.COMPLETED, 160)] * 3
    assert [row.value for row in rows[:3]] == pytest.approx([3.0, 1 + 8**0.5, 1 + 6**0.5])
    assert rows[1].params == {"learning_rate": 2e-4, "num_ppo_epochs": 2, "cliprange": 0.2}
    assert rows[1].config == {**rows[0].config, "learning_rate": 2e-4, "num_ppo_epochs": 2}
    assert value_sources(rows[1], study)["num_ppo_epochs"] == "listed"
    told = as_read(study, rows[:3])
    assert [trial.state for trial in told] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert [trial.value for trial in told] == [pytest.approx(3.0), None, pytest.approx(1 + 6**0.5)]
    others = [rows[0], replace(rows[1], value=100.0, config=rows[0].config, params=rows[0].params), *rows[2:]]
    assert [propose(study, rows[:n], n) for n in (3, 4)] == [rows[n].params for n in (3, 4)]
    assert [propose(study, others[:n], n) for n in (3, 4)] == [rows[n].params for n in (3, 4)]
    with opened(tmp_path) as store:
        assert read_study(store, quick_study.NAME).best() == rows[1], "it may be the best"


def test_the_guard_applies_to_it(tmp_path: Path) -> None:
    quick_study.run(tmp_path, quick_spec(**{**QUICK, "trials": 2, "baseline": {"learning_rate": 9e-4}}))
    _, row = quick_study.rows(tmp_path)
    assert (row.origin, row.status) == (Origin.BASELINE, Status.PRUNED)
    assert row.reason is not None and row.reason.rule == "kl_limit"


def test_it_stays_once_trials_have_run_and_a_resumed_study_runs_it_once(tmp_path: Path) -> None:
    quick_study.run(tmp_path, quick_spec(**{**QUICK, "trials": 1}))
    for other in ({"baseline": {"learning_rate": 2e-4}}, {"baseline": {"learning_rate": 3e-4, "num_ppo_epochs": 2}}):
        with pytest.raises(ConfigError, match=r"baseline\.(num_ppo_epochs|learning_rate): .*another name"):
            quick_study.run(tmp_path, quick_spec(**{**QUICK, **other}))
    quick_study.run(tmp_path, quick_spec(**{**QUICK, "trials": 2}))
    stored = StudySpec.from_stored(quick_study.stored_spec(tmp_path), "stored")
    quick_study.run(tmp_path, stored, from_file=False, trials=3)
    assert [row.origin for row in quick_study.rows(tmp_path)] == [Origin.REFERENCE, Origin.BASELINE, Origin.SAMPLED]


def test_a_search_of_few_points_tries_those_that_only_the_baseline_shares() -> None:
    """A baseline that states more than the search is none of its points; one that does not is."""
    few = {"search": {"batch_size": [32, 64]}}
    for baseline, points in ((TRL, 1), ({"batch_size": 32}, 2)):
        study = spec(baseline, **few)
        rows = []
        for number, origin in enumerate((Origin.REFERENCE, Origin.BASELINE)):
            chosen = choose(study, rows, ())
            assert chosen is not None and getattr(chosen, "origin", None) is origin
            new = new_trial(study, rows, chosen, 1)  # type: ignore[arg-type]
            rows.append(trial_row(number, origin=origin, config=new.config, params=new.params))
        if points == 1:
            rows[1] = replace(rows[1], config={**rows[1].config, "batch_size": 32})
        assert len(tried(study, rows)) == points and is_exhausted(study, rows) is (points == 2)


# Confirming


def test_the_rest_of_a_budget_pays_for_the_seeds_of_all_that_are_confirmed() -> None:
    study = make_spec(budget=16.0, baseline={"learning_rate": 3e-6})
    whole = {"sft_reward": 0.0, "value_step": 3, "value_se": 0.0, "episodes": study.total_episodes}
    origins = [Origin.REFERENCE, Origin.BASELINE, *[Origin.SAMPLED] * 5]
    values = [1.0, 5.0, 1.01, 0.99, 1.0, 1.02, 1.0]
    rows = [trial_row(n, origin=origins[n], value=value, **whole) for n, value in enumerate(values)]
    view = StudyView(None, study, tuple(rows))  # type: ignore[arg-type]
    assert _confirmed_by_rest(view) == Plan(top=1, seeds=3), "of three configurations 9 trials pay for three each"
    without = replace(view, trials=(rows[0], *(replace(row, number=row.number - 1) for row in rows[2:])))
    assert _confirmed_by_rest(without) == Plan(top=1, seeds=5), "of two configurations 10 trials"
    timed = replace(view, spec=make_spec(budget="3m", baseline={"learning_rate": 3e-6}))
    assert _confirmed_by_rest(timed) == Plan(top=1, seeds=3), "of 180 seconds 70 are spent, and 11 trials take 110"
    assert _confirmed_by_rest(replace(view, spec=make_spec(budget="159s", baseline=study.baseline))) is None


def test_it_is_confirmed_with_the_others_and_gains_are_over_both(tmp_path: Path) -> None:
    study = quick_spec("tested", **{**QUICK, "trials": 3}, start=[{"learning_rate": 2.4e-4}])
    quick_study.run(tmp_path, study, workers=1)
    rows = quick_study.rows(tmp_path)
    assert [row.number for row in always_confirmed(rows)] == [0, 1]
    wanted = missing(rows, study, Plan(top=1, seeds=3))
    assert [(run.parent, run.config["seed"]) for run in wanted] == [
        (2, 6), (0, 6), (1, 6), (2, 7), (0, 7), (1, 7), (2, 8), (0, 8), (1, 8)
    ]  # fmt: skip
    assert {run.role for run in wanted} == {Role.CONFIRM} and wanted[2].config["learning_rate"] == 2e-4
    assert cost_line(wanted, rows, 1).startswith(
        "9 runs of 160 episodes will confirm trial 2, the reference and the baseline;"
    )
    with opened(tmp_path) as store:
        before = study_answer(store, read_study(store, quick_study.NAME))
    assert before is not None and before.gains == (
        Gain(Origin.REFERENCE, 0, pytest.approx(9.6**0.5 - 2), pytest.approx(0.5**0.5)),
        Gain(Origin.BASELINE, 1, pytest.approx(9.6**0.5 - 8**0.5), pytest.approx(0.5**0.5)),
    )
    assert before.gained == "Over the reference (trial 0): +1.10 ± 0.71; over the baseline (trial 1): +0.27 ± 0.71."
    quick_study.run(tmp_path, study, workers=1, plan=Plan(top=1, seeds=3), from_file=False)
    with opened(tmp_path) as store:
        view = read_study(store, quick_study.NAME)
        after = study_answer(store, view)
    assert [(run.parent, run.status) for run in view.confirming] == [(run.parent, Status.COMPLETED) for run in wanted]
    assert after is not None and after.trial.number == 0, "the test reward is the step, so all are equal"
    assert after.gains == (Gain(Origin.BASELINE, 1, 0.0, None, 0.0, 0.0),)
