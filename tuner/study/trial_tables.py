"""The [[trial]], [[start]] and [baseline] tables and the warm starts of a study file. Never imports torch.

A study either searches or lists its trials, which then run in order. Starts of a search are moved into its ranges. A
recipe has the searchable values that its source states; the reference fills in the rest. Its rates suit models of 1B to
7B, so in a study of a small one they move to the nearest end of the range. Batches count responses.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ppo_core.config import checks
from ppo_core.config.declare import RUN_LENGTH, Choices, Dimension, HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, inert
from ppo_core.data.task import Task
from ppo_core.errors import ConfigError, nearest
from tuner.study.space import inside, is_number
from tuner.study.study_file import NAME, OF_A_SCHEDULE, matching, read_fixed

STUDY = "study:"
"""Prefix of an earlier study's name, whose best trial is a warm start."""


@dataclass(frozen=True)
class ListedTrial:
    """A trial that a study file lists, or a start of its search."""

    params: Mapping[str, HyperValue]
    """Its own values, over the study's fixed ones."""
    label: str = ""
    """Name for people, or empty."""
    source: str = ""
    """The warm start's name in the study file; empty: the file states the values."""
    moved_from: Mapping[str, HyperValue] | None = None
    """Requested values that lay outside their ranges, by name; None: not a start."""

    @property
    def text(self) -> str:
        """Its values in one line: `learning_rate = 0.001, kl_coef = 0.1`."""
        return ", ".join(f"{name} = {value}" for name, value in self.params.items())

    @property
    def name(self) -> str:
        """Name in a note: `start "trl"`, or its values if it has no label."""
        return f'start "{self.label}"' if self.label else f"the start {self.text}"

    @property
    def original(self) -> dict[str, HyperValue]:
        """The requested values."""
        return {**self.params, **(self.moved_from or {})}

    @property
    def moves(self) -> list[str]:
        """Values that were moved into their ranges, with the originals: `kl_coef 0 moved to 0.01`."""
        return [f"{name} {old:g} moved to {self.params[name]:g}" for name, old in (self.moved_from or {}).items()]

    @property
    def title(self) -> str:
        """The label and the first of the moved values, in one line."""
        more = f" and {len(self.moves) - 1} more" if len(self.moves) > 1 else ""
        return ": ".join(text for text in (self.label, "".join(self.moves[:1]) + more) if text)

    def to_dict(self) -> dict[str, Any]:
        """Return the table that it is read from."""
        named = {key: text for key, text in (("label", self.label), ("warm_start", self.source)) if text}
        moved = {} if self.moved_from is None else {"moved_from": dict(self.moved_from)}
        return {**named, **moved, **self.params}


class PublishedRecipe(NamedTuple):
    """Published hyperparameters."""

    source: str
    """Paper or repository, with its date or version."""
    values: Mapping[str, float]


def _recipe(source: str, **values: float) -> PublishedRecipe:
    return PublishedRecipe(source, {"gamma": 1.0, "cliprange": 0.2, **values})


