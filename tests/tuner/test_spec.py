import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.config.declare import Choices, Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import ConfigError
from ppo_core.loading.task_file import get_task
from tuner.control.changes import continuing, spec_changes
from tuner.control.needs import extreme_configs
from tuner.judge.results import reference_sources
from tuner.study import study_file
from tuner.study.spec import KL_TARGET, StudySpec
from tuner.study.study_file import SamplerSpec
from tuner.study.worker_settings import WorkerSettings

SHIPPED = sorted((Path(__file__).parents[2] / "studies").glob("*.toml"))

OTHER_TASK = replace(
    get_task("reviews"), advised={}, reference={"kl_target": 6.0, "num_ppo_epochs": 2, "temperature": 0.9}
)
OTHER_TASK_PATH = "tests.tuner.test_spec:OTHER_TASK"

BETA_TASK = replace(get_task("reviews"), reference={"kl_coef": 0.3})
BETA_TASK_PATH = "tests.tuner.test_spec:BETA_TASK"

LONG_TASK = replace(get_task("reviews"), eval_response_length=1024, reference={"response_length": 512})
LONG_TASK_PATH = "tests.tuner.test_spec:LONG_TASK"


def content(**changes: Any) -> dict[str, Any]:
    base = {"name": "mine", "task": "reviews", "trials": 5, "search": {"learning_rate": {"low": 1e-5, "high": 1e-3}}}
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def spec(**changes: Any) -> StudySpec:
    return StudySpec.from_dict(content(**changes), "s.toml")


def search(**values: Any) -> dict[str, Any]:
    return {"search": values}


