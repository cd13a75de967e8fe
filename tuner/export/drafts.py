"""What a configuration is in the words of TRL's PPO, of OpenRLHF and of verl. Never imports torch.

Their keys are those that `tuner.search.other_trainers` and `ppo_core.run.trl` read; here stands what an inverse needs
besides. What a trainer always does is taken to be our declared default, or is in its `always`; a value that is neither
written nor that is listed as not mapped, so nothing is left out silently.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig, inert
from ppo_core.output import short
from ppo_core.run import trl
from tuner.export.chosen import Chosen
from tuner.export.task_parts import Parts, is_file
from tuner.search import other_trainers as theirs
from tuner.search.other_trainers import Row

Values = Mapping[str, HyperValue]
_SIZES = ("batch_size", "mini_batch_size", "num_mini_batches", "per_device_train_batch_size",
          "gradient_accumulation_steps")  # fmt: skip
MISSING = "???"
"""What stands in the place of a value that is to be filled in: Hydra and the importer know it as that."""
_LORA = ("lora_r", "lora_alpha", "lora_target_modules", "use_rslora", "lora_modules_to_save", "load_in_4bit")


@dataclass
class Draft:
    """What is written of a configuration in another trainer's words."""

    values: Values
    """Ours (see `effective`)."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Theirs, in the order of the file."""
    mapped: dict[str, HyperValue] = field(default_factory=dict)
    """Those of ours that the keys say, as reading the file gives them back."""
    written: set[str] = field(default_factory=set)
    """Those of ours that keys say in other words, which are not read back."""
    notes: dict[str, str] = field(default_factory=dict)
    """Those of ours that the keys do not say, and why."""
    missing: dict[str, str] = field(default_factory=dict)
    """Keys that are for the user to fill in, and what belongs there."""

    def put(self, ours: str, key: str) -> None:
        """Write a value under a key, as it is."""
        self.keys[key] = self.mapped[ours] = self.values[ours]
        more = theirs.MORE_FROZEN.get(key, 0)
        if more > 0 or (more and self.values[ours]):  # none is 0 where they freeze fewer, and -1 where they freeze more
            self.keys[key] = self.number(ours) - more

    def put_rows(self, rows: Iterable[Row], choose: Callable[[tuple[str, ...]], str | None]) -> None:
        """Write the values of a reader's rows, each under the key that is chosen of the row's."""
        for ours, keys, default in rows:
            key = choose(keys)
            if key is None or _is_idle(ours, self.values):
                continue
            if self.values[ours] is not None:
                self.put(ours, key)
            elif default is not None:
                self.notes[ours] = f"there it cannot be unset; {key} is {short(default)} unless you set it"

    def put_word(self, ours: str, key: str, words: Mapping[str, str]) -> None:
        """Write a choice in the trainer's word for it: the first of a reader's `words` that means it."""
        word = next((word for word, meaning in words.items() if meaning == self.values[ours]), None)
        if word is None:
            known = ", ".join(dict.fromkeys(words.values()))
            self.notes[ours] = f"there {key} is one of those that are {known} here; its default holds"
        else:
            self.keys[key], self.mapped[ours] = word, self.values[ours]

    def say(self, key: str, value: object, *ours: str) -> None:
        """Write a value of theirs that says `ours` in other words."""
        self.keys[key] = value
        self.written.update(ours)

    def put_place(self, key: str, value: str | None, what: str) -> None:
        """Write where a model or data lies, or note that it is to be filled in."""
        if value is None:
            self.missing[key], self.keys[key] = what, MISSING
        else:
            self.keys[key] = value

    def number(self, ours: str) -> int:
        """Return a value that is a whole number."""
        return int(self.values[ours] or 0)


def effective(config: PPOConfig) -> dict[str, HyperValue]:
    """Return a configuration's values with what follows from others filled in, for one process."""
    values = config.to_dict()
    sizes = config.batch_sizes(1)
    values |= {name: getattr(sizes, name) for name in _SIZES}
    values["eval_every_episodes"] = max(config.eval_interval, sizes.batch_size)  # it evaluates after whole iterations
    values["bf16"] = config.bf16 is not False  # theirs run on GPUs
    values["gradient_checkpointing"] = config.gradient_checkpointing is True
    values["whiten_advantages"] = config.whitens_advantages
    values["cliprange_high"] = config.cliprange if config.cliprange_high is None else config.cliprange_high
    for own, shared in _OF_CRITIC.items():
        values[own] = values[shared] if values[own] is None else values[own]
    if values["value_lr_scheduler_type"] == "constant":
        values["value_warmup_ratio"] = 0.0
    return values


