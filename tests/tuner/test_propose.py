import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from optuna.samplers import BaseSampler, TPESampler
from optuna.search_space import intersection_search_space
from optuna.trial import TrialState

from ppo_core.config.declare import HyperValue
from ppo_core.errors import ConfigError
from tests.tuner.trial_rows import make_spec, pruned, running, trial_row
from tuner.search import propose as proposing
from tuner.search.choose import New
from tuner.search.prior import first_params, spread_params
from tuner.search.propose import as_read, new_trial, propose, require_usable
from tuner.store import TrialRow
from tuner.study.space import sampler_space
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Role, Status

Params = dict[str, HyperValue]


SPEC = make_spec()
SMALL = {"learning_rate": "advised", "batch_size": "advised", "vf_coef": {"low": 0.5, "high": 1.0}}
INSIDE: Params = {**SPEC.reference_params(), "vf_coef": 0.7}


def ended(row: TrialRow, how: str, value: float) -> TrialRow:
    """The row of a running trial after it ended."""
    made = {
        "completed": trial_row(row.number, value=value, kl=8.0 * value),
        "kl_limit": pruned(row.number, "kl_limit", 20.0, value=value),
        "nonfinite": pruned(row.number, "nonfinite", None, value=value),
        "nothing_learned": pruned(row.number, "nothing_learned", 0.0, value=0.0, kl=0.0),
        "failed": trial_row(row.number, status=Status.FAILED, value=None, kl=None),
        "stopped": trial_row(row.number, status=Status.STOPPED, value=value, episodes=10 * row.number),
        "paused": trial_row(row.number, status=Status.PAUSED, value=value, episodes=10),
        "waiting": trial_row(row.number, status=Status.WAITING, value=None, kl=None),
        "running": running(row.number, {}),
    }[how]
    return replace(made, params=row.params, origin=row.origin, role=row.role)


HOW = ("completed", "kl_limit", "nonfinite", "nothing_learned", "failed", "stopped")
SET_ASIDE = ("paused", "waiting", "running")


def ninth(spec: StudySpec, values: Mapping[int, float]) -> Params:
    """What is proposed after eight trials, of which those with a value have ended."""
    rows: list[TrialRow] = []
    for number in range(8):
        row = running(number, propose(spec, rows, number) if rows else spec.reference_params())
        rows.append(ended(row, "completed", values[number]) if number in values else row)
    return propose(spec, rows, 8)


def test_a_proposal_depends_on_the_seed_the_number_and_the_history_alone() -> None:
    history = dict.fromkeys(range(6), 0.5)
    first = ninth(SPEC, history)
    assert ninth(SPEC, history) == first
    assert ninth(make_spec(seed=1), history) != first
    assert ninth(SPEC, {**history, 5: 1.0}) != first  # the sampler has learned
    assert ninth(make_spec("random"), {**history, 5: 1.0}) == ninth(make_spec("random"), history)


def began(*hows: str) -> list[TrialRow]:
    """The trials of a study that ended in these ways."""
    params = [{**INSIDE, "learning_rate": 1e-4 * (number + 1)} for number in range(len(hows))]
    return [ended(running(number, params[number]), how, 1.0) for number, how in enumerate(hows)]


@pytest.mark.parametrize("sampler", ["tpe", "gp", "tests.tuner.test_propose:mine"])
def test_the_first_trials_are_drawn_and_not_proposed(sampler: str) -> None:
    """As long as fewer have a value than the sampler asks for."""
    spec = make_spec(sampler, startup_trials=2)

    def centre(*hows: str) -> int | None:
        """The trial around which the next one is drawn; -1: the reference; None: the sampler proposes it."""
        rows, number = began(*hows), 9  # not a point of the even sequence
        proposed = propose(spec, rows, number)
        for row in rows:
            if proposed == first_params(spec.search, {**row.config, **row.params}, spec.seed, number):
                return row.number
        return -1 if proposed == first_params(spec.search, spec.config({}).to_dict(), spec.seed, number) else None

    assert centre(*["running"] * 6) == -1
    assert centre("failed", "running", "waiting") == -1
    assert centre("running", "completed", "failed", "waiting") == 1
    assert centre("paused", "running", "waiting", "running") == -1, "one that has not ended"
    assert centre("stopped", "running", "waiting", "running") == 0
    assert centre("nonfinite", "running", "waiting", "running") == -1, "one that broke leads nowhere"
    assert centre("completed", "running", "completed", "running") is None
    assert centre("paused", "running", "stopped", "running") is None