def error(**changes: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        spec(**changes)
    message = str(raised.value)
    assert message.startswith("s.toml: ")
    assert "\n" not in message
    return message.removeprefix("s.toml: ")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_studies_load_and_round_trip(path: Path) -> None:
    loaded = StudySpec.load(path)
    assert StudySpec.from_dict(json.loads(json.dumps(loaded.to_dict())), "stored") == loaded
    loaded.config(loaded.reference_params())


def test_settings_of_workers_are_read_over_the_defaults_and_may_change() -> None:
    study = spec(workers={"save_seconds": 5, "checkpoint_seconds": 0})
    assert study.workers == WorkerSettings(save_seconds=5.0, checkpoint_seconds=0.0)
    changes = spec_changes(
        spec(workers={"checkpoint_seconds": 0}), study.with_keys({"workers": {"checkpoint_seconds": 7}}, "run")
    )
    assert changes.refused == []
    assert changes.allowed == ["workers.checkpoint_seconds: 7, was 0", "workers.save_seconds: 5, was 1800"]


def test_a_sampler_of_ones_own_is_named_by_its_path() -> None:
    """It is imported only when it is to propose: a store is read without it."""
    mine = spec(sampler={"name": "my_samplers:cautious", "startup_trials": 2})
    assert mine.sampler == SamplerSpec("my_samplers:cautious", 2)
    assert mine.sampler.is_own and not spec(sampler={"name": "gp"}).sampler.is_own
    assert spec(sampler="gp") == spec(sampler={"name": "gp"})
    assert StudySpec.from_dict(mine.to_dict(), "stored") == mine


def test_a_pruner_is_a_name_and_stays_for_good() -> None:
    assert spec().pruner is None and "pruner" not in spec().to_dict()
    median = spec(pruner="median")
    assert median.pruner == "median"
    mine = spec(pruner="my_pruners:cautious")
    for study in (median, mine):
        assert StudySpec.from_dict(json.loads(json.dumps(study.to_dict())), "stored") == study
    refused = spec_changes(median, spec()).refused, spec_changes(median, mine).refused
    assert refused == (
        ["pruner: unset, was median; give the study another name"],
        ["pruner: my_pruners:cautious, was median; give the study another name"],
    )


def test_advised_is_the_tasks_range_else_the_declared_one() -> None:
    study = spec(search={"learning_rate": "advised", "lam": "advised"})
    assert study.search["learning_rate"].high > 5e-5  # the declared range, for 1B models, ends here
    assert study.search["lam"] == Range(0.9, 0.9999, "log_from_1")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (search(whiten_rewards="advised"), "search.whiten_rewards: has no range | not a number | list the values"),
        (search(gamma="advised"), "search.gamma: no range is advised"),
        (search(gamma="advise"), "search.gamma = 'advise' is not allowed | \"advised\", a range | a list"),
        (search(gamma={"low": 0.9, "high": 1.5}), "search.gamma.high = 1.5 is not allowed | in [0, 1]"),
        (
            search(gamma={"low": 0.9, "high": 1, "scale": "lg"}),
            "search.gamma.scale = 'lg' is not allowed | linear, log, log2, log_from_1 | \"log\"?",
        ),
        (search(lam={"low": 0.5, "high": 1}), "search.lam: a log_from_1 scale needs a high below 1, not 1"),
        (search(gamma={"low": 0.5, "high": 1, "scale": "log2"}), "search.gamma: the scale log2 is for whole numbers"),
        (
            search(critic_warmup={"low": 0, "high": 8, "scale": "log2"}),
            "search.critic_warmup: a log2 scale needs a low over 0",
        ),
        (search(num_ppo_epochs={"low": 1.5, "high": 3}), "search.num_ppo_epochs.low = 1.5 is not allowed | a whole"),
        (
            search(batch_size={"low": 32, "high": 64, "scale": "linear"}),
            'search.batch_size | divide one another | "log2", not "linear"',
        ),
        ({"kl": {"budget": 6, "budget_per_token": 0.1}}, "kl: budget and budget_per_token are both given"),
        ({"kl": {"limit_per_token": -1}}, "kl.limit_per_token = -1 is not allowed | a number over 0"),
        ({"kl": {"limit_per_tokens": 1}}, 'kl.limit_per_tokens: unknown key | "limit_per_token"?'),
        (
            search(response_length={"low": 10, "high": 30}) | {"kl": {"limit_per_token": 1.0}},
            "kl.limit_per_token is not allowed: trials differ in response_length; give limit, in nats per response",
        ),
        ({"workers": {"checkpoint_seconds": -1}}, "checkpoint_seconds = -1 is not allowed | at least 0"),
        ({"guard": {"kl_hard": 0.5}}, "guard.kl_hard = 0.5 is not allowed | at least 1, or false to switch"),
        ({"guard": {"kl_limit": 20}}, "guard.kl_limit = 20 is not allowed | true or false"),
        ({"pruner": 3}, "pruner = 3 is not allowed | median"),
        ({"pruner": "median", "trial": [{"lam": 0.9}], "search": None, "trials": None}, "pruner has no effect beside"),
        ({"sampler": {"name": ["tpe"]}}, "sampler.name = ['tpe'] is not allowed"),
        ({"sampler": {"strange": 1}}, "sampler.strange: unknown key"),
        ({"guard": {"strange": 1}}, "guard.strange: unknown"),
        ({"kl_bugdet": 6}, 'kl_bugdet: unknown key | "kl.budget"?'),
        ({"response_lenght": 6}, 'response_lenght: unknown key | "fixed.response_length"?'),
        ({"kl": {"kl_budget": 6}}, 'kl.kl_budget: unknown key | "budget"?'),
    ],
)
def test_a_mistake_gives_one_line_that_names_it(changes: dict[str, Any], named: str) -> None:
    """Those that test_bad_input.py has not: the key and the rule, what is allowed, and the hint."""
    message = error(**changes)
    assert all(text in message for text in named.split(" | ")), message


