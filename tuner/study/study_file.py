"""Read and check a study file's tables, for `StudySpec`. Never imports torch."""

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ppo_core.config import checks, declare, hyperparameters
from ppo_core.config.checks import Bounds
from ppo_core.config.hyperparameters import HYPERPARAMETERS, MAKES_INERT, PPOConfig, inert, require_name
from ppo_core.config.lookup import import_module, user_path
from ppo_core.data.task import BUILT_IN, Task
from ppo_core.errors import ConfigError, TaskError, nearest
from ppo_core.loading.task_file import KL_LIMIT, get_task, is_task_path, read_table, stated_name
from ppo_core.loading.task_file import read_task as read_task_file
from tuner.study.space import is_number

TOP_LEVEL: Mapping[str, str] = {
    "name": "results are stored under this name, and found again by it",
    "task": "a built-in task's name, the path of a task file or folder (it begins at the study file's folder), "
    "`module:TASK`, or a table with a task file's keys",
    "trainer": "`module:function` of a trainer of your own; unset: PPO",
    "trials": "the most trials that the search starts, trial 0 included; this, `budget` or both",
    "budget": 'what the search may spend, in trials of full length such as 8, or in time such as `"90s"`, '
    '`"3m"` or `"2h"`, after which no trial begins; this, `trials` or both',
    "stop_early": "true (unless set): a search ends once another trial is expected to add less than half a percent of "
    "what its best has gained; false: it spends its whole budget",
    "seed": "of every trial and of the sampler; 0 unless set",
    "device": "`auto` (unless set) or `cpu`; CUDA_VISIBLE_DEVICES picks GPUs",
    "threads": "CPU threads of a trial; unset: each worker's share of the cores. The same count gives the same numbers",
    "gpus_per_trial": "processes that train each trial together, on a GPU each; 1 unless set",
    "fixed": "a table of hyperparameters that are the same in all trials",
    "search": 'a table of what is searched: `"advised"`, `{ low = ..., high = ..., scale = ... }`, or a list of values',
    "baseline": "a table: your present configuration, which runs as trial 1 and is never told to the sampler; what it "
    "leaves out is trial 0's",
    "start": "`[[start]]` tables: configurations that run first, in the study's ranges",
    "warm_start": "names of published recipes, or `study:NAME`, whose configurations run first",
    "trial": "`[[trial]]` tables: exactly these trials run, and nothing is searched",
    "kl": "a table: the KL budget and the KL limit",
    "guard": "a table: the limits of the rules that end trials early",
    "sampler": "what proposes configurations: a name, or a table",
    "pruner": "what stops trials early by their evaluations: one of the pruners, or `module:callable`: called without "
    "arguments, it returns an Optuna pruner; unset: nothing",
    "workers": "a table: checkpoint interval and time limits of worker processes",
}
"""Keys of a study file, with descriptions."""
KL: Mapping[str, str] = {
    "budget": "eval KL that a recommended policy may have, in nats per response; the task's unless set",
    "limit": "training KL at which the guard ends a trial, in nats per response; unless set the task's, or where "
    f"`budget` is set {KL_LIMIT:g} times `first_budget`",
    "budget_per_token": "the budget in nats per token; multiplied by the tokens of an evaluation's longest response",
    "first_budget": "the budget that trials are made for, in nats per response; `budget` unless set, and the first one "
    "of a study whose budget has changed",
    "limit_per_token": "the limit in nats per token; multiplied by `response_length`",
}
BELOW = {**{name: f"fixed.{name}" for name in HYPERPARAMETERS}, **{f"kl_{key}": f"kl.{key}" for key in KL}}
"""Where names belong that are often given at the top of a study file."""
SAMPLER: Mapping[str, str] = {
    "name": "one of the samplers, or `module:callable`: called with `seed`, it returns an Optuna sampler. "
    "It is made anew for each trial and may keep nothing in the study",
    "startup_trials": "trials with a value that the sampler waits for (default 4)",
}

