"""What a response is drawn from and what ends it: filters, stops, groups."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from ppo_core import PPOConfig
from ppo_core.algorithm.experience import read_policy
from ppo_core.data.task import Prompt
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import ConfigError
from ppo_core.loading.load import TaskModels
from ppo_core.models.memory import ChunkRows
from ppo_core.models.networks import build_network
from ppo_core.randomness import prompt_rows
from ppo_core.sampling.generation import Rollouts, generate
from ppo_core.sampling.next_token import SamplingSettings, Stops, _StopTexts, likeliest
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.families import COMMON, load_models
from tests.ppo_core.test_networks import CONFIG

FILTERS = [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 6, "top_p": 0.5}, {"top_k": 1}, {"top_k": 99}]


def respond(
    models: TaskModels,
    config: PPOConfig,
    texts: Sequence[str],
    numbers: Tensor | None = None,
    chunk: int = 99,
    policy: PreTrainedModel | None = None,
) -> Rollouts:
    if numbers is None:
        generator = torch.Generator().manual_seed(1)
        numbers = torch.rand(len(texts), config.response_length, generator=generator, dtype=torch.float64)
    settings = SamplingSettings.of(config, models.reference, models.tokenizer)
    prompts = [Prompt(text) for text in texts]
    return generate(policy or models.reference, models.tokenizer, prompts, numbers, settings, chunk_rows=chunk)


def prompts_of(models: TaskModels, count: int) -> list[str]:
    return [prompt.text for prompt in models.prompts.train[:count]]


def warped(logits: Tensor, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Which tokens transformers keeps of logits [R, V], bool."""
    ids = torch.zeros((len(logits), 1), dtype=torch.long)
    if top_k is not None:
        logits = TopKLogitsWarper(top_k)(ids, logits)
    return TopPLogitsWarper(top_p)(ids, logits).isfinite() if top_p < 1 else logits.isfinite()


# Top-k and top-p


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_what_transformers_keeps(filters: dict[str, Any]) -> None:
    logits = 3 * torch.randn(200, 23, generator=torch.Generator().manual_seed(0))
    kept = likeliest(logits, filters.get("top_k"), filters.get("top_p", 1.0))
    assert torch.equal(kept, warped(logits, **filters))


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
@pytest.mark.parametrize("filters", FILTERS[:4], ids=str)
def test_training_reads_the_filtered_distribution(models: TaskModels, filters: dict[str, Any], estimator: str) -> None:
    config = replace(CONFIG, entropy_coef=0.01, num_ppo_epochs=1, mini_batch_size=16, **filters)
    if estimator == "grpo":
        config = replace(config, advantage_estimator="grpo", num_generations=4)
    _, *reports = PPOTrainer(config, models, world=ONE_PROCESS)
    for report in reports:
        assert torch.tensor(list(report.metrics.values())).isfinite().all()
        assert report.metrics["objective/kl_exact"] > 0, "from the first step on: the reference is not filtered"
        assert report.metrics["sampler/mismatch"] < 1e-4
        assert report.metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert report.metrics["val/ratio_var"] == pytest.approx(0, abs=1e-6)
        if filters != {"top_k": 1}:
            assert 0 < report.metrics["policy/entropy_avg"] < torch.log(torch.tensor(filters.get("top_k", 23.0)))


