"""Every PPO hyperparameter, declared once.

One `hyper` declaration per field feeds validation, the command line, the search space, the dashboard's labels and the
docs. `valid` is a mathematical limit, always enforced; `search` is advice for a 1B to 7B model, which a task or a
study may replace. `ppo_core.config.hyperparameters` says what follows from them. Never imports torch.
"""

from dataclasses import dataclass
from typing import Literal

from ppo_core.config.checks import AT_LEAST_ONE, POSITIVE, Bounds
from ppo_core.config.declare import Range, hyper

SHARE = RATE = Bounds(0, 1)
CRITIC = "it decides which critic the checkpoint holds, if any"
TRL = "TRL 1.12 PPOConfig"
PPO_PAPER = "Schulman et al. 2017, arXiv 1707.06347"
ZIEGLER = "Ziegler et al. 2019, arXiv 1909.08593"
COUNTED = "episodes, and with them the place in the order of prompts, are counted in rollout batches of its size"
ADAPTERS = "it decides which weights are trained, and so what the checkpoint holds"
SCALE = "the trained adapters are scaled by it, so the policy would jump"
Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup"]


# fmt: off
@dataclass(frozen=True)
class PPOFields:
    """One PPO run's hyperparameters, under TRL's names where TRL has the field (`ppo_core.cli.trl` has the others)."""

    total_episodes: int = hyper(100_000, "Total episodes",
        "Length of the run: one episode is one prompt and its response. Rounded up to whole rollout batches.",
        heading="Length, evaluation and seed", source=TRL, unit="episodes", valid=AT_LEAST_ONE)
    eval_every_episodes: int | None = hyper(None, "Evaluate every",
        "Episodes between evaluations on held-out prompts (also before the first and after the last update). Unset: "
        "a tenth of total_episodes.", source="PPO Tuner", unit="episodes", valid=AT_LEAST_ONE)
    seed: int = hyper(0, "Seed",
        "Decides every random draw of the run, regardless of chunking and the number of processes.",
        source=TRL, valid=Bounds(0, 2**32 - 1))

    lr_controller: Literal["schedule", "kl_step"] = hyper("schedule", "Learning rate controller",
        "What sets the policy's learning rate. schedule: learning_rate and lr_scheduler_type. kl_step: the rate that "
        "moves the policy by kl_step in each iteration, found and followed by the run itself; needs kl_target.",
        heading="Optimization", source="this project (kl_step)")
    learning_rate: float = hyper(3e-6, "Policy learning rate",
        "Peak AdamW learning rate of the policy. Too high and the KL blows up; too low and nothing is learned. "
        "With lr_controller = kl_step it only sets where the search for the rate begins: at a hundredth of it.",
        source=f"{TRL}; search range from published recipes of 0.5B to 70B", valid=RATE,
        search=Range(1e-7, 1e-4, "log"))
    value_learning_rate: float = hyper(1e-5, "Value learning rate",
        "Peak AdamW learning rate of the critic. With a shared trunk it trains only the value head.",
        source="OpenRLHF and verl give the critic a rate of its own", valid=RATE, search=Range(1e-6, 1e-4, "log"))
    lr_scheduler_type: Schedule = hyper("linear", "Schedule",
        "How the learning rates fall from their peak after the warm-up. constant and constant_with_warmup keep it. "
        "With lr_controller = kl_step only the critic's.", source=f"{TRL} (linear)")
    value_lr_scheduler_type: Schedule | None = hyper(None, "Value schedule",
        "Schedule of the critic's learning rate. Unset: lr_scheduler_type.",
        source="OpenRLHF and verl schedule the critic on its own")
    warmup_ratio: float = hyper(0.0, "Warm-up",
        "Share of the iterations over which the learning rates rise to their peak.",
        source="transformers 4 TrainingArguments", unit="share of the run", valid=Bounds(0, 1, high_open=True))
    value_warmup_ratio: float | None = hyper(None, "Value warm-up",
        "Share of the iterations over which the critic's learning rate rises to its peak. Unset: warmup_ratio.",
        source="OpenRLHF and verl schedule the critic on its own", unit="share of the run",
        valid=Bounds(0, 1, high_open=True))
    min_lr_rate: float = hyper(0.0, "Learning rate floor",
        "Floor of the linear and cosine schedules of both networks, as a share of the peak.",
        source="transformers' cosine_with_min_lr; OpenRLHF uses 0.1", unit="share of the peak", valid=SHARE)
    max_grad_norm: float = hyper(1.0, "Gradient clip",
        "Gradient norm that an optimizer step is clipped to, for the policy and the critic separately.",
        source=f"{TRL} (declared there, never applied)", valid=POSITIVE)
    value_max_grad_norm: float | None = hyper(None, "Value gradient clip",
        "Gradient norm that the critic's optimizer step is clipped to. Unset: max_grad_norm.",
        source="OpenRLHF and verl clip each network on its own", valid=POSITIVE)
    skip_nonfinite_updates: bool = hyper(False, "Skip non-finite steps",
        "Skip an optimizer step whose gradient norm is not finite, and count it, instead of ruining the "
        "weights.", source="verl")
    optim: Literal["adamw", "adamw_8bit"] = hyper("adamw", "Optimizer",
        "adamw: its two moments of each trained weight in float32. adamw_8bit: in 8 bits, a quarter of that; needs "
        "bitsandbytes (the extra quantized).",
        source="transformers TrainingArguments; Dettmers et al. 2022, arXiv 2110.02861",
        fixed_by_checkpoint="the checkpoint holds its moments")
    adam_beta1: float = hyper(0.9, "Adam β1",
        "Decay of AdamW's mean of the gradients.",
        source="transformers TrainingArguments", valid=Bounds(0, 1, high_open=True))
    adam_beta2: float = hyper(0.999, "Adam β2",
        "Decay of AdamW's mean of the squared gradients.",
        source="transformers TrainingArguments", valid=Bounds(0, 1, high_open=True))
    adam_epsilon: float = hyper(1e-8, "Adam epsilon",
        "Term added to AdamW's denominator.",
        source="Huang et al. 2024, arXiv 2403.17031: 1e-5 was used for TL;DR, frameworks default to 1e-8",
        valid=POSITIVE)
    weight_decay: float = hyper(0.0, "Weight decay",
        "AdamW's decoupled weight decay, for the matrices of both networks; biases and norms are not decayed.",
        source="transformers TrainingArguments", valid=Bounds(0))
    critic_warmup: int = hyper(0, "Critic warm-up",
        "Iterations at the start in which only the critic learns; the policy stays as it is.",
        source="verl trainer.critic_warmup; OpenRLHF critic.freezing_steps", unit="iterations", valid=Bounds(0))

    batch_size: int | None = hyper(None, "Rollout batch",
        "Episodes collected in one iteration, over all processes. Unset: per_device_train_batch_size x "
        "gradient_accumulation_steps x processes where both are set, else 64.",
        heading="Batches and epochs", source="TRL's derived batch_size", unit="episodes", valid=AT_LEAST_ONE,
        search=Range(64, 1024, "log2"), fixed_by_checkpoint=COUNTED)
    mini_batch_size: int | None = hyper(None, "Mini-batch",
        "Episodes of one optimizer step, over all processes; divides batch_size. Unset: batch_size / "
        "num_mini_batches where that is set, else the whole batch_size (as TRL).",
        source="TRL's derived mini_batch_size", unit="episodes", valid=AT_LEAST_ONE, search=Range(4, 64, "log2"))
    per_device_train_batch_size: int | None = hyper(None, "Micro-batch per device",
        "Episodes of one forward and backward pass on one device: what fits in memory, never a change of the "
        "experiment. Unset: the device's whole share of a mini-batch.",
        source=TRL, unit="episodes", valid=AT_LEAST_ONE)
    gradient_accumulation_steps: int | None = hyper(None, "Accumulation steps",
        "Forward and backward passes per device in one rollout batch (TRL's meaning); another way to state "
        "batch_size.", source=TRL, valid=AT_LEAST_ONE, fixed_by_checkpoint=COUNTED)
    num_mini_batches: int | None = hyper(None, "Mini-batches",
        "Optimizer steps in one PPO epoch; another way to state mini_batch_size.",
        source=TRL, valid=AT_LEAST_ONE)
    local_rollout_forward_batch_size: int = hyper(256, "Forward rows",
        "Most rows of one pass without gradients per device (generation, scoring, evaluation). Memory only.",
        source=TRL, unit="episodes", valid=AT_LEAST_ONE)
    num_ppo_epochs: int = hyper(4, "PPO epochs",
        "Passes over one rollout batch. More learn more from it, and move further from the policy that sampled it.",
        source=TRL, unit="epochs", valid=AT_LEAST_ONE, search=Range(2, 10))

    cliprange: float = hyper(0.2, "Clip range ε",
        "No gain from a probability ratio outside [1-ε, 1+ε].",
        heading="Loss and advantages", source=f"{PPO_PAPER}, eq. 7; {TRL}",
        valid=Bounds(0, 1, low_open=True, high_open=True), search=Range(0.1, 0.3))
    cliprange_high: float | None = hyper(None, "Upper clip range",
        "Clip range above 1 where it differs from the one below: no gain from a ratio outside [1-cliprange, "
        "1+cliprange_high]. Unset: as cliprange.",
        source="Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 10; verl clip_ratio_high", valid=POSITIVE)
    dual_clip: float | None = hyper(None, "Dual clip",
        "Where an advantage is negative the loss of a token is at most this times it, so that one ratio cannot "
        "explode it. Unset: no bound.",
        source="Ye et al. 2020, arXiv 1912.09729, eq. 5; verl clip_ratio_c = 3", valid=Bounds(1, low_open=True))
    log_ratio_clamp: float | None = hyper(20.0, "Log-ratio clamp",
        "The log of the probability ratio stays within ± this before it is exponentiated. Unset: no bound.",
        source="OpenRLHF and verl (20)", unit="nats per token", valid=POSITIVE)
    normalize_values: bool = hyper(True, "Normalize values",
        "The critic predicts normalized returns: minus their running mean, divided by their running standard "
        "deviation. Its loss and cliprange_value are in these units, so the scale and offset of the reward do "
        "not matter. false: in reward, as in TRL.", source="van Hasselt et al. 2016 (PopArt), arXiv 1602.07714")
    cliprange_value: float | None = hyper(0.2, "Value clip range",
        "No gain from moving a value prediction further than this from the old one, in standard deviations of the "
        "returns. Unset: no clip.", source=f"{TRL}, in reward; OpenAI baselines", valid=POSITIVE)
    vf_coef: float = hyper(0.1, "Value loss weight c1",
        "Weight of the value loss. With a separate critic AdamW cancels it, so it does nothing there.",
        source=f"{PPO_PAPER}, eq. 9 (c1); {TRL}", valid=Bounds(0), search=Range(0.5, 1.0))
    entropy_coef: float = hyper(0.0, "Entropy bonus c2",
        "Weight of the policy's entropy beside the advantages: in penalty_unit where they are not whitened.",
        source=f"{PPO_PAPER}, eq. 9 (c2)", valid=Bounds(0))
    advantage_estimator: Literal["gae", "rloo", "grpo"] = hyper("gae", "Advantages",
        "gae: from a critic. rloo: the response's reward less the mean of the prompt's other responses. grpo: less "
        "the mean of the prompt's responses, over their standard deviation. The last two have no critic.",
        source="Schulman et al. 2016; Ahmadian et al. 2024, arXiv 2402.14740; Shao et al. 2024, arXiv 2402.03300",
        fixed_by_checkpoint=CRITIC)
    num_generations: int = hyper(1, "Responses per prompt",
        "Responses sampled of each prompt of a rollout batch; divides batch_size. rloo and grpo need at least 2.",
        source="TRL GRPOConfig and RLOOConfig", unit="responses", valid=AT_LEAST_ONE,
        fixed_by_checkpoint="the place in the order of prompts is counted in groups of that many")
    gamma: float = hyper(1.0, "Discount γ",
        "Discount per token. 1 for episodic text.", source=TRL, valid=SHARE)
    lam: float | None = hyper(None, "GAE λ",
        "Trade-off between variance (1: Monte Carlo) and bias (0: one-step TD) in the advantages. Unset: 0.95, or "
        "1 - 1 / the mean length of the first batch's responses in tokens where that is more, so that a score reaches "
        "the first token of a long response.",
        source=f"Schulman et al. 2016, arXiv 1506.02438, eq. 16; {TRL} (0.95); this project (unset)", valid=SHARE,
        search=Range(0.9, 0.9999, "log_from_1"))
    value_lam: float | None = hyper(None, "Critic's λ",
        "λ of the returns that the critic learns, where it differs from that of the advantages. Unset: lam.",
        source="Yuan et al. 2025 (VC-PPO), arXiv 2503.01491; VAPO, arXiv 2504.05118; NeMo-RL", valid=SHARE)
    whiten_advantages: bool | None = hyper(None, "Whiten advantages",
        "Shift and scale the advantages of a rollout batch to mean 0 and variance 1 over its tokens. Unset: with gae"
        " yes, with rloo and grpo no.", source="TRL, OpenRLHF and verl do so with GAE")

    kl_coef: float = hyper(0.05, "KL coefficient β",
        "Price of one nat of KL in reward. Where kl_target makes β adaptive, its first value.",
        heading="KL from the reference", source=TRL, unit="reward per nat", valid=Bounds(0))
    normalize_kl_coef: bool = hyper(False, "Normalize β",
        "kl_coef is in standard deviations of the first batch's scores per nat, so that the reward's own unit decides "
        "nothing; β is 0 until a batch's scores differ. false: in reward, as TRL.", source="this project")
    kl_target: float | None = hyper(None, "KL target",
        "Set: β moves so that the exact KL of a response approaches this. Unset: β is fixed.",
        source=f"{ZIEGLER}, section 2.2 (6 nats for 24 tokens)", unit="nats per response", valid=POSITIVE)
    kl_controller: Literal["adaptive", "hold"] | None = hyper(None, "KL controller",
        "How β moves where kl_target is set. adaptive: up while the KL is over the target, down while it is under it. "
        "hold: looking ahead, so that the KL reaches the target and stays; β begins at ½ σ / √(2 kl_target), with σ "
        "the standard deviation of the first batch's scores, and kl_coef is not read. Unset: hold with lr_controller = "
        "kl_step, which it needs, else adaptive.",
        source=f"{ZIEGLER}, section 2.2 (adaptive); this project (hold)")
    kl_step: float | None = hyper(None, "KL step",
        "With lr_controller = kl_step, the KL from the policy that samples a batch to the one that has learned from "
        "it. Unset: 1 over the iterations in which the policy learns, at most 0.1. The run raises it where the KL "
        "would come to its target late, and lowers it where little is left to the target.",
        source="this project", unit="share of kl_target", valid=Bounds(0, 1, low_open=True))
    kl_horizon: int | None = hyper(None, "KL horizon",
        "Episodes over which an adaptive β can adapt by a factor of about e^0.2. Unset: a tenth of total_episodes (the "
        "classic 10,000 does nothing in a short trial).",
        source=f"{ZIEGLER}, section 2.2", unit="episodes", valid=AT_LEAST_ONE)
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = hyper("k1", "KL estimator",
        "Per-token estimate of the KL that β weighs, of the log-ratio r: k1 = r, k2 = r²/2, k3 = exp(-r) - 1 + r, "
        "abs = |r|.",
        source=f"{TRL} (k1, k3); verl (k2, abs); J. Schulman, Approximating KL Divergence, 2020")
    use_kl_loss: bool = hyper(False, "KL as a loss",
        "The KL to the reference is a term of the policy's loss, weighted by β, instead of a part of the reward.",
        source="OpenRLHF and verl use_kl_loss; Shao et al. 2024, arXiv 2402.03300")
    kl_clamp: float | None = hyper(None, "KL clamp",
        "The sampled KL of a token stays within ± this. Unset: no bound.",
        source="OpenRLHF (10)", unit="nats per token", valid=POSITIVE)

    missing_eos_penalty: float | None = hyper(None, "Missing-EOS penalty",
        "Subtracted from the score of a response that does not end by itself within response_length, in penalty_unit.",
        heading="Rewards", source=TRL, valid=Bounds(0))
    overlong_buffer: int | None = hyper(None, "Overlong buffer",
        "The last this many tokens before response_length cost a penalty that rises linearly to overlong_penalty. "
        "Unset: they cost nothing.",
        source="Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13; OpenRLHF overlong_buffer_len", unit="tokens",
        valid=AT_LEAST_ONE)
    overlong_penalty: float = hyper(1.0, "Overlong penalty",
        "What a response of full response_length costs where overlong_buffer is set, in penalty_unit.",
        source="OpenRLHF overlong_penalty_factor", valid=Bounds(0))
    penalty_unit: Literal["reward", "spread"] = hyper("reward", "Penalty unit",
        "What missing_eos_penalty and overlong_penalty are counted in, and entropy_coef where advantages are not "
        "whitened. reward: as TRL. spread: the standard deviation of the first batch's scores, normalized and clipped "
        "where that is asked for, so that the reward's own unit decides nothing; 0 until scores differ.",
        source="this project (spread)")
    normalize_rewards: Literal["none", "running", "reference"] = hyper("none", "Normalize scores",
        "Shift and scale the scores before PPO reads them, by mean and standard deviation of all scores so far "
        "(running) or of the first rollout batch (reference). Logged scores stay raw.",
        source="trlx scale_reward; OpenRLHF (reward model's mean and std)")
    cliprange_reward: float | None = hyper(None, "Score clip",
        "The score of a response, normalized where that is asked for, stays within ± this. Unset: no bound.",
        source="trlx cliprange_reward and OpenRLHF (10)", unit="reward", valid=POSITIVE)
    whiten_rewards: bool = hyper(False, "Whiten rewards",
        "Scale the per-token rewards of a rollout batch to unit variance before GAE, their mean with them.",
        source=f"{TRL}, which leaves the mean in its own unit")

    response_length: int = hyper(53, "Response length",
        "Largest number of new tokens in a response.",
        heading="Sampling", source=TRL, unit="tokens", valid=AT_LEAST_ONE)
    temperature: float = hyper(0.7, "Temperature",
        "Divides the logits, both in sampling and in training.", source=TRL, valid=POSITIVE)
    top_p: float = hyper(1.0, "Top-p",
        "Sample only from the likeliest tokens that hold this much probability, and train that filtered policy. The "
        "reference is not filtered, so it adds up to -log(top_p) nats per token to the training KL, from the first "
        "step on.",
        source="TRL; Holtzman et al. 2020, arXiv 1904.09751", unit="share", valid=Bounds(0, 1, low_open=True))
    top_k: int | None = hyper(None, "Top-k",
        "Sample only from this many likeliest tokens, and train that filtered policy. The reference is not filtered,"
        " so it adds to the training KL, from the first step on. Unset: from all.",
        source="TRL; Fan et al. 2018, arXiv 1805.04833", unit="tokens", valid=AT_LEAST_ONE)
    stop_token: Literal["eos", "none"] = hyper("eos", "Stop token",
        "eos: a response ends with the end-of-sequence tokens of the model and its tokenizer. none: they are "
        "ordinary tokens.", source=TRL)
    stop_token_id: int | None = hyper(None, "Stop token id",
        "A further token of the policy that ends a response, by id.", source=TRL, valid=Bounds(0))
    stop_strings: str | None = hyper(None, "Stop strings",
        "A text that ends a response, which keeps it; or several as a JSON list.",
        source="transformers GenerationConfig")

    value_model: Literal["shared", "separate"] = hyper("shared", "Critic",
        "shared: a value head on the policy's own trunk. separate: its own network, initialized from the policy "
        "or from value_model_path.",
        heading="Networks", source="trlx (shared); TRL, OpenRLHF and verl (separate)", fixed_by_checkpoint=CRITIC)
    value_model_path: str | None = hyper(None, "Critic's start",
        "What a separate critic is initialized from: a path or hub id of the policy's architecture and tokenizer, or "
        "reward_model. Unset: from the policy.",
        source="Stiennon et al. 2020 and OpenRLHF start it from the reward model; TRL reward_model_path",
        fixed_by_checkpoint=CRITIC)
    use_peft: bool = hyper(False, "LoRA",
        "Train low-rank adapters on frozen weights, which are then also the reference. A separate critic has its own "
        "adapters on the same weights.",
        source="Hu et al. 2021, arXiv 2106.09685; TRL ModelConfig", fixed_by_checkpoint=ADAPTERS)
    lora_r: int = hyper(16, "LoRA rank",
        "Rank of the adapters.", source="TRL ModelConfig", valid=AT_LEAST_ONE, fixed_by_checkpoint=ADAPTERS)
    lora_alpha: int = hyper(32, "LoRA alpha",
        "The adapters' output is scaled by this over lora_r.",
        source="TRL ModelConfig", valid=AT_LEAST_ONE, fixed_by_checkpoint=SCALE)
    lora_target_modules: str | None = hyper(None, "LoRA modules",
        "Names of the modules with adapters, with commas between them, or all-linear. Unset: peft's choice for the "
        "architecture.", source="TRL ModelConfig", fixed_by_checkpoint=ADAPTERS)
    use_rslora: bool = hyper(False, "rsLoRA",
        "Scale the adapters' output by lora_alpha over the square root of lora_r, so that a high rank learns as fast "
        "as a low one.",
        source="Kalajdzievski 2023, arXiv 2312.03732; TRL ModelConfig", fixed_by_checkpoint=SCALE)
    lora_modules_to_save: str | None = hyper(None, "Modules trained whole",
        "Names of modules that are trained whole beside the adapters, in float32, with commas between them, such as "
        "lm_head. Unset: none.",
        source="TRL ModelConfig; peft modules_to_save", fixed_by_checkpoint=ADAPTERS)
    load_in_4bit: bool = hyper(False, "4-bit weights",
        "Hold the frozen linear layers under the adapters, all but the head, in 4 bits (NF4, double quantisation): "
        "about a quarter of bfloat16's memory. They are also the reference. Needs use_peft, and bitsandbytes (the "
        "extra quantized).", source="Dettmers et al. 2023 (QLoRA), arXiv 2305.14314; TRL ModelConfig",
        fixed_by_checkpoint="the frozen weights, the reference among them, are rounded to it")
    bf16: bool | None = hyper(None, "bfloat16",
        "Forward and backward passes in bfloat16. Trained weights stay in float32; frozen ones are held in bfloat16. "
        "Losses, log-softmax and values are in float32 always; with LoRA the eval KL is read in float32, too, unless "
        "load_in_4bit, lora_modules_to_save or flash attention rules it out. Any other KL holds what rounding shows "
        "(eval/kl_rounding at step 0). Unset: on a GPU that computes in it.",
        source="transformers TrainingArguments",
        fixed_by_checkpoint="the frozen weights, the reference among them, are rounded to it")
    attn_implementation: str | None = hyper(None, "Attention",
        "Which kernels compute the policy's attention, as transformers names them: sdpa, eager, flash_attention_2 and "
        "others. Unset: transformers' choice.", source="TRL ModelConfig; transformers")
    use_fsdp: bool = hyper(False, "FSDP",
        "With several processes, each holds a share of the weights, gradients and AdamW's moments (FSDP2) and gathers "
        "a layer's weights when it works: for full fine-tuning that is too large for one GPU. The same steps.",
        source="Zhao et al. 2023, arXiv 2304.11277; PyTorch fully_shard")
    fsdp_reshard_after_forward: bool = hyper(True, "FSDP drops weights",
        "With use_fsdp, drop a layer's gathered weights after its forward pass and gather them again for the backward "
        "pass, as ZeRO-3 does. false keeps them until then, as ZeRO-2 does: more memory, less traffic, the same steps.",
        source="Rajbhandari et al. 2020, arXiv 1910.02054; accelerate, PyTorch fully_shard")
    gradient_checkpointing: bool | None = hyper(None, "Gradient checkpointing",
        "Compute the layers' activations again in the backward pass instead of keeping them, in the policy and the "
        "critic: less memory, more time, the same gradients. Unset: once memory runs out with a single row.",
        source="transformers TrainingArguments (TRL's PPO declared it and applied it to neither)")