@pytest.mark.parametrize(
    ("kl", "fixed", "budget", "limit"),
    [
        ({}, {}, 6.0, 15.0),
        ({"budget": 0.5}, {}, 0.5, 1.25),
        ({"budget": 200}, {}, 200.0, 500.0),
        ({"budget_per_token": 0.0078125}, {}, 8.0, 20.0),
        ({"limit_per_token": 0.0625}, {}, 6.0, 32.0),
        ({"limit_per_token": 0.0625}, {"response_length": 2048}, 6.0, 128.0),
        ({"budget_per_token": 0.03125, "limit_per_token": 0.125}, {}, 32.0, 64.0),
        ({"budget": 9, "limit_per_token": 0.125}, {}, 9.0, 64.0),
    ],
)
def test_kl_per_token_is_that_of_the_longest_responses(
    kl: dict[str, float], fixed: dict[str, int], budget: float, limit: float
) -> None:
    """The budget is of evaluations, here of 1,024 tokens, the limit of training, of 512 unless a study fixes others."""
    study = spec(task=LONG_TASK_PATH, kl=kl, fixed=fixed)
    assert (study.kl_budget, study.kl_limit) == (budget, limit)
    assert study.to_dict()["kl"] == {"budget": budget, "first_budget": budget, "limit": limit}
    assert StudySpec.from_dict(study.to_dict(), "stored") == study


def test_listed_trials_of_one_length_may_have_a_limit_per_token() -> None:
    listed: dict[str, Any] = {"search": None, "trials": None, "kl": {"limit_per_token": 0.25}}
    same = [{"response_length": 128, "gamma": gamma} for gamma in (0.9, 1.0)]
    assert spec(**listed, trial=same).kl_limit == 32.0
    message = error(**listed, trial=[*same, {"gamma": 0.8}])
    assert message.startswith("kl.limit_per_token is not allowed: trials differ in response_length")


@pytest.mark.parametrize(
    ("searched", "fixed", "params", "sizes"),
    [
        (("batch_size", "mini_batch_size"), {}, {"batch_size": 32, "mini_batch_size": 64}, (32, 32)),
        (("batch_size", "mini_batch_size"), {}, {"batch_size": 64, "mini_batch_size": 16}, (64, 16)),
        (("mini_batch_size",), {"batch_size": 16}, {"mini_batch_size": 64}, (16, 16)),
        (("mini_batch_size",), {}, {"mini_batch_size": 128}, (64, 64)),  # the task's own batch
        (("batch_size",), {"mini_batch_size": 64}, {"batch_size": 32}, (32, 32)),
        (("batch_size",), {"mini_batch_size": 64}, {"batch_size": 128}, (128, 64)),
    ],
)
def test_a_searched_mini_batch_is_at_most_its_rollout_batch(
    searched: tuple[str, ...], fixed: dict[str, int], params: dict[str, int], sizes: tuple[int, int]
) -> None:
    ranges = {"batch_size": {"low": 32, "high": 128}, "mini_batch_size": {"low": 8, "high": 128}}
    study = spec(search={name: ranges[name] for name in searched}, fixed=fixed)
    config = study.config(params)
    assert (config.batch_size, config.mini_batch_size) == sizes
    assert StudySpec.from_dict(study.to_dict(), "stored") == study


def test_configurations_that_cannot_be_are_found_when_the_file_is_read() -> None:
    message = error(search={"num_generations": {"low": 1, "high": 7}})
    assert message.startswith("all searched values at their high end: num_generations = 7 does not divide batch_size")
    assert error(fixed={"batch_size": 40}).startswith("trial 0 (the reference): mini_batch_size = 16 does not divide")


def test_what_does_nothing_is_not_searched_and_said() -> None:
    study = spec(
        search={"learning_rate": "advised", "vf_coef": "advised", "kl_horizon": {"low": 100, "high": 1000}},
        fixed={"value_model": "separate", "kl_coef": 0.1},
    )
    assert list(study.search) == ["learning_rate"]
    assert [note.split(":")[0] for note in study.notes] == ["vf_coef is not searched", "kl_horizon is not searched"]
    assert StudySpec.from_dict(study.to_dict(), "stored").notes == study.notes
    assert "vf_coef is not searched" in error(search={"vf_coef": "advised"}, fixed={"value_model": "separate"})


