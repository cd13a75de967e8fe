"""The guard's rules, each declared once with its default limit. Never imports torch.

The defaults of the last rules are chosen to be late rather than wrong. A shrinking response is no
rule: a task may well reward brevity.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ppo_core.agreement import KL_GAP, KL_GAP_LIMIT, MISMATCH, MISMATCH_LIMIT
from ppo_core.declare import Bounds

KL = "objective/kl_exact"
ENTROPY = "policy/entropy_avg"
VALUE_LOSS = "loss/value_avg"
REPETITION = "response/repetition"

Blame = Literal["kl", "broken", "idle"]
"""What a stop says of the trial: too much KL, a run that broke, or one that stood still."""

IDLE_STEPS = 8
"""Steps that a trial has at least before it is ended for standing still: nothing is learned yet in the first one."""

_SHARE = Bounds(0, 1, low_open=True, high_open=True)
_TIMES = Bounds(1)
_POSITIVE = Bounds(0, low_open=True)


@dataclass(frozen=True)
class Rule:
    """One rule. A rule without `valid` has no number of its own: it is only on or off."""

    name: str
    label: str
    doc: str
    blame: Blame
    metric: str | None
    """The metric that it reads; None: several."""
    limit: float | Literal[True]
    """The default."""
    valid: Bounds | None = None
    relative_to: str = ""
    """What the limit is a share or multiple of; empty: the limit is in the metric's unit."""
    breaks_below: bool = False
    """Whether a reading under the limit breaks it, instead of one over it."""
    is_patient: bool = True
    """Whether it waits until it is broken for `patience` steps in a row."""
    has_grace: bool = False
    """Whether it is silent at the start of a trial."""

    @property
    def allowed(self) -> str:
        """What its setting may be, in words."""
        return f"a number {self.valid}, or false to switch the rule off" if self.valid else "true or false"


_DECLARED = (
    Rule(
        name="nonfinite",
        label="Not a number",
        doc="A core metric is NaN or infinite. Stops at once.",
        blame="broken",
        metric=None,
        limit=True,
        is_patient=False,
    ),
    Rule(
        name="kl_hard",
        label="KL far over the limit",
        doc="The KL of a single step is over this many times the KL limit. Stops at once.",
        blame="kl",
        metric=KL,
        limit=4.0,
        valid=_TIMES,
        relative_to="the KL limit",
        is_patient=False,
    ),
    Rule(
        name="kl_limit",
        label="KL over the limit",
        doc="The KL stays over the KL limit.",
        blame="kl",
        metric=KL,
        limit=True,
    ),
    Rule(
        name="entropy_collapse",
        label="Entropy collapse",
        doc="The policy's entropy stays under this share of its first reading. Where one answer is right, a policy "
        "may well become certain: switch the rule off for such a task.",
        blame="broken",
        metric=ENTROPY,
        limit=0.02,
        valid=_SHARE,
        relative_to="the first reading",
        breaks_below=True,
        has_grace=True,
    ),
    Rule(
        name="repetition_collapse",
        label="Repetition collapse",
        doc="Repetition stays over this share of the way from its first reading to 1: of 24 tokens, 3 different ones.",
        blame="broken",
        metric=REPETITION,
        limit=0.8,
        valid=_SHARE,
        relative_to="the way from the first reading to 1",
        has_grace=True,
    ),
    Rule(
        name="value_divergence",
        label="Value divergence",
        doc="The value loss stays over this many times its scale: the largest of its readings in the grace period "
        "and of the mean square of score and KL penalty (twice the loss of a critic that always says 0).",
        blame="broken",
        metric=VALUE_LOSS,
        limit=100.0,
        valid=_TIMES,
        relative_to="its scale",
        has_grace=True,
    ),
    Rule(
        name="sampler_mismatch",
        label="Sampler mismatch",
        doc="The sampler and the training forward stay this far apart on some token's log-prob, in nats. Low "
        "precision makes tenths of a nat, a wrong mask or temperature makes several.",
        blame="broken",
        metric=MISMATCH,
        limit=MISMATCH_LIMIT,
        valid=_POSITIVE,
    ),
    Rule(
        name="sampled_kl",
        label="Sampled KL apart from exact KL",
        doc="The sampled KL (k1) stays this many times its noise away from the exact KL of the same responses. The "
        "two agree but for chance where tokens are sampled from the distribution that is trained.",
        blame="broken",
        metric=KL_GAP,
        limit=KL_GAP_LIMIT,
        valid=_POSITIVE,
        relative_to="its noise",
        has_grace=True,
    ),
    Rule(
        name="nothing_learned",
        label="Nothing learned",
        doc=f"After half of the trial's episodes and at least {IDLE_STEPS} steps the KL never reached this, in nats "
        "per response: the policy is where it began. A trial that has run all its episodes is never ended by it. "
        "Where the first KL is over this already, as with top-k or top-p, only the evaluation's KL counts.",
        blame="idle",
        metric=KL,
        limit=0.01,
        valid=_POSITIVE,
        breaks_below=True,
        is_patient=False,
    ),
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _DECLARED})
"""Every rule by name. Where several break in one step, the first names the reason."""
