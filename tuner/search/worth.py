"""Whether another trial of a search is worth its cost. Never imports torch.

The values of n trials that ran, with mean m, variance v and mean squared standard error e of their evaluations, are
about normal. What they differ by beside the noise of an evaluation, and where the best of them really is, is

    s² = max(v - e, 0)        b = m + (highest - m) · s² / v

Another trial is expected to add (expected improvement; Jones, Schonlau and Welch 1998)

    gain = s · (φ(z) - z · Φ(-z)),    z = (b - m) / s

A search ends where that is less than LEAST_GAIN of what its best has gained over the SFT policy.
"""

import math
import statistics
from collections.abc import Sequence

from tuner.judge.best import is_sound
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin

LEAST_TRIALS = 6
"""Trials with a value, before which no search ends."""
LEAST_GAIN = 0.005
"""Least gain that another trial is to promise, as a share of the gain so far."""


def outlook(rows: Sequence[TrialRow]) -> tuple[float, float] | None:
    """Return what a search has gained, and what another trial is expected to add, in reward; None: too few values."""
    own = [row for row in rows if row.informs_sampler and row.origin in (Origin.REFERENCE, Origin.SAMPLED)]
    ended = [row for row in own if row.status.is_final]
    valued = [row for row in ended if row.value is not None and row.sft_reward is not None and is_sound(row)]
    values = [row.value for row in valued if row.value is not None]
    if len(values) < LEAST_TRIALS:
        return None
    gained = max(values) - statistics.fmean(row.sft_reward for row in valued if row.sft_reward is not None)
    return gained, expected_gain(values, [row.value_se or 0.0 for row in valued])


def expected_gain(values: Sequence[float], errors: Sequence[float]) -> float:
    """Return what another trial is expected to add to the best of these values, by the formula above."""
    mean, variance = statistics.fmean(values), statistics.variance(values)
    between = max(variance - statistics.fmean(error**2 for error in errors), 0.0)
    if between == 0:
        return 0.0
    spread = math.sqrt(between)
    z = (max(values) - mean) * between / variance / spread
    normal = statistics.NormalDist()
    return spread * (normal.pdf(z) - z * normal.cdf(-z))


def ends_early(spec: StudySpec, rows: Sequence[TrialRow]) -> bool:
    """Return True if a search ends before its budget is spent."""
    if spec.listed or not spec.stop_early:
        return False
    found = outlook(rows)
    return found is not None and found[1] < LEAST_GAIN * found[0]