def test_what_is_searched_may_be_a_list_of_choices_in_the_fields_types() -> None:
    study = spec(
        search={
            "lr_scheduler_type": ["linear", "cosine"],
            "whiten_rewards": [True, False],
            "lam": [1, 0.9, "0.95"],
            "learning_rate": "advised",
        }
    )
    assert study.search == {
        "learning_rate": Range(1e-5, 3e-3, "log"),
        "lr_scheduler_type": Choices(("linear", "cosine")),
        "lam": Choices((1.0, 0.9, 0.95)),
        "whiten_rewards": Choices((True, False)),
    }
    assert list(study.search) == [name for name in HYPERPARAMETERS if name in study.search]
    assert study.to_dict()["search"]["lam"] == [1.0, 0.9, 0.95]
    assert StudySpec.from_dict(json.loads(json.dumps(study.to_dict())), "stored") == study
    reference = study.reference_params()
    assert (reference["lr_scheduler_type"], reference["lam"]) == ("linear", 1 - 1 / 24)  # trial 0 stays the reference
    assert study.config({"lr_scheduler_type": "cosine"}).lr_scheduler_type == "cosine"


@pytest.mark.parametrize(
    ("searched", "named"),
    [
        ({"lam": [1, 0.9, 1.0]}, "search.lam = [1, 0.9, 1.0] is not allowed; expected at least two values, each once"),
        ({"num_ppo_epochs": [1, 1.5]}, "search.num_ppo_epochs = 1.5 is not allowed; expected a whole number"),
        ({"whiten_rewards": [True, "maybe"]}, "search.whiten_rewards = 'maybe' is not allowed; expected true or false"),
        ({"lr_scheduler_type": ["linear", "cosin"]}, "search.lr_scheduler_type = 'cosin' is not allowed; expected one"),
        # Each value is checked, and beside those of other lists
        ({"batch_size": [32, 40, 64]}, "batch_size = 40: mini_batch_size = 16 does not divide batch_size = 40"),
        (
            {"lr_scheduler_type": ["linear", "constant"], "warmup_ratio": [0.0, 0.1]},
            'lr_scheduler_type = "constant", all others at their high end: lr_scheduler_type = "constant" has no warm-up',
        ),
        (
            {"batch_size": [48, 64], "mini_batch_size": {"low": 16, "high": 64}},
            "batch_size = 48, mini_batch_size = 32: mini_batch_size = 32 does not divide batch_size = 48",
        ),
        (
            {"advantage_estimator": ["gae", "rloo"]},
            'advantage_estimator = "rloo": num_generations = 1 is not allowed with advantage_estimator = "rloo"',
        ),
    ],
)
def test_a_mistake_in_a_list_of_choices_names_the_value(searched: dict[str, Any], named: str) -> None:
    assert error(search=searched).startswith(named)


def test_what_one_choice_needs_does_something_beside_it() -> None:
    """A hyperparameter is searched where some trial uses it, and not where none does."""
    adapters: dict[str, Any] = {"lora_r": {"low": 4, "high": 64, "scale": "log2"}}
    assert list(spec(search={**adapters, "use_peft": [True, False]}).search) == ["use_peft", "lora_r"]
    assert list(spec(search={**adapters, "learning_rate": "advised"}).search) == ["learning_rate"]
    groups: dict[str, Any] = {"lam": "advised", "advantage_estimator": ["rloo", "grpo"]}
    assert list(spec(search=groups, fixed={"num_generations": 2}).search) == ["advantage_estimator"]


def test_what_a_study_takes_at_most_follows_from_each_choice() -> None:
    study = spec(search={"value_model": ["shared", "separate"], "batch_size": [64, 32], "learning_rate": "advised"})
    largest = {name: config for name, config in extreme_configs(study).items() if name.startswith("largest")}
    assert [config.value_model for config in largest.values()] == ["shared", "separate"]
    assert {config.batch_size for config in largest.values()} == {64}
    assert 'largest values, value_model = "separate"' in largest


def test_the_value_rate_reaches_the_head_alone_with_a_shared_trunk() -> None:
    shared = spec(**search(value_learning_rate="advised"))
    assert shared.notes == ('value_learning_rate trains only the value head, because value_model = "shared"',)
    assert spec(**search(value_learning_rate="advised"), fixed={"value_model": "separate"}).notes == ()
    assert spec(**search(value_learning_rate="advised", value_model=["shared", "separate"])).notes == ()


