"""verl's keys. Its batches count prompts, each with `rollout.n` responses.

The KL is in the reward or a loss, by two switches; a coefficient counts only if its switch alone is on. With
`trainer.critic_warmup` = N the policy learns from iteration N on, counted from 1.
"""

from typing import Any

from tuner.exchange.table import PER_TOKEN, Key, Ours, Table, pair, per_prompt, words

_MODEL, _ACTOR, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_OPTIM, _RESPONSES = f"{_ACTOR}.optim", f"{_ROLLOUT}.n"
_SWITCHES = ("algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss")
_COEFFICIENTS = ("algorithm.kl_ctrl.kl_coef", f"{_ACTOR}.kl_loss_coef")
_KINDS = ("algorithm.kl_penalty", f"{_ACTOR}.kl_loss_type")
_ESTIMATORS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "abs": "abs"}
_SCHEDULES = {"constant_with_warmup": "constant", "constant": "constant", "cosine": "cosine"}


def _kl_rows(is_loss: bool) -> tuple[Key, ...]:
    def coefficient(value: Any, ours: Ours) -> Any:
        return value if ours["use_kl_loss"] is is_loss else None

    def kind(value: Any, ours: Ours) -> Any:
        return coefficient(_ESTIMATORS[value], ours)

    return (
        Key("use_kl_loss", _SWITCHES[is_loss], lambda on, _: on is is_loss),
        Key("kl_coef", _COEFFICIENTS[is_loss], coefficient),
        Key("kl_estimator", _KINDS[is_loss], kind),
    )


VERL = Table(
    "verl 0.8",
    (
        Key("total_episodes", "trainer.total_training_steps trainer.total_epochs",
            lambda episodes, ours: -(-episodes // int(ours["batch_size"]))),
        Key("seed", "data.seed"),
        Key("learning_rate", f"{_OPTIM}.lr"),
        Key("value_learning_rate", "critic.optim.lr"),
        words("lr_scheduler_type", _SCHEDULES, f"{_OPTIM}.lr_scheduler_type"),
        words("value_lr_scheduler_type", _SCHEDULES, "critic.optim.lr_scheduler_type"),
        Key("warmup_ratio", f"{_OPTIM}.lr_warmup_steps_ratio"),
        Key("value_warmup_ratio", "critic.optim.lr_warmup_steps_ratio"),
        Key("min_lr_rate", f"{_OPTIM}.min_lr_ratio critic.optim.min_lr_ratio"),
        Key("max_grad_norm", f"{_ACTOR}.grad_clip {_OPTIM}.clip_grad"),  # its older and its newer engine
        Key("value_max_grad_norm", "critic.grad_clip critic.optim.clip_grad"),
        words("optim", {"adamw": "AdamW", "adamw_8bit": "AdamW8bit"}, f"{_OPTIM}.optimizer critic.optim.optimizer"),
        words("optim", {"adamw": "torch.optim", "adamw_8bit": "bitsandbytes.optim"},
              f"{_OPTIM}.optimizer_impl critic.optim.optimizer_impl"),
        *pair("adam_beta1", "adam_beta2", f"{_OPTIM}.betas critic.optim.betas"),
        Key("weight_decay", f"{_OPTIM}.weight_decay critic.optim.weight_decay"),
        Key("critic_warmup", "trainer.critic_warmup", lambda n, _: n and n + 1),
        per_prompt("batch_size", "data.train_batch_size"),
        Key("num_generations", _RESPONSES),
        per_prompt("mini_batch_size", f"{_ACTOR}.ppo_mini_batch_size"),
        Key("num_ppo_epochs", f"{_ACTOR}.ppo_epochs"),
        Key("cliprange", f"{_ACTOR}.clip_ratio_low"),
        Key("cliprange_high", f"{_ACTOR}.clip_ratio_high"),
        Key("dual_clip", f"{_ACTOR}.clip_ratio_c"),
        Key("cliprange_value", "critic.cliprange_value"),
        Key("entropy_coef", f"{_ACTOR}.entropy_coeff"),
        words("advantage_estimator", {name: name for name in ("gae", "rloo", "grpo")}, "algorithm.adv_estimator"),
        Key("gamma", "algorithm.gamma"),
        Key("lam", "algorithm.lam"),
        *_kl_rows(is_loss=False),
        *_kl_rows(is_loss=True),
        Key("response_length", "data.max_response_length"),
        Key("temperature", f"{_ROLLOUT}.temperature"),
        Key("top_p", f"{_ROLLOUT}.top_p"),
        Key("top_k", f"{_ROLLOUT}.top_k", lambda k, _: k or -1),
        Key("lora_r", f"{_MODEL}.lora_rank critic.model.lora_rank"),
        Key("use_peft", f"{_MODEL}.lora_rank critic.model.lora_rank",
            lambda on, ours: ours["lora_r"] if on else 0),
        Key("lora_alpha", f"{_MODEL}.lora_alpha critic.model.lora_alpha"),
        Key("lora_target_modules", f"{_MODEL}.target_modules critic.model.target_modules",
            lambda names, _: names.split(",") if names and "," in names else names),
    ),
    {
        "kl_target": PER_TOKEN,
        "mini_batch_size": "it counts whole prompts",
        **dict.fromkeys(("value_model", "vf_coef"), "its critic is a network of its own"),
        "bf16": "its engines compute in bfloat16",
    },
)  # fmt: skip
