"""When failures stop a study."""

import errno
import inspect
from dataclasses import replace

import pytest

from ppo_core.errors import CheckpointError, ConfigError, RewardError, RewardOutage
from tests.tuner.trial_rows import trial_row
from tuner.protocol import Failed
from tuner.retry import error_reason, failing, lost_reason
from tuner.status import STOPPED_BY_PERSON, PausedBy, Reason, Status
from tuner.store import TrialRow


def told_by(rows: list[TrialRow]) -> list[str | None]:
    """What is told after each of the trials has ended."""
    return [failing(rows[: count + 1]) for count in range(len(rows))]


def failed(number: int, message: str) -> TrialRow:
    return trial_row(number, status=Status.FAILED, reason=Reason("error", message))


def pruned(number: int) -> TrialRow:
    return trial_row(number, status=Status.PRUNED, reason=Reason("kl_limit", "too far"))


@pytest.mark.parametrize(
    ("rows", "stops_at"),
    [
        ([failed(0, "no disk"), failed(1, "no disk"), failed(2, "no disk")], 2),
        ([failed(0, "no disk"), failed(1, "no disk"), trial_row(2), failed(3, "no disk")], None),
        ([failed(0, "no disk"), failed(1, "no disk"), pruned(2), failed(3, "no disk")], None),
        ([failed(0, "no disk"), failed(1, "no net"), failed(2, "no disk")], None),
        ([failed(0, "no net"), failed(1, "no disk"), failed(2, "no disk"), failed(3, "no disk")], 3),
        ([failed(0, "20 MiB in runs/0"), failed(1, "3.5 MiB in runs/1"), failed(2, "1 MiB in runs/2")], None),
        ([failed(0, "2.5 MiB at 0xab1"), failed(1, "3.5 MiB at 0x7f"), failed(2, "1.0 MiB at 0xc")], 2),
        ([pruned(0), pruned(1), pruned(2)], None),
    ],
)
def test_only_one_cause_three_times_in_a_row_stops_the_study(rows: list[TrialRow], stops_at: int | None) -> None:
    told = told_by(rows)
    assert [row.number for row, text in zip(rows, told, strict=True) if text] == (
        [] if stops_at is None else [stops_at]
    )
    if stops_at is not None:
        assert f"trial {stops_at}: {rows[-1].reason.message}" in str(told[-1])  # type: ignore[union-attr]


def lost(number: int, how: str, log: str = "") -> TrialRow:
    return trial_row(number, status=Status.FAILED, reason=lost_reason(how, 3, log))


def stopped(number: int) -> TrialRow:
    return trial_row(number, status=Status.STOPPED, reason=STOPPED_BY_PERSON)


@pytest.mark.parametrize(
    ("rows", "stops"),
    [
        ([lost(0, "killed by SIGKILL"), lost(1, "killed by SIGKILL"), lost(2, "killed by SIGKILL")], True),
        ([lost(0, "exit code 3", "loss 1"), lost(1, "exit code 3", "no words"), lost(2, "exit code 3")], True),
        (
            [lost(0, "made no report for 125 s"), lost(1, "made no report for 9 s"), lost(2, "made no report for 1 s")],
            True,
        ),
        ([lost(0, "killed by SIGKILL"), lost(1, "killed by SIGSEGV"), lost(2, "killed by SIGKILL")], False),
        ([failed(0, "no disk"), failed(1, "no disk"), lost(2, "killed by SIGKILL")], False),
    ],
)
def test_workers_lost_in_the_same_way_are_one_cause_whatever_they_printed(rows: list[TrialRow], stops: bool) -> None:
    assert [text is not None for text in told_by(rows)] == [False, False, stops]


def test_trials_that_a_person_ended_neither_count_nor_begin_anew() -> None:
    rows = [failed(0, "no disk"), stopped(1), failed(2, "no disk"), stopped(3), stopped(4)]
    assert told_by(rows) == [None] * 5
    assert failing([*rows, failed(5, "no disk")]) is not None