def test_config_layers_defaults_task_fixed_and_params() -> None:
    study = spec(fixed={"gamma": 0.99, "batch_size": 32}, seed=7)
    config = study.config({"learning_rate": 5e-4})
    assert (config.learning_rate, config.gamma, config.batch_size, config.seed) == (5e-4, 0.99, 32, 7)
    assert (config.mini_batch_size, config.response_length) == (16, 24)  # the task's reference
    assert config.cliprange == 0.2  # declared
    with pytest.raises(ConfigError, match='unknown hyperparameter "learning_rat"'):
        study.config({"learning_rat": 1.0})


def test_trial_0_is_trls_values_at_the_tasks_rates() -> None:
    names = ("learning_rate", "value_learning_rate", "batch_size", "mini_batch_size", "num_ppo_epochs", "cliprange",
             "lam", "vf_coef", "kl_coef")  # fmt: skip
    study = spec(search=dict.fromkeys(names, "advised"), fixed={"gamma": 0.5})
    assert study.reference_params() == {
        "learning_rate": 2e-4, "value_learning_rate": 1e-3, "batch_size": 64, "mini_batch_size": 16,
        "num_ppo_epochs": 4, "cliprange": 0.2, "lam": 1 - 1 / 24, "vf_coef": 0.1, "kl_coef": 0.05,
    }  # fmt: skip
    origins = reference_sources(study)
    assert set(origins) == {*names, "gamma"}
    assert {name for name, origin in origins.items() if origin == "study"} == {"gamma", "lam"}
    assert {name for name, origin in origins.items() if origin == "task"} == set(names[:4])


def beta(study: StudySpec, **params: Any) -> tuple[float, float | None, str]:
    """What a trial's β begins at, where it brings the KL, and what sets its learning rate."""
    config = study.config({**study.reference_params(), **params})
    return config.kl_coef, config.kl_target, config.lr_controller


def test_trials_keep_their_pace_where_the_study_sets_no_rate_nor_beta() -> None:
    study = spec(search={"lam": "advised"}, kl={"budget": 6.0, "limit": 15.0})
    assert study.keeps_kl_step
    assert beta(study) == (0.05, pytest.approx(6.0 * KL_TARGET), "kl_step")
    assert study.config({}).learning_rate == 2e-4, "the task's, where the search of the rate begins"


def test_a_trial_that_sets_beta_or_rate_keeps_no_pace() -> None:
    study = spec(task=BETA_TASK_PATH, search={"lam": "advised"}, kl={"budget": 6.0, "limit": 15.0})
    assert get_task(study.task).reference["kl_coef"] == 0.3
    assert beta(study) == (0.05, pytest.approx(6.0 * KL_TARGET), "kl_step")
    assert beta(study, kl_target=4.0) == (0.05, 4.0, "kl_step")
    assert beta(study, kl_coef=0.1) == (0.1, None, "schedule")
    assert beta(study, kl_coef=0.1, kl_target=4.0) == (0.1, 4.0, "schedule")
    assert beta(study, learning_rate=1e-3) == (0.3, pytest.approx(6.0 * KL_TARGET), "schedule")


def test_a_study_says_how_rate_and_beta_move_by_search_or_fixed_values() -> None:
    kl = {"budget": 6.0, "limit": 15.0}
    fixed_by_search = spec(search={"kl_coef": "advised"}, kl=kl)
    assert beta(fixed_by_search, kl_coef=0.1) == (0.1, None, "schedule")
    assert beta(spec(search={"lam": "advised"}, fixed={"kl_coef": 0.2}, kl=kl)) == (0.2, None, "schedule")
    rate = spec(search={"learning_rate": "advised"}, kl=kl)
    assert beta(rate, learning_rate=1e-3) == (
        pytest.approx(0.2 / 12**0.5),
        pytest.approx(6.0 * KL_TARGET),
        "schedule",
    ), "β adapts to the budget's share"
    both = spec(search={"kl_coef": "advised", "kl_target": "advised"}, kl=kl)
    assert both.reference_params() == {"kl_coef": 0.05, "kl_target": pytest.approx(6.0 * KL_TARGET)}
    assert beta(both, kl_coef=0.1, kl_target=8.0) == (0.1, 8.0, "schedule")
    assert not any(one.keeps_kl_step for one in (fixed_by_search, rate, both))
    target = spec(search={"kl_target": "advised"}, fixed={"kl_controller": "hold"}, kl=kl)
    assert beta(target, kl_target=8.0) == (0.05, 8.0, "kl_step")
    begins = spec(search={"lam": "advised"}, fixed={"lr_controller": "kl_step", "learning_rate": 1e-5}, kl=kl)
    assert begins.config({}).learning_rate == 1e-5 and beta(begins)[1:] == (pytest.approx(6.0 * KL_TARGET), "kl_step")


