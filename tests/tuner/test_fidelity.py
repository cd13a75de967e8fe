"""Where trials are read: what is offered, and that no two lengths of training are mixed."""

from typing import Any

from tests.dashboard.fake_store import CUT_SPEC, SPEC
from tests.tuner.trial_rows import pruned, trial_row
from tuner.search import fidelity
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import PausedBy, Status

CONFIG = CUT_SPEC.config({}).to_dict()  # 1,920 episodes in batches of 64: the rung is at 192


def evaluated(*rows: tuple[int, int, float, float]) -> dict[tuple[int, int], tuple[float, float]]:
    """Evaluations from (trial, episode, reward, KL)."""
    return {(trial, episode): (reward, kl) for trial, episode, reward, kl in rows}


def came(number: int, score: float | None, **values: Any) -> TrialRow:
    return trial_row(number, config=CONFIG, rung_episode=192, rung_score=score, **values)


def screened(number: int, score: float | None) -> TrialRow:
    return came(number, score, status=Status.PAUSED, paused_by=PausedBy.STRATEGY, value=0.9, kl=3.0, end_kl=3.0)


def read(rows: list[TrialRow], at: str, spec: StudySpec, *rows_there: tuple[int, int, float, float]) -> list[Any]:
    [chosen] = [one for one in fidelity.offered(spec) if one.name == at]
    return [(row.number, row.value, row.kl) for row in fidelity.read(rows, chosen, evaluated(*rows_there))]


ROWS = [screened(0, 0.5), came(1, 0.8, value=1.7, kl=9.0, end_kl=14.0), pruned(2, value=0.4, kl=0.0, end_kl=70.0)]


def test_the_rung_of_the_strategy_is_offered_before_the_end() -> None:
    assert [one.name for one in fidelity.offered(SPEC)] == ["at their end"]
    assert [one.name for one in fidelity.offered(CUT_SPEC)] == ["at screening", "at their end"]
    assert [one.at_rung for one in fidelity.offered(CUT_SPEC)] == [True, False]
    rung, end = (one.doc for one in fidelity.offered(CUT_SPEC))
    assert rung.startswith("All trials that were screened, ")
    assert end.startswith("Trials that were not promoted are left out, ")


def test_at_a_rung_every_trial_that_came_to_it_reads_as_it_did_there() -> None:
    found = [(0, 192, 0.6, 2.5), (1, 192, 0.7, 3.5), (1, 1920, 1.7, 14.0), (2, 192, 0.2, 9.0)]
    assert read(ROWS, "at screening", CUT_SPEC, *found) == [(0, 0.6, 2.5), (1, 0.7, 3.5)]
    assert read(ROWS[:1], "at screening", CUT_SPEC) == [(0, None, None)]


def test_at_their_end_no_trial_rests_and_a_best_checkpoint_is_held_against_the_last_kl() -> None:
    assert read(ROWS, "at their end", CUT_SPEC) == [(1, 1.7, 14.0), (2, 0.4, 70.0)]
    promoted = came(3, 0.8, status=Status.RUNNING, value=0.8, kl=3.0)
    assert read([promoted], "at their end", CUT_SPEC) == [], "its value is of the rung"
    paused = trial_row(4, status=Status.PAUSED, paused_by=PausedBy.PERSON)
    assert read([paused], "at their end", CUT_SPEC) == []


def test_a_rung_that_is_later_than_its_share_is_told_as_it_is() -> None:
    at = fidelity.offered(CUT_SPEC)[0]

    def paused(number: int, batch: int) -> TrialRow:
        return trial_row(number, config={"total_episodes": 512}, rung_episode=2 * batch, rung_score=0.5)

    assert fidelity.read_where([paused(0, 64), paused(1, 128)], at, CUT_SPEC) == (
        "2 trials read at 25% to 50% of their episodes. Screening is at 10%, rounded up to whole iterations, and to two "
        "at least."
    )
    early = trial_row(2, config={"total_episodes": 512}, status=Status.PRUNED)
    assert fidelity.read_where([paused(0, 64), early], at, CUT_SPEC).endswith(" 1 other ended before it.")
    assert fidelity.read_where([paused(0, 64)], fidelity.offered(CUT_SPEC)[-1], CUT_SPEC) == ""
