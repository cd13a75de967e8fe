"""PPO as one visible loop on the public pieces of ppo_core, without the trainer and its options.

    OMP_NUM_THREADS=1 .venv/bin/python examples/ppo_loop.py

The task is `arithmetic`: answer a sum, and the reward is 1 for the right answer, else 0. Each rollout batch's mean
reward and exact KL from the reference (nats per response) are printed before it is learned from. In well under a minute
on one core that begins and ends with about these lines:

    iteration 0: reward 0.402, KL 0.000
    iteration 23: reward 0.734, KL 0.539
"""

from collections.abc import Iterator

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from ppo_core import PPOConfig
from ppo_core.algorithm.advantages import gae, masked_whiten
from ppo_core.algorithm.experience import Experience, read_policy
from ppo_core.algorithm.kl import sampled_kl
from ppo_core.algorithm.ppo_loss import policy_loss, value_loss
from ppo_core.algorithm.scores import on_last_token
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import load_task
from ppo_core.models.memory import ChunkRows
from ppo_core.models.networks import build_network
from ppo_core.models.policy import response_states, token_readings
from ppo_core.randomness import Key, Purpose, mini_batch_order, prompt_rows
from ppo_core.sampling.generation import Request, TransformersGenerator
from ppo_core.sampling.next_token import SamplingSettings, eos_ids

ITERATIONS, BATCH, MINI_BATCH, EPOCHS, SEED = 24, 256, 64, 2, 0
TEMPERATURE, RESPONSE_LENGTH = 1.0, 4
LEARNING_RATE, VALUE_LEARNING_RATE, MAX_GRAD_NORM = 3e-4, 1e-3, 1.0
BETA, GAMMA, LAMBDA = 0.05, 1.0, 0.95
CLIPRANGE, CLIPRANGE_VALUE, VF_COEF = 0.2, 0.2, 0.1


def ppo() -> Iterator[tuple[float, float]]:
    """Yield each rollout batch's mean reward and exact KL from the reference, in nats per response."""
    models = load_task("arithmetic", "cpu")
    network = build_network(PPOConfig(), models.reference, None)  # a policy with a value head on its trunk
    generator = TransformersGenerator(network, models.tokenizer, ChunkRows("generation", BATCH, ONE_PROCESS))
    stop_ids = tuple(eos_ids(models.reference, models.tokenizer))
    sampling = SamplingSettings(TEMPERATURE, RESPONSE_LENGTH, stop_ids=stop_ids)
    rates = [(network.policy_parameters(), LEARNING_RATE), (network.value_parameters(), VALUE_LEARNING_RATE)]
    optimizer = AdamW([{"params": parameters, "lr": rate} for parameters, rate in rates], weight_decay=0.0)
    prompts = models.prompts.train

    for iteration in range(ITERATIONS):
        # Collect: one response per prompt.
        chosen = prompt_rows(SEED, len(prompts), iteration * BATCH, BATCH)
        requests = [Request(row, prompts[number]) for row, number in enumerate(chosen)]
        rollouts = generator.generate(requests, sampling, Key(SEED, Purpose.ROLLOUT, iteration))
        sequences, mask = rollouts.sequences, rollouts.sequences.response_mask

        # Score: the reward of each response; log-probs, values and exact KL of each token.
        texts = models.token_texts(sequences)
        scored = models.reward(rollouts.prompts, rollouts.responses, texts, rollouts.ended.tolist())
        scores = torch.tensor(scored.totals)
        old = read_policy(network, models.reference, sequences, TEMPERATURE, ChunkRows("scoring", BATCH, ONE_PROCESS))
        assert old.values is not None
        yield scores.mean().item(), old.kl_exact.sum(-1).mean().item()

        # Advantages: each token pays β KL, the last one earns the score.
        kl = sampled_kl(old.logprobs, old.ref_logprobs, "k1")
        rewards = on_last_token(-BETA * kl * mask, scores, mask)
        advantages, returns = gae(rewards, old.values, mask, GAMMA, LAMBDA)
        advantages = masked_whiten(advantages, mask, world=ONE_PROCESS)
        experience = Experience(sequences, old.logprobs, old.ref_logprobs, advantages, old.values, returns)

        # Learn: epochs of mini-batches in another order each, one optimizer step a mini-batch.
        for epoch in range(EPOCHS):
            for rows in torch.tensor(mini_batch_order(SEED, iteration, epoch, BATCH)).split(MINI_BATCH):
                mini = experience.rows(rows)
                sequences, mask = mini.sequences, mini.sequences.response_mask
                states = response_states(network.policy, sequences)
                logprobs, _ = token_readings(network.head, states, sequences, TEMPERATURE, with_entropy=False)
                values = network.values(states, sequences)
                assert mini.values is not None and mini.returns is not None
                policy = policy_loss(logprobs, mini.logprobs, mini.advantages, mask, CLIPRANGE)
                value = value_loss(values, mini.values, mini.returns, mask, CLIPRANGE_VALUE)
                optimizer.zero_grad()
                ((policy.loss + VF_COEF * value.loss) / mask.sum()).backward()
                for parameters, _ in rates:
                    clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
        generator.update_weights()


if __name__ == "__main__":
    for iteration, (reward, kl) in enumerate(ppo()):
        print(f"iteration {iteration}: reward {reward:.3f}, KL {kl:.3f}")
