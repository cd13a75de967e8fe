"""Each field of TRL's that is said in our words: one function each, from its value to what is told of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppo_core.command import trl_fields
from ppo_core.command.config_files import hyperparameter, texts
from ppo_core.declaration import HyperValue
from ppo_core.errors import ConfigError, nearest

REWARD_MODEL = "reward_model"
"""What value_model_path says of a critic that begins as the reward model."""
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")

TRL_ONLY: Mapping[str, HyperValue] = {
    "value_model": "separate",
    "value_model_path": REWARD_MODEL,
    "lr_scheduler_type": "linear",
    "stop_token": "none",
    "stop_token_id": None,
}
"""What TRL's PPO does where no field of the file says otherwise, in our words."""


@dataclass
class Reading:
    """What is gathered while a file's keys are read one by one."""

    where: str
    content: Mapping[str, Any]
    values: dict[str, HyperValue] = field(default_factory=lambda: {**trl_fields.DEFAULTS, **TRL_ONLY})
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    generations: int = 10
    warmup_steps: float = 0
    save_steps: float | None = 500

    @property
    def epochs(self) -> float | None:
        """Passes over the prompts, where the file states no total_episodes."""
        if self.content.get("total_episodes") is not None:
            return None
        stated = self.content.get("num_train_epochs")
        return 3.0 if stated is None else self.number("num_train_epochs", stated)

    def number(self, key: str, value: object) -> float:
        """Return a number of at least 0 (YAML hands `1e-5` over as text)."""
        try:
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else -1.0
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise self.refused(key, value, "a number of at least 0")
        return number

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise self.refused(key, value, "a text")
        return value

    def refused(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} = {value!r} is not allowed: {allowed}")


def _policy(reading: Reading, value: Any) -> str:
    reading.settings["policy"] = reading.text("sft_model_path", value)
    return f"policy = {value}"


def _model_name(reading: Reading, value: Any) -> str:
    if reading.content.get("sft_model_path") is not None:
        return "TRL's script takes only the tokenizer from it; here the tokenizer is the policy's"
    reading.settings["policy"] = reading.text("model_name_or_path", value)
    return f"policy = {value}"


def _reward(reading: Reading, value: Any) -> str:
    reading.settings["reward"] = (reading.text("reward_model_path", value),)
    return f"reward = {value}"


def _dataset(reading: Reading, value: Any) -> str:
    reading.settings["prompts"] = reading.text("dataset_name", value)
    return f"prompts = {value}"


def _prompts_key(key: str, ours: str) -> Callable[[Reading, Any], str]:
    def translate(reading: Reading, value: Any) -> str:
        reading.prompts[ours] = reading.text(key, value)
        return f"prompts.{ours} = {value}"

    return translate


def _setting(key: str, ours: str) -> Callable[[Reading, Any], str]:
    def translate(reading: Reading, value: Any) -> str:
        reading.settings[ours] = reading.text(key, value)
        return f"{ours} = {value}"

    return translate


def _report_to(reading: Reading, value: Any) -> str:
    names = () if value in ([], "none", ["none"]) else texts(value, f"{reading.where}: report_to")
    reading.settings["report_to"] = names
    return f"report_to = {', '.join(names) or 'nothing'}"


def _generations(reading: Reading, value: Any) -> str:
    reading.generations = int(reading.number("num_sample_generations", value))
    if reading.content.get("eval_every_episodes") is not None:
        return "eval_every_episodes comes first"
    if not reading.generations:
        return "evaluations before the first and after the last iteration"
    return (
        f"eval_every_episodes, from max(1, iterations // {reading.generations}), as TRL samples completions; "
        "and before the first and after the last iteration"
    )


def _epochs(reading: Reading, value: Any) -> str:
    epochs = reading.number("num_train_epochs", value)
    if reading.epochs is None:
        return "total_episodes comes first, as in TRL"
    return f"total_episodes = {epochs:g} times the number of training prompts"


def _warmup_steps(reading: Reading, value: Any) -> str:
    reading.warmup_steps = reading.number("warmup_steps", value)
    return "warmup_ratio, by the number of iterations; a constant schedule has no warm-up"


def _schedule(reading: Reading, value: Any) -> str:
    floored = value == "cosine_with_min_lr"
    if value not in SCHEDULES and not floored:
        hint = nearest(str(value), SCHEDULES)
        raise reading.refused("lr_scheduler_type", value, f"here one of {', '.join(SCHEDULES)}{hint}")
    reading.values["lr_scheduler_type"] = "cosine" if floored else value
    return f"lr_scheduler_type = {reading.values['lr_scheduler_type']}" + (" with min_lr_rate" if floored else "")