SAMPLERS: Mapping[str, str] = {
    "tpe": "learns where good trials lie, from all trials so far",
    "gp": "models the value as a Gaussian process; loads torch, and gets slow from some hundred trials on",
    "random": "draws evenly at random",
    "qmc": "covers the space evenly",
}
"""Samplers by name. `module:callable` names your own."""
PRUNERS: Mapping[str, str] = {
    "median": "stops a trial that is below the median of earlier ones at the same episode",
    "percentile": "stops a trial that is outside the best quarter of earlier ones at the same episode",
    "successive_halving": "lets the best share of the trials go on at each of several episodes",
    "hyperband": "runs several brackets of successive halving, which begin at different episodes",
}
"""Pruners, which stop trials early by their evaluations, by name. `module:callable` names your own."""

DECLARED = "declared"
"""Key of a stored study for what its task declares."""
_DECLARED = tuple(each.name for each in fields(Task) if each.name not in ("name", "advised", "prepare"))
REQUIRED = ("name", "task", "search")
REQUIRED_OF_LISTED = ("name", "task")

KL_TARGETS = (0.6, 1.0)
"""Advised KL targets, as shares of the KL budget."""
BETA, BETAS = 0.2, (0.04, 0.8)
"""Usual β and its advised range, in units of `beta_of_best`: TRL's 0.05, and 0.01 to 0.2, at a spread of 1 and a KL
budget of 10."""
KL_STEP_SPAN = 3.0
"""Advised KL steps: the default, divided and multiplied by this."""
OF_A_SCHEDULE = ("learning_rate", "kl_coef", "kl_horizon", "kl_controller")
"""Hyperparameters of trials that do not keep their own pace."""
LENGTH = ("total_episodes", "batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
"""Hyperparameters that decide how many iterations a run has."""

NAME = (re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"), "letters, digits, dots, dashes and underscores, at most 100")
UNITS: Mapping[str, tuple[float, str]] = {"s": (1.0, "s"), "m": (60.0, "min"), "h": (3600.0, "h")}
"""Seconds of each unit of time, and how it is printed."""
BUDGET_IS = "a number over 0 of full-length trials, such as 8, or a time such as 90s, 3m or 2h"
PER_TOKEN = "_per_token"
"""Suffix of the [kl] table's values in nats per token."""
TRAINER = (re.compile(r"[\w.]+:\w+"), '"module:function"')


class Time(NamedTuple):
    """A time as it was given."""

    amount: float
    unit: str
    """As it is printed: `s`, `min` or `h`."""
    seconds: float

    @classmethod
    def read(cls, text: str) -> "Time | None":
        """Return the time of `90s`, `10m` or `2h`; None: it is none over 0."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text, flags=re.ASCII)
        if match is None or not 0 < float(match[1]) < math.inf:
            return None
        seconds, unit = UNITS[match[2]]
        return cls(float(match[1]), unit, float(match[1]) * seconds)

    def in_unit(self, seconds: float) -> float:
        """Return so many seconds in this time's unit."""
        return seconds * self.amount / self.seconds


@dataclass(frozen=True)
class SamplerSpec:
    """The sampler, and when it takes over."""

    name: str = "tpe"
    """One of SAMPLERS, or `module:callable`: given `seed`, it returns an `optuna.samplers.BaseSampler`."""
    startup_trials: int = 4
    """Trials that must have a value before the sampler proposes. Until then they are drawn around the best one so far,
    the reference at first (see `tuner.search.prior`); `random` and `qmc` need none."""

    @property
    def is_own(self) -> bool:
        """True for a user's own sampler."""
        return self.name not in SAMPLERS


def matching(value: object, pattern: tuple[re.Pattern[str], str], where: str) -> str:
    """Return `value` if it is text of that pattern, else raise ConfigError with the pattern's description."""
    regex, allowed = pattern
    if not isinstance(value, str) or not regex.fullmatch(value):
        raise ConfigError(f"{where} = {value!r} is not allowed; expected {allowed}")
    return value


def read_budget(value: object, where: str) -> float | str:
    """Return a study's budget, a number of trials or a time's text, from either or a number's text."""
    if isinstance(value, str) and Time.read(value):
        return value
    try:
        return checks.number(float(value) if isinstance(value, str) else value, checks.POSITIVE, where)
    except (ConfigError, ValueError):
        raise ConfigError(f"{where} = {value!r} is not allowed; expected {BUDGET_IS}") from None


def setting_text(value: float | str) -> str:
    """Return a setting that is a number or a text as text: `9.5`, `3m`."""
    return value if isinstance(value, str) else f"{value:g}"


def read_kl(value: object, task: Task, length: int | None, where: str) -> tuple[float, float, float]:
    """Return KL budget, first budget and limit in nats per response: the [kl] table's over the task's.

    Beside a budget of the study's own the limit is KL_LIMIT times that. What is given per token is multiplied by the
    tokens of the longest response: of evaluations, or for the limit of training (`length`; None: trials differ in it).

    Raises:
        ConfigError: a value is given twice or not allowed, or the limit is below the budget.
    """
    values = checks.table(value, where)
    checks.require_known(values, KL, f"{where}.", {f"kl_{key}": key for key in KL})
    budget = _nats(values, "budget", task.kl_budget, task.eval_response_length, where)
    first = _nats(values, "first_budget", budget, task.eval_response_length, where)
    is_tasks = not values.keys() & {"budget", f"budget{PER_TOKEN}"}
    limit = _nats(values, "limit", task.kl_limit if is_tasks else KL_LIMIT * first, length, where)
    if limit < budget:
        raise ConfigError(f"{where}: limit = {limit:g} is below budget = {budget:g}, so good trials would be stopped")
    return budget, first, limit


def _nats(values: Mapping[str, Any], name: str, default: float, length: int | None, where: str) -> float:
    per_token = f"{name}{PER_TOKEN}"
    if per_token not in values:
        return checks.number(values.get(name, default), checks.POSITIVE, f"{where}.{name}")
    if name in values:
        raise ConfigError(f"{where}: {name} and {per_token} are both given; give only one")
    if length is None:
        raise ConfigError(
            f"{where}.{per_token} is not allowed: trials differ in response_length; give {name}, in nats per response"
        )
    return checks.number(values[per_token], checks.POSITIVE, f"{where}.{per_token}") * length


def read_fixed(values: Mapping[str, Any], where: str) -> dict[str, declare.HyperValue]:
    """Return the [fixed] table in the fields' types; `where` names the table."""
    fixed = {}
    for name, value in values.items():
        hyper = require_name(name, where)
        if name == "seed":
            raise ConfigError(f"{where}.seed: the seed is set at the top of the file, outside all tables")
        try:
            fixed[name] = hyper.coerce(value)
        except ConfigError as error:
            raise ConfigError(f"{where}.{error}") from None
    return fixed


def pace(
    given: Collection[str], fixed: Mapping[str, declare.HyperValue], kl_target: declare.HyperValue, *, is_listed: bool
) -> dict[str, declare.HyperValue]:
    """Return how the rate and β of trials move where their study does not say.

    They keep their own pace, at `kl_target` (nats per response), if the study fixes that, or if neither it nor one of
    its trials sets a learning rate or how β moves. In another search β adapts to the target, unless it is set, and
    begins in units of the scores' spread. `given` are the names that the study searches, or that a trial sets.
    """
    if fixed.get("lr_controller") == "kl_step" or fixed.get("kl_controller") == "hold":
        return {"kl_target": kl_target, "lr_controller": "kl_step"}
    names = {*given, *fixed}
    if not names & {*OF_A_SCHEDULE, "lr_controller"}:
        return {"kl_target": kl_target, "lr_controller": "kl_step"}
    return {} if is_listed or "kl_coef" in names else {"kl_target": kl_target, "normalize_kl_coef": True}


def reference_kl_step(task: Task, fixed: Mapping[str, declare.HyperValue]) -> float:
    """Return the KL step of the reference where nothing states one, as a share of the KL target."""
    length = {name: value for name, value in {**task.reference, **fixed}.items() if name in LENGTH}
    return hyperparameters.default_kl_step(PPOConfig.from_dict(length).num_iterations())


def beta_of_best(spread: float, kl_budget: float) -> float:
    """Return the β at which the best policy has the KL budget, in reward per nat: σ / √(2 budget).

    σ is the `spread` of the scores, if they are normal (see `ppo_core.algorithm.kl_controller`). No policy is that
    good, so at this β one stays under the budget.
    """
    return spread / math.sqrt(2 * kl_budget)


def usual_beta(kl_budget: float) -> float:
    """Return the usual β for a KL budget, in spreads of the scores per nat."""
    return BETA * beta_of_best(1.0, kl_budget)


def advised_ranges(task: Task, fixed: Mapping[str, declare.HyperValue], kl_budget: float) -> dict[str, declare.Range]:
    """Return the range that `"advised"` stands for, by name: the task's, else the declared one.

    Those of the KL target and the KL step are shares of the KL budget and of the run; that of β lies around the task's
    own, else it is in spreads of the scores per nat.
    """
    declared = {name: hyper.search for name, hyper in HYPERPARAMETERS.items() if hyper.search is not None}
    step = reference_kl_step(task, fixed)
    low, high = KL_TARGETS
    beta = float(task.reference.get("kl_coef") or usual_beta(kl_budget))
    own = {
        "kl_coef": declare.Range(BETAS[0] / BETA * beta, BETAS[1] / BETA * beta, "log"),
        "kl_target": declare.Range(low * kl_budget, high * kl_budget),
        "kl_step": declare.Range(step / KL_STEP_SPAN, min(1.0, step * KL_STEP_SPAN), "log"),
    }
    return declared | own | {name: advised.range for name, advised in task.advised.items()}


def read_search(
    values: Mapping[str, Any], advised: Mapping[str, declare.Range], where: str
) -> dict[str, declare.Dimension]:
    """Return the [search] table as ranges and choices, in the order of declaration; `where` names the table."""
    read = {name: (require_name(name, where), value) for name, value in values.items()}
    search = {name: _read_dimension(*pair, advised, f"{where}.{name}") for name, pair in read.items()}
    return {name: search[name] for name in HYPERPARAMETERS if name in search}


def extreme(dimension: declare.Dimension, which: Literal["low", "high"]) -> declare.HyperValue:
    """Return the lowest or highest value of a dimension; of choices without an order, the first."""
    if not isinstance(dimension, declare.Choices):
        return dimension.low if which == "low" else dimension.high
    numbers = [value for value in dimension.values if is_number(value)]
    if len(numbers) < len(dimension.values):
        return dimension.values[0]
    return min(numbers) if which == "low" else max(numbers)


def single_values(dimension: declare.Dimension) -> tuple[declare.HyperValue, ...]:
    """Return the values of a small dimension: its choices or powers of two; empty for others."""
    if isinstance(dimension, declare.Choices):
        return dimension.values
    if dimension.scale != "log2":
        return ()
    return tuple(2**power for power in range(int(math.log2(dimension.low)), int(math.log2(dimension.high)) + 1))


def choice_pairs(search: Mapping[str, declare.Dimension]) -> Iterator[dict[str, declare.HyperValue]]:
    """Yield each choice of a search, alone and with each single value of every other dimension."""
    singles = {name: values for name, dimension in search.items() if (values := single_values(dimension))}
    for name, dimension in search.items():
        if isinstance(dimension, declare.Choices):
            yield from ({name: value} for value in dimension.values)
            for other in (each for each in singles if each != name):
                yield from ({name: value, other: beside} for value in dimension.values for beside in singles[other])


def why_idle(name: str, search: Mapping[str, declare.Dimension], fixed: Mapping[str, declare.HyperValue]) -> str | None:
    """Return why searching `name` would have no effect in any trial, or None."""
    deciding = [
        [(other, value) for value in single_values(search[other]) or (extreme(search[other], "low"),)]
        for other in MAKES_INERT
        if other in search
    ]
    reasons = [inert(name, {**fixed, **dict(values)}) for values in itertools.product(*deciding)]
    return None if None in reasons else reasons[0]


def _read_dimension(
    hyper: declare.Hyperparameter, value: object, advised: Mapping[str, declare.Range], where: str
) -> declare.Dimension:
    declare.require_searchable(hyper, where)
    if isinstance(value, list):
        return declare.read_choices(hyper, value, where)
    declare.require_numeric(hyper, where)
    if value == "advised":
        if hyper.name not in advised:
            raise ConfigError(f"{where}: no range is advised for it; write {{ low = ..., high = ... }}")
        return advised[hyper.name]
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'{where} = {value!r} is not allowed; expected "advised", a range {{ low = ..., high = ... }} or a list'
        )
    return declare.read_range(hyper, value, where)


def read_task(value: object, where: str) -> Task:
    """Return the task that a study file names, by a path from its folder or else, or states in a table."""
    file = Path(where)
    try:
        if isinstance(value, Mapping):
            task = read_table(value, file, f"{where}: task.")
            with suppress(TaskError):
                if file.suffix == ".toml" and replace(read_task_file(str(file)), name=task.name) == task:
                    return task
            return replace(task, name=stated_name(value, file.parent))
        name = checks.text(value, f"{where}: task", "a string in quotes, or a [task] table")
        is_path = name not in BUILT_IN and is_task_path(name, file.parent)
        return get_task(str(file.parent / user_path(name)) if is_path else name)
    except TaskError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(f"{where}: ") else f"{where}: task: {message}") from None