# A recipe gives no kl_coef if its source has no single number. TRL and its ancestors give the critic the policy's rate.
RECIPES: Mapping[str, PublishedRecipe] = {
    "trl": _recipe(
        "TRL 1.12.0 (2026), trl/experimental/ppo and examples/scripts/ppo/ppo_tldr.py: TL;DR, 1B",
        learning_rate=3e-6, value_learning_rate=3e-6, batch_size=512, mini_batch_size=512, num_ppo_epochs=4,
        kl_coef=0.05, lam=0.95, cliprange_value=0.2, vf_coef=0.1, temperature=0.7, missing_eos_penalty=1.0,
    ),
    "ziegler_sentiment": _recipe(
        "Ziegler et al. 2019, arXiv 1909.08593 (openai/lm-human-preferences): sentiment, 774M",
        learning_rate=1e-5, value_learning_rate=1e-5, batch_size=512, mini_batch_size=512, num_ppo_epochs=4,
        kl_coef=0.15, kl_target=6.0, kl_horizon=10_000, vf_coef=0.1, temperature=0.7,
    ),
    "stiennon": _recipe(
        "Stiennon et al. 2020, arXiv 2009.01325: TL;DR, 1.3B",
        learning_rate=1.5e-5, batch_size=512, mini_batch_size=256, num_ppo_epochs=4, kl_coef=0.05, lam=0.95,
    ),
    "instructgpt": _recipe(
        "Ouyang et al. 2022, arXiv 2203.02155 (InstructGPT): 1.3B and 6B",
        learning_rate=9e-6, batch_size=512, mini_batch_size=64, num_ppo_epochs=1, kl_coef=0.02, temperature=1.0,
    ),
    "openrlhf": _recipe(
        "OpenRLHF 0.11.0 (2026), examples/scripts/train_ppo_ray_hybrid_engine.sh: 8B",
        learning_rate=5e-7, value_learning_rate=9e-6, batch_size=1024, mini_batch_size=128, num_ppo_epochs=1,
        kl_coef=0.01, lam=1.0, cliprange_value=0.5, temperature=1.0,
    ),
    "verl": _recipe(
        "verl 0.8.0.dev (2026), examples/ppo_trainer/run_deepseek7b_llm.sh: GSM8K, 7B; it has no KL penalty",
        learning_rate=1e-6, value_learning_rate=1e-5, batch_size=1024, mini_batch_size=256, num_ppo_epochs=1,
        kl_coef=0.0, lam=1.0, cliprange_value=0.5, temperature=1.0,
    ),
    "deepspeed_chat": _recipe(
        "Yao et al. 2023, arXiv 2308.01320 (DeepSpeed-Chat): OPT-1.3B",
        learning_rate=9.65e-6, value_learning_rate=5e-6, num_ppo_epochs=1, kl_coef=0.1, lam=0.95, cliprange_reward=5.0,
    ),
    "ppo_max": _recipe(
        "Zheng et al. 2023, arXiv 2307.04964 (PPO-max, MOSS-RLHF): 7B; its KL coefficient is 0.01 to 0.1",
        learning_rate=5e-7, value_learning_rate=1.5e-6, batch_size=128, mini_batch_size=32, lam=0.95, vf_coef=1.0,
        temperature=0.8,
    ),
}  # fmt: skip

_ONLY_SEARCHED = ("search", "sampler", "pruner", "baseline", "start", "warm_start")


def read_listed(content: Mapping[str, Any], fixed: Mapping[str, HyperValue], where: str) -> tuple[ListedTrial, ...]:
    """Return the `[[trial]]` tables of a parsed study file; empty without any.

    Raises:
        ConfigError: one has a value that is not allowed or already fixed, two are the same, there is a table that only
            a search reads, or `trials` is another number.
    """
    if "trial" not in content:
        return ()
    for key in _ONLY_SEARCHED:
        if key in content:
            raise ConfigError(f"{where}: {key} has no effect beside [[trial]] tables; remove one of them")
    tables = _tables(content, "trial", where)
    if not tables:
        raise ConfigError(f"{where}: trial = {tables!r} is not allowed; expected [[trial]] tables, one per trial")
    listed = tuple(read_trial(table, fixed, f"{where}: trial {number}") for number, table in enumerate(tables))
    params = [dict(trial.params) for trial in listed]
    for number, values in enumerate(params):
        if (first := params.index(values)) < number:
            raise ConfigError(f"{where}: trial {number} lists the same values as trial {first}; remove one of them")
    trials = checks.integer(content.get("trials", len(listed)), None, f"{where}: trials")
    if trials != len(listed):
        raise ConfigError(
            f"{where}: trials = {trials} is not allowed beside [[trial]] tables: leave it out, or list as many "
            f"(there are {len(listed)})"
        )
    return listed


def response_length(
    task: Task, fixed: Mapping[str, HyperValue], search: Collection[str], listed: Sequence[ListedTrial]
) -> int | None:
    """Return the response length in tokens if it is the same in all trials, else None."""
    name = "response_length"
    default = fixed.get(name, task.reference.get(name, HYPERPARAMETERS[name].default))
    lengths = {trial.params.get(name, default) for trial in listed} or {default}
    return int(lengths.pop() or 0) if name not in search and len(lengths) == 1 else None


def notes(listed: Sequence[ListedTrial], fixed: Mapping[str, HyperValue]) -> list[str]:
    """Return a line for each listed value that has no effect in its trial."""
    return [
        f"trial {number}: {name} does nothing: {why}"
        for number, trial in enumerate(listed)
        for name in trial.params
        if (why := inert(name, {**fixed, **trial.params}))
    ]


def read_trial(values: object, fixed: Mapping[str, HyperValue], where: str) -> ListedTrial:
    """Read one table of values with an optional label; ConfigError if a value is not allowed, or already fixed."""
    table = dict(checks.table(values, where))
    label = checks.text(table.pop("label"), f"{where}.label") if "label" in table else ""
    params = read_fixed(table, where)
    for name in params:
        if name in fixed:
            raise ConfigError(f"{where}.{name}: it is also in [fixed]; remove it from one of them")
    return ListedTrial(params, label)