def test_trials_are_in_a_row_as_they_ended() -> None:
    times = {0: 5.0, 1: 1.0, 2: 2.0, 3: 3.0}
    rows = [replace(failed(n, "no disk") if n else trial_row(n), ended_at=at) for n, at in times.items()]
    assert failing(rows) is None, "trial 0 ended last, and well"
    assert failing([replace(rows[0], ended_at=0.5), *rows[1:]]) is not None


def rested(number: int, started_at: float) -> TrialRow:
    return trial_row(number, status=Status.PAUSED, paused_by=PausedBy.STRATEGY, started_at=started_at)


def test_a_trial_that_came_to_its_rung_meanwhile_shows_that_the_study_is_well() -> None:
    rows = [replace(failed(n, "no disk"), started_at=float(n), ended_at=n + 0.5) for n in range(3)]
    assert failing(rows) is not None
    assert failing([*rows, rested(3, 1.5)]) is None
    assert failing([rested(3, -1.0), *rows]) is not None, "it says nothing of what came later"


def raised(number: int, message: str, cause: str) -> TrialRow:
    return trial_row(number, status=Status.FAILED, reason=Reason("error", message, cause=cause))


def test_the_cause_is_the_errors_type_and_place_whatever_its_message() -> None:
    """A message may quote the sample that it met."""
    rows = [raised(n, f"KeyError: 'score' on {text!r}", "KeyError at r.py:3") for n, text in enumerate("abc")]
    assert failing(rows) is not None
    assert failing([*rows[:2], raised(2, "KeyError: 'score' on 'c'", "KeyError at r.py:9")]) is None


def score(text: str) -> float:
    return {"good": 1.0}[text]


def error_of(text: str, wrap: bool = True) -> Exception:
    try:
        try:
            score(text)
        except KeyError as error:
            if not wrap:
                raise
            raise RewardError(f"the reward raised on {text}") from error
    except Exception as error:
        return error
    raise AssertionError


def test_the_cause_of_a_failure_is_the_error_that_came_first() -> None:
    one, other = Failed.of(error_of("bad")), Failed.of(error_of("worse"))
    line = inspect.getsourcelines(score)[1] + 1
    assert one.cause == other.cause == f"KeyError at {__file__}:{line}"
    assert Failed.of(error_of("bad", wrap=False)).cause == one.cause
    assert one.message != other.message and error_reason(one, None).cause == one.cause
    assert Failed.of(ValueError("never raised")).cause == "ValueError"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "input/output error"), True),
        (OSError(errno.ESTALE, "stale file handle"), True),
        (OSError(errno.ENOSPC, "no space left on device"), True),
        (RewardOutage("cannot be reached, after 3 attempts"), True),
        (RewardError("answered with words"), False),
        (OSError(errno.ENOENT, "no such file"), False),
        (RuntimeError("CUDA error"), False),
        (ConfigError("not allowed"), False),
    ],
)
def test_an_outage_is_told_from_other_errors_also_where_it_is_only_the_cause(error: Exception, expected: bool) -> None:
    assert Failed.of(error).is_outage is expected
    outer = CheckpointError("cannot be written")
    outer.__cause__ = error
    assert Failed.of(outer).is_outage is expected


def test_reasons_hold_the_end_of_the_log_and_a_lost_workers_its_last_words() -> None:
    log = "=== attempt\nCUDA error: no kernel\n--- worker lost"
    reason = lost_reason("exit code 1", 2, log)
    assert reason.message == "worker lost after 2 retries: exit code 1; the last it printed: CUDA error: no kernel"
    assert reason.log == log and lost_reason("exit code 1", 2).message.endswith("exit code 1")
    error = error_reason(Failed("ValueError: no", "Traceback"), "runs/x/error.txt", log)
    assert (error.message, error.log) == ("ValueError: no (traceback in runs/x/error.txt)", log)
    assert error_reason(Failed("ValueError: no", "Traceback"), None).message == "ValueError: no"