def test_the_first_trials_are_drawn_around_the_best_that_has_ended() -> None:
    spec = make_spec(startup_trials=9)

    def centre(*values: float, hows: Sequence[str] = ("completed",) * 3) -> int:
        rows = [replace(row, value=value) for row, value in zip(began(*hows), values, strict=True)]
        drawn = [first_params(spec.search, {**row.config, **row.params}, spec.seed, 9) for row in rows]
        return drawn.index(propose(spec, rows, 9))

    assert centre(1.0, 1.2, 1.1) == 1
    assert centre(-3.0, -2.0, -1.0) == 2
    assert centre(1.0, 1.0, 0.5) == 0, "the earlier of equals"
    assert centre(1.0, 3.0, 2.0, hows=("completed", "paused", "kl_limit")) == 2, "however it ended, if it has"
    assert centre(1.0, 3.0, 2.0, hows=("completed", "nonfinite", "failed")) == 0, "and did not break"


def test_a_trial_is_read_as_its_value_and_nothing_is_added_to_it() -> None:
    spec = make_spec(search={"learning_rate": "advised"})
    hows = ("completed", "kl_limit", "stopped", "paused", "running", "completed")
    rows = [ended(running(n, {"learning_rate": 1e-4}), how, 1.0 + n) for n, how in enumerate(hows)]
    read = as_read(spec, rows)
    assert [trial.value for trial in read] == [1.0, 2.0, 3.0, 4.0, None, 6.0]
    complete = [TrialState.COMPLETE] * 4
    assert [trial.state for trial in read] == [*complete, TrialState.RUNNING, TrialState.COMPLETE]


def test_random_and_qmc_are_baselines_and_begin_as_they_go_on() -> None:
    spec = make_spec("random")
    uniform = [float(propose(make_spec("random", seed=seed), [], 0)["learning_rate"]) for seed in range(60)]  # type: ignore[arg-type]
    low, high = spec.search["learning_rate"].low, spec.search["learning_rate"].high
    assert statistics.median(uniform) == pytest.approx(math.sqrt(low * high), rel=0.7), "the middle, not the reference"
    for values in ({}, dict.fromkeys(range(8), 1.0)):
        spec = make_spec("qmc")
        assert ninth(spec, values) == spread_params(spec.search, spec.seed, 8)


def mine(seed: int) -> BaseSampler:
    """A sampler of one's own."""
    return TPESampler(seed=seed, n_startup_trials=1, multivariate=True)


def needs_more(seed: int, more: int) -> BaseSampler:
    return mine(seed + more)


def number(seed: int) -> int:
    return seed


not_callable = 3


class Failing(TPESampler):
    """Cannot propose."""

    def sample_relative(self, *_: object) -> dict[str, object]:
        raise RuntimeError("no idea")


