"""A study's trials as Optuna reads them: state, value and constraint by status. Never imports torch.

| status                  | Optuna state | value                       | constraint |
|-------------------------|--------------|-----------------------------|------------|
| waiting, running        | RUNNING      |                             |            |
| paused, not evaluated   | RUNNING      |                             |            |
| paused by a person      | PRUNED       | so far                      | satisfied  |
| completed               | COMPLETE     | of the trial                | satisfied  |
| pruned: broken          | PRUNED       | so far, else the SFT one's  | 1          |
| pruned: other rules     | PRUNED       | so far                      | satisfied  |
| stopped by a person     | PRUNED       | so far                      | satisfied  |
| failed                  | FAIL         |                             |            |
| any, not of the search  | FAIL         |                             |            |
| the baseline            | FAIL         |                             |            |

A value comes from a checkpoint within the KL budget, so a satisfied constraint is its log(KL / budget), at most 0.

The states are those of an exported study. To the study's own sampler every trial with a value is reported as COMPLETE,
since that value counts however the trial ended: TPE would put all COMPLETE trials before all PRUNED ones, and rank
those by their last step.

A fork's result is not due to its configuration alone, a confirming run says nothing new about where to search, and the
baseline is no point of the search. FAIL keeps their numbers.
"""

from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState, create_trial

from tuner.judge.scoring import violation
from tuner.store import TrialRow
from tuner.study.space import Encoded
from tuner.study.spec import StudySpec
from tuner.study.status import Status

CONSTRAINT = "kl"  # its name in Optuna; the value is log(KL / budget), see `tuner.judge.scoring.violation`


@dataclass(frozen=True)
class OptunaReport:
    """A trial's report to a sampler (Optuna's "tell")."""

    state: TrialState
    value: float | None = None
    constraint: float | None = None
    """Finite for every trial that a sampler learns from."""


def to_optuna(row: TrialRow, spec: StudySpec) -> OptunaReport:
    """Return a trial's report to a sampler, by the table above; a completed one that was never evaluated is failed."""
    if not row.informs_sampler or row.status is Status.FAILED:
        return OptunaReport(TrialState.FAIL)
    constraint = violation(row.kl, spec.kl_budget, row.reason)
    if row.status in (Status.WAITING, Status.RUNNING) or (row.status is Status.PAUSED and row.value is None):
        return OptunaReport(TrialState.RUNNING)
    if row.status is Status.COMPLETED and row.value is None:
        return OptunaReport(TrialState.FAIL)
    state = TrialState.COMPLETE if row.status is Status.COMPLETED else TrialState.PRUNED
    return OptunaReport(state, row.value, constraint)


def frozen(report: OptunaReport, encoded: Encoded) -> FrozenTrial:
    params, distributions = encoded
    return create_trial(
        state=report.state,
        value=report.value,
        params=params,
        distributions=distributions,
        constraints=None if report.constraint is None else {CONSTRAINT: report.constraint},
    )
