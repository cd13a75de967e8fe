"""Checks that sampler and trainer agree: metrics and alarm thresholds. Never imports torch.

Two signs of disagreement: a token's log-probability when sampled differs from the one in training; and sampled and
exact KL differ, though k1 estimates the exact KL without bias for tokens drawn from the trained distribution.
"""

from collections.abc import Mapping

from ppo_core.report import StepReport

MISMATCH = "sampler/mismatch"
MISMATCH_LIMIT = 1.0
"""In nats. Low precision causes tenths of a nat; a wrong mask or temperature, several."""

KL_GAP, KL_GAP_NOISE = "sampler/kl_gap", "sampler/kl_gap_noise"
KL_GAP_LIMIT = 4.0
"""In multiples of the noise."""
KL_GAP_STEPS = 3
"""Consecutive steps over the limit before a warning: a single one may be chance."""


class AgreementWatch:
    """Warns, once per sign, that a run's sampler and trainer disagree."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._gaps = 0

    def warnings(self, report: StepReport) -> list[str]:
        """Return the new warnings after a step, one line each."""
        lines = []
        mismatch = report.metrics.get(MISMATCH, 0.0)
        if mismatch > MISMATCH_LIMIT and self._is_new(MISMATCH):
            lines.append(
                f"sampler mismatch of {mismatch:.3g} nats at step {report.step}, over {MISMATCH_LIMIT:g}: sampler and "
                f"trainer disagree ({MISMATCH}), so this run's KL cannot be trusted"
            )
        self._gaps = self._gaps + 1 if is_apart(report.metrics) else 0
        if self._gaps >= KL_GAP_STEPS and self._is_new(KL_GAP):
            lines.append(
                f"sampled and exact KL were {abs(report.metrics[KL_GAP]):.3g} nats per response apart at step "
                f"{report.step}, for {self._gaps} steps over {KL_GAP_LIMIT:g} times their noise: sampler and trainer "
                f"disagree ({KL_GAP}), so this run's KL cannot be trusted"
            )
        return lines

    def _is_new(self, sign: str) -> bool:
        is_new = sign not in self._warned
        self._warned.add(sign)
        return is_new


def is_apart(metrics: Mapping[str, float]) -> bool:
    """Return True if sampled and exact KL differ by more than chance explains."""
    if KL_GAP not in metrics or KL_GAP_NOISE not in metrics:
        return False
    return abs(metrics[KL_GAP]) > KL_GAP_LIMIT * metrics[KL_GAP_NOISE]
