"""The reviews task: its prompts, its score, its tokenizer, and the models that ship with it."""

import re
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ppo_core.data.task import TaskAssets
from tools.reviews import make_tokenizer
from tools.reviews_corpus import LEVELS, MAX_WORDS, UNFINISHED, augmented, prefix_scores, prompts, review


def join(words: Sequence[str]) -> str:
    """The text of the words: spaces between them, none before punctuation."""
    return " ".join(words).replace(" .", ".").replace(" ,", ",")


def score(text: str) -> float:
    """The sentiment score of a whole text, prompt and response: about -3 to 3, near 0 on average."""
    return prefix_scores(re.findall(r"\w+|[^\w\s]", text))[-1] if text else -UNFINISHED


def _rewards(assets: TaskAssets, texts: Sequence[str]) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(assets.reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(assets.reward_model)
    with torch.no_grad():
        rewards: list[float] = model(**tokenizer(list(texts), return_tensors="pt", padding=True)).logits[:, 0].tolist()
    return rewards


def _correlation(left: Sequence[float], right: Sequence[float]) -> float:
    return float(torch.corrcoef(torch.tensor([left, right]))[0, 1])


# --- prompts and corpus


def test_prompts_are_disjoint_distinct_and_counted() -> None:
    splits = prompts()
    everything = [prompt.text for prompt in (*splits.train, *splits.eval, *splits.test)]
    assert len(splits.train) >= 1024
    assert len(splits.eval) == len(splits.test) == 256
    assert len(set(everything)) == len(everything)
    assert all(4 <= len(text.split()) <= 8 for text in everything)


def test_reviews_end_within_a_response_and_mix_sentiments() -> None:
    rng = Random(0)
    reviews = [review(rng) for _ in range(2000)]
    scores = torch.tensor([prefix_scores(words)[-1] for words in reviews])
    assert all(len(words) <= MAX_WORDS and words[-1] == "." for words in reviews)
    assert abs(scores.mean().item()) < 0.1
    assert 0.8 < scores.std().item() < 1.3
    assert scores.abs().max().item() < 3.5


# --- score


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", -0.5),
        ("the lamp i bought online", -0.5),
        ("was good.", 0.2612),
        ("was superb.", 1.0397),
        ("was superb", 0.5397),
        ("was very superb.", 1.3744),
        ("was slightly superb.", 0.6540),
        ("was not superb.", -0.6540),
        ("was not very superb.", -0.8916),
        ("was atrocious.", -1.0397),
        ("was superb superb.", 1.0397),  # strung together
        ("was superb and superb.", 1.2133),  # the second use adds a fifth
        ("was superb and flawless.", 1.7922),
        ("was superb but atrocious.", 0.0),
    ],
)
def test_score_of_literal_texts(text: str, expected: float) -> None:
    assert score(text) == pytest.approx(expected, abs=1e-4)


def test_score_grows_with_every_new_strong_word_and_hardly_with_an_old_one() -> None:
    words = [word for word, level in LEVELS.items() if level >= 3]
    varied = [score(" and ".join(words[:count]) + ".") for count in range(1, len(words) + 1)]
    repeated = [score(" and ".join(words[:1] * count) + ".") for count in range(1, len(words) + 1)]
    assert all(later - earlier > 0.08 for earlier, later in pairwise(varied))
    assert repeated[-1] < varied[1]


# --- tokenizer


def test_any_string_of_words_comes_back() -> None:
    tokenizer = make_tokenizer()
    rng = Random(1)
    ordinary = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    for _ in range(300):
        ids = rng.choices(ordinary, k=rng.randint(1, 24))
        text = tokenizer.decode(ids)
        assert tokenizer(text).input_ids == ids
        assert tokenizer("the lamp" + " " + text).input_ids[2:] == ids
        assert text == join(tokenizer.convert_ids_to_tokens(ids))


# --- models


def test_reward_model_agrees_with_the_score_on_held_out_texts(assets: TaskAssets) -> None:
    rng = Random(12345)
    for draw in (review, augmented):
        texts = [join([*start.split(), *draw(rng)]) for start in (prompt.text for prompt in assets.prompts.test)]
        assert _correlation(_rewards(assets, texts), [score(text) for text in texts]) > 0.95


def test_reward_model_is_not_fooled_by_repetition(assets: TaskAssets) -> None:
    start = "the lamp i bought in june "
    good = start + "is superb and flawless. the price was wonderful. we really adored it."
    repeated = [
        start + "superb " * 23,
        start + "superb. " * 12,
        start + "superb and " * 11 + "superb.",
        start + "very superb and " * 7 + "very superb.",
        start + "is superb. " + "it is superb. " * 5,
    ]
    reward, *rewards = _rewards(assets, [good, *(text.strip() for text in repeated)])
    assert max(rewards) < reward - 0.5
