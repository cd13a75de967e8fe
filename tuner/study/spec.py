"""A study's spec, from a TOML file: its search or list of trials, length and KL limits. Never imports torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from ppo_core.config import checks
from ppo_core.config.batch_sizes import DEFAULT_BATCH_SIZE
from ppo_core.config.checks import Bounds
from ppo_core.config.declare import Choices, Dimension, HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig, cautions, default_lam
from ppo_core.config.kl_budget import KL_TARGET
from ppo_core.data.task import Task
from ppo_core.errors import ConfigError, first_line
from ppo_core.loading.task_file import budget_note
from ppo_core.output import pluralize, short
from ppo_core.report import require_device
from ppo_core.tasks.skeleton import example_note
from tuner.environment import STUDY_FILE, to_copy
from tuner.study import study_file, trial_tables
from tuner.study.rules import GuardSettings
from tuner.study.study_file import SamplerSpec
from tuner.study.trial_tables import ListedTrial, clip_to_space
from tuner.study.worker_settings import WorkerSettings

PPO_TRAINER = "ppo_core.trainer:ppo_trainer"

THREADS = Bounds(1, 1024)  # CPU threads allowed a trial: at most the cores of the largest machines

_PLAIN = ("name", "task", "trainer", "trials", "budget", "stop_early", "seed", "device", "gpus_per_trial", "pruner")
"""Keys of a study file that are fields of `StudySpec` as they are."""


@dataclass(frozen=True)
class StudySpec:
    """One study. Make it with `load` or `from_dict`, which check everything."""

    name: str
    task: str
    declared: Task = field(compare=False)
    """What its task declares: of a stored study as its last run read it (see `from_stored`)."""
    trainer: str
    trials: int | None
    """Maximum number of trials, trial 0 included; None: limited by the budget alone."""
    budget: float | str | None
    """In trials of full length (`total_episodes`), or a time such as `3m`; None: not limited."""
    stop_early: bool
    """True: the search ends once another trial is not worth its cost (`tuner.search.worth`)."""
    seed: int
    """Seed of every trial and of the sampler."""
    device: str
    threads: int | None
    """CPU threads of a trial; None: each worker's share of the cores. The same count gives the same results."""
    gpus_per_trial: int
    """Processes that train a trial together, on a GPU each, or on the CPU. It changes no result."""
    fixed: Mapping[str, HyperValue]
    search: Mapping[str, Dimension]
    """The searched hyperparameters, in the order of their declaration."""
    idle: Mapping[str, Dimension]
    """Requested, but not searched because they would have no effect; `notes` says why."""
    kl_budget: float
    """Highest eval KL of a recommended policy, in nats per response."""
    first_budget: float
    """The KL budget that trials are made for: the study's as its first trial began. KL targets, β, guard and extra
    evaluations follow it, so that a budget that changes chooses among trials that ran alike."""
    guard: GuardSettings
    sampler: SamplerSpec
    pruner: str | None = None
    """One of PRUNERS, or `module:callable`: it returns an `optuna.pruners.BasePruner`. None: nothing prunes."""
    baseline: Mapping[str, HyperValue] = field(default_factory=dict)
    """The user's present configuration, which is trial 1; empty: none is stated."""
    listed: tuple[ListedTrial, ...] = ()
    """The study's trials, if it lists them instead of searching."""
    starts: tuple[ListedTrial, ...] = ()
    """Trials after trial 0 that begin the search, in the study's ranges; no two are alike."""
    warm_start: tuple[str, ...] = ()
    """Names of warm starts in the study file; empty once all are among `starts` (see `tuner.control.session`)."""
    dropped: tuple[tuple[ListedTrial, str], ...] = field(default=(), compare=False)
    """Starts that were left out, with the earlier trial that each would repeat."""
    workers: WorkerSettings = field(default_factory=WorkerSettings)

    @property
    def kl_limit(self) -> float:
        """KL over which the guard stops a trial, in nats per response."""
        return self.guard.kl_limit

    @property
    def budget_time(self) -> study_file.Time | None:
        return study_file.Time.read(self.budget) if isinstance(self.budget, str) else None

    @property
    def most_spent(self) -> float | None:
        """Most that the search can spend, in trials of full length, at most all trials; None: not limited so."""
        if self.budget is None or isinstance(self.budget, str):
            return None
        return self.budget if self.trials is None else min(self.budget, self.trials)

    @property
    def total_episodes(self) -> int:
        """Episodes of a full-length trial; its last rollout batch may exceed them."""
        return self.config({}).total_episodes

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on the search, one line each."""
        asked, known = {**self.search, **self.idle}, {**self._pace({}), **self.fixed}
        notes = [f"{name} is not searched: {study_file.why_idle(name, asked, known)}" for name in self.idle]
        critic = self.fixed.get("value_model", self._reference_value("value_model"))
        if "value_learning_rate" in self.search and critic == "shared" and "value_model" not in self.search:
            notes.append('value_learning_rate trains only the value head, because value_model = "shared"')
        length = self.declared.eval_response_length
        notes += filter(None, (example_note(self.declared), budget_note(self.kl_budget, length), self.budget_changed))
        notes += trial_tables.notes(self.listed, self.fixed)
        notes += [f"{start.name}: {', '.join(start.moves)}" for start in self.starts if start.moves]
        for start, other in self.dropped:
            why = f"in this study it is the same as {other}" if start.params else "it states nothing that is searched"
            notes.append(f"{start.name} is left out: {why}")
        room = len(self.starts) if self.trials is None else max(0, self.trials - 1 - bool(self.baseline))
        if room < len(self.starts):
            notes.append(f"trials = {self.trials} leaves room for {room} of {pluralize(len(self.starts), 'start')}")
        reference = {"": self.reference_params()} | ({"baseline": self.baseline_params()} if self.baseline else {})
        for name, params in (self.listed_params or reference).items():
            notes += [f"{name}: {line}" if name else line for line in cautions(self.config(params))]
        return tuple(notes)

    @property
    def listed_params(self) -> dict[str, Mapping[str, HyperValue]]:
        """The stated values of each listed trial, by its name."""
        return {f"trial {number}": trial.params for number, trial in enumerate(self.listed)}

    @classmethod
    def load(cls, path: Path | str) -> "StudySpec":
        """Return the study of a TOML file.

        Raises:
            ConfigError: it cannot be read or holds something that is not allowed; the message names the
                file and the key (bad syntax: the line), and what is allowed.
        """
        content = checks.read_toml(Path(path), "study file")
        if "task" not in content and {"policy", "reward", "prompts"} & content.keys():
            study = Path(path).with_name(STUDY_FILE)
            tune = f"run its study: {to_copy(['run', str(study)])}, or " if study.is_file() else ""
            once = to_copy(["train", "--task", str(path)])
            raise ConfigError(f"{path} is a task, not a study; {tune}train once: {once}")
        # A file declares nothing for its task.
        checks.require_known(content, study_file.TOP_LEVEL, f"{path}: ", study_file.BELOW)
        return cls.from_dict(content, str(path))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str) -> "StudySpec":
        """Return the study of a parsed file; `where` names it in errors.

        Raises:
            ConfigError: as `load`.
        """
        content = dict(content)
        stored = content.pop(study_file.DECLARED, None)
        checks.require_known(content, study_file.TOP_LEVEL, f"{where}: ", study_file.BELOW)
        for key in study_file.REQUIRED_OF_LISTED if "trial" in content else study_file.REQUIRED:
            if key not in content:
                raise ConfigError(f"{where}: {key} is missing")
        if stored is None:
            task = study_file.read_task(content["task"], where)
        else:
            task = study_file.stored_task(checks.text(content["task"], f"{where}: task"), stored, where)
        fixed = study_file.read_fixed(checks.table(content.get("fixed", {}), f"{where}: fixed"), f"{where}: fixed")
        table = checks.table(content.get("search", {}), f"{where}: search")
        has_own_beta = "kl_coef" in {**task.advised, **task.reference}  # in its own units
        if table.get("kl_coef") == "advised" and not has_own_beta:
            fixed.setdefault("normalize_kl_coef", True)
        listed = trial_tables.read_listed(content, fixed, where)
        kl_budget, first_budget, kl_limit = study_file.read_kl(
            content.get("kl", {}), task, trial_tables.response_length(task, fixed, table, listed), f"{where}: kl"
        )
        advised = study_file.advised_ranges(task, fixed, first_budget)
        asked = study_file.read_search(table, advised, f"{where}: search")
        listed_names = {name for trial in listed for name in trial.params}
        pace = study_file.pace({*asked, *listed_names}, fixed, first_budget, is_listed=bool(listed))
        idle = {name: span for name, span in asked.items() if study_file.why_idle(name, asked, {**pace, **fixed})}
        search = {name: span for name, span in asked.items() if name not in idle}
        names = trial_tables.read_warm_starts(content, content["name"], where)
        settled, starts = trial_tables.read_starts(content, fixed, search, where)
        optional = partial(study_file.optional, content, where)
        guard = checks.table(content.get("guard", {}), f"{where}: guard")
        spec = cls(
            name=study_file.matching(content["name"], study_file.NAME, f"{where}: name"),
            task=task.name,
            declared=task,
            trainer=study_file.matching(content.get("trainer", PPO_TRAINER), study_file.TRAINER, f"{where}: trainer"),
            trials=len(listed) or optional("trials", partial(checks.integer, bounds=Bounds(1))),
            budget=optional("budget", study_file.read_budget),
            stop_early=checks.boolean(content.get("stop_early", True), f"{where}: stop_early"),
            seed=checks.integer(content.get("seed", 0), HYPERPARAMETERS["seed"].valid or Bounds(), f"{where}: seed"),
            device=require_device(content.get("device", "auto"), f"{where}: device"),
            threads=optional("threads", partial(checks.integer, bounds=THREADS)),
            gpus_per_trial=checks.integer(content.get("gpus_per_trial", 1), Bounds(1), f"{where}: gpus_per_trial"),
            fixed=fixed,
            search=search,
            idle=idle,
            kl_budget=kl_budget,
            first_budget=first_budget,
            guard=GuardSettings.from_dict(guard, kl_limit, f"{where}: guard"),
            sampler=study_file.read_sampler(content.get("sampler", {}), f"{where}: sampler"),
            pruner=optional("pruner", partial(study_file.name_or_path, known=study_file.PRUNERS)),
            baseline=trial_tables.read_baseline(content, where),
            listed=listed,
            warm_start=names,
            workers=WorkerSettings.from_dict(content.get("workers", {}), f"{where}: workers"),
        )
        spec._check(where)
        known = {start.source for start in settled}
        recipes = [name for name in names if name in trial_tables.RECIPES and name not in known]
        starts += [clip_to_space(trial_tables.RECIPES[name].values, search, name, source=name) for name in recipes]
        return spec.with_starts(settled, starts, f"{where}: ")

    @classmethod
    def from_stored(cls, content: Mapping[str, Any], where: str) -> "StudySpec":
        """Return a stored study, by what its task declared: the task is not read, so that nothing of it is run.

        Raises:
            ConfigError: as `load`, or it is of another version, or damaged.
        """
        if study_file.DECLARED not in content:
            raise ConfigError(f"{where}: it was stored by another version")
        try:
            return cls.from_dict(content, where)
        except ConfigError:
            raise
        except (TypeError, AttributeError, LookupError, ValueError) as error:
            raise ConfigError(f"{where}: it is damaged: {first_line(error)}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, shaped as the file with what its task declares; `from_stored` reads them back."""
        asked = {**self.search, **self.idle}
        search = {
            name: list(span.values) if isinstance(span, Choices) else asdict(span) for name, span in asked.items()
        }
        values: dict[str, Any] = {
            **{key: getattr(self, key) for key in _PLAIN},
            study_file.DECLARED: study_file.declared_values(self.declared),
            "fixed": dict(self.fixed),
            **({} if self.listed else {"search": search, "sampler": asdict(self.sampler)}),
            **({"baseline": dict(self.baseline)} if self.baseline else {}),
            "trial": [trial.to_dict() for trial in self.listed],
            "start": [start.to_dict() for start in self.starts],
            "warm_start": list(self.warm_start),
            "kl": {"budget": self.kl_budget, "first_budget": self.first_budget, "limit": self.kl_limit},
            "guard": self.guard.to_dict(),
            "workers": self.workers.to_dict(),
        }
        return {key: value for key, value in values.items() if value not in (None, [])} | {"threads": self.threads}

    def with_starts(self, settled: Sequence[ListedTrial], asked: Iterable[ListedTrial], where: str = "") -> "StudySpec":
        """Return this study with the `settled` starts and the new ones among those `asked` for.

        Raises:
            ConfigError: the values of one that is asked for do not go together.
        """
        seen = {self.config(self.params_with(start.params)): start.name for start in settled}
        if self.baseline:
            seen[self.config(self.baseline_params())] = "trial 1, the baseline"
        seen[self.config(self.reference_params())] = "trial 0, the reference"
        starts, dropped = list(settled), []
        for start in asked:
            try:
                config = self.config(self.params_with(start.params))
            except ConfigError as error:
                raise ConfigError(f"{where}{start.name}: {error}") from None
            if config in seen:
                dropped.append((start, seen[config]))
            else:
                seen[config] = start.name
                starts.append(start)
        return replace(self, starts=tuple(starts), dropped=tuple(dropped))

    def with_keys(self, keys: Mapping[str, Any], where: str) -> "StudySpec":
        """Return this study with other values of some keys of its file; in a table only those given are replaced.

        Raises:
            ConfigError: one is not allowed; the message begins with `where`.
        """
        content = self.to_dict()
        for key, value in keys.items():
            content[key] = {**content[key], **value} if isinstance(value, Mapping) else value
        return replace(StudySpec.from_stored(content, where), dropped=self.dropped)

    def config(self, params: Mapping[str, HyperValue]) -> PPOConfig:
        """Return a trial's configuration: declared defaults, task reference, fixed values, then `params`.

        A searched value that `params` lacks is trial 0's. Where a batch size is searched, a mini-batch larger than the
        rollout batch is the whole of it.

        Raises:
            ConfigError: an unknown name, or values that do not go together.
        """
        values = dict(self.declared.reference)
        values |= (pace := self._pace(params))
        if "lr_controller" in pace:
            values.pop("kl_coef", None)
        elif "normalize_kl_coef" in pace:
            values["kl_coef"] = study_file.usual_beta(self.first_budget)
        values |= {name: self._reference_value(name) for name in self.search}
        if "lr_controller" not in pace:
            values.pop("kl_step", None)
        values |= self.fixed
        values |= params
        if "batch_size" in self.search or "mini_batch_size" in self.search:
            mini, batch = values.get("mini_batch_size"), values.get("batch_size")
            if batch is None and values.get("gradient_accumulation_steps") is None:
                batch = DEFAULT_BATCH_SIZE
            values["mini_batch_size"] = min(mini, batch) if isinstance(mini, int) and isinstance(batch, int) else mini
        return PPOConfig.from_dict({**values, "seed": self.seed}, "params")

    def reference_params(self) -> dict[str, HyperValue]:
        """Return trial 0's params, the task's own or TRL's, also outside the ranges; empty if trials are listed."""
        values = {name: self._reference_value(name) for name in self.search}
        return {name: value for name, value in values.items() if value is not None}

    def baseline_params(self) -> dict[str, HyperValue]:
        """Return the baseline's params; trial 0's fill in the rest, but for how its rate and β move.

        A given rate follows a schedule. A given β is fixed, and in reward, unless the baseline has a KL target, or
        states that it is normalized.
        """
        given = dict(self.baseline)
        if "learning_rate" in given and self.keeps_kl_step:
            given = {"lr_controller": "schedule", **given}
        if "kl_coef" in given:
            in_reward = {"normalize_kl_coef": False} if self.fixed.get("normalize_kl_coef") else {}
            given = {"kl_target": None, **in_reward, **given}
        return self.params_with(given)

    def params_with(self, given: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
        """Return the params of a trial with the values `given`; trial 0's fill in the rest.

        A trial that sets its own rate or β, in a study whose trials keep their pace, has no KL step to fill in. Its own
        β is fixed, unless it states how β moves, and then moves to the study's KL target.
        """
        reference = self.reference_params()
        if "lr_controller" not in self._pace(given):
            reference.pop("kl_step", None)
            if self.keeps_kl_step and "kl_coef" in given:
                moves = {"kl_controller", "kl_horizon"} & given.keys()
                reference["kl_target"] = {**self._pace({}), **reference, **self.fixed}["kl_target"] if moves else None
        return {**reference, **given}

    @property
    def budget_changed(self) -> str:
        """A sentence on a KL budget other than the first; empty: it is the same."""
        if self.kl_budget == self.first_budget:
            return ""
        return (
            f"Trials are still made for the study's first KL budget, {short(self.first_budget)}: to aim at "
            f"{short(self.kl_budget)}, start another study."
        )

    @property
    def keeps_kl_step(self) -> bool:
        """True if each trial keeps its own pace, unless its params say otherwise."""
        return "lr_controller" in self._pace({})

    def _pace(self, params: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
        """Return how the rate and β of a trial with these params move, where the study does not say."""
        given = {*self.search, *params, *(name for trial in self.listed for name in trial.params)}
        target = self._reference_value("kl_target")
        own = {"lr_controller": "schedule"} if params.get("lr_controller") == "schedule" else {}
        pace = study_file.pace(given, {**self.fixed, **own}, target, is_listed=bool(self.listed))
        if "kl_coef" in self.declared.reference:  # in reward
            pace.pop("normalize_kl_coef", None)
        return pace

    def _reference_value(self, name: str) -> HyperValue:
        task = self.declared
        value = task.reference.get(name, HYPERPARAMETERS[name].default)
        if name == "kl_target" and value is None:
            return KL_TARGET * self.first_budget
        if name == "kl_coef" and self.fixed.get("normalize_kl_coef"):
            return study_file.usual_beta(self.first_budget)
        if name == "kl_step" and value is None:
            return study_file.reference_kl_step(task, self.fixed)
        if name == "lam" and value is None:
            length = self.fixed.get("response_length", self._reference_value("response_length"))
            return default_lam(cast(int, length))
        return value

    def _check(self, where: str) -> None:
        if self.listed:
            self._check_each(self.listed_params, where)
            return
        if not self.search:
            why = f"; {self.notes[0]}" if self.notes else ""
            raise ConfigError(f"{where}: [search] is empty, so all trials would be the same{why}")
        if self.trials is None and self.budget is None:
            raise ConfigError(f"{where}: budget or trials is missing: how much the study may spend, or start")
        if isinstance(self.budget, float) and self.budget < 1:
            raise ConfigError(
                f"{where}: budget = {self.budget:g} is not allowed; expected at least 1, one trial of full length"
            )
        for name in self.fixed:
            if name in self.search or name in self.idle:
                raise ConfigError(f"{where}: {name} is in both [fixed] and [search]; remove it from one of them")
        low, high = self.corner("low"), self.corner("high")
        trials = {
            "trial 0 (the reference)": self.reference_params(),
            "all searched values at their low end": low,
            "all searched values at their high end": high,
        }
        for values in study_file.choice_pairs(self.search):
            trials[study_file.values_text(values)] = {**low, **values}
            trials[f"{study_file.values_text(values)}, all others at their high end"] = {**high, **values}
        self._check_each(trials, where)
        if self.baseline:
            self._check_each({"baseline": self.baseline_params()}, where)
            config = self.config(self.baseline_params())
            require_stated_mini_batch(self.baseline, config, f"{where}: baseline.")
            if config == self.config(self.reference_params()):
                raise ConfigError(f"{where}: baseline: it is the same as trial 0, the reference; state what differs")

    def _check_each(self, trials: Mapping[str, Mapping[str, HyperValue]], where: str) -> None:
        for which, params in trials.items():
            try:
                config = self.config(params)
                steps = config.gradient_accumulation_steps
                if self.gpus_per_trial > 1 and steps is not None:
                    raise ConfigError(
                        f"gradient_accumulation_steps = {steps} is not allowed with gpus_per_trial = "
                        f"{self.gpus_per_trial}: the batch would grow with the number of GPUs; set batch_size and "
                        "mini_batch_size instead"
                    )
                config.batch_sizes(self.gpus_per_trial)
            except ConfigError as error:
                raise ConfigError(f"{where}: {which}: {error}") from None

    def corner(self, which: Literal["low", "high"]) -> dict[str, HyperValue]:
        """Return the lowest or highest value of each searched hyperparameter."""
        return {name: study_file.extreme(span, which) for name, span in self.search.items()}


def require_stated_mini_batch(given: Mapping[str, HyperValue], config: PPOConfig, where: str = "") -> None:
    """Raise ConfigError if the `given` mini-batch is larger than the batch, which a trial's `config` would cut."""
    mini = given.get("mini_batch_size")
    if mini is not None and mini != config.mini_batch_size:
        raise ConfigError(
            f"{where}mini_batch_size = {mini} is not allowed; expected at most batch_size = {config.batch_size}"
        )