@torch.no_grad()
@pytest.mark.parametrize("moved", [False, True], ids=["untrained", "moved"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_kl_is_the_filtered_policys_from_the_whole_reference(
    models: TaskModels, filters: dict[str, Any], moved: bool
) -> None:
    config = replace(CONFIG, temperature=0.8, **filters)
    network = build_network(config, models.reference, None)
    if moved:
        network.policy.get_parameter("transformer.h.0.mlp.c_fc.weight").mul_(1.5)
    sequences = respond(models, config, prompts_of(models, 8), policy=network.policy).sequences
    reading = read_policy(
        network, models.reference, sequences, config.temperature, ChunkRows("scoring", 99, ONE_PROCESS)
    )
    for row, used in enumerate(sequences.attention_mask.bool()):
        ids = sequences.ids[row][used].unsqueeze(0)
        length = int(sequences.response_mask[row].sum())
        logits, ref_logits = (
            m(input_ids=ids).logits[0, -length - 1 : -1] / 0.8 for m in (network.policy, models.reference)
        )
        kept = warped(logits, **filters)
        policy, reference = logits.masked_fill(~kept, -torch.inf).log_softmax(-1), ref_logits.log_softmax(-1)
        kl = torch.where(kept, policy.exp() * (policy - reference), 0).sum(-1)
        assert (kl > -1e-6).all()
        if not moved:
            torch.testing.assert_close(kl, -(reference.exp() * kept).sum(-1).log(), atol=1e-5, rtol=1e-5)
        expected = {"kl_exact": kl}
        for name, logprobs in (("logprobs", policy), ("ref_logprobs", reference)):
            expected[name] = logprobs.gather(-1, ids[0, -length:].unsqueeze(-1)).squeeze(-1)
        for name, values in expected.items():
            torch.testing.assert_close(getattr(reading, name)[row, :length], values, atol=1e-4, rtol=1e-4, msg=name)


# What ends a response


def endings(rollouts: Rollouts) -> list[int]:
    rows = zip(rollouts.sequences.response_ids.tolist(), rollouts.lengths.int().tolist(), strict=True)
    return [ids[length - 1] for ids, length in rows]


def test_without_a_stop_token_eos_is_a_token_like_others(models: TaskModels) -> None:
    config = replace(CONFIG, stop_token="none", response_length=12)
    rollouts = respond(models, config, prompts_of(models, 24))
    assert not rollouts.ended.any() and set(rollouts.lengths.tolist()) == {12.0}
    assert (rollouts.sequences.response_ids[:, :-1] == 1).any()
    baseline, first, *_ = PPOTrainer(replace(config, missing_eos_penalty=2.0), models, world=ONE_PROCESS)
    assert baseline.metrics["eval/length"] == 6, "the task's"
    assert first.metrics["response/truncated_share"] == 1 and first.metrics["val/num_eos_tokens"] == 0


@pytest.mark.parametrize("stop", [0, 7])
@pytest.mark.parametrize("stop_token", ["eos", "none"])
def test_a_stop_token_id_ends_a_response(models: TaskModels, stop: int, stop_token: str) -> None:
    config = replace(CONFIG, stop_token=stop_token, stop_token_id=stop, response_length=12)
    rollouts = respond(models, config, prompts_of(models, 24) * 3)
    ends = {stop, 1} if stop_token == "eos" else {stop}
    for last, ended, ids, length in zip(
        endings(rollouts), rollouts.ended, rollouts.sequences.response_ids.tolist(), rollouts.lengths.int(), strict=True
    ):
        assert (last in ends) == bool(ended)
        assert not ends.intersection(ids[: length - 1])
        assert ended or length == 12, "cut, not ended"
    assert {last for last, ended in zip(endings(rollouts), rollouts.ended, strict=True) if ended} == ends


@pytest.mark.parametrize("stop", [23, 50_000])
def test_a_stop_token_id_beyond_the_vocabulary_is_refused(models: TaskModels, stop: int) -> None:
    with pytest.raises(ConfigError, match=rf"^stop_token_id = {stop} is not allowed.* 0 to 22") as caught:
        PPOTrainer(replace(CONFIG, stop_token_id=stop), models, world=ONE_PROCESS)
    assert "\n" not in str(caught.value)
    PPOTrainer(replace(CONFIG, stop_token_id=22), models, world=ONE_PROCESS)


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with byte-level BPE, whose tokens are letters but for "ab"."""
    folder = tmp_path_factory.mktemp("bytes")
    vocabulary = {letter: i for i, letter in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])}
    tokenizer = Tokenizer(BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{**COMMON, "vocab_size": len(vocabulary), "eos_token_id": 0}))
    # Only a few letters are likely, so that random responses hold the texts that end them.
    bias = torch.full((len(vocabulary), 1), -1.0)
    bias[[vocabulary[letter] for letter in ("a", "b", "c", "Ċ", "ab")]] = 1.0
    with torch.no_grad():
        model.transformer.ln_f.bias.copy_(torch.ones(32))
        model.lm_head.weight.mul_(0.3).add_(bias * 0.12)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


STOPS = [("ab", ["ab"]), ("bca", ["bca"]), ('["\\n\\n", "cc"]', ["\n\n", "cc"]), ("abab", ["abab"])]


@pytest.mark.parametrize(("stop_strings", "texts"), STOPS, ids=lambda value: repr(value))
def test_a_stop_string_ends_a_response_that_keeps_it(bytes_folder: Path, stop_strings: str, texts: list[str]) -> None:
    models = load_models(bytes_folder, bytes_folder)
    # The prompt's own end is not part of what is looked at.
    prompts = ["a", "bc", "ab", "abab", "\n"] * 12
    free = replace(CONFIG, stop_token="none", response_length=16)
    rollouts = respond(models, replace(free, stop_strings=stop_strings), prompts)
    whole = respond(models, free, prompts)
    for row, (response, ended, length) in enumerate(
        zip(rollouts.responses, rollouts.ended, rollouts.lengths.int(), strict=True)
    ):
        tokens = whole.sequences.response_ids[row]
        shown = [models.tokenizer.decode(tokens[: n + 1]) for n in range(16)]
        expected = next((n + 1 for n, text in enumerate(shown) if any(stop in text for stop in texts)), None)
        assert bool(ended) == (expected is not None)
        assert int(length) == (expected or 16)
        assert any(stop in response for stop in texts) == bool(ended)
    assert rollouts.ended.any()


def test_a_stop_string_of_no_token_is_refused_in_one_line(models: TaskModels) -> None:
    with pytest.raises(ConfigError, match=r"stop_strings = \('é',\) is not allowed"):
        list(PPOTrainer(replace(CONFIG, stop_strings="é"), models, world=ONE_PROCESS))


def test_rows_that_have_ended_leave_without_a_trace(models: TaskModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the rows ended early the batch shrinks; each row is what it is alone."""
    rows: list[int] = []
    handle = models.reference.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    config, texts = replace(CONFIG, top_k=9, stop_token_id=7, response_length=26), prompts_of(models, 24)
    numbers = torch.rand(24, 26, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    together = respond(models, config, texts, numbers)
    handle.remove()
    assert max(rows) == 24 and min(rows) <= 12, "24 rows, then at most 12"
    for row in range(24):
        alone = respond(models, config, texts[row : row + 1], numbers[row : row + 1])
        length = int(alone.lengths[0])
        assert alone.responses[0] == together.responses[row] and length == together.lengths[row]
        assert bool(alone.ended[0]) == bool(together.ended[row])
        assert torch.equal(alone.sequences.response_ids[0], together.sequences.response_ids[row, :length])
        of_row = together.sequences.rows(torch.tensor([row])).allowed
        assert torch.equal(alone.sequences.allowed.members(), of_row.members())
        torch.testing.assert_close(
            alone.sampler_logprobs[0], together.sampler_logprobs[row, :length], atol=1e-5, rtol=0
        )


# Groups


def test_a_prompts_responses_stand_together_and_differ(models: TaskModels) -> None:
    seen: list[tuple[str, str]] = []

    def reward(prompts: Sequence[Prompt], responses: Sequence[str], *others: Any) -> Any:
        seen.extend((prompt.text, response) for prompt, response in zip(prompts, responses, strict=True))
        return models.reward(prompts, responses, *others)

    trainer = PPOTrainer(
        replace(CONFIG, num_generations=4, eval_every_episodes=48), replace(models, reward=reward), world=ONE_PROCESS
    )
    for report in trainer:
        if report.step == 0:
            seen.clear()  # the evaluation's
    rollouts = seen[:48]
    groups = [rollouts[start : start + 4] for start in range(0, 48, 4)]
    assert all(len({prompt for prompt, _ in group}) == 1 for group in groups)
    order = prompt_rows(CONFIG.seed, 24, 0, 12)  # 12 prompts of one pass: four in each iteration
    assert [group[0][0] for group in groups] == [models.prompts.train[row].text for row in order]
    assert sum(len({response for _, response in group}) for group in groups) > 40


def test_the_table_of_stop_strings_is_made_once_a_run(bytes_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    true_table = _StopTexts.clean_tokenizer_vocab

    def count(*args: Any, **options: Any) -> Any:
        made.append(args)
        return true_table(*args, **options)

    monkeypatch.setattr(_StopTexts, "clean_tokenizer_vocab", staticmethod(count))
    tokenizer = AutoTokenizer.from_pretrained(bytes_folder)
    orders = [dict(items) for items in (sorted(tokenizer.get_vocab().items()), reversed(tokenizer.get_vocab().items()))]
    monkeypatch.setattr(
        tokenizer, "get_vocab", lambda: orders[len(made) % 2]
    )  # no order of its own, as large ones have
    for _ in range(3):
        Stops(SamplingSettings(1.0, 4, stop_strings=("zq",)), tokenizer, torch.device("cpu"))
    assert len(made) == 1