def read_sampler(value: object, where: str) -> SamplerSpec:
    """Return the sampler of a name or of the [sampler] table, or raise ConfigError."""
    values = {"name": value} if isinstance(value, str) else checks.table(value, where)
    checks.require_known(values, SAMPLER, f"{where}.")
    startup = values.get("startup_trials", SamplerSpec.startup_trials)
    startup_trials = checks.integer(startup, Bounds(1), f"{where}.startup_trials")
    return SamplerSpec(name_or_path(values.get("name", SamplerSpec.name), SAMPLERS, f"{where}.name"), startup_trials)


def name_or_path(name: object, known: Mapping[str, str], where: str) -> str:
    """Return a known name, or the path of a user's own callable."""
    if not isinstance(name, str) or not (name in known or TRAINER[0].fullmatch(name)):
        raise ConfigError(
            f'{where} = {name!r} is not allowed; expected one of {", ".join(known)}, or "module:callable"'
            f"{nearest(str(name), known)}"
        )
    return name


def import_object(path: str, what: str) -> Callable[..., Any]:
    """Return the trainer, sampler or pruner that a study file names as `module:callable`.

    Raises:
        ConfigError: there is no such module or callable; `what` it is begins the message.
    """
    module, name = import_module(path, what, ConfigError)
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        hint = nearest(name, (key for key, value in vars(module).items() if callable(value)))
        raise ConfigError(f'{what} "{path}": module "{module.__name__}" has no callable "{name}"{hint}')
    return found


def optional(content: Mapping[str, Any], where: str, key: str, read: Callable[..., Any]) -> Any:
    """Return `read` applied to a key's value, or None if the key is missing."""
    return read(content[key], where=f"{where}: {key}") if content.get(key) is not None else None


def declared_values(task: Task) -> dict[str, Any]:
    """Return what a task declares, but its advised ranges, as plain JSON values that `stored_task` reads back."""
    return {name: getattr(task, name) for name in _DECLARED} | {"reference": dict(task.reference)}


def stored_task(name: str, values: object, where: str) -> Task:
    """Return the task `name` as a study stores its declaration. The task itself is loaded only to be prepared."""
    table = checks.table(values, f"{where}: {DECLARED}")
    checks.require_known(table, _DECLARED, f"{where}: {DECLARED}.")
    return Task(name, **table, advised={}, prepare=lambda progress: get_task(name).prepare(progress))


def values_text(values: Mapping[str, declare.HyperValue]) -> str:
    """Return values as `name = value` in JSON, joined by commas."""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
