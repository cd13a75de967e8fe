"""Listed trials: the `[[trial]]` tables of a study file, which are run in order instead of what a sampler proposes.

No torch. A study either searches or lists; its trial 0 is then the first one listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import CategoricalDistribution

from ppo_core import declare
from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError
from ppo_core.hyperparameters.rules import inert
from tuner.space import Encoded
from tuner.study_file import read_fixed

_ONLY_SEARCHED = ("search", "sampler")
"""Tables that do nothing beside listed trials."""


@dataclass(frozen=True)
class ListedTrial:
    """One trial that a study file lists."""

    params: Mapping[str, HyperValue]
    """Its own values, over the study's fixed ones."""
    label: str = ""
    """What people call it; empty: it has no name."""

    def to_dict(self) -> dict[str, HyperValue]:
        """Return the table that `read_listed` reads."""
        return {**({"label": self.label} if self.label else {}), **self.params}


def read_listed(content: Mapping[str, Any], fixed: Mapping[str, HyperValue], where: str) -> tuple[ListedTrial, ...]:
    """Return the `[[trial]]` tables of a parsed study file; none where it has no such key.

    Raises:
        ConfigError: one holds what is not allowed or fixed already, two are the same, there is a table that only a
            search reads, or `trials` says another number.
    """
    if "trial" not in content:
        return ()
    for key in _ONLY_SEARCHED:
        if key in content:
            raise ConfigError(f"{where}: {key} does nothing beside [[trial]] tables; take one of them out")
    found = content["trial"]
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ConfigError(f"{where}: trial = {found!r} is not allowed: [[trial]] tables, one a trial")
    listed = tuple(_read(values, fixed, f"{where}: trial {number}") for number, values in enumerate(found))
    for number, trial in enumerate(listed):
        first = next(i for i, other in enumerate(listed) if other.params == trial.params)
        if first < number:
            raise ConfigError(f"{where}: trial {number} lists the same values as trial {first}; take one of them out")
    require_total(declare.whole(content.get("trials", len(listed)), None, f"{where}: trials"), listed, f"{where}: ")
    return listed


def require_total(trials: int, listed: Sequence[ListedTrial], where: str = "") -> None:
    """Raise ConfigError where a study is to have another number of trials than it lists."""
    if trials != len(listed):
        raise ConfigError(
            f"{where}trials = {trials} is not allowed beside [[trial]] tables: leave it out, or list as many "
            f"(there are {len(listed)})"
        )


def notes(listed: Sequence[ListedTrial], fixed: Mapping[str, HyperValue]) -> list[str]:
    """Return which listed values do nothing in their trial, one line each."""
    return [
        f"trial {number}: {name} does nothing: {why}"
        for number, trial in enumerate(listed)
        for name in trial.params
        if (why := inert(name, {**fixed, **trial.params}))
    ]


def changes(old: Sequence[ListedTrial], new: Sequence[ListedTrial]) -> list[str]:
    """Return where `new` says otherwise than `old` of the trials that `old` lists, one line each."""
    if bool(old) != bool(new):
        return [f"trials: {'listed' if new else 'searched'}, were {'listed' if old else 'searched'}"]
    lines = []
    for number, trial in enumerate(old):
        now = new[number].to_dict() if number < len(new) else "not listed"
        if now != trial.to_dict():
            lines.append(f"trial {number}: {now}, was {trial.to_dict()}")
    return lines


def for_people(listed: Sequence[ListedTrial], params: Mapping[str, HyperValue]) -> Encoded:
    """Return a listed trial's params as Optuna's own tables hold them: each is one of the listed values."""
    choices = {name: dict.fromkeys(t.params[name] for t in listed if name in t.params) for name in params}
    return dict(params), {name: CategoricalDistribution(tuple(values)) for name, values in choices.items()}


def _read(values: object, fixed: Mapping[str, HyperValue], where: str) -> ListedTrial:
    own = dict(declare.table(values, where))
    label = declare.text(own.pop("label"), f"{where}.label") if "label" in own else ""
    params = read_fixed(own, where)
    for name in params:
        if name in fixed:
            raise ConfigError(f"{where}.{name}: it stands in [fixed], too; take it out of one of them")
    return ListedTrial(params, label)
