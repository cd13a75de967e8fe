"""OpenRLHF's flags, the dotted ones since 0.11.

`rollout.batch_size` counts prompts, `train.batch_size` responses. With `critic.freezing_steps` = N the policy learns in
iterations over N, counted from 0; -1: in all.
"""

from tuner.exchange.table import PER_TOKEN, Key, Ours, Table, pair, per_prompt, words

_RESPONSES = "rollout.n_samples_per_prompt"
_FLOORED = "cosine_with_min_lr"
_SCHEDULES = {"cosine": _FLOORED} | {name: name for name in ("linear", "constant", "constant_with_warmup")}


def _prompts(episodes: int, ours: Ours) -> int:
    batch = int(ours["batch_size"])
    return -(-episodes // batch) * batch // int(ours["num_generations"])


def _floor(rate: float, ours: Ours) -> float | None:
    schedules = {ours["lr_scheduler_type"], ours["value_lr_scheduler_type"]}
    return rate if rate == 0 or schedules == {"cosine"} else None


OPENRLHF = Table(
    "OpenRLHF 0.11",
    (
        Key("total_episodes", "data.max_samples", _prompts),
        Key("total_episodes", "train.num_episodes", lambda *_: 1),  # passes over these prompts
        Key("seed", "train.seed"),
        Key("learning_rate", "actor.adam.lr"),
        Key("value_learning_rate", "critic.adam.lr"),
        words("lr_scheduler_type", _SCHEDULES, "actor.lr_scheduler"),
        words("value_lr_scheduler_type", _SCHEDULES, "critic.lr_scheduler"),
        Key("warmup_ratio", "actor.lr_warmup_ratio"),
        Key("value_warmup_ratio", "critic.lr_warmup_ratio"),
        Key("min_lr_rate", "actor.min_lr_ratio critic.min_lr_ratio", _floor),
        Key("max_grad_norm", "actor.max_norm"),
        Key("value_max_grad_norm", "critic.max_norm"),
        *pair("adam_beta1", "adam_beta2", "actor.adam.betas critic.adam.betas"),
        Key("adam_epsilon", "actor.adam.eps critic.adam.eps"),
        Key("weight_decay", "actor.adam.weight_decay critic.adam.weight_decay"),
        Key("critic_warmup", "critic.freezing_steps", lambda n, _: n - 1),
        per_prompt("batch_size", "rollout.batch_size"),
        Key("num_generations", _RESPONSES),
        Key("mini_batch_size", "train.batch_size"),
        Key("num_ppo_epochs", "train.max_epochs"),
        Key("cliprange", "actor.eps_clip"),
        *pair("cliprange", "cliprange_high", "actor.eps_clip_low_high"),
        Key("dual_clip", "actor.dual_clip"),
        Key("cliprange_value", "critic.value_clip"),
        Key("entropy_coef", "actor.entropy_coef"),
        words("advantage_estimator", {"gae": "gae", "rloo": "rloo", "grpo": "group_norm"}, "algo.advantage.estimator"),
        Key("gamma", "algo.advantage.gamma"),
        Key("lam", "algo.advantage.lambd"),
        Key("kl_coef", "algo.kl.init_coef"),
        words("kl_estimator", {"k1": "k1", "k2": "k2", "k3": "k3"}, "algo.kl.estimator"),
        Key("use_kl_loss", "algo.kl.use_loss"),
        Key("overlong_buffer", "reward.overlong_buffer_len"),
        Key("overlong_penalty", "reward.overlong_penalty_factor"),
        words("normalize_rewards", {"none": False, "running": True}, "reward.normalize_enable"),
        Key("cliprange_reward", "reward.clip_range", lambda most, _: most and [-most, most]),
        Key("response_length", "rollout.max_new_tokens"),
        Key("temperature", "rollout.temperature"),
        Key("top_p", "rollout.top_p"),
        Key("lora_r", "ds.lora.rank"),
        Key("use_peft", "ds.lora.rank", lambda on, ours: ours["lora_r"] if on else 0),
        Key("lora_alpha", "ds.lora.alpha"),
        Key("lora_target_modules", "ds.lora.target_modules", lambda names, _: names and names.split(",")),
        Key("load_in_4bit", "ds.load_in_4bit"),
        words("bf16", {True: "bf16"}, "ds.param_dtype"),
    ),
    {
        "kl_target": PER_TOKEN,
        **dict.fromkeys(("value_model", "vf_coef"), "its critic is a network of its own"),
        "kl_clamp": "it bounds the sampled KL of a token to ± 10 nats",
        "min_lr_rate": f"only its {_FLOORED} has a floor",
    },
)
