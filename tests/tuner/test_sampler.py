from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.samplers import TPESampler
from optuna.search_space import intersection_search_space
from optuna.trial import TrialState

from ppo_core.declare import HyperValue
from tests.tuner.trial_rows import make_spec, pruned, running, trial_row
from tuner.search.sampler import Projection
from tuner.space import arm_search, sampler_space, suggest
from tuner.spec import StudySpec
from tuner.status import Origin, Role, Status
from tuner.store import TrialRow

Params = dict[str, HyperValue]


SPEC = make_spec()


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
EVENT = st.tuples(st.integers(0, 5), st.sampled_from((*HOW, *SET_ASIDE)), st.floats(0, 2), st.booleans())


@settings(max_examples=15, deadline=None)
@given(st.lists(EVENT, min_size=8, max_size=12), st.sampled_from(["tpe", "random"]))
def test_rows_known_one_by_one_and_rows_read_at_once_give_the_same_proposals(
    events: list[tuple[int, str, float, bool]], sampler: str
) -> None:
    """Up to three trials run at a time, are set aside and go on, and end in any order; some are forks."""
    spec = make_spec(sampler)
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


def test_tpe_begins_after_the_startup_trials_that_were_told() -> None:
    """Before, it proposes what random search does, whatever runs or failed meanwhile."""
    spec = make_spec(startup_trials=3)

    def proposal(*hows: str, startup_trials: int = 3) -> Params:
        projection = Projection(make_spec(startup_trials=startup_trials), [])
        for number, how in enumerate(hows):
            params: Params = {**spec.reference_params(), "learning_rate": 1e-4 * (number + 1), "vf_coef": 0.7}
            projection.tell(running(number, params))
            if how != "running":
                projection.tell(ended(running(number, params), how, 1.0))
        return projection.propose(len(hows))

    at_random = proposal(*["running"] * 5)
    assert proposal("completed", "stopped", "failed", "failed", "running") == at_random
    assert proposal("completed", "stopped", "completed", "failed", "running") != at_random
    assert proposal(*["completed"] * 5, startup_trials=6) == at_random


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


def test_the_sampler_goes_where_the_value_is_and_flees_where_the_kl_was() -> None:
    spec = make_spec(startup_trials=1, search={"learning_rate": "advised"})
    border = 1e-5 * 1.8**4.5
    high = sorted(learn(spec, "completed"))
    low = sorted(learn(spec, "kl_limit"))
    assert high[10] > border > low[10]


def test_trial_0_outside_a_range_counts_as_the_nearest_value_in_it() -> None:
    """TRL's vf_coef is 0.1, and this study searches 0.5 to 1."""
    reference = SPEC.reference_params()
    assert reference["vf_coef"] == 0.1
    others = [trial_row(n, params={**reference, "vf_coef": 0.5 + n / 10, "learning_rate": 1e-5 * n}) for n in (1, 2, 3)]

    def proposals(**trial_0: HyperValue) -> list[Params]:
        rows = [trial_row(0, params={**reference, **trial_0}, value=3.0), *others]
        return [Projection(make_spec(seed=seed), rows).propose(4) for seed in range(5)]

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
    st.lists(EVENT, min_size=6, max_size=18), st.sampled_from(["tpe", "random"]), st.sampled_from(["fixed", "adaptive"])
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
    params: Params = {**SPEC.reference_params(), "vf_coef": 0.7}
    rows = [trial_row(n, params={**params, "learning_rate": 1e-5 * (n + 1)}, value=float(n)) for n in range(3)]
    rows += [replace(row, number=3 + n, params={**params, "learning_rate": 2e-4}) for n, row in enumerate(told)]
    return [Projection(make_spec(seed=seed), rows).propose(len(rows)) for seed in range(6)]


NOTHING = trial_row(status=Status.FAILED)


def test_a_fork_teaches_nothing_and_keeps_its_number() -> None:
    for how in (*HOW, *SET_ASIDE):
        fork = replace(ended(running(0, {}), how, 9.0), origin=Origin.FORKED, role=Role.FORK, parent=1)
        assert after(fork) == after(NOTHING)
    enqueued = trial_row(value=9.0, origin=Origin.ENQUEUED)
    assert after(enqueued) == after(replace(enqueued, origin=Origin.SAMPLED)) != after(NOTHING)


def test_a_waiting_trial_counts_as_one_that_runs_and_a_paused_one_as_pruned() -> None:
    runs = after(*[running(0, {})] * 9)
    assert after(*[trial_row(status=Status.WAITING, value=None, kl=None)] * 9) == runs != after(*[NOTHING] * 9)
    paused = after(*[trial_row(status=Status.PAUSED, value=0.5)] * 9)
    assert paused == after(*[pruned(rule="halving", value=0.5)] * 9) != runs


def test_a_paused_trial_that_goes_on_runs_again() -> None:
    """Ten trials have ended: with an eleventh TPE takes two of them, not one, for the best."""
    spec = make_spec(search={"learning_rate": "advised", "lam": "advised"})
    rows = [trial_row(n, params={"learning_rate": 1e-4 * 1.2**n, "lam": 0.9}, value=n) for n in range(10)]
    row = running(10, {"learning_rate": 1e-9, "lam": 0.91})
    projection = Projection(spec, [*rows, row])
    while_it_runs = projection.propose(11)
    paused = replace(row, status=Status.PAUSED, value=0.5, kl=5.0)
    projection.tell(paused)
    assert projection.trials()[10].state is TrialState.PRUNED
    assert projection.propose(11) == Projection(spec, [*rows, paused]).propose(11) != while_it_runs
    projection.tell(row)
    assert projection.trials()[10].state is TrialState.RUNNING
    assert projection.propose(11) == while_it_runs


def test_other_ranges_or_another_budget_change_proposals() -> None:
    rows = [trial_row(n, params={"learning_rate": 1e-4 * 1.2**n, "lam": 0.9}, value=n, kl=n) for n in range(12)]
    spec = make_spec(search={"learning_rate": "advised", "lam": "advised"})
    narrow = make_spec(search={"learning_rate": {"low": 2e-4, "high": 5e-4}, "lam": "advised"})
    strict = make_spec(search={"learning_rate": "advised", "lam": "advised"}, kl={"budget": 2.0, "limit": 15.0})
    first = Projection(spec, rows).propose(12)
    narrowed, stricter = (Projection(other, rows).propose(12) for other in (narrow, strict))
    assert narrowed != first != stricter
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
    projection, hows = Projection(SPEC, []), (*HOW, "paused", "running")
    for number in range(40):
        params = SPEC.reference_params() if number == 0 else projection.propose(number)
        if number:
            seed = int(np.random.SeedSequence([SPEC.seed, number]).generate_state(1)[0])
            sampler = TPESampler(seed=seed, n_startup_trials=2, multivariate=True, constant_liar=True)
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
