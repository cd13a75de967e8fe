import math
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.samplers import BaseSampler, TPESampler
from optuna.search_space import intersection_search_space
from optuna.trial import TrialState

from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError
from tests.tuner.trial_rows import make_spec, pruned, running, trial_row
from tuner.search import memory
from tuner.search.prior import first_params, spread_params
from tuner.search.sampler import Projection
from tuner.space import arm_search, sampler_space, suggest
from tuner.spec import StudySpec
from tuner.status import Origin, PausedBy, Role, Status
from tuner.store import TrialRow

Params = dict[str, HyperValue]


SPEC = make_spec()
ONE_ARM = {"learning_rate": "advised", "batch_size": "advised", "vf_coef": {"low": 0.5, "high": 1.0}}
_FIXED: Params = {**SPEC.reference_params(), "vf_coef": 0.7}
_ADAPTIVE: Params = {**_FIXED, "kl_control": "adaptive", "kl_target": 4.0}
ARMS = (_FIXED, {name: value for name, value in _ADAPTIVE.items() if name != "kl_coef"})


def ended(row: TrialRow, how: str, value: float) -> TrialRow:
    """The row of a running trial after it ended."""
    made = {
        "completed": trial_row(row.number, value=value, kl=8.0 * value),
        "kl_limit": pruned(row.number, "kl_limit", 20.0, value=value),
        "nonfinite": pruned(row.number, "nonfinite", None, value=value),
        "nothing_learned": pruned(row.number, "nothing_learned", 0.0, value=0.0, kl=0.0),
        "failed": trial_row(row.number, status=Status.FAILED, value=None, kl=None),
        "stopped": trial_row(row.number, status=Status.STOPPED, value=value, episodes=10 * row.number),
        "finished": trial_row(row.number, value=value, rung=1, rung_scores=(0.7 * value,)),
        "resting": trial_row(row.number, status=Status.PAUSED, paused_by=PausedBy.STRATEGY, rung_scores=(value,)),
        "paused": trial_row(row.number, status=Status.PAUSED, paused_by=PausedBy.PERSON, value=value, episodes=10),
        "waiting": trial_row(row.number, status=Status.WAITING, value=None, kl=None),
        "running": running(row.number, {}),
    }[how]
    return replace(made, params=row.params, origin=row.origin, role=row.role)


HOW = ("completed", "finished", "kl_limit", "nonfinite", "nothing_learned", "failed", "stopped")
SET_ASIDE = ("paused", "resting", "waiting", "running")
EVENT = st.tuples(st.integers(0, 5), st.sampled_from((*HOW, *SET_ASIDE)), st.floats(0, 2), st.booleans())


@settings(max_examples=15, deadline=None)
@given(st.lists(EVENT, min_size=8, max_size=12), st.sampled_from(["tpe", "random", "qmc"]))
def test_rows_known_one_by_one_and_rows_read_at_once_give_the_same_proposals(
    events: list[tuple[int, str, float, bool]], sampler: str
) -> None:
    """Up to three trials run at a time, are paused and resumed, and end in any order; some are forks."""
    _require_the_same(make_spec(sampler), events)


def test_gp_proposes_the_same_however_the_rows_became_known() -> None:
    spec = make_spec("gp", startup_trials=1, search={"learning_rate": "advised", "lam": "advised"})
    hows = ("completed", "resting", "finished", "kl_limit", "resting", "finished")
    _require_the_same(spec, [(n, how, 0.3 * n % 1.7, False) for n, how in enumerate(hows)])


def _require_the_same(spec: StudySpec, events: list[tuple[int, str, float, bool]]) -> None:
    fed = Projection(spec, [])
    rows: dict[int, TrialRow] = {}
    for which, how, value, is_fork in events:
        number = len(rows)
        rebuilt = Projection(spec, [replace(row) for row in reversed(rows.values())])
        params = fed.propose(number)
        assert rebuilt.propose(number) == params
        rows[number] = running(number, params)
        if is_fork:
            rows[number] = replace(rows[number], origin=Origin.FORKED, role=Role.FORK, parent=0, fork_step=1)
        fed.tell(rows[number])
        under_way = [row for row in rows.values() if not row.status.is_final]
        if len(under_way) >= 3:
            row = ended(under_way[which % 3], how, value)
            rows[row.number] = row
            fed.tell(row)


