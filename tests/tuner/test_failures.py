"""When failures stop a study."""

import pytest

from tests.tuner.trial_rows import trial_row
from tuner.failures import FailureStreak
from tuner.status import Reason, Status
from tuner.store import TrialRow


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
    streak = FailureStreak()
    told = [streak.add(row) for row in rows]
    assert [row.number for row, text in zip(rows, told, strict=True) if text] == (
        [] if stops_at is None else [stops_at]
    )
    if stops_at is not None:
        assert f"trial {stops_at}: {rows[-1].reason.message}" in str(told[-1])  # type: ignore[union-attr]
