"""Every metric the trainer reports, declared once: name, unit, doc. Never imports torch.

Names are TRL's where TRL has the metric. All means are over response tokens that exist (padding and
what follows the end of a response never count). The store's columns, the guard's rules, the
dashboard's labels and the docs come from this table; a task's own metrics travel beside it as JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Metric:
    """One declared metric."""

    name: str
    label: str
    doc: str
    unit: str = ""

    @property
    def column(self) -> str:
        """Name of its column in the store: `objective/kl` is `objective_kl`."""
        return self.name.replace("/", "_")

    @property
    def title(self) -> str:
        """The label with its unit, unless it ends with that, for axes and tables."""
        return self.label if self.label.endswith(self.unit) else f"{self.label} ({self.unit})"

    def with_unit(self, reading: str) -> str:
        """Return `15 nats per response`, `1 nat per response`; shares have no unit."""
        if self.unit in ("", "share"):
            return reading
        what, *per = self.unit.split(" ")
        return " ".join([reading, what.removesuffix("s") if reading == "1" else what, *per])


QUANTILES = {"min": "minimum", "q25": "lower quartile", "q50": "median", "q75": "upper quartile", "max": "maximum"}
"""Quantiles reported of a distribution in addition to its mean and spread, by suffix, at evenly spaced levels from 0 to 1."""

REPETITION_WINDOW = 24
"""Tokens within which repetition is read, so that the length of a response does not decide it."""

_REPEATED = f"Share of tokens already seen earlier in the same {REPETITION_WINDOW} tokens of a response, the mean over all such windows."
_NATS = "nats per response"
_TOKEN = "nats per token"


def _distribution(name: str, label: str, of: str) -> tuple[Metric, ...]:
    return tuple(
        Metric(f"{name}_{suffix}", f"{label}, {words}", f"{words.capitalize()} of {of}.", "reward")
        for suffix, words in QUANTILES.items()
    )


_DECLARED = (
    Metric("objective/kl", "Sampled KL", "Sum over a response of kl_estimator's estimate of KL(policy ‖ SFT policy).", _NATS),
    Metric("objective/kl_exact", "Training KL", "Sum over a response of KL(policy ‖ SFT policy) over the whole vocabulary. Guards and budgets read this one. The policy is the one that sampled, so top-k and top-p raise it by what the SFT policy gives to other tokens.", _NATS),
    Metric("objective/kl_per_token", "Sampled KL per token", "objective/kl over the number of response tokens.", _TOKEN),
    Metric("objective/kl_exact_per_token", "KL per token", "objective/kl_exact over the response tokens.", _TOKEN),
    Metric("objective/kl_coef", "KL coefficient β", "β in force in this iteration.", "reward per nat"),
    Metric("objective/scores", "Score", "Mean raw score of the rollouts.", "reward"),
    Metric("objective/scores_std", "Score spread", "Standard deviation of the rollouts' raw scores.", "reward"),
    *_distribution("objective/scores", "Score", "the rollouts' raw scores"),
    Metric("objective/penalty_unit", "Worth of a penalty of 1", "1, or with penalty_unit = spread the standard deviation of the first batch's scores.", "reward"),
    Metric("objective/non_score_reward", "KL penalty", "Mean per response of -β x KL in the reward; 0 with use_kl_loss.", "reward"),
    Metric("objective/rlhf_reward", "Score - β KL", "Score plus KL penalty (use_kl_loss: the score): depends on β, so never an objective.", "reward"),
    Metric("objective/rlhf_reward_std", "Score - β KL spread", "Standard deviation of score plus KL penalty.", "reward"),
    *_distribution("objective/rlhf_reward", "Score - β KL", "score plus KL penalty"),
    Metric("objective/entropy", "Surprise", "Mean per response of -log π of the sampled tokens.", _NATS),
    Metric("policy/approxkl_avg", "Approx KL", "Mean of half the squared log-ratio to the sampling policy.", _TOKEN),
    Metric("policy/clipfrac_avg", "Clip fraction", "Share of tokens whose clipped ratio set the loss.", "share"),
    Metric("policy/entropy_avg", "Entropy", "Mean entropy of the policy over the vocabulary.", _TOKEN),
    Metric("loss/policy_avg", "Policy loss", "Clipped surrogate loss, mean over the iteration's optimizer steps."),
    Metric("loss/value_avg", "Value loss", "Value loss before vf_coef, mean over the optimizer steps."),
    Metric("loss/kl_avg", "KL loss", "Sampled KL as a loss before β, mean over the optimizer steps (use_kl_loss)."),
    Metric("val/clipfrac_avg", "Value clip fraction", "Share of tokens whose clipped value set the loss.", "share"),
    Metric("val/ratio", "Ratio", "Mean probability ratio to the sampling policy; 1 before the first update."),
    Metric("val/ratio_var", "Ratio variance", "Variance over tokens of the probability ratio."),
    Metric("val/num_eos_tokens", "Ended responses", "Rollouts that ended by themselves.", "responses"),
    Metric("val/return_std", "Return spread", "Standard deviation of the token returns; with normalize_values the running one, in which the critic predicts.", "reward"),
    Metric("val/var_explained", "Explained variance", "1 - Var(return - value) / Var(return): 1 is a perfect critic."),
    Metric("policy/grad_norm", "Policy gradient norm", "Mean norm before clipping."),
    Metric("value/grad_norm", "Value gradient norm", "Mean norm before clipping (shared trunk: of the value head)."),
    Metric("sampler/mismatch", "Sampler mismatch", "Largest |log π sampled - log π trained| of a token: near 0, always.", "nats"),
    Metric("sampler/kl_gap", "Sampled - exact KL", "Mean of k1 less the exact KL of the same responses: noise around 0 where sampler and trainer agree.", _NATS),
    Metric("sampler/kl_gap_noise", "Noise of sampled - exact KL", "How far chance and rounding take sampler/kl_gap: its standard error, what rare tokens add that a small batch lacks, and the KL of rounding.", _NATS),
    Metric("response/length_mean", "Response length", "Mean length of the rollouts.", "tokens"),
    Metric("response/length_min", "Shortest response", "Shortest rollout.", "tokens"),
    Metric("response/length_max", "Longest response", "Longest rollout.", "tokens"),
    Metric("response/truncated_share", "Truncated share", "Share of rollouts cut at response_length.", "share"),
    Metric("response/repetition", "Repetition", _REPEATED, "share"),
    Metric("lr", "Policy learning rate", "Learning rate of the policy in this iteration."),
    Metric("value/lr", "Value learning rate", "Learning rate of the critic in this iteration."),
    Metric("policy/lam", "GAE λ", "λ in force of the advantages."),
    Metric("policy/kl_step", "KL step", "KL from the policy that sampled the batch to the one after its updates, rounding included (lr_controller = kl_step).", _NATS),
    Metric("policy/kl_step_wanted", "Wanted KL step", "The KL step that the policy's learning rate is moved for.", _NATS),
    Metric("policy/epochs", "PPO epochs", "Passes over the batch that the policy learned from: fewer than num_ppo_epochs where the KL step ended them.", "epochs"),
    Metric("policy/skipped_steps", "Skipped steps", "Optimizer steps left out for a gradient that was not finite.", "steps"),
    Metric("optimizer_steps", "Optimizer steps", "Optimizer steps taken since the start."),
    Metric("eval/reward", "Eval reward", "Mean raw score on the eval prompts.", "reward"),
    Metric("eval/reward_se", "Eval reward SE", "Standard error of eval/reward over the prompts.", "reward"),
    Metric("eval/kl", "Eval KL", "Exact KL of the policy from the reference on the eval prompts.", _NATS),
    Metric("eval/kl_se", "Eval KL SE", "Standard error of eval/kl over the prompts.", _NATS),
    Metric("eval/kl_rounding", "KL of rounding", "KL of the reference from itself, rounded otherwise in bfloat16, on step 0's responses: what rounding alone adds to the training KL, and to the eval KL where it is not read in float32.", _NATS),
    Metric("eval/entropy", "Eval entropy", "Mean entropy of the policy on the eval prompts.", _TOKEN),
    Metric("eval/length", "Eval response length", "Mean response length on the eval prompts.", "tokens"),
    Metric("eval/repetition", "Eval repetition", _REPEATED, "share"),
    Metric("time/generate", "Generation", "Seconds of sampling the rollouts.", "seconds"),
    Metric("time/score", "Scoring", "Seconds of the reward, the reference, log-probs and values.", "seconds"),
    Metric("time/update", "Update", "Seconds of the PPO epochs.", "seconds"),
    Metric("time/evaluate", "Evaluation", "Seconds of the evaluation.", "seconds"),
    Metric("eps", "Episodes per second", "Episodes collected and learned from, without the evaluation.", "episodes/second"),
    Metric("memory/peak", "Peak memory", "Most memory held since the process began: on the GPU, else resident.", "MiB"),
    Metric("time/tokens_per_second", "Throughput", "Response tokens collected and learned from.", "tokens/second"),
)  # fmt: skip

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _DECLARED})

CORE = (
    "objective/kl", "objective/kl_exact", "objective/scores", "objective/non_score_reward", "objective/rlhf_reward",
    "objective/entropy", "policy/approxkl_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg", "val/ratio",
    "policy/grad_norm", "value/grad_norm", "sampler/mismatch", "eval/reward", "eval/kl",
)  # fmt: skip
"""Metrics that must be finite. Others may legitimately not be (the explained variance of equal returns)."""

OF_SAMPLED_POLICY = frozenset(
    ("objective/kl", "objective/kl_exact", "objective/entropy", "policy/entropy_avg", "sampler/mismatch")
)
"""Those of them that are not finite because the policy before the step's update already was not."""