def read_baseline(content: Mapping[str, Any], where: str) -> dict[str, HyperValue]:
    """Return the `[baseline]` table of a parsed study file; empty without one.

    Raises:
        ConfigError: a value is not allowed, there is none, or it is one of those that all trials share.
    """
    at = f"{where}: baseline"
    values = read_fixed(checks.table(content.get("baseline", {}), at), at)
    if "baseline" in content and not values:
        raise ConfigError(f"{at}: it states nothing, so it is the same as trial 0, the reference")
    for name in RUN_LENGTH:
        if name in values:
            raise ConfigError(f"{at}.{name}: it is the same in all trials of a study; set it in [fixed]")
    return values


def read_warm_starts(content: Mapping[str, Any], study: object, where: str) -> tuple[str, ...]:
    """Return the names in `warm_start` of a study file: recipes, and earlier studies as `study:NAME`.

    Raises:
        ConfigError: a name is unknown or listed twice, or names this study itself.
    """
    names = content.get("warm_start", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'{where}: warm_start = {names!r} is not allowed; expected a list of names such as ["trl"]')
    at = f"{where}: warm_start"
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(f'{at}: "{name}" is listed twice')
        if name == f"{STUDY}{study}":
            raise ConfigError(f'{at}: "{name}" is this study; name an earlier one')
        if name.startswith(STUDY):
            matching(name.removeprefix(STUDY), NAME, f"{at}: {STUDY}NAME with NAME")
        elif name not in RECIPES:
            there_are = f"available: {', '.join(RECIPES)}, and {STUDY}NAME for the best trial of an earlier study"
            raise ConfigError(f'{at}: unknown recipe "{name}"; {there_are}{nearest(name, RECIPES)}')
    return tuple(names)


def read_starts(
    content: Mapping[str, Any], fixed: Mapping[str, HyperValue], search: Mapping[str, Dimension], where: str
) -> tuple[list[ListedTrial], list[ListedTrial]]:
    """Return the `[[start]]` tables of a parsed study file: the settled ones of a stored study, and those to settle.

    Raises:
        ConfigError: one has a value that is not allowed, fixed, or not searched.
    """
    settled, requested = [], []
    for number, values in enumerate(_tables(content, "start", where)):
        at = f"{where}: start {number}"
        table = dict(checks.table(values, at))
        if "moved_from" in table:
            moved_from = read_fixed(checks.table(table.pop("moved_from"), at), f"{at}.moved_from")
            source = table.pop("warm_start", "")
            settled.append(replace(read_trial(table, fixed, at), source=source, moved_from=moved_from))
            continue
        start = read_trial(table, fixed, at)
        allowed = dict.fromkeys((*search, *OF_A_SCHEDULE))
        for name in start.params:
            if name not in allowed:
                hint = nearest(name, allowed)
                raise ConfigError(f"{at}.{name}: it is not searched; a start may set: {', '.join(allowed)}{hint}")
        try:
            inside = clip_to_space(start.params, search, start.label)
        except ConfigError as error:
            raise ConfigError(f"{at}.{error}") from None
        requested.append(replace(inside, params={**start.params, **inside.params}))
    return settled, requested


def _tables(content: Mapping[str, Any], key: str, where: str) -> Sequence[object]:
    tables = content.get(key, [])
    if not isinstance(tables, Sequence) or isinstance(tables, str):
        raise ConfigError(f"{where}: {key} = {tables!r} is not allowed; expected [[{key}]] tables, one per {key}")
    return tables


def clip_to_space(
    values: Mapping[str, HyperValue], search: Mapping[str, Dimension], label: str, source: str = ""
) -> ListedTrial:
    """Return a start of the searched `values`, each moved to the nearest value of its range or choices.

    Raises:
        ConfigError: a value without an order is none of its choices.
    """
    requested = {name: value for name in search if isinstance(value := values.get(name), int | float | str)}
    params = {name: _nearest(name, value, search[name]) for name, value in requested.items()}
    moved_from = {name: value for name, value in requested.items() if value != params[name]}
    return ListedTrial(params, label, source, moved_from)


def _nearest(name: str, value: float | str, dimension: Dimension) -> HyperValue:
    if isinstance(dimension, Choices):
        if value in dimension.values:
            return value
        choices = [choice for choice in dimension.values if is_number(choice)]
        if not is_number(value) or not choices:
            raise ConfigError(f"{name} = {value!r} is not allowed; expected {dimension.text}, which is searched")
        return min(choices, key=lambda choice: abs(choice - value))
    assert isinstance(value, int | float)
    return inside(name, value, dimension)
