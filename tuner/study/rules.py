"""All limits on trials, declared once: rules that end a trial, and signs of what is wrong. Never imports torch.

The guard enforces `RULES`. The diagnosis, its command and the dashboard read `SIGNS`. Limits without a source are
rules of thumb, chosen to trip late rather than wrongly. No rule ends a trial for shrinking responses, since a task may
well reward brevity.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ppo_core.config import checks
from ppo_core.config.checks import Bounds
from ppo_core.config.declare import HyperValue
from ppo_core.errors import ConfigError
from ppo_core.metrics import METRICS, REPETITION_WINDOW
from ppo_core.report import KL_GAP, KL_GAP_LIMIT, MISMATCH, MISMATCH_LIMIT
from tuner.study.status import Reason

KL = "objective/kl_exact"
ENTROPY = "policy/entropy_avg"
VALUE_LOSS = "loss/value_avg"
REPETITION = "response/repetition"
RETURN_STD = "val/return_std"
LENGTH = "response/length_mean"
KL_STEP, WANTED_KL_STEP = "policy/kl_step", "policy/kl_step_wanted"

Blame = Literal["kl", "broken", "idle"]
"""Problem for which a rule ends a trial: too much KL, a broken run, or nothing learned."""

Moves = tuple[tuple[str, float], ...]
"""Changes, best first: a hyperparameter and a factor; inf and 0: up and down, as far as KL asks."""


class Knob(NamedTuple):
    """The hyperparameter to change in place of one that the run moves by itself."""

    name: str
    power: float
    """Power of the factor that the other one would get."""
    replaces: Callable[[Mapping[str, HyperValue]], bool]
    """Says whether a run of this config moves the other one by itself."""


IN_PLACE_OF: Mapping[str, Knob] = MappingProxyType(
    {
        "kl_coef": Knob("kl_target", -1.0, lambda config: config.get("kl_target") is not None),  # β acts as a price
        "learning_rate": Knob("kl_step", 0.5, lambda config: config.get("lr_controller") == "kl_step"),
    }
)


def knob_of(name: str, config: Mapping[str, HyperValue]) -> tuple[str, float]:
    """Return what to change in a run of this config to the effect of a change of `name`, and the factor's power."""
    knob = IN_PLACE_OF.get(name)
    return (knob.name, knob.power) if knob is not None and knob.replaces(config) else (name, 1.0)


IDLE_STEPS = 8
"""Fewest iterations before a trial is ended for standing still: a short one is over before it could save much."""

ROUNDING = 0.02
"""Share of the KL budget up to which the KL of a policy that has not moved may be rounding."""

EARLY = 0.2
"""Share of the episodes in which β has no time to respond."""

_SHARE = Bounds(0, 1, low_open=True, high_open=True)
_TIMES = Bounds(1)
_POSITIVE = Bounds(0, low_open=True)

_LESS_KL: Moves = (("kl_coef", math.inf), ("learning_rate", 0.0))
_MORE_KL: Moves = (("kl_coef", 0.0), ("learning_rate", math.inf))
_FASTER: Moves = (("learning_rate", 3.0), ("kl_coef", 0.25))
_SLOWER: Moves = (("learning_rate", 0.3), ("kl_coef", 4.0))
_HELD: Moves = (("kl_coef", 2.0), ("learning_rate", 0.5))
_SMALLER_UPDATES: Moves = (("num_ppo_epochs", 0.5), ("cliprange", 0.5))
_FEWER_UPDATES: Moves = (("num_ppo_epochs", 0.5), ("learning_rate", 0.5))  # a lower cliprange clips even more
_SLOWER_CRITIC: Moves = (("value_learning_rate", 0.3), ("vf_coef", 0.3))
_FASTER_CRITIC: Moves = (("value_learning_rate", 3.0), ("vf_coef", 3.0))
_MORE_EPOCHS: Moves = (("num_ppo_epochs", 2.0), ("learning_rate", 3.0))
_EARLIER_CUT: Moves = (("mini_batch_size", 0.5), ("num_mini_batches", 2.0), ("num_ppo_epochs", 0.5))