def feed(spec: StudySpec, values: Mapping[int, float], count: int = 8) -> Projection:
    projection = Projection(spec, [])
    for number in range(count):
        params = spec.reference_params() if number == 0 else projection.propose(number)
        projection.tell(running(number, params))
        if number in values:
            projection.tell(ended(running(number, params), "completed", values[number]))
    return projection


def test_a_proposal_depends_on_the_seed_the_number_and_the_history_alone() -> None:
    history = dict.fromkeys(range(6), 0.5)
    first = feed(SPEC, history).propose(8)
    assert feed(SPEC, history).propose(8) == first
    projection = feed(SPEC, history)
    assert [projection.propose(8), projection.propose(8)] == [first, first]
    assert feed(make_spec(seed=1), history).propose(8) != first
    assert feed(SPEC, {**history, 3: 1.0}).propose(8) != first  # the sampler has learned
    assert feed(make_spec("random"), {**history, 3: 1.0}).propose(8) == feed(make_spec("random"), history).propose(8)


def test_proposals_differ_and_make_valid_configurations() -> None:
    projection = Projection(SPEC, [])
    proposals: list[Params] = []
    for number in range(12):
        proposals.append(projection.propose(number))
        SPEC.config(proposals[-1])
        projection.tell(ended(running(number, proposals[-1]), "completed", float(number)))
    assert len({tuple(params.values()) for params in proposals}) == 12
    assert {params["kl_control"] for params in proposals} == {"fixed", "adaptive"}
    for params in proposals:
        assert ("kl_coef" in params, "kl_target" in params) == (
            (True, False) if params["kl_control"] == "fixed" else (False, True)
        )


def began(spec: StudySpec, *hows: str) -> Projection:
    """What a study knows whose trials, of one arm and then the other, ended in these ways."""
    projection = Projection(spec, [])
    for number, how in enumerate(hows):
        params: Params = {**ARMS[number % 2], "learning_rate": 1e-4 * (number + 1)}
        projection.tell(ended(running(number, params), how, 1.0))
    return projection


@pytest.mark.parametrize("sampler", ["tpe", "gp", "tests.tuner.test_sampler:mine"])
def test_the_first_trials_of_an_arm_are_drawn_around_the_reference(sampler: str) -> None:
    """As long as fewer of the arm have a value or a rung score than the sampler asks for, whatever the other arm has."""

    def is_drawn(*hows: str) -> bool:
        spec, number = make_spec(sampler, startup_trials=2), len(hows)
        search, arm = arm_search(spec.search, "fixed"), {"kl_control": "fixed"}
        first = first_params(search, spec.config({}).to_dict(), spec.seed, number, "fixed")
        return began(spec, *hows).propose(number) == arm | first

    assert is_drawn(*["running"] * 6)
    assert is_drawn("completed", "completed", "running", "completed", "failed", "completed")
    assert not is_drawn("completed", "running", "completed", "running")
    assert not is_drawn("resting", "running", "stopped", "running")
    assert is_drawn("resting", "running", "waiting", "running")


def test_random_and_qmc_are_baselines_and_begin_as_they_go_on() -> None:
    spec = make_spec("random")
    uniform = [float(Projection(make_spec("random", seed=seed)).propose(0)["learning_rate"]) for seed in range(60)]  # type: ignore[arg-type]
    low, high = spec.search["learning_rate"].low, spec.search["learning_rate"].high
    assert statistics.median(uniform) == pytest.approx(math.sqrt(low * high), rel=0.7), "the middle, not the reference"
    for values in ({}, dict.fromkeys(range(8), 1.0)):
        spec = make_spec("qmc")
        search = arm_search(spec.search, "fixed")
        assert feed(spec, values).propose(8) == {"kl_control": "fixed", **spread_params(search, spec.seed, 8, "fixed")}


def mine(seed: int) -> BaseSampler:
    """A sampler of one's own."""
    return TPESampler(seed=seed, n_startup_trials=1, multivariate=True)


def needs_more(seed: int, more: int) -> BaseSampler:
    return mine(seed + more)


def number(seed: int) -> int:
    return seed


not_callable = 3