def test_beta_is_in_spreads_of_the_scores_where_nobody_states_it() -> None:
    """At a budget of 8 nats the best policy has σ / 4."""
    kl = {"budget": 8.0}
    searched = spec(task=OTHER_TASK_PATH, search={"kl_coef": "advised"}, kl=kl)
    assert searched.search["kl_coef"] == Range(0.01, pytest.approx(0.2), "log")
    assert searched.config(searched.reference_params()).normalize_kl_coef
    assert searched.reference_params() == {"kl_coef": 0.05}
    assert StudySpec.from_dict(json.loads(json.dumps(searched.to_dict())), "stored") == searched
    budget = spec(task=OTHER_TASK_PATH, search={"kl_coef": "advised"}, kl={"budget": 2.0})
    assert budget.search["kl_coef"] == Range(0.02, pytest.approx(0.4), "log")
    adapts = spec(search={"learning_rate": "advised"}, kl=kl)
    assert (adapts.config({}).kl_coef, adapts.config({}).normalize_kl_coef) == (0.05, True)
    assert not adapts.config({"kl_coef": 0.3}).normalize_kl_coef, "stated in reward"
    for stated in (
        spec(search={"kl_coef": "advised"}, kl=kl),
        spec(task=BETA_TASK_PATH, search={"learning_rate": "advised"}, kl=kl),
        spec(search={"kl_coef": {"low": 0.01, "high": 1.0}}, kl=kl),
        spec(search={"lam": "advised"}, fixed={"kl_coef": 0.2}, kl=kl),
    ):
        assert not stated.config(stated.reference_params()).normalize_kl_coef
    around = replace(get_task("reviews"), reference={"kl_coef": 0.3}, advised={})
    assert study_file.advised_ranges(around, {}, 8.0)["kl_coef"] == Range(
        pytest.approx(0.06), pytest.approx(1.2), "log"
    )


def test_ranges_of_kl_are_shares_of_the_budget_and_of_the_run() -> None:
    study = spec(
        search={"kl_target": "advised", "kl_step": "advised"},
        fixed={"batch_size": 32},
        kl={"budget": 5.0, "limit": 9.0},
    )
    assert study.search == {"kl_target": Range(3.0, 5.0), "kl_step": Range(1 / 180, 3 / 60, "log")}  # 1,920 / 32
    assert study.reference_params() == {"kl_target": pytest.approx(5.0 * KL_TARGET), "kl_step": pytest.approx(1 / 60)}
    assert reference_sources(study) == {"batch_size": "study", "kl_target": "study", "kl_step": "study"}
    short = spec(search={"kl_step": "advised"}, fixed={"batch_size": 640})
    assert short.reference_params() == {"kl_step": 0.1}, "at most a tenth by default"


def test_what_a_task_says_of_beta_holds_and_listed_trials_stay() -> None:
    assert beta(spec(task=OTHER_TASK_PATH, search={"lam": "advised"})) == (0.05, 6.0, "kl_step")
    trials = [{"learning_rate": 1e-4}, {"kl_coef": 0.1, "kl_target": 4}]
    listed = StudySpec.from_dict({"name": "s", "task": "reviews", "trial": trials}, "s.toml")
    assert [beta(listed, **trial.params)[1] for trial in listed.listed] == [None, 4.0]


