"""What an evaluation's samples say of single tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import TaskModels
from ppo_core.report import Sample
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.test_networks import CONFIG, NETWORKS

SPECIAL = {"<pad>", "<eos>", "<unk>"}


@torch.no_grad()
def read(model: nn.Module, models: TaskModels, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the response's token ids [T] and a model's log-probabilities [T, V], by a plain pass over the whole."""
    prompt = models.tokenizer(sample.prompt)["input_ids"]
    response = torch.tensor(models.tokenizer.convert_tokens_to_ids(list(sample.tokens.texts)))
    ids = torch.cat([torch.tensor(prompt), response]).unsqueeze(0)
    return response, model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("networks", NETWORKS)
def test_each_tokens_reading_is_what_the_models_say(models: TaskModels, networks: str) -> None:
    # Rollouts at another temperature and from fewer tokens: an evaluation has the task's, and none left out.
    config = replace(NETWORKS[networks], temperature=0.7, top_k=4, gamma=1.0, lam=1.0)
    trainer = PPOTrainer(config, models, world=ONE_PROCESS)
    *_, last = trainer
    assert len(last.samples) == 8
    for sample in last.samples:
        tokens = sample.tokens
        fields = (tokens.texts, tokens.logprobs, tokens.log_ratios, tokens.kls, tokens.advantages, tokens.values)
        assert [len(field) for field in fields] == [sample.length] * 6
        assert " ".join(text for text in tokens.texts if text not in SPECIAL) == sample.response.strip()
        assert sum(tokens.kls) == pytest.approx(sample.kl, rel=1e-5) and min(tokens.kls) >= 0
        assert max(tokens.logprobs) <= 0
        ids, logprobs = read(trainer.network.policy, models, sample)
        _, ref_logprobs = read(models.reference, models, sample)
        taken, ref_taken = (p.gather(-1, ids.unsqueeze(-1)).squeeze(-1) for p in (logprobs, ref_logprobs))
        exact = (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)
        for told, expected in ((tokens.logprobs, taken), (tokens.log_ratios, taken - ref_taken), (tokens.kls, exact)):
            torch.testing.assert_close(torch.tensor(told), expected, atol=1e-4, rtol=1e-4)
        # λ = γ = 1: advantage and value add up to the response's reward everywhere.
        sums = [advantage + value for advantage, value in zip(tokens.advantages, tokens.values, strict=True)]
        assert sums == pytest.approx([sample.reward] * sample.length, abs=1e-5)
    assert last.metrics["eval/kl"] > 0
    assert any(value != 0 for sample in last.samples for value in sample.tokens.values)


def test_the_test_prompts_are_read_with_numbers_of_their_own(models: TaskModels) -> None:
    *_, last = reports = list(trainer := PPOTrainer(CONFIG, models, world=ONE_PROCESS))
    found = trainer.tested()
    assert found is not None and found.prompts == len(models.prompts.test)
    assert found == trainer.tested(), "the same numbers each time"
    assert trainer.evaluated(last).metrics["eval/reward"] == last.metrics["eval/reward"], (
        "which evaluations do not feel"
    )

    # On the eval prompts the same readings would be another draw of the same policy.
    again = PPOTrainer(
        CONFIG, replace(models, prompts=replace(models.prompts, test=models.prompts.eval)), world=ONE_PROCESS
    )
    assert [r.metrics["eval/reward"] for r in again if r.is_evaluation] == [
        r.metrics["eval/reward"] for r in reports if r.is_evaluation
    ]
    drawn = again.tested()
    assert drawn is not None
    evaluated = [last.metrics[f"eval/{name}"] for name in ("reward", "kl")]
    assert [drawn.reward, drawn.kl] != evaluated
    assert [drawn.reward, drawn.kl] == pytest.approx(evaluated, abs=6 * max(drawn.reward_se, drawn.kl_se))
    assert drawn.reward_se > 0 and drawn.kl_se > 0

    bare = PPOTrainer(CONFIG, replace(models, prompts=replace(models.prompts, test=())), world=ONE_PROCESS)
    assert bare.tested() is None


def test_the_untrained_policys_tokens_are_the_references(models: TaskModels) -> None:
    baseline = next(iter(PPOTrainer(CONFIG, models, world=ONE_PROCESS)))
    for sample in baseline.samples:
        assert sample.kl == 0 and set(sample.tokens.kls) == set(sample.tokens.log_ratios) == {0.0}
        assert sample.tokens.values == () == sample.tokens.advantages, "no critic has learned anything yet"
        assert len(sample.tokens.logprobs) == sample.length