def test_a_sampler_of_ones_own_proposes_from_the_same_trials() -> None:
    """Here one that is Optuna's TPE without the constant liar, which proposes the same where nothing runs."""
    history = dict.fromkeys(range(8), 0.5) | {3: 1.0}
    proposals = [feed(make_spec(name), history).propose(8) for name in ("tests.tuner.test_sampler:mine", "tpe")]
    assert proposals[0] == proposals[1] != feed(make_spec("optuna.samplers:RandomSampler"), history).propose(8)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.tuner.nowhere:mine", 'sampler "tests.tuner.nowhere:mine": module "tests.tuner.nowhere" not found'),
        ("tests.tuner.test_sampler:mien", 'has no callable "mien"; did you mean "mine"?'),
        ("tests.tuner.test_sampler:not_callable", 'has no callable "not_callable"'),
        (
            "tests.tuner.test_sampler:needs_more",
            "raised TypeError: needs_more() missing 1 required positional argument",
        ),
        ("tests.tuner.test_sampler:number", "which is not an optuna.samplers.BaseSampler"),
    ],
)
def test_a_sampler_that_cannot_be_used_is_refused_in_one_line_before_anything_runs(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Projection(make_spec(path))
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_sampler_that_keeps_state_in_the_study_is_refused() -> None:
    """Optuna's QMC counts its points there."""
    projection = began(make_spec("optuna.samplers:QMCSampler"), *["completed"] * 6)
    with pytest.raises(ConfigError, match="a sampler that keeps state in the study cannot be used"):
        projection.propose(6)


WITHOUT_TORCH = """
import sys
from tests.tuner.test_sampler import began
from tests.tuner.trial_rows import make_spec
began(make_spec("gp"))
for sampler in ("tpe", "random", "qmc"):
    began(make_spec(sampler), *["completed"] * 6).propose(6)
print([name for name in ("torch", "scipy") if name in sys.modules])
"""


def test_nothing_imports_torch_or_scipy_before_gp_proposes() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


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
    assert Projection(spec, rows + crowd).propose(15) != Projection(spec, rows + other).propose(15)


def test_of_many_trials_a_sampler_reads_the_best_the_running_and_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_READ", 12)
    monkeypatch.setattr(memory, "BEST_READ", 4)
    spec = make_spec(startup_trials=1, search={"learning_rate": "advised"})
    rows = [trial_row(n, params={"learning_rate": 1e-5 * 1.2**n}, value=n % 10, kl=5.0) for n in range(40)]
    rows[9] = pruned(9, "nonfinite", params={"learning_rate": 1e-4}, value=99.0)  # broken
    rows[3] = running(3, {"learning_rate": 3e-5})
    projection = Projection(spec, rows)
    read = projection._views[None]._study.get_trials(deepcopy=False)
    # The best feasible ones of 0 to 31 are 19 and 29 (9 each), 8 and 18; the last eight are read whatever they are.
    assert [trial.number for trial in read] == [3, 8, 18, 19, 29, *range(32, 40)]
    assert len(projection.trials()) == 40
    proposal = projection.propose(40)
    rows[10] = trial_row(10, params={"learning_rate": 9e-4}, value=0.5, kl=5.0)
    assert Projection(spec, rows).propose(40) == proposal, "trial 10 is not among what is read"


def learn(spec: StudySpec, told: str) -> list[float]:
    """The learning rates proposed after ten trials, of which the fast ones ended in `told` with the best values."""
    rows = []
    for number in range(10):
        row = running(number, {"learning_rate": 1e-5 * 1.8**number})
        rows.append(ended(row, told if number >= 5 else "completed", 0.1 * number))
    proposals = []
    for number in range(10, 30):
        proposals.append(float(Projection(spec, rows).propose(number)["learning_rate"]))  # type: ignore[arg-type]
        rows.append(trial_row(number, status=Status.FAILED))
    return proposals


def test_the_sampler_goes_where_the_value_is_and_flees_where_trials_broke() -> None:
    """A trial that the guard ended for its KL is worth its best checkpoint before."""
    spec = make_spec(startup_trials=1, search={"learning_rate": "advised"})
    border = 1e-5 * 1.8**4.5
    assert sorted(learn(spec, "completed"))[10] > border
    assert sorted(learn(spec, "kl_limit"))[10] > border
    assert sorted(learn(spec, "nonfinite"))[10] < border


# A toy: at a rate r the KL after a share t of a trial is (2 t r / 1e-4)² nats, and the reward sqrt(KL). The best
# checkpoint within the budget of 10 nats counts; the guard ends a trial at 15.

TOY = {"search": {"learning_rate": "advised"}, "kl": {"budget": 10.0, "limit": 15.0}}
TOY_RUNG = 0.1


def toy(number: int, rate: float, until: str) -> TrialRow:
    """A trial of the toy that rests at its rung, or went on from there to its end, or to the guard's."""
    pace = 2.0 * rate / 1e-4
    score, end = pace * TOY_RUNG, min(1.0, math.sqrt(15.0) / pace)
    value = math.sqrt(min((pace * end) ** 2, 10.0))
    made = {
        "rest": trial_row(number, status=Status.PAUSED, paused_by=PausedBy.STRATEGY, value=score, episodes=192),
        "end": trial_row(number, value=value, rung=1, episodes=1920),
        "guard": pruned(number, "kl_limit", 15.0, value=value, rung=1, episodes=round(1920 * end)),
    }[until]
    return replace(made, params={"learning_rate": rate}, rung_scores=(score,))


def rates(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (n / (count - 1)) for n in range(count)]


def proposed_rate(rows: list[TrialRow]) -> float:
    """The median of what is proposed next, by five seeds."""
    specs = [make_spec(startup_trials=1, seed=seed, **TOY) for seed in range(5)]
    return statistics.median(
        float(Projection(spec, rows).propose(len(rows))["learning_rate"])  # type: ignore[arg-type]
        for spec in specs
    )


def test_poor_trials_that_were_finished_do_not_outrank_those_at_a_rung_that_promise_more() -> None:
    """Slow ones were finished when there were no better ones; the fast ones that rest now come near the budget."""
    rows = [toy(n, 3e-5 * 1.1**n, "end") for n in range(3)]
    rows += [toy(3 + n, rate, "rest") for n, rate in enumerate(rates(1e-5, 1.5e-3, 24))]
    assert proposed_rate(rows) > 3e-4


def test_what_the_guard_ended_late_does_not_outrank_those_at_a_rung_that_promise_more() -> None:
    """Trials so fast that they had no checkpoint in between, and are worth little within the budget."""
    rows = [toy(0, 1e-4, "end")]
    rows += [replace(toy(1 + n, rate, "guard"), value=0.3) for n, rate in enumerate(rates(1e-3, 2.9e-3, 3))]
    rows += [toy(4 + n, rate, "rest") for n, rate in enumerate(rates(1e-5, 4e-4, 20))]
    assert 2e-4 < proposed_rate(rows) < 7e-4


def test_predictions_follow_the_median_gain_of_the_finished_trials_after_the_rung() -> None:
    """What is finished is not made again when they change."""
    search = {"search": {"learning_rate": "advised"}}
    resting = {"status": Status.PAUSED, "paused_by": PausedBy.STRATEGY}
    rows = [
        trial_row(0, params={"learning_rate": 1e-4}, value=2.0, rung=1, rung_scores=(0.5,)),
        trial_row(1, params={"learning_rate": 2e-4}, value=1.0, rung_scores=(0.5,), **resting),
        trial_row(2, params={"learning_rate": 3e-4}, rung_scores=(0.75,), **resting),
    ]
    projection = Projection(make_spec(**search), rows)
    assert [trial.value for trial in projection.trials()] == [2.0, 0.5 + 1.5, 0.75 + 1.5]
    before = projection.trials()[0]
    more = [trial_row(n, params={"learning_rate": 4e-4}, value=4.0, rung=1, rung_scores=(0.5,)) for n in (3, 4)]
    projection.update([*rows, *more])
    predicted = [2.0, 0.5 + 3.5, 0.75 + 3.5, 4.0, 4.0]
    assert [trial.value for trial in projection.trials()] == predicted
    assert projection.trials()[0] is before
    assert [trial.value for trial in Projection(make_spec(**search), [*rows, *more]).trials()] == predicted
    more[1] = replace(more[1], value=2.5)
    projection.update(more)
    assert projection.trials()[2].value == 0.75 + 2.0, "the median of 1.5, 3.5 and 2.0"
    no_lesson = [
        trial_row(5, params={"learning_rate": 4e-4}, value=9.0),  # it never rested
        pruned(6, params={"learning_rate": 4e-4}, value=0.0, rung_scores=(0.5,)),
    ]
    projection.update(no_lesson)
    assert projection.trials()[2].value == 0.75 + 2.0
    promoted = replace(rows[1], status=Status.RUNNING, paused_by=None, value=None, rung=1)
    projection.update([promoted])
    assert projection.trials()[1].state is TrialState.RUNNING and projection.trials()[1].value is None


def test_trial_0_outside_a_range_counts_as_the_nearest_value_in_it() -> None:
    """TRL's vf_coef is 0.1, and this study searches 0.5 to 1."""
    reference = make_spec(search=ONE_ARM).reference_params()
    assert reference["vf_coef"] == 0.1
    others = [trial_row(n, params={**reference, "vf_coef": 0.5 + n / 10, "learning_rate": 1e-5 * n}) for n in (1, 2, 3)]

    def proposals(**trial_0: HyperValue) -> list[Params]:
        rows = [trial_row(0, params={**reference, **trial_0}, value=3.0), *others]
        return [Projection(make_spec(seed=seed, search=ONE_ARM), rows).propose(4) for seed in range(5)]

    assert all(0.5 <= float(params["vf_coef"]) <= 1.0 for params in proposals())  # type: ignore[arg-type]
    assert proposals(vf_coef=0.2) == proposals(vf_coef=0.5) == proposals() != proposals(vf_coef=0.9)
    assert proposals(learning_rate=3e-3) != proposals()


def test_whatever_the_trials_had_the_sampler_searches_all_dimensions_of_an_arm_jointly() -> None:
    """TPE takes those jointly that all its trials have: here trials of both arms and of earlier ranges."""
    reference = SPEC.reference_params()
    adaptive: Params = {**reference, "kl_control": "adaptive", "kl_target": 60.0}
    configs: list[Params] = [
        reference,
        {name: value for name, value in adaptive.items() if name != "kl_coef"},
        {"learning_rate": 1e-6, "gamma": 0.9},
        {"learning_rate": 1e-4, "kl_target": 5.0},
    ]
    rows = [trial_row(n, params=own, config=SPEC.config(own).to_dict()) for n, own in enumerate(configs)]
    for arm in ("fixed", "adaptive"):
        seen = Projection(SPEC, rows).trials(arm)
        assert intersection_search_space(seen) == sampler_space(arm_search(SPEC.search, arm))
        assert [trial.state for trial in seen] == [TrialState.COMPLETE] * 4


@settings(max_examples=10, deadline=None)
@given(
    st.lists(EVENT, min_size=6, max_size=18),
    st.sampled_from(["tpe", "random", "qmc"]),
    st.sampled_from(["fixed", "adaptive"]),
)
def test_each_arm_gets_its_share_of_the_proposals(
    events: list[tuple[int, str, float, bool]], sampler: str, better: str
) -> None:
    """Whichever was better so far, however trials ended, and whatever people added."""
    spec = make_spec(sampler)
    projection = Projection(spec, [])
    taken: list[HyperValue] = []
    for number, (_, how, value, is_added) in enumerate(events):
        params = projection.propose(number) if taken else spec.reference_params()
        row = ended(running(number, params), how, value + (params["kl_control"] == better))
        if is_added and taken:
            row = replace(row, origin=Origin.ENQUEUED)
        else:
            taken.append(params["kl_control"])
        projection.tell(row)
        assert abs(taken.count("fixed") - taken.count("adaptive")) <= 1


def test_trials_without_a_value_in_some_dimension_are_no_obstacle() -> None:
    rows = [trial_row(n, params={"learning_rate": 1e-6, "gamma": 0.5 + n / 10}) for n in range(4)]
    proposal = Projection(SPEC, rows).propose(4)
    failed = [trial_row(n, status=Status.FAILED, params={"learning_rate": 1e-4}) for n in range(4)]
    assert proposal == Projection(SPEC, failed).propose(4)
    SPEC.config(proposal)


def after(*told: TrialRow) -> list[Params]:
    """What studies of some seeds propose after three completed trials and these."""
    params: Params = {**make_spec(search=ONE_ARM).reference_params(), "vf_coef": 0.7}
    rows = [trial_row(n, params={**params, "learning_rate": 1e-5 * (n + 1)}, value=float(n)) for n in range(3)]
    rows += [replace(row, number=3 + n, params={**params, "learning_rate": 2e-4}) for n, row in enumerate(told)]
    return [Projection(make_spec(seed=seed, search=ONE_ARM), rows).propose(len(rows)) for seed in range(6)]


NOTHING = trial_row(status=Status.FAILED)


def test_a_fork_teaches_nothing_and_keeps_its_number() -> None:
    for how in (*HOW, *SET_ASIDE):
        fork = replace(ended(running(0, {}), how, 9.0), origin=Origin.FORKED, role=Role.FORK, parent=1)
        assert after(fork) == after(NOTHING)
    enqueued = trial_row(value=9.0, origin=Origin.ENQUEUED)
    assert after(enqueued) == after(replace(enqueued, origin=Origin.SAMPLED)) != after(NOTHING)


def test_a_waiting_trial_counts_as_one_that_runs_and_a_paused_one_by_its_value_so_far() -> None:
    runs = after(*[running(0, {})] * 9)
    assert after(*[trial_row(status=Status.WAITING, value=None, kl=None)] * 9) == runs != after(*[NOTHING] * 9)
    paused = after(*[trial_row(status=Status.PAUSED, value=0.5)] * 9)
    assert paused == after(*[pruned(rule="halving", value=0.5)] * 9) == after(*[trial_row(value=0.5)] * 9) != runs


def test_a_paused_trial_that_goes_on_runs_again() -> None:
    """Ten trials have ended: with an eleventh TPE takes two of them, not one, for the best."""
    spec = make_spec(search={"learning_rate": "advised", "lam": "advised"})
    rows = [trial_row(n, params={"learning_rate": 1e-4 * 1.2**n, "lam": 0.9}, value=n) for n in range(10)]
    row = running(10, {"learning_rate": 1e-9, "lam": 0.91})
    projection = Projection(spec, [*rows, row])
    while_it_runs = projection.propose(11)
    paused = replace(row, status=Status.PAUSED, value=0.5, kl=5.0)
    projection.tell(paused)
    assert projection.trials()[10].value == 0.5
    assert projection.propose(11) == Projection(spec, [*rows, paused]).propose(11) != while_it_runs
    projection.tell(row)
    assert projection.trials()[10].state is TrialState.RUNNING
    assert projection.propose(11) == while_it_runs


def test_other_ranges_change_proposals() -> None:
    rows = [trial_row(n, params={"learning_rate": 1e-4 * 1.2**n, "lam": 0.9}, value=n, kl=n) for n in range(12)]
    searched = {"search": {"learning_rate": "advised", "lam": "advised"}}
    spec = make_spec(**searched)
    narrow = make_spec(**searched | {"search": {"learning_rate": {"low": 2e-4, "high": 5e-4}, "lam": "advised"}})
    narrowed = Projection(narrow, rows).propose(12)
    assert narrowed != Projection(spec, rows).propose(12)
    assert 2e-4 <= float(narrowed["learning_rate"]) <= 5e-4  # type: ignore[arg-type]


def test_rows_given_again_are_taken_over_where_they_changed() -> None:
    rows = [trial_row(n, params={"learning_rate": 1e-4 * 1.2**n, "lam": 0.9}, value=n, kl=1) for n in range(12)]
    spec = make_spec(search={"learning_rate": "advised", "lam": "advised"})
    projection = Projection(spec, [*rows[:11], running(11, rows[11].params)])
    before = projection.propose(12)
    projection.update(rows)
    assert projection.propose(12) == Projection(spec, rows).propose(12) != before


def test_proposals_are_those_of_an_optuna_study_of_the_same_trials() -> None:
    """The joint space, which it is told, is the one that Optuna finds by going through all trials of the arm's view."""
    projection, hows = Projection(SPEC, []), (*HOW, *SET_ASIDE)
    for number in range(40):
        params = SPEC.reference_params() if number == 0 else projection.propose(number)
        if number > 10:
            seed = int(np.random.SeedSequence([SPEC.seed, number]).generate_state(1)[0])
            sampler = TPESampler(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True)
            study = optuna.create_study(direction="maximize", sampler=sampler)
            study.add_trials(projection.trials(str(params["kl_control"])))
            arm = {"kl_control": params["kl_control"]}
            assert arm | suggest(study.ask(), arm_search(SPEC.search, str(params["kl_control"]))) == params
        projection.tell(running(number, params))
        how = hows[number % len(hows)]
        projection.tell(ended(running(number, params), how, 0.1 * (number % 7)))


def test_numbers_without_gaps() -> None:
    projection = Projection(SPEC, [])
    with pytest.raises(ValueError, match="trial 1 cannot be proposed: the next one is 0"):
        projection.propose(1)
    with pytest.raises(ValueError, match="trial 1 cannot be noted before trial 0"):
        projection.tell(running(1, {}))
