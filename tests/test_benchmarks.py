"""The benchmarks: what they count, how their sides take turns, and when they say that curves agree."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ppo_core.models import resolve_device

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as for the scripts there

import ppo_iteration  # noqa: E402
from support import cells, recorded  # noqa: E402
from support.curves import Curve, Point, agree, differences  # noqa: E402
from support.shape import Shape  # noqa: E402
from support.turns import Lap, Side, Track, alternate  # noqa: E402

TINY = Shape(
    layers=2,
    width=32,
    heads=2,
    vocabulary=64,
    episodes=16,
    prompt_tokens=4,
    new_tokens=6,
    epochs=2,
    mini_batches=2,
)


def test_a_cell_is_measured_with_the_kernels_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[object] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", switched.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("accelerate.Accelerator.device", torch.device("cuda"))
    monkeypatch.setattr("ppo_core.models._has_float64", lambda device: True)
    device = resolve_device("auto")
    of_runs = list(switched)
    assert of_runs == ["high", False]

    def build(*arguments: object) -> None:
        assert switched == of_runs * 2
        raise NotImplementedError("all is switched before a model is built")

    monkeypatch.setattr(cells, "cell_models", build)
    with pytest.raises(NotImplementedError):
        cells.measure(cells.Cell("tiny", lora=True), device, cells.Rates(1.0, 1.0))


def _lap(seconds: float = 1.0, steps: int = 4, tokens: int = 96) -> Lap:
    return Lap(seconds, 2 * seconds, steps, tokens, peak_mib=100.0, threads=1, phases={"update": seconds / 2})


def _write_turns(track: Track, name: str, book: Path) -> None:
    while True:
        track.wait()
        with book.open("a") as file:
            file.write(name)
        track.report(_lap())


def _give_up(track: Track) -> None:
    track.wait()


def _accept(name: str, lap: Lap) -> None:
    pass


def test_sides_take_turns_after_one_lap_to_warm_up(tmp_path: Path) -> None:
    book = tmp_path / "book"
    sides = [Side(name, _write_turns, name, book) for name in "ab"]
    laps = alternate(sides, 3, _accept)
    for side in sides:
        side.close()
    assert book.read_text() == "ab" + "ab" + "ba" + "ab"
    assert {name: len(of_side) for name, of_side in laps.items()} == {"a": 3, "b": 3}


def test_a_side_that_ends_early_is_named() -> None:
    side = Side("broken", _give_up)
    with pytest.raises(SystemExit, match='the side "broken" ended'):
        side.lap()
    side.close()


@pytest.mark.parametrize("lap", [_lap(steps=1), _lap(tokens=95)], ids=["steps", "tokens"])
def test_times_of_unequal_work_are_refused(lap: Lap) -> None:
    ppo_iteration.require_same_work(TINY, "trl", _lap())
    with pytest.raises(SystemExit, match='the side "trl" took'):
        ppo_iteration.require_same_work(TINY, "trl", lap)


def test_ratios_are_medians_over_trl_and_floor_shares_are_of_our_time() -> None:
    laps = {
        "trl": [_lap(1.0), _lap(2.0), _lap(9.0)],
        "shared_trunk": [_lap(0.1), _lap(0.5), _lap(0.6)],
        "separate_critic": [_lap(1.0), _lap(1.0), _lap(1.0)],
    }
    result = ppo_iteration.summarise(TINY, laps)
    assert (result.shared_trunk_ratio, result.separate_critic_ratio) == (0.25, 0.5)
    assert result.shared_trunk_floor_share == result.floor_seconds["shared_trunk"] / 0.5
    assert result.cpu_seconds == {"trl": 4.0, "shared_trunk": 1.0, "separate_critic": 2.0}
    assert result.phase_seconds["shared_trunk"] == {"update": 0.25}
    assert "ours, shared" in ppo_iteration.table(TINY, result)


@pytest.mark.parametrize("separate_critic", [False, True])
def test_the_floor_counts_what_torch_counts_in_real_models(separate_critic: bool) -> None:
    import torch
    from support.floor import products
    from support.models import gpt2_config
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import GPT2LMHeadModel, GPT2Model

    config = gpt2_config(TINY)
    config._attn_implementation = "eager"  # whose matrix products torch counts one by one
    policy, trunk = GPT2LMHeadModel(config), GPT2Model(config)
    length, kept = TINY.prompt_tokens + TINY.new_tokens, TINY.new_tokens
    batch = torch.zeros(TINY.episodes, length, dtype=torch.long)
    mini_batch = batch[: TINY.mini_batch]
    counter = FlopCounterMode(display=False)
    with counter:
        with torch.no_grad():
            feed, cache = batch[:, : TINY.prompt_tokens], None
            for _ in range(TINY.new_tokens):
                cache = policy(feed, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
                feed = batch[:, :1]
            for _ in ("policy", "reference"):
                policy(batch, logits_to_keep=kept)
            for _ in ("reward", "critic") if separate_critic else ("reward",):
                trunk(batch)
        for _ in range(TINY.optimizer_steps):
            policy(mini_batch, logits_to_keep=kept).logits.sum().backward()
            if separate_critic:
                trunk(mini_batch).last_hidden_state.sum().backward()
    counted = sum(product.flops * count for product, count in products(TINY, separate_critic).items())
    assert counted == counter.get_total_flops()


def test_our_side_does_all_of_an_iteration_and_nothing_else(tmp_path: Path) -> None:
    from support import ours
    from support.models import save_models

    side = Side("ours", ours.run, save_models(tmp_path, TINY), TINY, 1, "separate")
    laps = alternate([side], 1, lambda name, lap: ppo_iteration.require_same_work(TINY, name, lap))["ours"]
    side.close()
    assert laps[0].phases.keys() == {"generate", "score", "update"}
    assert laps[0].threads == 1


def test_both_trainers_score_the_same_text_the_same(tmp_path: Path) -> None:
    import torch
    from support.models import save_models
    from support.runs import LastWordReward
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from ppo_core.rewards.combined import load_reward
    from ppo_core.task import Prompt, RewardPart

    saved = save_models(tmp_path, TINY)
    texts = ["w2 w3 w4 w5 w6", "w9 w8"]
    part = RewardPart("reward", "model", str(saved.reward_model))
    prompts, responses = [Prompt(text) for text in texts], ["", ""]
    score = load_reward([part], torch.device("cpu"))
    wanted = score(prompts, responses, [text.split() for text in texts], [False, False]).totals
    tokenizer = AutoTokenizer.from_pretrained(saved.reward_model)
    classifier = AutoModelForSequenceClassification.from_pretrained(saved.reward_model).eval()
    wrapped = LastWordReward(classifier, tokenizer.eos_token_id)
    for text, score in zip(texts, wanted, strict=True):
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            hidden = wrapped.backbone(ids, output_hidden_states=True).hidden_states[-1]
            assert wrapped.score(hidden)[0, -1].item() == pytest.approx(score, abs=1e-6)


def _curves(side: str, value: Callable[[int, int], float], episodes: Sequence[int] = range(0, 600, 100)) -> list[Curve]:
    return [
        Curve(side, seed, tuple(Point(episode, value(episode, seed), 0.0) for episode in episodes)) for seed in range(3)
    ]


def test_curves_agree_within_the_spread_of_seeds_and_not_beyond() -> None:
    def ours(episode: int, seed: int) -> float:
        return episode / 100 + seed - 1  # standard deviation 1 over the seeds 0, 1, 2

    for shift, verdict in ((2.4, True), (2.5, False)):  # 3 standard errors: 3 * sqrt(2/3) = 2.449
        theirs = _curves("b", lambda episode, seed, shift=shift: ours(episode, seed) + shift * (episode >= 300))
        found = differences(_curves("a", ours), theirs, "reward")
        assert agree(found) is verdict
        assert [d.errors for d in found] == pytest.approx([0, 0, *[-shift / (2 / 3) ** 0.5] * 3])
    assert [difference.episode for difference in found] == [100, 200, 300, 400, 500]
    assert found[0].spreads == (1, 1)


def test_curves_that_cannot_be_compared_are_refused() -> None:
    curves = _curves("a", lambda episode, seed: float(seed))
    with pytest.raises(ValueError, match="same episodes"):
        differences(curves, _curves("b", lambda episode, seed: 0.0, range(0, 500, 100)), "kl")
    with pytest.raises(ValueError, match="at least two"):
        differences(curves, curves[:1], "kl")


def test_the_page_holds_every_run(tmp_path: Path) -> None:
    from support.page import write_page

    curves = {side: _curves(side, lambda episode, seed: float(seed)) for side in ("ours", "TRL")}
    write_page(tmp_path / "new" / "page.html", curves, {"reward": "They agree."})
    page = (tmp_path / "new" / "page.html").read_text()
    assert page.count('"name":"TRL, seed ') == 2 * 3
    assert "They agree." in page


def _script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS / name), *arguments], capture_output=True, text=True)


def test_a_wrong_number_of_rounds_or_seeds_is_an_error() -> None:
    assert "--pairs = 4 is not allowed; expected at least 5" in _script("ppo_iteration.py", "--pairs", "4").stderr
    assert "--seeds = 1 is not allowed; expected at least 2" in _script("against_trl.py", "--seeds", "1").stderr


@pytest.mark.slow
def test_a_growing_study_is_measured_in_windows(tmp_path: Path) -> None:
    page = tmp_path / "growth.html"
    flags = ("--trials", "300", "--workers", "8", "--storage", "sqlite", "--html", str(page))
    done = _script("growth.py", *flags)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^ +(\d+)- +(\d+) +([\d.]+)", done.stdout, re.MULTILINE)
    assert [(int(begin), int(end)) for begin, end, _ in found] == [(100, 200), (200, 300)]
    assert all(3 <= float(reports) <= 20 for _, _, reports in found)
    assert re.search(r"in all: 300 trials and \d+ reports", done.stdout)
    assert page.stat().st_size > 100_000
    assert "at least 200" in _script("growth.py", "--trials", "100").stderr


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed")
@pytest.mark.parametrize("name", ["ppo_iteration.py", "against_trl.py"])
def test_without_trl_one_line_says_how_to_get_it(name: str) -> None:
    answer = _script(name)
    assert answer.returncode == 1
    assert answer.stderr == f"{name}: TRL is not installed; run: pip install -e '.[bench]'\n"


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra bench")
def test_trl_does_the_same_work(tmp_path: Path) -> None:
    laps = ppo_iteration.run_sides(tmp_path, TINY, 1, 1)
    assert {name: lap[0].optimizer_steps for name, lap in laps.items()} == {
        "trl": 4,
        "shared_trunk": 4,
        "separate_critic": 4,
    }


@pytest.mark.parametrize("name", ["arithmetic", "reviews"])
def test_a_shipped_recording_is_of_a_study_that_can_be_read(name: str) -> None:
    recording = recorded.read(BENCHMARKS / "data" / f"{name}.parquet")
    assert recording.spec.name == name and len(recording.runs) >= 120