def test_a_sampler_of_ones_own_proposes_from_the_same_trials() -> None:
    """Here one that is Optuna's TPE without the constant liar, which proposes the same where nothing runs."""
    history = dict.fromkeys(range(8), 0.5) | {3: 1.0}
    proposals = [ninth(make_spec(name), history) for name in ("tests.tuner.test_propose:mine", "tpe")]
    assert proposals[0] == proposals[1] != ninth(make_spec("optuna.samplers:RandomSampler"), history)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.tuner.nowhere:mine", 'sampler "tests.tuner.nowhere:mine": module "tests.tuner.nowhere" not found'),
        ("tests.tuner.test_propose:mien", 'has no callable "mien"; did you mean "mine"?'),
        ("tests.tuner.test_propose:not_callable", 'has no callable "not_callable"'),
        (
            "tests.tuner.test_propose:needs_more",
            "raised TypeError: needs_more() missing 1 required positional argument",
        ),
        ("tests.tuner.test_propose:number", "which is not an optuna BaseSampler"),
        ("tests.tuner.test_propose:Failing", "proposing raised RuntimeError: no idea"),
    ],
)
def test_a_sampler_that_cannot_be_used_is_refused_before_anything_runs(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_usable(make_spec(path))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_sampler_that_keeps_state_in_the_study_is_refused() -> None:
    """Optuna's QMC counts its points there."""
    spec = make_spec("optuna.samplers:QMCSampler")
    for ask in (lambda: require_usable(spec), lambda: propose(spec, began(*["completed"] * 6), 6)):
        with pytest.raises(ConfigError, match=r"optuna\.samplers:QMCSampler\" keeps state in the study"):
            ask()


WITHOUT_TORCH = """
import sys
from tests.tuner.test_propose import began
from tests.tuner.trial_rows import make_spec
from tuner.search.propose import propose
for sampler in ("tpe", "random", "qmc"):
    propose(make_spec(sampler), began(*["completed"] * 6), 6)
print("torch" in sys.modules)
"""


def test_nothing_imports_torch_before_gp_proposes() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_a_running_trial_is_kept_away_from() -> None:
    """With the constant liar a running trial counts as a bad one until it is told."""
    search = {"search": {"learning_rate": "advised"}}
    spec = make_spec(startup_trials=1, **search)
    rows = [
        trial_row(number, params={"learning_rate": rate}, value=value, kl=5.0)
        for number, (rate, value) in enumerate([(1e-3, 1.0), (2e-5, 0.0), (3e-5, 0.1)])
    ]
    crowd = [running(number, {"learning_rate": 1e-3}) for number in range(3, 15)]
    other = [running(number, {"learning_rate": 2e-5}) for number in range(3, 15)]
    assert propose(spec, rows + crowd, 15) != propose(spec, rows + other, 15)


def test_of_many_trials_a_sampler_reads_best_running_and_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposing, "MOST_READ", 12)
    monkeypatch.setattr(proposing, "BEST_READ", 4)
    spec = make_spec(startup_trials=1, search={"learning_rate": "advised"})
    rows = [trial_row(n, params={"learning_rate": 1e-5 * 1.2**n}, value=n % 10, kl=5.0) for n in range(40)]
    rows[9] = pruned(9, "nonfinite", params={"learning_rate": 1e-4}, value=99.0)  # broken
    rows[3] = running(3, {"learning_rate": 3e-5})
    read = [trial.params["learning_rate"] for trial in as_read(spec, rows)]
    # The best feasible ones of 0 to 31 are 19 and 29 (9 each), 8 and 18; the last eight are read whatever they are.
    assert read == [min(1e-5 * 1.2**n, 3e-3) if n != 3 else 3e-5 for n in (3, 8, 18, 19, 29, *range(32, 40))]
    proposal = propose(spec, rows, 40)
    rows[10] = trial_row(10, params={"learning_rate": 9e-4}, value=0.5, kl=5.0)
    assert propose(spec, rows, 40) == proposal, "trial 10 is not among what is read"


def learn(spec: StudySpec, told: str) -> list[float]:
    """The learning rates proposed after ten trials, of which the fast ones ended in `told` with the best values."""
    rows = []
    for number in range(10):
        row = running(number, {"learning_rate": 1e-5 * 1.8**number})
        rows.append(ended(row, told if number >= 5 else "completed", 0.1 * number))
    proposals = []
    for number in range(10, 30):
        proposals.append(float(propose(spec, rows, number)["learning_rate"]))  # type: ignore[arg-type]
        rows.append(trial_row(number, status=Status.FAILED))
    return proposals