_OF_CRITIC = {
    "value_lr_scheduler_type": "lr_scheduler_type",
    "value_warmup_ratio": "warmup_ratio",
    "value_max_grad_norm": "max_grad_norm",
}
"""The critic's own values that are the policy's where they are unset."""


def _is_idle(name: str, values: Values) -> bool:
    """Return whether a value does nothing beside the others, or decides memory alone."""
    return inert(name, values) is not None and name != "gradient_checkpointing"


def _note_rest(draft: Draft, title: str, always: Values, why: Mapping[str, str]) -> None:
    """Note every value that is not written and is not what the trainer always does."""
    values = draft.values
    baseline = {name: declared.default for name, declared in HYPERPARAMETERS.items()}
    baseline |= {"cliprange_high": values["cliprange"], "whiten_advantages": values["advantage_estimator"] == "gae"}
    baseline |= {own: values[shared] for own, shared in _OF_CRITIC.items()}
    baseline |= always
    covered = {*draft.mapped, *draft.written, *draft.notes, *_SIZES}
    for name in HYPERPARAMETERS:
        if name not in covered and values[name] != baseline[name] and not _is_idle(name, values):
            draft.notes[name] = why.get(name, f"{title} has no such option")


_SHARED_CRITIC = "there the critic is a network of its own, here a head on the policy's trunk"
_ADAPTIVE = "theirs is a mean per token, ours a sum per response, so β is fixed"


_UNSET_BF16 = "unset in the trial, which computes in bfloat16 on a GPU and in float32 on a CPU"


def _draft(chosen: Chosen) -> Draft:
    """Return an empty draft of a configuration, with the note on what it leaves to the machine."""
    return Draft(_values(chosen), notes={"bf16": _UNSET_BF16} if chosen.config.bf16 is None else {})


def _values(chosen: Chosen) -> Values:
    """Return the values to write: ours, with the β that an adaptive one had come to at the trial's end."""
    values = effective(chosen.config)
    is_known = values["kl_target"] is not None and chosen.last_kl_coef is not None
    return {**values, "kl_coef": chosen.last_kl_coef} if is_known else values


def _about_adaptive_beta(last: float | None) -> str:
    """Return what becomes of β where it adapted in the study."""
    start = "" if last is None else ", at what the study's had adapted to by the end of the trial"
    return f"β is fixed at kl_coef here{start}, and does not adapt"


# TRL

_TRL_OURS = {ours for ours, _ in trl.TRANSLATED.values()}
_TRL_SAME = (
    *(name for name in trl.DEFAULTS if name not in {*_TRL_OURS, *_SIZES, "value_model", "value_model_path"}),
    "total_episodes", "max_grad_norm", "bf16", "gradient_checkpointing", "use_peft", "use_rslora", "load_in_4bit",
    "attn_implementation",
)  # fmt: skip
"""The fields of TRL's that have our names, and mean the same."""
_TRL_ESTIMATORS = ("k1", "k3")
_TRL_WHY = {
    "value_learning_rate": "TRL's critic trains at the policy's learning_rate",
    "eval_every_episodes": "TRL samples completions num_sample_generations times, and evaluates nothing",
    "value_model": f"{_SHARED_CRITIC}; it starts as reward_model_path",
    "value_model_path": "TRL's critic starts as reward_model_path",
    "max_grad_norm": "TRL's PPO declares it and clips nothing",
    "log_ratio_clamp": "TRL does not bound the log-ratio",
    "stop_token_id": "TRL takes it or stop_token, not both",
    "kl_estimator": f"TRL has {' and '.join(_TRL_ESTIMATORS)}; its k1 holds",
    "min_lr_rate": "only the cosine schedule has a floor there",
}