@dataclass(frozen=True)
class Limit:
    """A limit on a metric, its meaning, and the change to make if it is broken."""

    name: str
    label: str
    doc: str
    metric: str | None
    """None: several metrics."""
    limit: float
    """Default, where a study file may set it."""
    moves: Moves = ()
    relative_to: str = ""
    """Quantity that the limit multiplies; empty: the limit is in the metric's unit."""
    breaks_below: bool = False
    """True if readings under the limit break it, not those over."""

    @property
    def range(self) -> str:
        """Range of a sound reading, in words."""
        times = f"{self.limit:g} times {self.relative_to}" if self.limit != 1 else self.relative_to
        return f"{'at least' if self.breaks_below else 'at most'} {times if self.relative_to else f'{self.limit:g}'}"

    @property
    def change(self) -> str:
        """The changes, in words."""
        return ", else ".join(_in_words(name, factor > 1) for name, factor in self.moves)

    def reads(self, value: float) -> str:
        """Return a reading with its allowed range, in words; of a relative limit the reading is a multiple."""
        label = METRICS[str(self.metric)].label
        if not self.relative_to:
            return f"{label} is {value:.3g} ({self.range})"
        least = "at least" if self.breaks_below else "at most"
        return f"{label} is {value:.3g} times {self.relative_to} ({least} {self.limit:g})"

    def is_broken(self, value: float, of: float = 1.0) -> bool:
        """Return True if a reading breaks it; a relative limit is multiplied by `of`."""
        return value < self.limit * of if self.breaks_below else value > self.limit * of


@dataclass(frozen=True)
class Rule(Limit):
    """A rule of the guard: it ends a trial."""

    blame: Blame = "broken"
    valid: Bounds | None = None
    """Allowed limits in a study file; None: it sets none, and switches the rule on or off by true or false."""
    is_patient: bool = True
    """True if it must be broken for `patience` steps in a row."""
    has_grace: bool = False
    """True if it is silent at the start of a trial."""

    @property
    def allowed(self) -> str:
        """The allowed settings, in words."""
        return f"a number {self.valid}, or false to switch the rule off" if self.valid else "true or false"


@dataclass(frozen=True)
class Sign(Limit):
    """A sign of what is wrong with a trial, which the diagnosis reads."""

    after: float = 0.0
    """Share of the run's iterations to be read for a verdict, 2 at least; of health or of the KL step."""
    of_whole_run: bool = False
    """True if it is the largest reading so far while KL hardly moves, not a median of the last steps; of health."""


def _in_words(name: str, is_up: bool) -> str:
    """Return a change and, where a run may move `name` by itself, the one in its place."""
    words, knob = f"a {'higher' if is_up else 'lower'} {name}", IN_PLACE_OF.get(name)
    return words if knob is None else f"{words} or a {'higher' if is_up is (knob.power > 0) else 'lower'} {knob.name}"


_LARGE, _BUDGET, _FIRST = "Updates too large", "the KL budget", "the first reading"
_WANTED = "the wanted one"
RETURNS = "the variance of the returns"
STRAIGHT = "that of a straight course"