def test_the_sampler_goes_where_the_value_is_and_flees_where_trials_broke() -> None:
    """A trial that the guard ended for its KL is worth its best checkpoint before."""
    spec = make_spec(startup_trials=1, search={"learning_rate": "advised"})
    border = 1e-5 * 1.8**4.5
    assert sorted(learn(spec, "completed"))[10] > border
    assert sorted(learn(spec, "kl_limit"))[10] > border
    assert sorted(learn(spec, "nonfinite"))[10] < border


def test_trial_0_outside_a_range_counts_as_the_nearest_value_in_it() -> None:
    """TRL's vf_coef is 0.1, and this study searches 0.5 to 1."""
    reference = make_spec(search=SMALL).reference_params()
    assert reference["vf_coef"] == 0.1
    others = [trial_row(n, params={**reference, "vf_coef": 0.5 + n / 10, "learning_rate": 1e-5 * n}) for n in (1, 2, 3)]

    def proposals(**trial_0: HyperValue) -> list[Params]:
        rows = [trial_row(0, params={**reference, **trial_0}, value=3.0), *others]
        return [propose(make_spec(seed=seed, search=SMALL), rows, 4) for seed in range(5)]

    assert all(0.5 <= float(params["vf_coef"]) <= 1.0 for params in proposals())  # type: ignore[arg-type]
    assert proposals(vf_coef=0.2) == proposals(vf_coef=0.5) == proposals() != proposals(vf_coef=0.9)
    assert proposals(learning_rate=3e-3) != proposals()


def test_the_sampler_searches_all_dimensions_jointly() -> None:
    """TPE takes those jointly that all its trials have: here trials of earlier ranges."""
    reference = SPEC.reference_params()
    configs: list[Params] = [
        reference, {**reference, "kl_target": 60.0}, {"learning_rate": 1e-6, "gamma": 0.9}, {"kl_target": 5.0}
    ]  # fmt: skip
    rows = [trial_row(n, params=own, config=SPEC.config(own).to_dict()) for n, own in enumerate(configs)]
    seen = as_read(SPEC, rows)
    assert intersection_search_space(seen) == sampler_space(SPEC.search)
    assert [trial.state for trial in seen] == [TrialState.COMPLETE] * 4


def after(*told: TrialRow) -> list[Params]:
    """What studies of some seeds propose after three completed trials and these."""
    params: Params = {**make_spec(search=SMALL).reference_params(), "vf_coef": 0.7}
    rows = [trial_row(n, params={**params, "learning_rate": 1e-5 * (n + 1)}, value=float(n)) for n in range(3)]
    rows += [replace(row, number=3 + n, params={**params, "learning_rate": 2e-4}) for n, row in enumerate(told)]
    return [propose(make_spec(seed=seed, search=SMALL), rows, len(rows)) for seed in range(6)]


NOTHING = trial_row(status=Status.FAILED)


def test_forks_and_the_baseline_teach_nothing_and_keep_their_numbers() -> None:
    for how in (*HOW, *SET_ASIDE):
        trial = ended(running(0, {}), how, 9.0)
        fork = replace(trial, origin=Origin.FORKED, role=Role.FORK, parent=1)
        assert after(fork) == after(replace(trial, origin=Origin.BASELINE)) == after(NOTHING)
    enqueued = trial_row(value=9.0, origin=Origin.ENQUEUED)
    assert after(enqueued) == after(replace(enqueued, origin=Origin.SAMPLED)) != after(NOTHING)


def test_an_enqueued_trial_with_an_unsearched_value_teaches_nothing() -> None:
    spec, params = (
        make_spec(search=SMALL, startup_trials=1),
        {"learning_rate": 1e-4, "batch_size": 64, "vf_coef": 0.7},
    )
    rows = [trial_row(n, params={**params, "learning_rate": 1e-5 * (n + 1)}, value=float(n)) for n in range(3)]
    own = trial_row(3, params={**params, "lam": 0.5}, value=9.0, origin=Origin.ENQUEUED)
    failed = replace(own, status=Status.FAILED)
    assert propose(spec, [*rows, own], 4) == propose(spec, [*rows, failed], 4)
    assert propose(spec, [*rows, replace(own, params=params)], 4) != propose(spec, [*rows, failed], 4)