def to_trl(chosen: Chosen, parts: Parts) -> Draft:
    """Return a configuration in the words of TRL's PPO.

    Raises:
        ConfigError: it has no critic, and TRL's PPO always has one.
    """
    draft = _draft(chosen)
    values = draft.values
    if values["advantage_estimator"] != "gae":
        raise ConfigError(
            f'trial {chosen.trial.number} has advantage_estimator = "{values["advantage_estimator"]}", and TRL\'s PPO '
            "has GAE alone; write it with --to openrlhf or --to verl"
        )
    _trl_places(draft, parts)
    batch, mini = draft.number("batch_size"), draft.number("mini_batch_size")
    # Where TRL accumulates gradients it steps once an epoch, so several mini-batches need G = 1. A pass has B / M rows.
    per_device = draft.number("per_device_train_batch_size") if batch == mini else batch
    for key, size in zip(theirs.TRL_SIZES, (per_device, batch // per_device, batch // mini), strict=True):
        draft.keys[key] = size
    draft.mapped |= {"batch_size": batch, "mini_batch_size": mini}
    for name in _TRL_SAME:
        if name in _LORA and not values["use_peft"]:
            continue
        if values[name] is not None and (name != "kl_estimator" or values[name] in _TRL_ESTIMATORS):
            draft.put(name, name)
        elif values[name] is None and trl.DEFAULTS.get(name) is not None:
            draft.notes[name] = f"there it cannot be unset; its default of {short(trl.DEFAULTS[name])} holds"
    draft.notes["max_grad_norm"] = _TRL_WHY["max_grad_norm"]
    _trl_others(draft)
    if values["kl_target"] is not None:
        draft.notes["kl_target"] = _about_adaptive_beta(chosen.last_kl_coef)
    always: dict[str, HyperValue] = {
        "log_ratio_clamp": None, "value_model": "separate", "value_model_path": trl.REWARD_MODEL,
        "value_learning_rate": values["learning_rate"], "kl_estimator": "k1",
    }  # fmt: skip
    if values["value_model"] == "shared":
        always["value_model_path"] = None
    _note_rest(draft, "TRL's PPO", always, _TRL_WHY)
    return draft


def _trl_places(draft: Draft, parts: Parts) -> None:
    draft.put_place("model_name_or_path", parts.policy, "the SFT policy")
    draft.put_place("sft_model_path", parts.policy, "the SFT policy")
    reward = parts.reward_model
    draft.put_place("reward_model_path", reward, f"a reward model, for {parts.reward_text}")
    prompts = parts.prompts if parts.prompts is not None and not is_file(parts.prompts) else None
    draft.put_place("dataset_name", None if prompts is None else prompts.path, f"a dataset of {parts.prompts_text}")
    if prompts is not None and prompts.config is not None:
        draft.keys["dataset_config"] = prompts.config
    if prompts is not None and isinstance(prompts.train, str):
        draft.keys["dataset_train_split"] = prompts.train


def _trl_others(draft: Draft) -> None:
    """Write what TRL says in other words than ours: schedule, warm-up, evaluations, stop token, LoRA's modules."""
    values = draft.values
    has_floor = values["lr_scheduler_type"] == "cosine" and values["min_lr_rate"]
    draft.keys["lr_scheduler_type"] = "cosine_with_min_lr" if has_floor else values["lr_scheduler_type"]
    draft.mapped["lr_scheduler_type"] = values["lr_scheduler_type"]
    if has_floor:
        draft.keys["lr_scheduler_kwargs"] = {"min_lr_rate": values["min_lr_rate"]}
        draft.mapped["min_lr_rate"] = values["min_lr_rate"]
    draft.say("warmup_steps", values["warmup_ratio"], "warmup_ratio")  # below 1 a share of the run
    evaluations = draft.number("total_episodes") // draft.number("eval_every_episodes")
    draft.keys["num_sample_generations"] = max(1, evaluations)
    draft.notes["eval_every_episodes"] = _TRL_WHY["eval_every_episodes"]
    if values["stop_token"] == "eos":
        draft.put("stop_token", "stop_token")
    else:
        draft.say("stop_token", None, "stop_token")
        draft.mapped["stop_token"] = "none"
        if values["stop_token_id"] is not None:
            draft.put("stop_token_id", "stop_token_id")
    if values["load_in_4bit"]:
        draft.keys["use_bnb_nested_quant"] = True  # NF4 is its default
    if values["optim"] != "adamw":
        draft.put("optim", "optim")
    for name in ("lora_target_modules", "lora_modules_to_save"):
        modules = values[name]
        if values["use_peft"] and isinstance(modules, str):
            draft.keys[name] = modules.split(",")
            draft.mapped[name] = modules


# OpenRLHF

_SAID_OPENRLHF = (
    ("seed", "train.seed"),
    ("weight_decay", "critic.adam.weight_decay"),
    ("adam_epsilon", "critic.adam.eps"),
    ("min_lr_rate", "critic.min_lr_ratio"),
    ("overlong_buffer", "reward.overlong_buffer_len"),
)
"""What the reader does not read, and the critic's copies of what the policy has, too."""
_EOS = "it stops at EOS"
_OPENRLHF_WHY = {
    "value_model": f"{_SHARED_CRITIC}; it starts as the policy",
    "vf_coef": "there the critic has an optimizer of its own, where AdamW cancels the weight",
    "eval_every_episodes": "eval.steps counts its steps, and evaluates eval.dataset",
    "bf16": "it trains in bf16 or fp16 (ds.param_dtype)",
    "kl_clamp": "it bounds the sampled KL of a token to ± 10 nats",
    "cliprange_reward": "it clips scores to ± 10 unless reward.clip_range says otherwise",
    "missing_eos_penalty": "its reward.stop_properly_penalty_coef scales or replaces the score",
    "stop_token": _EOS,
    "min_lr_rate": "only its cosine_with_min_lr has a floor",
    "normalize_rewards": "it has a running normalization alone (reward.normalize_enable)",
}


def _dotted(keys: tuple[str, ...]) -> str | None:
    """Return the flag since OpenRLHF 0.11, if there is one."""
    return next((key for key in reversed(keys) if "." in key), None)


def to_openrlhf(chosen: Chosen, parts: Parts) -> Draft:
    """Return a configuration in the flags of OpenRLHF's PPO; a switch is True or False."""
    draft = _draft(chosen)
    values, has_critic = draft.values, chosen.config.has_critic
    models = ("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path")
    _places(draft, parts, models, own_reward="reward.remote_url")
    prompts = parts.prompts
    draft.put_place("data.prompt_dataset", None if prompts is None else prompts.path, parts.prompts_text)
    if prompts is not None:
        draft.keys["data.max_len"] = prompts.max_prompt_tokens + draft.number("response_length")
        draft.keys |= {"data.input_key": prompts.column} if prompts.column is not None else {}
    responses = draft.number("num_generations")
    for keys, size in (
        (theirs.OPENRLHF_PROMPTS[0], draft.number("batch_size") // responses),
        (theirs.OPENRLHF_RESPONSES[0], responses),
        (theirs.OPENRLHF_MINI[0], draft.number("mini_batch_size")),
    ):
        draft.keys[_dotted(keys) or keys[0]] = size
    draft.mapped |= {name: values[name] for name in ("batch_size", "mini_batch_size", "num_generations")}
    # One pass over as many prompts as the run takes; a smaller dataset needs more passes.
    draft.say("data.max_samples", chosen.config.whole_episodes() // responses, "total_episodes")
    draft.say("train.num_episodes", 1)
    apart = {"cliprange", "lr_scheduler_type", "advantage_estimator", "kl_estimator"}  # as pairs and words
    draft.put_rows((row for row in theirs.OPENRLHF if row[0] not in apart), _dotted)
    draft.keys["actor.eps_clip_low_high"] = [values["cliprange"], values["cliprange_high"]]
    betas = [values["adam_beta1"], values["adam_beta2"]]
    draft.keys["actor.adam.betas"] = betas
    draft.mapped |= {name: values[name] for name in ("cliprange", "cliprange_high", "adam_beta1", "adam_beta2")}
    draft.put_word("lr_scheduler_type", "actor.lr_scheduler", theirs.SCHEDULERS)
    draft.put_word("advantage_estimator", "algo.advantage.estimator", theirs.ADVANTAGES)
    draft.put_word("kl_estimator", "algo.kl.estimator", {name: name for name in ("k1", "k2", "k3")})
    if has_critic:
        draft.say("critic.adam.betas", betas)
        inverse = {meaning: word for word, meaning in reversed(theirs.SCHEDULERS.items())}
        draft.say("critic.lr_scheduler", inverse[str(values["value_lr_scheduler_type"])], "value_lr_scheduler_type")
    _openrlhf_others(draft, has_critic)
    _note_adaptive(draft, chosen)
    always: dict[str, HyperValue] = {
        "value_model": "separate", "value_model_path": None, "bf16": True, "kl_clamp": 10.0, "vf_coef": None,
        "cliprange_reward": 10.0, "min_lr_rate": 0.0,
    }  # fmt: skip
    _note_rest(draft, "OpenRLHF", always, _OPENRLHF_WHY)
    return draft


def _openrlhf_others(draft: Draft, has_critic: bool) -> None:
    values = draft.values
    for ours, key in _SAID_OPENRLHF:
        if values[ours] is not None and (has_critic or not key.startswith("critic.")):
            draft.say(key, values[ours], ours)
    if values["overlong_buffer"] is not None:
        draft.say("reward.overlong_penalty_factor", values["overlong_penalty"], "overlong_penalty")
    if values["normalize_rewards"] == "running":
        draft.keys["reward.normalize_enable"], draft.mapped["normalize_rewards"] = True, "running"
    bound = values["cliprange_reward"]
    if isinstance(bound, float):
        draft.say("reward.clip_range", [-bound, bound], "cliprange_reward")
    if values["bf16"]:
        draft.say("ds.param_dtype", "bf16", "bf16")
    if values["use_peft"]:
        draft.say("ds.lora.rank", values["lora_r"], "use_peft", "lora_r")
        draft.say("ds.lora.alpha", values["lora_alpha"], "lora_alpha")
        if values["load_in_4bit"]:
            draft.say("ds.load_in_4bit", True, "load_in_4bit")
        if isinstance(values["lora_target_modules"], str):
            draft.say("ds.lora.target_modules", values["lora_target_modules"].split(","), "lora_target_modules")
    if values["min_lr_rate"] and {values["lr_scheduler_type"], values["value_lr_scheduler_type"]} != {"cosine"}:
        draft.notes["min_lr_rate"] = _OPENRLHF_WHY["min_lr_rate"]


def _places(draft: Draft, parts: Parts, keys: tuple[str, str, str], own_reward: str) -> None:
    """Write where policy, critic and reward model lie; any other reward is to be filled in under `own_reward`."""
    policy, critic, reward = keys
    values = draft.values
    draft.put_place(policy, parts.policy, "the SFT policy")
    if values["advantage_estimator"] == "gae":
        start = values["value_model_path"]
        place = parts.reward_model if start == trl.REWARD_MODEL else parts.policy if start is None else str(start)
        draft.put_place(critic, place, "where the critic starts: in the study as " + short(start or "the policy"))
        draft.written.add("value_model_path")
    if parts.rewards and parts.reward_model is None:
        draft.put_place(own_reward, None, f"the reward as {own_reward} wants it, for {parts.reward_text}")
    else:
        draft.put_place(reward, parts.reward_model, f"a reward model, for {parts.reward_text}")


def _note_adaptive(draft: Draft, chosen: Chosen) -> None:
    """Note that OpenRLHF and verl count the KL in other units than an adaptive β does here."""
    if draft.values["kl_target"] is not None:
        draft.notes["kl_target"] = f"{_ADAPTIVE}: {_about_adaptive_beta(chosen.last_kl_coef)}"


# verl

_SAID_VERL = (
    ("seed", "data.seed"),
    ("weight_decay", "critic.optim.weight_decay"),
    ("min_lr_rate", "actor_rollout_ref.actor.optim.min_lr_ratio"),
    ("min_lr_rate", "critic.optim.min_lr_ratio"),
    ("gradient_checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing"),
    ("gradient_checkpointing", "critic.model.enable_gradient_checkpointing"),
)
"""What the reader does not read, and the critic's copies of what the policy has, too."""
_VERL_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
_VERL_WHY = {
    "value_model": f"{_SHARED_CRITIC}; it starts as the policy",
    "vf_coef": "there the critic has an optimizer of its own, where AdamW cancels the weight",
    "eval_every_episodes": "trainer.test_freq counts iterations, and evaluates data.val_files",
    "adam_epsilon": "it keeps torch's 1e-08 unless optim.override_optimizer_config says otherwise",
    "bf16": "its engines compute in bfloat16 unless fsdp_config.dtype says otherwise",
    "skip_nonfinite_updates": "it leaves such steps out",
    "stop_token": _EOS,
}


def to_verl(chosen: Chosen, parts: Parts) -> Draft:
    """Return a configuration in verl's keys, joined by dots."""
    draft = _draft(chosen)
    values, has_critic = draft.values, chosen.config.has_critic
    reward, own_reward = "reward.reward_model.model_path", "reward.custom_reward_function.path"
    _places(draft, parts, ("actor_rollout_ref.model.path", "critic.model.path", reward), own_reward)
    if reward in draft.keys:
        draft.keys["reward.reward_model.enable"] = True
    prompts = parts.prompts
    is_parquet = prompts is not None and prompts.path.endswith(".parquet")
    draft.put_place("data.train_files", prompts.path if prompts and is_parquet else None,
                    f"a Parquet file of {parts.prompts_text}")  # fmt: skip
    draft.put_place("data.val_files", None, "a Parquet file of other prompts")
    if prompts is not None:
        draft.keys["data.max_prompt_length"] = prompts.max_prompt_tokens
        draft.keys |= {"data.prompt_key": prompts.column} if prompts.column is not None else {}
    _verl_sizes(draft)
    draft.say("trainer.total_training_steps", chosen.config.num_iterations(), "total_episodes")
    draft.say("trainer.total_epochs", chosen.config.num_iterations())  # at most so many: total_training_steps ends it
    draft.put_rows(theirs.VERL, lambda keys: keys[0])
    own_words = {ours: ours for ours in reversed(theirs.ADVANTAGES.values())}
    draft.put_word("advantage_estimator", "algorithm.adv_estimator", own_words)
    _verl_kl(draft)
    for ours, key in _SAID_VERL:
        if has_critic or not key.startswith("critic."):
            draft.say(key, values[ours], ours)
    draft.say("actor_rollout_ref.rollout.top_k", -1 if values["top_k"] is None else values["top_k"], "top_k")
    _verl_optimizers(draft, has_critic)
    _verl_adapters(draft, has_critic)
    _note_adaptive(draft, chosen)
    always: dict[str, HyperValue] = {
        "value_model": "separate", "bf16": True, "vf_coef": None, "skip_nonfinite_updates": True,
    }  # fmt: skip
    _note_rest(draft, "verl", always, _VERL_WHY)
    return draft


def _verl_optimizers(draft: Draft, has_critic: bool) -> None:
    """Write the schedules and AdamW's β of both networks."""
    values = draft.values
    networks = {"lr_scheduler_type": f"{theirs.ACTOR}optim", "value_lr_scheduler_type": "critic.optim"}
    for name, optimizer in networks.items() if has_critic else [*networks.items()][:1]:
        draft.say(f"{optimizer}.betas", [values["adam_beta1"], values["adam_beta2"]], "adam_beta1", "adam_beta2")
        if values["optim"] == "adamw_8bit":
            draft.say(f"{optimizer}.optimizer_impl", "bitsandbytes.optim", "optim")
            draft.say(f"{optimizer}.optimizer", "AdamW8bit", "optim")
        schedule = _VERL_SCHEDULES.get(str(values[name]))
        if schedule is not None:
            draft.say(f"{optimizer}.lr_scheduler_type", schedule, name)
        elif values[name] == values["lr_scheduler_type"]:
            draft.notes["lr_scheduler_type"] = "verl has constant and cosine; its default, constant, holds"
            draft.written.add(name)
        else:
            draft.notes[name] = "verl has constant and cosine; its default, constant, holds for the critic"


def _verl_adapters(draft: Draft, has_critic: bool) -> None:
    values, modules = draft.values, draft.values["lora_target_modules"]
    if not values["use_peft"]:
        return
    for model in ("actor_rollout_ref.model", "critic.model") if has_critic else ("actor_rollout_ref.model",):
        draft.say(f"{model}.lora_rank", values["lora_r"], "use_peft", "lora_r")
        draft.say(f"{model}.lora_alpha", values["lora_alpha"], "lora_alpha")
        if isinstance(modules, str):
            named = modules.split(",") if "," in modules else modules
            draft.say(f"{model}.target_modules", named, "lora_target_modules")


def _verl_sizes(draft: Draft) -> None:
    """Write the sizes, of which verl counts prompts."""
    responses, mini = draft.number("num_generations"), draft.number("mini_batch_size")
    draft.keys[theirs.VERL_PROMPTS[0][0]] = draft.number("batch_size") // responses
    draft.keys[theirs.VERL_RESPONSES[0][0]] = responses
    draft.keys[theirs.VERL_MINI[0][0]] = max(1, mini // responses)
    draft.mapped |= {name: draft.values[name] for name in ("batch_size", "num_generations")}
    if mini % responses:
        draft.notes["mini_batch_size"] = f"verl counts prompts, each with {responses} responses, so it is rounded"
    else:
        draft.mapped["mini_batch_size"] = mini


def _verl_kl(draft: Draft) -> None:
    """Write β where it is: of the KL in the reward, or as a loss."""
    is_loss = bool(draft.values["use_kl_loss"])
    for key, is_on in zip(theirs.KL_SWITCHES, (not is_loss, is_loss), strict=True):
        draft.keys[key] = is_on
    coefficient, estimator = theirs.KL_OF_LOSS if is_loss else theirs.KL_OF_REWARD
    if not is_loss:
        draft.keys["algorithm.kl_ctrl.type"] = "fixed"
    draft.put("kl_coef", coefficient)
    draft.put_word("kl_estimator", estimator, theirs.ESTIMATORS)
    draft.written.add("use_kl_loss")