def _schedule_options(reading: Reading, value: Any) -> str:
    if not value:
        return "it says nothing"
    options = value if isinstance(value, Mapping) else {}
    floor = options.get("min_lr_rate")
    if floor is None and "min_lr" in options:
        rate = reading.number(
            "learning_rate", reading.content.get("learning_rate", trl_fields.DEFAULTS["learning_rate"])
        )
        floor = reading.number("lr_scheduler_kwargs.min_lr", options["min_lr"]) / rate if rate else 0.0
    if floor is None or set(options) - {"min_lr", "min_lr_rate"}:
        raise reading.refused("lr_scheduler_kwargs", value, "here min_lr or min_lr_rate, of cosine_with_min_lr")
    reading.values["min_lr_rate"] = hyperparameter("min_lr_rate", floor, reading.where)
    return f"min_lr_rate = {floor:g}"


def _stop_token(reading: Reading, value: Any) -> str:
    if value is None:
        return "no token ends a response" if reading.content.get("stop_token_id") is None else "stop_token_id ends it"
    if value != "eos":
        raise reading.refused("stop_token", value, "eos or null")
    if reading.content.get("stop_token_id") is not None:
        raise ConfigError(f"{reading.where}: stop_token and stop_token_id are both given; TRL allows one of them")
    reading.values["stop_token"] = "eos"
    return "stop_token = eos"


def _stop_token_id(reading: Reading, value: Any) -> str:
    reading.values["stop_token_id"] = hyperparameter("stop_token_id", value, reading.where)
    return f'stop_token_id = {value}, and stop_token = "none": TRL then lets no other token end a response'


def _lora_modules(reading: Reading, value: Any) -> str:
    names = texts(value, f"{reading.where}: lora_target_modules")
    reading.values["lora_target_modules"] = ",".join(names)
    return f"lora_target_modules = {','.join(names)}"


def _save_strategy(reading: Reading, value: Any) -> str:
    if value == "steps":
        return "save_every_episodes, from save_steps"
    reading.save_steps = None
    if value in ("no", False):  # YAML reads a bare no as false
        return (
            "not followed: checkpoints are saved by save_every_seconds and at a new best evaluation, so that --resume "
            "can go on; they are removed at the end"
        )
    return "no save_steps then; save_every_seconds and evaluations decide"


def _save_steps(reading: Reading, value: Any) -> str:
    steps = reading.number("save_steps", value)
    if reading.content.get("save_strategy") not in (None, "steps"):
        return "save_strategy leaves it without effect"
    reading.save_steps = steps or None
    return "save_every_episodes, by the size of an iteration"


def _cpu(reading: Reading, value: Any) -> str:
    if value is True:
        reading.settings["device"] = "cpu"
    return f"device = {'cpu' if value is True else 'auto'}"


def _optimizer(reading: Reading, value: Any) -> str:
    return "AdamW, as here" if str(value).startswith("adamw") else f"AdamW trains here, not {value}"


def _adafactor(reading: Reading, value: Any) -> str:
    return "AdamW trains here, not Adafactor" if value is True else "AdamW, as here"


TRANSLATORS: Mapping[str, Callable[[Reading, Any], str]] = {
    "sft_model_path": _policy,
    "model_name_or_path": _model_name,
    "reward_model_path": _reward,
    "dataset_name": _dataset,
    "dataset_config": _prompts_key("dataset_config", "config"),
    "dataset_train_split": _prompts_key("dataset_train_split", "train"),
    "dataset_test_split": _prompts_key("dataset_test_split", "eval"),
    "output_dir": _setting("output_dir", "output"),
    "run_name": _setting("run_name", "run_name"),
    "report_to": _report_to,
    "num_sample_generations": _generations,
    "num_train_epochs": _epochs,
    "warmup_steps": _warmup_steps,
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _schedule_options,
    "stop_token": _stop_token,
    "stop_token_id": _stop_token_id,
    "lora_target_modules": _lora_modules,
    "save_strategy": _save_strategy,
    "save_steps": _save_steps,
    "use_cpu": _cpu,
    "no_cuda": _cpu,
    "optim": _optimizer,
    "adafactor": _adafactor,
}
NULL_SAYS = ("stop_token",)
"""Fields whose null says more than a missing one."""