_ENDING = (
    Rule("nonfinite", "Not a number", "A core metric is NaN or infinite. Stops at once.", None, 0.0, _SLOWER, is_patient=False),
    Rule(
        "kl_hard", "KL far over the limit", "The KL of a single step is over this many times the KL limit. Stops at once.",
        KL, 4.0, _LESS_KL, "the KL limit", blame="kl", valid=_TIMES, is_patient=False,
    ),
    Rule("kl_limit", "KL over the limit", "The KL stays over the KL limit.", KL, 1.0, _LESS_KL, "the KL limit", blame="kl"),
    Rule(
        "entropy_collapse", "Entropy collapse",
        "The policy's entropy stays under this share of its first reading. Where one answer is right, a policy may well "
        "become certain: switch the rule off for such a task.",
        ENTROPY, 0.02, _HELD, _FIRST, breaks_below=True, valid=_SHARE, has_grace=True,
    ),
    Rule(
        "repetition_collapse", "Repetition collapse",
        "Repetition stays over this share of the way from its first reading to 1, as with 3 distinct tokens of "
        f"{REPETITION_WINDOW}.",
        REPETITION, 0.8, _HELD, "the way from the first reading to 1", valid=_SHARE, has_grace=True,
    ),
    Rule(
        "value_divergence", "Value divergence",
        "The value loss stays over this many times its scale. The scale is the largest value loss of the grace "
        "period, or the largest variance of the returns if that is more. Steps in which the critic diverges "
        "(see the signs) do not count for the variance, since they would inflate it.",
        VALUE_LOSS, 100.0, _SLOWER_CRITIC, "its scale", valid=_TIMES, has_grace=True,
    ),
    Rule(
        "sampler_mismatch", "Sampler mismatch",
        "The sampler and the training forward stay this far apart on some token's log-prob, in nats. Low "
        "precision makes tenths of a nat, a wrong mask or temperature makes several.",
        MISMATCH, MISMATCH_LIMIT, valid=_POSITIVE,
    ),
    Rule(
        "sampled_kl", "Sampled KL apart from exact KL",
        "The sampled KL (k1) stays away from the exact KL of the same responses by more than this many times "
        "its noise. If tokens are sampled from the distribution that is trained, the two differ only by chance "
        "and rounding.",
        KL_GAP, KL_GAP_LIMIT, (), "its noise", valid=_POSITIVE, has_grace=True,
    ),
    Rule(
        "nothing_learned", "Nothing learned",
        f"After half of the trial's episodes and at least {IDLE_STEPS} steps, the policy has not moved: the KL has "
        "neither risen by this share of the KL budget above its lowest reading since the first update "
        f"(which may be rounding alone), nor reached {ROUNDING:g} of the budget. It never ends a trial that has run "
        "all its episodes. Where the first KL is over this already, as with top-k or top-p, only the evaluation's KL "
        "counts.",
        KL, 0.002, _FASTER, "the KL budget", breaks_below=True, blame="idle", valid=_SHARE, is_patient=False,
    ),
)  # fmt: skip
_HEALTH = (
    Sign(
        "updates_small", "Updates too small",
        "Read only if KL lags far behind a linear course to the budget; the reading is then the largest of the "
        "run. It is measured against a straight course, in which all updates pull the same way: that reaches "
        "the KL budget if each iteration's approx KL, per response, is the budget divided by the square of the "
        "number of iterations. Sound trials of the built-in tasks reach 70 times that; a trial with a "
        "hundredth of a sound learning rate reaches 0.7 times. With a single update per rollout the metric is "
        "always 0.",
        "policy/approxkl_avg", 1.0, _FASTER, STRAIGHT, breaks_below=True, of_whole_run=True,
    ),
    Sign("approx_kl", _LARGE, "OpenAI Spinning Up ends its epochs at 0.01 to 0.05.", "policy/approxkl_avg", 0.05, _SMALLER_UPDATES),
    Sign("clip_fraction", _LARGE, "That many tokens have moved as far as cliprange lets them, and no longer learn.", "policy/clipfrac_avg", 0.3, _FEWER_UPDATES),
    Sign("ratio_high", _LARGE, "TRL's tips for debugging: it should stay near 1.", "val/ratio", 1.1, _SMALLER_UPDATES),
    Sign("ratio_low", _LARGE, "TRL's tips for debugging: it should stay near 1.", "val/ratio", 0.9, _SMALLER_UPDATES, breaks_below=True),
    Sign(
        "value_loss", "Critic diverges",
        "A critic that always predicts the mean return has a loss of half the variance; one that is 2.4 "
        "standard deviations off has 3 times the variance. If the loss started higher, as it can without "
        "normalize_values, it is compared with its start.",
        VALUE_LOSS, 3.0, _SLOWER_CRITIC, RETURNS, after=1 / 3,
    ),
    Sign(
        "var_explained", "Critic explains nothing",
        "By definition: under 0 the critic predicts worse than the mean return. Sound trials end at 0.03 to 0.7.",
        "val/var_explained", 0.0, _FASTER_CRITIC, breaks_below=True, after=1 / 3,
    ),
)  # fmt: skip
_COURSE = (
    Sign("kl_early", "KL too high", f"KL of the rollouts, within the first {EARLY:.0%} of the episodes: β has no time to answer.", KL, 1.0, _SLOWER, "the KL limit"),
    Sign("kl_end", "KL too high", "KL at the end.", "eval/kl", 1.0, _LESS_KL, _BUDGET),
    Sign("kl_stuck", "KL budget unused", "The highest KL, once at least half of the episodes have run. If a fixed β is so high that even the best possible policy stays under the budget, lower β first.", "eval/kl", 0.1, _FASTER, _BUDGET, breaks_below=True),
    Sign(
        "kl_step_low", "KL step not reached",
        "Median of the last third of the run. The first learning rate is too far below the right one for so short a "
        "run, or rounding hides what a step changes.",
        KL_STEP, 0.3, _MORE_EPOCHS, _WANTED, breaks_below=True, after=0.2,
    ),
    Sign(
        "kl_step_high", "KL step overshot",
        "Median of the last third of the run. Too few mini-batches to end the updates of an iteration in time.",
        KL_STEP, 3.0, _EARLIER_CUT, _WANTED, after=0.2,
    ),
    Sign("kl_unspent", "Stable but slow", "KL at the end, while reward still rises.", "eval/kl", 0.5, _MORE_KL, _BUDGET, breaks_below=True),
    Sign("longer", "Reward hacking", "While reward rises.", "eval/length", 1.5, _HELD, _FIRST),
    Sign("shorter", "Reward hacking", "While reward rises.", "eval/length", 0.5, _HELD, _FIRST, breaks_below=True),
    Sign("repeats", "Reward hacking", "Rise of repetition, while reward rises.", "eval/repetition", 0.15, _HELD),
    Sign("narrows", "Reward hacking", "While reward rises.", "eval/entropy", 0.5, _HELD, _FIRST, breaks_below=True),
)  # fmt: skip

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _ENDING})
"""Rules that end a trial, by name. If several break in one step, the first names the reason."""

