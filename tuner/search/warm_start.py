"""The starts of a search: `[[start]]` tables and published recipes, moved into the study's ranges. No torch.

A recipe holds what its source states of what can be searched; what it leaves out is the reference's. Its rates suit
models of 1B to 7B, so in a study of a small one they move to the nearest end of the range. Batches count responses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_core import declare
from ppo_core.declare import Choices, Dimension, HyperValue
from ppo_core.errors import ConfigError, nearest
from tuner import study_file
from tuner.space import has_kl_choice, inside, require_one_control
from tuner.study_file import ListedTrial

STUDY = "study:"
"""Before the name of an earlier study whose best trial is a warm start."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters that somebody published."""

    source: str
    """Paper or repository, and its date or version."""
    values: Mapping[str, float]


def _recipe(source: str, **values: float) -> Recipe:
    return Recipe(source, {"gamma": 1.0, "cliprange": 0.2, **values})


# A recipe without kl_coef has none that is one number. TRL and its ancestors give the critic the policy's rate.
RECIPES: Mapping[str, Recipe] = {
    "trl": _recipe(
        "TRL 1.12.0 (2026), trl/experimental/ppo and examples/scripts/ppo/ppo_tldr.py: TL;DR, 1B",
        learning_rate=3e-6, value_learning_rate=3e-6, batch_size=512, mini_batch_size=512, num_ppo_epochs=4,
        kl_coef=0.05, lam=0.95, cliprange_value=0.2, vf_coef=0.1, temperature=0.7, missing_eos_penalty=1.0,
    ),
    "n_details": _recipe(
        "Huang et al. 2024, arXiv 2403.17031 (summarize_from_feedback_details): TL;DR, 1B to 6.9B",
        learning_rate=3e-6, value_learning_rate=3e-6, adam_epsilon=1e-5, batch_size=512, mini_batch_size=512,
        num_ppo_epochs=4, kl_coef=0.05, lam=0.95, cliprange_value=0.2, vf_coef=0.1, temperature=0.7,
        missing_eos_penalty=1.0,
    ),
    "ziegler_sentiment": _recipe(
        "Ziegler et al. 2019, arXiv 1909.08593 (openai/lm-human-preferences): sentiment, 774M",
        learning_rate=1e-5, value_learning_rate=1e-5, batch_size=512, mini_batch_size=512, num_ppo_epochs=4,
        kl_coef=0.15, kl_target=6.0, kl_horizon=10_000, vf_coef=0.1, temperature=0.7,
    ),
    "ziegler_tldr": _recipe(
        "Ziegler et al. 2019, arXiv 1909.08593 (openai/lm-human-preferences): TL;DR, 774M",
        learning_rate=2e-6, batch_size=32, mini_batch_size=32, num_ppo_epochs=4, kl_coef=0.03, temperature=0.7,
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
    "trlx_hh": _recipe(
        "trlx (CarperAI, 2023), examples/hh: 125M",
        learning_rate=8e-6, value_learning_rate=8e-6, batch_size=128, mini_batch_size=32, num_ppo_epochs=4,
        kl_coef=0.05, kl_target=6.0, lam=0.95, vf_coef=1.0,
    ),
}  # fmt: skip
"""The published recipes that a study may begin with, by name."""


def read_names(content: Mapping[str, Any], study: object, where: str) -> tuple[str, ...]:
    """Return what `warm_start` at the top of a study file names: recipes, and earlier studies as `study:NAME`.

    Raises:
        ConfigError: a name is unknown or stands there twice, or is of `study`, this one.
    """
    found = content.get("warm_start", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f'{where}: warm_start = {found!r} is not allowed; expected a list of names such as ["trl"]')
    at = f"{where}: warm_start"
    for number, name in enumerate(found):
        if name in found[:number]:
            raise ConfigError(f'{at}: "{name}" is listed twice')
        if name == f"{STUDY}{study}":
            raise ConfigError(f'{at}: "{name}" is this study; name an earlier one')
        if name.startswith(STUDY):
            study_file.matching(name.removeprefix(STUDY), study_file.NAME, f"{at}: {STUDY}NAME with NAME")
        elif name not in RECIPES:
            there_are = f"available: {', '.join(RECIPES)}, and {STUDY}NAME for the best trial of an earlier study"
            raise ConfigError(f'{at}: unknown recipe "{name}"; {there_are}{nearest(name, RECIPES)}')
    return tuple(found)


def read_tables(
    content: Mapping[str, Any], fixed: Mapping[str, HyperValue], search: Mapping[str, Dimension], where: str
) -> tuple[list[ListedTrial], list[ListedTrial]]:
    """Return the `[[start]]` tables of a parsed study file: those that a stored study settled, and those to settle.

    Raises:
        ConfigError: one holds what is not allowed, is fixed, or is not searched.
    """
    found = content.get("start", [])
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ConfigError(f"{where}: start = {found!r} is not allowed; expected [[start]] tables, one per start")
    settled, asked = [], []
    for number, values in enumerate(found):
        at = f"{where}: start {number}"
        own = dict(declare.table(values, at))
        if "moved_from" in own:
            moved_from = study_file.read_fixed(declare.table(own.pop("moved_from"), at), f"{at}.moved_from")
            source = own.pop("warm_start", "")
            stored = study_file.read_trial(own, fixed, at)
            settled.append(ListedTrial(stored.params, stored.label, source, moved_from))
            continue
        start = study_file.read_trial(own, fixed, at)
        for name in start.params:
            if name not in search:
                hint = nearest(name, search)
                raise ConfigError(f"{at}.{name}: it is not searched; a start may set: {', '.join(search)}{hint}")
        require_one_control(search, start.params, f"{at}: ")
        try:
            asked.append(moved(start.params, search, start.label))
        except ConfigError as error:
            raise ConfigError(f"{at}.{error}") from None
    return settled, asked


def recipe_start(name: str, search: Mapping[str, Dimension]) -> ListedTrial:
    """Return the start that a recipe is in a study's ranges."""
    return moved(RECIPES[name].values, search, name, source=name)


def moved(
    values: Mapping[str, HyperValue], search: Mapping[str, Dimension], label: str, *, source: str = ""
) -> ListedTrial:
    """Return a start with those of `values` that are searched, each at the nearest value of its range or choices.

    With a KL target β is not searched: it begins at the reference's.

    Raises:
        ConfigError: a value without an order is none of its choices.
    """
    is_adaptive = has_kl_choice(search) and values.get("kl_target") is not None
    asked = {
        name: value
        for name in search
        if isinstance(value := values.get(name), int | float | str) and not (is_adaptive and name == "kl_coef")
    }
    params = {name: _nearest(name, value, search[name]) for name, value in asked.items()}
    moved_from = {name: value for name, value in asked.items() if value != params[name]}
    return ListedTrial(params, label, source, moved_from)


def _nearest(name: str, value: float | str, dimension: Dimension) -> HyperValue:
    if isinstance(dimension, Choices):
        if value in dimension.values:
            return value
        choices = [one for one in dimension.values if isinstance(one, int | float) and not isinstance(one, bool)]
        if isinstance(value, str | bool) or not choices:
            raise ConfigError(f"{name} = {value!r} is not allowed; expected {dimension.text}, which is searched")
        return min(choices, key=lambda choice: abs(choice - value))
    assert isinstance(value, int | float)
    return inside(name, value, dimension)
