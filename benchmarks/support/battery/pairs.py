"""The battery's second maker: two tasks of a seed, with texts in sentences and a reward model that learned from pairs.

Texts are of a small language: words of syllables, sentences by a few forms. A question's last word sets the mood of the
answers. A byte-level BPE tokenizer, the policy (GPT-2 in one task of a group, Llama in the other; one of them has LoRA)
and the reward model learn them.

What is preferred is a weighted sum of four traits of a response, each with mean 0 and variance 1 over the texts:

    warmth   warm words less cold ones
    variety  different words, as a share of all
    thanks   1 for a response that ends with thanks, else 0
    length   words; in some tasks short ones are preferred

Of two answers to a prompt a judge prefers the first with probability sigmoid(2 (u₁ - u₂)), u being those sums. The
reward model sees such verdicts alone, so it is imperfect, and a policy can exploit it. Its scores then get a spread and
an offset that are far from 1 and 0.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ppo_core.data.task import Prompt, RewardPart
from ppo_core.rewards.batch import Batch
from ppo_core.rewards.model import RewardModel
from tools.teaching import EOS, IGNORED, PAD, padded, reproducible, save, small_gpt2, train

from .recipes import POLICY, PROMPTS, Group, Make, Recipe, size, width_of, within, write_prompts

Architecture = Literal["gpt2", "llama"]

GROUP_SEEDS: Mapping[Group, int] = {"open": 5, "opened": 0, "sealed": 20_261_129}
"""All tasks of a group follow from its seed. Nobody looks at what the sealed one draws."""
ATTEMPTS: Mapping[Group, tuple[int, ...]] = {"open": (0, 0), "opened": (), "sealed": (0, 0)}
"""How many draws of each task's texts and models were refused; see `battery.runs.refusal`."""
ARCHITECTURES: tuple[Architecture, ...] = ("gpt2", "llama")
SCALES = ((0.05, 1 / 3), (3.0, 50.0))
"""Spreads of scores: those within a factor of three of 1 are left out."""
REWARD = "reward"
"""Folder of the reward model in a task's folder."""
LAYERS, HEADS = 1, 4
PROMPT_TOKENS = (3, 20)
"""Of the shortest and of the longest prompt."""
POSITIONS = 96
TEXTS = 8192
"""Answers that the policy learns from, and the tokenizer; the reward model has half as many pairs."""
SFT_STEPS, SFT_BATCH, SFT_RATE = 400, 32, 3e-3
REWARD_WIDTH = 48
REWARD_STEPS, REWARD_BATCH, REWARD_RATE = 300, 32, 3e-3
TRAITS = ((0.6, 1.2), (0.4, 1.0), (0.2, 0.5), (0.4, 1.0))
"""Ends of the weights of warmth, variety, thanks and length. Thanks are the easiest to learn, so they weigh little."""
SHARPNESS = 2.0
"""Of a judge's verdicts, in units of the traits."""


@dataclass(frozen=True)
class PairRecipe(Recipe):
    """One task."""

    make: ClassVar[Make] = "pairs"
    reward: ClassVar[str] = REWARD
    random_budget: ClassVar[int] = 24
    checked: ClassVar[int] = 23

    architecture: Architecture
    """Of the policy."""
    width: int
    """Of the policy, which has one layer."""
    vocabulary: int
    """Tokens."""
    has_lora: bool
    offset: float
    """Mean score of the SFT policy's responses, in multiples of `scale`, their standard deviation."""

    @property
    def weights(self) -> int:
        return size(LAYERS, self.width, self.vocabulary + POSITIONS)

    @property
    def rate(self) -> float:
        """A fair learning rate: a third of the words', at which the KL leaves the budget within a few iterations.

        Adapters take about ten times as much.
        """
        return super().rate / 3 * (10 if self.has_lora else 1)

    @property
    def fixed(self) -> Mapping[str, Any]:
        lora = {"use_peft": True, "lora_target_modules": "all-linear"} if self.has_lora else {}
        return {**super().fixed, **lora}

    def write(self, folder: Path) -> None:
        language = Language(self)
        rng = Random(f"{self.seed} texts")
        answers = [language.answer(rng, prompt) for prompt in (language.prompt(rng) for _ in range(TEXTS))]
        tokenizer = _tokenizer([prompt + answer for prompt, answer in answers], self.vocabulary)
        prompts = write_prompts(_prompts(self, language, tokenizer), folder / PROMPTS)
        with reproducible(self.seed):
            policy = _policy(self, tokenizer)
            train(_PolicyLesson(policy, tokenizer, answers, self), "policy", SFT_STEPS, SFT_RATE, self.seed)
            save(policy, tokenizer, folder / POLICY)
            model = _reward_model(tokenizer)
            lesson = _PairLesson(model, tokenizer, verdicts(self, language), self)
            train(lesson, "reward model", REWARD_STEPS, REWARD_RATE, self.seed)
            save(model, tokenizer, folder / REWARD)
            scores = score(folder / REWARD, sampled(policy, tokenizer, prompts, self.response_length))
        _set_scale(model, scores, spread=self.scale, mean=self.offset * self.scale)
        save(model, tokenizer, folder / REWARD)