SIGNS: Mapping[str, Sign] = MappingProxyType({sign.name: sign for sign in (*_HEALTH, *_COURSE)})
"""Signs of what is wrong with a trial, by name."""

HEALTH = tuple(sign.name for sign in _HEALTH)
"""Names of the signs of PPO health."""


def blame_of(reason: Reason | None) -> Blame | None:
    """Return the problem for which a rule ended a trial, or None if no rule did."""
    rule = None if reason is None else RULES.get(reason.rule)
    return None if rule is None else rule.blame


@dataclass(frozen=True)
class GuardSettings:
    """The limits of one study's guard."""

    kl_limit: float
    """In nats per response."""
    patience: int = 3
    """Consecutive iterations that a patient rule must be broken, however many there are: one batch may be odd."""
    grace: float = 0.1
    """Share of a trial's episodes in which the rules with a grace period are silent."""
    limits: Mapping[str, float] = field(default_factory=lambda: {rule.name: rule.limit for rule in RULES.values()})
    """Each rule's limit by name."""
    off: frozenset[str] = frozenset()
    """Names of the rules that are switched off."""

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], kl_limit: float, where: str) -> "GuardSettings":
        """Return the settings of a study file's [guard] table, with defaults; `where` names the table in errors.

        Raises:
            ConfigError: an unknown key, or a value that is not allowed.
        """
        checks.require_known(table, ("patience", "grace", *RULES), f"{where}.")
        off = frozenset(name for name in RULES if table.get(name) is False)
        set_limits = {
            name: _limit(RULES[name], value, f"{where}.{name}")
            for name, value in table.items()
            if name in RULES and name not in off
        }
        return cls(
            kl_limit,
            checks.integer(table.get("patience", cls.patience), Bounds(1), f"{where}.patience"),
            checks.number(table.get("grace", cls.grace), Bounds(0, 1, high_open=True), f"{where}.grace"),
            {**{rule.name: rule.limit for rule in RULES.values()}, **set_limits},
            off,
        )

    def to_dict(self) -> dict[str, float]:
        """Return the [guard] table that `from_dict` reads (the KL limit is not part of it)."""
        rules = {
            name: name not in self.off and (rule.valid is None or self.limits[name]) for name, rule in RULES.items()
        }
        return {"patience": self.patience, "grace": self.grace, **rules}


def _limit(rule: Rule, value: object, where: str) -> float:
    if value is True and rule.valid is None:
        return rule.limit
    with suppress(ConfigError):
        if rule.valid is not None:
            return checks.number(value, rule.valid, where)
    given = "true" if value is True else repr(value)
    raise ConfigError(f"{where} = {given} is not allowed; expected {rule.allowed}")
