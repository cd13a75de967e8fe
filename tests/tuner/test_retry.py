"""When failures stop a study."""

import errno
import inspect
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import pytest

from ppo_core.errors import CheckpointError, ConfigError, RewardError, RewardOutage
from tests.tuner.trial_rows import trial_row
from tuner.control.retry import error_reason, failing, lost_reason
from tuner.engine.protocol import Failed
from tuner.store import TrialRow
from tuner.study.status import STOPPED_BY_PERSON, Reason, Status


def told_by(rows: list[TrialRow]) -> list[str | None]:
    """What is told after each of the trials has ended."""
    return [failing(rows[: count + 1], row.number) for count, row in enumerate(rows)]


def failed(number: int, cause: str, **values: Any) -> TrialRow:
    return trial_row(number, status=Status.FAILED, reason=Reason("error", f"told of {number}", cause=cause), **values)


def pruned(number: int, metric: str = "objective/kl_exact", **values: Any) -> TrialRow:
    return trial_row(number, status=Status.PRUNED, reason=Reason("kl_limit", "too far", metric), **values)


@pytest.mark.parametrize(
    ("rows", "stops_at"),
    [
        ([failed(0, "no disk"), failed(1, "no disk"), failed(2, "no disk")], 2),
        ([failed(0, "no disk"), failed(1, "no disk"), trial_row(2), failed(3, "no disk")], None),
        ([failed(0, "no disk"), failed(1, "no disk"), pruned(2), failed(3, "no disk")], None),
        ([failed(0, "no disk"), failed(1, "no net"), failed(2, "no disk")], None),
        ([failed(0, "no net"), failed(1, "no disk"), failed(2, "no disk"), failed(3, "no disk")], 3),
        ([pruned(0), pruned(1), pruned(2)], None),
        ([pruned(0, episodes=0), pruned(1, episodes=0), pruned(2, episodes=0)], 2),
        ([pruned(0, episodes=0), pruned(1, "objective/scores", episodes=0), pruned(2, episodes=0)], None),
        ([pruned(0, episodes=0), failed(1, "no disk"), pruned(2, episodes=0)], None),
        ([pruned(0, episodes=0), pruned(1), pruned(2, episodes=0), pruned(3, episodes=0)], None),
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
    assert failing([*rows, failed(5, "no disk")], 5) is not None


def running(number: int, episodes: int, **values: Any) -> TrialRow:
    return trial_row(number, status=Status.RUNNING, episodes=episodes, **values)


def fork(number: int, episodes: int, **values: Any) -> TrialRow:
    """Return a trial forked at episode 192."""
    return trial_row(number, episodes=episodes, fork_step=3, config={"batch_size": 64}, **values)


@pytest.mark.parametrize(
    ("between", "stops"),
    [
        (running(1, 120), False),
        (running(1, 100), True),
        (trial_row(1, status=Status.WAITING, episodes=0), True),
        (fork(1, 192, status=Status.WAITING, attempts=0), True),  # of which nothing is its own
        (fork(1, 256, status=Status.RUNNING), True),  # 64 of its own
        (fork(1, 320, status=Status.RUNNING), False),
        (trial_row(1, status=Status.PAUSED, episodes=120), False),
        (trial_row(1, status=Status.PAUSED, episodes=80), True),
        (stopped(1), True),
        (pruned(1), False),
        (trial_row(1), False),
    ],
)
def test_a_trial_that_came_further_than_failed_ones_breaks_the_row(between: TrialRow, stops: bool) -> None:
    """They failed at episode 100; one that is still on its way there may fail, too."""
    rows = [failed(0, "no disk"), between, failed(2, "no disk"), failed(3, "no disk")]
    assert (failing(rows, 3) is not None) == stops
    after = [*(replace(row, number=number) for number, row in enumerate((rows[0], rows[2], rows[3], between)))]
    assert (failing(after, 2) is not None) == stops, "it was started after them, and they failed first"
    before = [*(replace(row, number=number) for number, row in enumerate((between, rows[0], rows[2], rows[3])))]
    assert failing(before, 3) is not None, "it was started before them: it says nothing of what is started now"


def test_trials_that_fail_further_on_are_in_a_row_despite_shorter_ones() -> None:
    rows = [trial_row(n, episodes=100) for n in range(9)]
    for number in (2, 5, 8):
        rows[number] = failed(number, "no disk", episodes=300)
    assert failing(rows, 5) is not None
    assert failing([*rows[:8], failed(8, "no disk", episodes=50)], 5) is None, "where that one failed others came past"


def test_a_fork_failed_as_far_as_it_came_itself() -> None:
    rows = [replace(fork(n, 192), status=Status.FAILED, reason=failed(n, "no disk").reason) for n in range(4)]
    rows[1] = running(1, 120)
    assert failing(rows, 3) is None, "they failed at once, and trial 1 did not"


def test_only_the_failure_that_completes_the_row_stops_the_study() -> None:
    rows = [failed(n, "no disk") for n in range(3)]
    assert failing([*rows, failed(3, "no net")], 3) is None
    old = [failed(0, "no net", episodes=300), *rows[1:], failed(3, "no disk")]
    assert failing(old, 0) is None


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
    rows = [
        trial_row(n, status=Status.FAILED, reason=error_reason(each, None)) for n, each in enumerate((one, other, one))
    ]
    assert failing(rows, 2) is not None, "whatever the messages quote of the samples"


def read(text: str) -> object:
    return json.loads(text)


def read_again(text: str) -> object:
    return json.loads(text)


def caught(work: Callable[[], object]) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError


def test_the_place_of_a_failure_is_the_innermost_line_that_is_no_librarys() -> None:
    places = [Failed.of(caught(lambda each=each: each("no"))).cause for each in (read, read_again)]
    lines = [inspect.getsourcelines(each)[1] + 1 for each in (read, read_again)]
    assert places == [f"JSONDecodeError at {__file__}:{line}" for line in lines]
    assert Failed.of(caught(lambda: bytearray(-1))).cause.startswith(f"ValueError at {__file__}:")


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
def test_an_outage_is_told_from_other_errors_by_its_cause_too(error: Exception, expected: bool) -> None:
    assert Failed.of(error).is_outage is expected
    outer = CheckpointError("cannot be written")
    outer.__cause__ = error
    assert Failed.of(outer).is_outage is expected


def test_a_host_that_a_reward_function_asks_in_vain_is_an_outage() -> None:
    """Here as in most libraries the error that is raised does not name its cause."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        no_proxy = build_opener(ProxyHandler({}))
        error = caught(lambda: no_proxy.open(url))
    outer = RewardError("the function raised")
    outer.__cause__ = error
    assert isinstance(error, URLError) and error.errno is None and error.__cause__ is None
    assert Failed.of(error).is_outage and Failed.of(outer).is_outage


def test_what_fails_while_a_user_handles_an_outage_is_no_outage() -> None:
    """The error is the fallback's: starts that waited for the host would wait for nothing."""

    def score(fallback: Callable[[], object]) -> object:
        try:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        except ConnectionRefusedError:
            return fallback()

    for fallback in (lambda: {}["prompt"], Path("/none").read_text):  # in the user's line, and in a library's
        error = caught(lambda each=fallback: score(each))
        assert isinstance(error.__context__, ConnectionRefusedError)
        outer = RewardError("the function raised")
        outer.__cause__ = error
        assert not Failed.of(error).is_outage and not Failed.of(outer).is_outage


def test_reasons_hold_the_end_of_the_log_and_a_lost_workers_its_last_words(tmp_path: Path) -> None:
    log = "=== 2026-11-28T12:00:00Z attempt\nCUDA error: no kernel\n--- 2026-11-28T12:01:00Z worker lost"
    reason = lost_reason("exit code 1", 2, log)
    assert reason.message == "worker lost after 2 retries: exit code 1; the last it printed: CUDA error: no kernel"
    assert reason.log == log and lost_reason("exit code 1", 2).message.endswith("exit code 1")
    file = tmp_path / "log.txt"
    unplaced = error_reason(Failed("node 10.0.0.7 lacks it"), file)
    file.write_text(log)
    error = error_reason(Failed("ValueError: no"), file, log)
    assert (error.message, error.log) == (f"ValueError: no (traceback in {file})", log)
    assert (unplaced.message, unplaced.cause) == ("node 10.0.0.7 lacks it", "node #.#.#.# lacks it")