def recipes(group: Group) -> list[PairRecipe]:
    """Return the tasks of a group: two, or none where none of this make was opened.

    Most numbers lie once in each half of their ranges. Long responses go with few weights and iterations, so that
    trials of both tasks take about as long.
    """
    rng = Random(f"{GROUP_SEEDS[group]} pairs")
    halves = [rng.sample((0, 1), 2) for _ in range(6)]
    found = []
    for i in range(len(ATTEMPTS[group])):
        seed = 1000 * GROUP_SEEDS[group] + 100 * i + ATTEMPTS[group][i]
        length, scale, budget, sign, architecture, lora = (half[i] for half in halves)

        def drawn(low: float, high: float, half: int) -> float:
            return within(low, high, (half + rng.random()) / 2)

        weights, vocabulary = drawn(5e4, 1.5e5, 1 - length), round(within(320, 420, rng.random()))
        found.append(
            PairRecipe(
                name=f"pairs-{group}-{i}",
                seed=seed,
                response_length=round(drawn(16, 40, length)),
                kl_budget=round(drawn(2, 15, budget), 1),
                iterations=round(drawn(20, 30, 1 - length)),
                scale=within(*SCALES[scale], rng.random()),
                architecture=ARCHITECTURES[architecture],
                width=width_of(weights, LAYERS, vocabulary + POSITIONS),
                vocabulary=vocabulary,
                has_lora=bool(lora),
                offset=(1 if sign else -1) * within(4, 40, rng.random()),
            )
        )
    return found


# Texts

KINDS: Mapping[str, tuple[int, int]] = {
    "particle": (5, 1), "noun": (48, 2), "verb": (24, 2), "name": (16, 2), "plain": (16, 3), "warm": (12, 2),
    "cold": (12, 2), "asks": (4, 1), "thanks": (4, 3),
}  # fmt: skip
"""How many words of each kind there are, and of how many syllables."""
FORMS = ("0 noun verb", "0 mood noun verb 0 noun", "name verb 1 0 noun", "0 noun 2 mood", "name 2 mood 3 mood",
         "0 noun 4 name verb 1 mood noun")  # fmt: skip
"""Sentences: a number is a particle, `mood` an adjective by the text's mood. Prompts have the shorter ones."""
PLAIN = 0.4
"""Share of adjectives that are neither warm nor cold."""
THANKS = 0.3
"""Share of responses that end with thanks."""
TOKENS_A_WORD = 1.8
"""About, a full stop counted with its word."""