def test_changes_that_take_effect_are_listed() -> None:
    old = spec(search={"learning_rate": "advised", "lam": "advised"})
    new = spec(
        trials=9,
        device="cpu",
        sampler={"name": "random"},
        search={"learning_rate": {"low": 1e-4, "high": 1e-3}, "gamma": {"low": 0.9, "high": 1}},
    )
    changes = spec_changes(old, new)
    assert changes.refused == []
    assert "search.learning_rate: 0.0001 to 0.001 (log), was 1e-05 to 0.003 (log)" in changes.allowed
    assert "search.gamma: 0.9 to 1 (linear), was not searched" in changes.allowed
    assert "search.lam: not searched, was 0.9 to 0.9999 (log_from_1)" in changes.allowed
    assert "trials: 9, was 5" in changes.allowed
    assert "device: cpu, was auto" in changes.allowed
    assert "sampler: random after 4 trials, was tpe after 4 trials" in changes.allowed
    assert len(changes.allowed) == 6


def test_changes_that_would_mix_experiments_are_refused() -> None:
    new = spec(
        trainer="mine:trainer", seed=1, fixed={"gamma": 0.9}, kl={"budget": 5, "limit": 6}, guard={"kl_hard": False}
    )
    changes = spec_changes(spec(), new)
    assert changes.allowed == ["kl.budget: 5.0, was 6.0"]
    assert [line.split(":")[0] for line in changes.refused] == [
        "trainer", "seed", "fixed.gamma", "kl.limit", "guard.kl_hard",
    ]  # fmt: skip
    assert changes.refused[2] == "fixed.gamma: 0.9, was unset; give the study another name"
    assert spec_changes(new, new).refused == []


def test_a_limit_that_nobody_states_follows_a_budget_that_may_change() -> None:
    old = spec(kl={"budget": 6})
    changes = spec_changes(old, continuing(spec(kl={"budget": 8}), old))
    assert (changes.allowed, changes.refused) == (["kl.budget: 8.0, was 6.0"], [])
    stated = spec_changes(spec(kl={"budget": 6, "limit": 16}), spec(kl={"budget": 8, "limit": 15}))
    assert [line.partition(":")[0] for line in stated.refused] == ["kl.limit"]


def test_trials_are_made_for_the_studys_first_budget_whatever_it_is_now() -> None:
    def now(budget: float) -> StudySpec:
        return spec(search={"learning_rate": "advised"}, kl={"budget": budget})

    old = now(6.0)
    by_file, by_order = continuing(now(9.0), old), old.with_keys({"kl": {"budget": 9.0}}, "set")
    for study in (by_file, by_order, StudySpec.from_dict(json.loads(json.dumps(by_file.to_dict())), "stored")):
        assert (study.kl_budget, study.first_budget, study.kl_limit) == (9.0, 6.0, 15.0)
        assert beta(study) == beta(old) and beta(old)[1] == pytest.approx(6.0 * KL_TARGET)
        assert study.budget_changed in study.notes and "first KL budget, 6" in study.budget_changed
        assert spec_changes(old, study).refused == []
    back = continuing(now(6.0), by_file)
    assert (back, back.budget_changed, old.budget_changed) == (old, "", "")
    with pytest.raises(ConfigError, match="limit = 15 is below budget = 16"):
        continuing(now(16.0), old)


def test_the_default_budget_is_noted_per_token_where_responses_are_long() -> None:
    def is_noted(task: str, **kl: float) -> bool:
        return any("per token" in note for note in spec(task=task, kl=kl).notes)

    assert is_noted(LONG_TASK_PATH, budget=10)
    assert not is_noted(LONG_TASK_PATH, budget=11) and not is_noted("reviews", budget=10)


def test_a_change_of_who_keeps_the_pace_is_refused() -> None:
    paced, searched = spec(search={"lam": "advised"}), spec(search={"lam": "advised", "kl_coef": "advised"})
    for new, old in ((searched, paced), (paced, searched)):
        refused = spec_changes(old, new).refused
        assert [line.partition(":")[0] for line in refused] == ["pace"]