def test_a_start_with_its_own_rate_teaches_nothing_where_none_is_searched() -> None:
    spec = make_spec(search={"kl_target": "advised", "lam": "advised"}, startup_trials=1)
    rows = [trial_row(n, params={"kl_target": 6.0 + n, "lam": 0.9 + 0.02 * n}, value=float(n)) for n in range(3)]
    params = {"kl_target": 9.0, "lam": 1.0}
    start = trial_row(3, params={**params, "learning_rate": 3e-3}, value=9.0, origin=Origin.LISTED)
    failed = propose(spec, [*rows, replace(start, status=Status.FAILED)], 4)
    assert propose(spec, [*rows, start], 4) == failed
    assert propose(spec, [*rows, replace(start, params=params)], 4) != failed


def test_a_waiting_trial_counts_as_running_a_paused_one_by_its_value() -> None:
    runs = after(*[running(0, {})] * 9)
    assert after(*[trial_row(status=Status.WAITING, value=None, kl=None)] * 9) == runs != after(*[NOTHING] * 9)
    paused = after(*[trial_row(status=Status.PAUSED, value=0.5)] * 9)
    assert paused == after(*[pruned(rule="halving", value=0.5)] * 9) == after(*[trial_row(value=0.5)] * 9) != runs


# Lists of values

LISTS: dict[str, Any] = {
    "learning_rate": "advised",
    "lr_scheduler_type": ["linear", "cosine", "constant"],
    "whiten_rewards": [True, False],
    "kl_coef": [0.02, 0.05, 0.1],
    "kl_target": "advised",
}


def with_lists(sampler: str = "tpe", **changes: Any) -> StudySpec:
    return make_spec(sampler, **{"startup_trials": 2, "search": LISTS, **changes})


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "gp"])
def test_a_list_of_values_is_searched_in_the_fields_types(sampler: str) -> None:
    spec, rows = with_lists(sampler), list[TrialRow]()
    for number in range(16):
        params = propose(spec, rows, number) if rows else spec.reference_params()
        config = spec.config(params).to_dict()
        assert params["lr_scheduler_type"] in ("linear", "cosine", "constant")
        assert type(params["whiten_rewards"]) is bool and params.get("kl_coef", 0.05) in (0.02, 0.05, 0.1)
        rows.append(trial_row(number, params=params, config=config, value=float(number % 5)))
    for name in ("lr_scheduler_type", "whiten_rewards", "kl_coef"):
        assert len({row.params[name] for row in rows if name in row.params}) > 1, name


def test_a_trial_whose_value_is_none_of_the_list_teaches_nothing() -> None:
    spec = make_spec(search={"lam": [0.9, 1.0], "learning_rate": "advised"}, startup_trials=1)
    rows = [trial_row(n, params={"lam": 0.9, "learning_rate": 1e-5 * (n + 1)}, value=float(n)) for n in range(3)]
    other = trial_row(3, params={"lam": 0.95, "learning_rate": 9e-5}, value=9.0)
    assert [trial.state for trial in as_read(spec, [*rows, other])] == [TrialState.COMPLETE] * 3 + [TrialState.FAIL]


def test_a_clipped_mini_batch_is_what_is_stored_and_learned_from() -> None:
    sizes = {"low": 16, "high": 128, "scale": "log2"}
    spec = make_spec("random", search={"batch_size": sizes, "mini_batch_size": sizes})
    seen = 0
    for number in range(1, 20):
        rows = [trial_row(n) for n in range(number)]
        drawn = propose(spec, rows, number)
        made = new_trial(spec, rows, New(drawn, Origin.SAMPLED), 1)
        assert made.params["mini_batch_size"] == made.config["mini_batch_size"] <= made.params["batch_size"]  # type: ignore[operator]
        seen += drawn["mini_batch_size"] != made.params["mini_batch_size"]
    assert seen > 2