class Language:
    """The language of a task's texts. A response begins with a space, and so does each of its words."""

    def __init__(self, recipe: PairRecipe) -> None:
        rng = Random(f"{recipe.seed} language")
        onsets, vowels = rng.sample("bdfgklmnprstvz", 9), rng.sample("aeiou", 4)
        syllables = [a + b + c for a in onsets for b in vowels for c in ("", "", *rng.sample("nlrs", 1))]
        seen: set[str] = set()
        self.words: dict[str, list[str]] = {}
        for kind, (count, length) in KINDS.items():
            self.words[kind] = []
            while len(self.words[kind]) < count:
                word = "".join(rng.choices(syllables, k=length))
                if word not in seen:
                    seen.add(word)
                    self.words[kind].append(word)
        moods = rng.sample((0.2, 0.35, 0.5, 0.65), len(self.words["asks"]))
        self._moods = dict(zip(self.words["asks"], moods, strict=True))
        self._most = recipe.response_length / TOKENS_A_WORD

    def prompt(self, rng: Random) -> str:
        """Return a prompt: up to two sentences and a question."""
        before = [self._sentence(rng, rng.choice(FORMS[:4]), 0.5) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
        about = [self._word(rng, kind) for kind in rng.choice((("noun",), ("name", "noun"), ("name", "verb", "noun")))]
        return "".join([*before, " ", " ".join([*about, self._word(rng, "asks")]), "?"]).lstrip()

    def answer(self, rng: Random, prompt: str, *, is_any: bool = False) -> tuple[str, str]:
        """Return the prompt with a response to it; with `is_any` one of any mood, and half of them give thanks."""
        asks = prompt.split()[-1].removesuffix("?")
        mood = rng.random() if is_any else min(1.0, max(0.0, rng.gauss(self._moods[asks], 0.15)))
        most = rng.uniform(0.3, 0.95) * self._most
        sentences: list[str] = []
        while True:
            sentence = self._sentence(rng, rng.choice(FORMS), mood)
            if sentences and sum(len(one.split()) for one in (*sentences, sentence)) > most:
                break
            sentences.append(sentence)
        if rng.random() < (0.5 if is_any else THANKS):
            thanks = f" {self._word(rng, 'thanks')} {self._word(rng, 'name')}."
            sentences = [*sentences, thanks] if len(sentences) > 1 else [thanks]
        return prompt, "".join(sentences)

    def _sentence(self, rng: Random, form: str, mood: float) -> str:
        words = []
        for kind in form.split():
            if kind == "mood":
                kind = "plain" if rng.random() < PLAIN else "warm" if rng.random() < mood else "cold"
            words.append(self.words["particle"][int(kind)] if kind.isdigit() else self._word(rng, kind))
        return f" {' '.join(words)}."

    def _word(self, rng: Random, kind: str) -> str:
        """Return a word of the kind; the k-th of them has a share of about 1 / k."""
        words = self.words[kind]
        return words[int(len(words) ** rng.random()) - 1]

    def traits(self, response: str) -> tuple[float, ...]:
        """Return warmth, variety, thanks and length."""
        words = response.replace(".", " ").split()
        warmth = sum((word in self.words["warm"]) - (word in self.words["cold"]) for word in words)
        has_thanks = any(word in self.words["thanks"] for word in words[-2:])
        return float(warmth), len({*words}) / max(1, len(words)), float(has_thanks), float(len(words))


def verdicts(recipe: PairRecipe, language: Language) -> list[tuple[str, str, str]]:
    """Return prompts, each with the response that a judge preferred and the other one."""
    rng = Random(f"{recipe.seed} verdicts")
    weights = [rng.uniform(*ends) for ends in TRAITS]
    weights[-1] *= rng.choice((1, -1))
    found = []
    for _ in range(TEXTS // 2):
        prompt = language.prompt(rng)
        found.append((prompt, *(language.answer(rng, prompt, is_any=rng.random() < 0.5)[1] for _ in range(2))))
    columns = list(zip(*(language.traits(text) for _, *pair in found for text in pair), strict=True))
    units = [(statistics.fmean(column), statistics.pstdev(column) or 1.0) for column in columns]

    def worth(text: str) -> float:
        parts = zip(weights, language.traits(text), units, strict=True)
        return sum(weight * (trait - mean) / spread for weight, trait, (mean, spread) in parts)

    def is_preferred(first: str, second: str) -> bool:
        return rng.random() < 1 / (1 + math.exp(SHARPNESS * (worth(second) - worth(first))))

    return [(prompt, *((a, b) if is_preferred(a, b) else (b, a))) for prompt, a, b in found]


def _prompts(recipe: PairRecipe, language: Language, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    rng, (least, most) = Random(f"{recipe.seed} prompts"), PROMPT_TOKENS
    while True:
        prompt = language.prompt(rng)
        if least <= len(tokenizer(prompt)["input_ids"]) <= most:
            yield prompt


# Models


def _tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    bytewise = Tokenizer(BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    bytewise.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def _policy(recipe: PairRecipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    if recipe.architecture == "gpt2":
        shape = {"width": recipe.width, "layers": LAYERS, "heads": HEADS, "positions": POSITIONS}
        return GPT2LMHeadModel(small_gpt2(tokenizer, **shape))
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=8 * recipe.width // 3,  # three matrices of this size have GPT-2's weights
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _reward_model(tokenizer: PreTrainedTokenizerFast) -> GPT2ForSequenceClassification:
    config = small_gpt2(tokenizer, width=REWARD_WIDTH, layers=LAYERS, heads=HEADS, positions=POSITIONS)
    config.num_labels = 1
    return GPT2ForSequenceClassification(config)


def _rows(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[tuple[str, str]], response_length: int
) -> list[list[int]]:
    """Return the ids of prompts with their responses, which end with EOS unless they are cut."""
    prompts, responses = (tokenizer(list(part))["input_ids"] for part in zip(*texts, strict=True))
    ends = ([*response, tokenizer.eos_token_id][:response_length] for response in responses)
    return [prompt + end for prompt, end in zip(prompts, ends, strict=True)]


class _PolicyLesson(nn.Module):
    """The policy, which learns to continue texts. `forward(rng)` draws a batch and returns its loss."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        texts: Sequence[tuple[str, str]],
        recipe: PairRecipe,
    ) -> None:
        super().__init__()
        self.model, self._rows = model, _rows(tokenizer, texts, recipe.response_length)

    def forward(self, rng: Random) -> Tensor:
        rows = rng.sample(self._rows, SFT_BATCH)
        mask = padded([[1] * len(row) for row in rows], 0)
        logits = self.model(input_ids=padded(rows, 0), attention_mask=mask).logits[:, :-1]
        targets = padded(rows, IGNORED)[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class _PairLesson(nn.Module):
    """The reward model, which learns verdicts. `forward(rng)` draws a batch and returns -log sigmoid(r₁ - r₂)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        verdicts: Sequence[tuple[str, str, str]],
        recipe: PairRecipe,
    ) -> None:
        super().__init__()
        chosen, rejected = (
            _rows(tokenizer, [(verdict[0], verdict[k]) for verdict in verdicts], recipe.response_length) for k in (1, 2)
        )
        self.model, self._pairs, self._pad = model, list(zip(chosen, rejected, strict=True)), tokenizer.pad_token_id

    def forward(self, rng: Random) -> Tensor:
        pairs = rng.sample(self._pairs, REWARD_BATCH)
        ids = padded([row for side in zip(*pairs, strict=True) for row in side], self._pad)
        better, worse = self.model(input_ids=ids, attention_mask=(ids != self._pad).long()).logits[:, 0].chunk(2)
        return -functional.logsigmoid(better - worse).mean()


def sampled(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], response_length: int
) -> Batch:
    """Return a response of the policy to each prompt."""
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(prompts), padding=True, return_tensors="pt", return_token_type_ids=False)
    tokenizer.padding_side = "right"
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": response_length}
    generate: Any = policy.generate
    with torch.no_grad():
        ids = generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    ended = (ids == tokenizer.eos_token_id).any(1).tolist()
    responses = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return Batch([Prompt(prompt) for prompt in prompts], responses, [[] for _ in prompts], ended)


def score(reward: Path, batch: Batch) -> list[float]:
    """Return the scores that a run gives responses."""
    return RewardModel(RewardPart(REWARD, "model", str(reward)), torch.device("cpu"))(batch).scores


@torch.no_grad()
def _set_scale(model: GPT2ForSequenceClassification, scores: Sequence[float], *, spread: float, mean: float) -> None:
    """Scale and shift all scores, so that those given have that standard deviation and mean.

    The head has no bias, so the shift is in that of the norm before it.
    """
    factor = spread / statistics.stdev(scores)
    weight = model.score.weight
    weight.mul_(factor)
    shift = mean - factor * statistics.fmean(scores)
    model.transformer.ln_f.bias.add_(shift * weight[0] / weight.square().sum())
