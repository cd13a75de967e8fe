"""Train the SFT policy and the reward model of the task `reviews`, and save them as transformers does."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

import torch
from tokenizers import decoders, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from tools import teaching
from tools.reviews_corpus import augmented, contributions, prefix_scores, prompts, review, vocabulary
from tools.teaching import SAMPLE, Continuation, Lesson, PolicyLesson, padded


@dataclass(frozen=True)
class Recipe:
    """Sizes and training of both models. The defaults made those that ship."""

    layers: int = 2
    heads: int = 4
    policy_width: int = 128
    reward_width: int = 64
    """Half the policy's: it is as good after the same time, and scoring stays cheap."""
    positions: int = 64
    """Longest text in tokens, prompt and response together."""
    batch_size: int = 32
    policy_steps: int = 550
    policy_learning_rate: float = 3e-3
    reward_steps: int = 1300
    reward_learning_rate: float = 3e-3
    seed: int = 1


_CORPUS_SHARE = 0.35
"""Share of the reward model's texts that come from the corpus; the others are augmented."""
_WORD_WEIGHT = 6.0
_MATCH_GAIN = 4.0


class RewardLesson(Lesson):
    """Teaches a sequence classifier with one label the score of texts.

    It learns from every prefix of a text, so truncated texts come for free. A second head, which is not saved, predicts
    from the first layer what each word adds and whether it came before. Without it, and without a first layer that
    begins by looking for equal words, the model is slow to notice repetition, and a policy would soon exploit that.
    """

    model: GPT2ForSequenceClassification

    def __init__(
        self, model: GPT2ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, batch_size: int
    ) -> None:
        super().__init__(model, tokenizer, batch_size)
        self.word_head = nn.Linear(model.config.n_embd, 2)
        _look_for_equal_words(model)

    def forward(self, rng: Random) -> Tensor:
        """Return the weighted mean squared error of the scores, plus that of the second head."""
        texts = [_text_to_score(rng) for _ in range(self.batch_size)]
        inputs = self.inputs([self.ids(words) for words in texts])
        output = self.model.transformer(**inputs, output_hidden_states=True)
        known = inputs["attention_mask"].bool()

        scores = self.model.score(output.last_hidden_state).squeeze(-1)[known]
        targets = padded([prefix_scores(words) for words in texts], 0)[known]
        # Extreme texts are rare here, but they are where a trained policy ends up.
        score_loss: Tensor = ((1 + targets.abs()) * (scores - targets).square()).mean()

        added = padded([contributions(words) for words in texts], 0)
        came_before = padded([[float(word in words[:i]) for i, word in enumerate(words)] for words in texts], 0)
        facts = torch.stack([added, came_before], dim=-1)[known]
        word_loss = functional.mse_loss(self.word_head(output.hidden_states[1])[known], facts)
        return score_loss + _WORD_WEIGHT * word_loss


def taught(recipe: Recipe) -> Iterator[str]:
    """Yield what both models are taught, as lines: the vocabulary, and a sample of each lesson's texts and scores."""
    yield " ".join(vocabulary())
    for prompt, continuation in _reviews(Random(recipe.seed), SAMPLE):
        yield " ".join([*prompt, *continuation])
    rng = Random(recipe.seed)
    for _ in range(SAMPLE):
        words = _text_to_score(rng)
        scored = zip(words, prefix_scores(words), contributions(words), strict=True)
        yield " ".join(f"{word} {score:.6f} {added:.6f}" for word, score, added in scored)


def _reviews(rng: Random, count: int) -> list[Continuation]:
    return [(_prompt(rng), review(rng)) for _ in range(count)]


def _prompt(rng: Random) -> list[str]:
    return rng.choice(prompts().train).text.split()


def _text_to_score(rng: Random) -> list[str]:
    response = review(rng) if rng.random() < _CORPUS_SHARE else augmented(rng)
    return [*_prompt(rng), *response]


def _look_for_equal_words(model: GPT2ForSequenceClassification) -> None:
    """Let queries and keys of the first layer start equal, and large enough to tell words apart."""
    first = cast(GPT2Block, model.transformer.h[0])
    weight = cast(Tensor, first.attn.c_attn.weight)  # width x (queries, keys, values)
    width = weight.shape[0]
    with torch.no_grad():
        weight[:, :width] *= _MATCH_GAIN
        weight[:, width : 2 * width] = weight[:, :width]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return both models' tokenizer: each word or mark is a token, and decoding leaves no space before a mark."""
    return teaching.word_tokenizer(
        vocabulary(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]),
        # Without a "##" in the vocabulary this decoder only joins words and moves marks up to them.
        decoders.WordPiece(prefix="##", cleanup=True),
    )


def build(folder: Path, recipe: Recipe) -> None:
    """Train both models by the recipe and save each with its tokenizer in a folder of its own under `folder`."""
    tokenizer = make_tokenizer()
    seed = recipe.seed
    with teaching.reproducible(seed):
        policy = GPT2LMHeadModel(_config(recipe, recipe.policy_width, tokenizer))
        reward_model = GPT2ForSequenceClassification(_config(recipe, recipe.reward_width, tokenizer))
        policy_lesson = PolicyLesson(policy, tokenizer, recipe.batch_size, _reviews)
        reward_lesson = RewardLesson(reward_model, tokenizer, recipe.batch_size)
        teaching.train(policy_lesson, "SFT policy", recipe.policy_steps, recipe.policy_learning_rate, seed)
        teaching.train(reward_lesson, "reward model", recipe.reward_steps, recipe.reward_learning_rate, seed)
    teaching.save(policy, tokenizer, folder / "policy")
    teaching.save(reward_model, tokenizer, folder / "reward_model")


def _config(recipe: Recipe, width: int, tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    config = teaching.small_gpt2(
        tokenizer, width=width, layers=recipe.layers, heads=recipe.heads, positions=recipe.positions
    )
    config.problem_type = "regression"
    config.num_labels = 1
    return config
