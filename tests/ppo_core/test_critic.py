"""The critic: where it begins, what it learns with, and its head start over the policy."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

from ppo_core import PPOConfig
from ppo_core.data.task import Prompt, RewardPart
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import ConfigError
from ppo_core.loading.load import TaskModels
from ppo_core.models.sequences import padded_left
from ppo_core.rewards.combined import load_reward
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.families import COMMON
from tests.ppo_core.test_networks import CONFIG, LORA, NETWORKS, assert_same, copies, save_adapters

pytestmark = pytest.mark.slow

SEPARATE = NETWORKS["separate"]


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A reward model with the policy's tokenizer, and weights of its own."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(1)
    GPT2ForSequenceClassification(GPT2Config(**COMMON, num_labels=1)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def judged(models: TaskModels, classifier_folder: Path) -> TaskModels:
    """The task with the classifier as its reward."""
    part = RewardPart("quality", "model", str(classifier_folder))
    return replace(models, reward=load_reward([part], torch.device("cpu")))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("by_path", [False, True], ids=["reward_model", "path"])
def test_a_critic_begins_with_the_reward_models_values(
    judged: TaskModels, classifier_folder: Path, by_path: bool, lora: bool
) -> None:
    path = str(classifier_folder) if by_path else "reward_model"
    config = replace(LORA if lora else CONFIG, value_model="separate", value_model_path=path)
    trainer = PPOTrainer(config, judged, world=ONE_PROCESS)
    frozen = copies(judged.reward_model)
    texts = ["w1", "w1 w2 w3 w4", "w5 w6"]
    # A token's value is read where it is predicted: that of an EOS behind a text is the text's.
    rows = [[*judged.tokenizer(text)["input_ids"], 1] for text in texts]
    whole = padded_left(rows, torch.device("cpu"))
    sequences = replace(whole, prompt_width=whole.prompt_width - 1)
    values = trainer.network.values(None, sequences).flatten()
    scores = judged.reward([Prompt(text) for text in texts], ["", "", ""], [[], [], []], [False] * 3).totals
    torch.testing.assert_close(values.detach(), torch.tensor(scores), atol=1e-5, rtol=1e-5)
    assert len(set(scores)) == 3
    list(trainer)
    assert_same(frozen, copies(judged.reward_model))
    assert (trainer.network.values(None, sequences).flatten() - values).abs().min() > 1e-3, "it learns"


def test_a_critic_may_begin_as_any_causal_lm_of_the_policys_tokens(models: TaskModels, tmp_path: Path) -> None:
    torch.manual_seed(2)
    other = GPT2LMHeadModel(GPT2Config(**{**COMMON, "num_hidden_layers": 1, "hidden_size": 16}))
    other.save_pretrained(tmp_path)
    trainer = PPOTrainer(replace(SEPARATE, value_model_path=str(tmp_path)), models, world=ONE_PROCESS)
    assert_same(copies(other.transformer), copies(trainer.network.critic))
    assert not trainer.network.value_head.weight.any()
    *_, last = trainer
    assert last.metrics["loss/value_avg"] > 0


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_critic_begins_with_the_adapters_of_a_folder(
    models: TaskModels, tiny_folder: Path, tmp_path: Path, task: str, lora: bool
) -> None:
    scores = task == "SEQ_CLS"
    kind, options = (AutoModelForSequenceClassification, {"num_labels": 1}) if scores else (AutoModelForCausalLM, {})
    adapted = save_adapters(kind.from_pretrained(tiny_folder, **options), tmp_path, task)
    config = replace(LORA if lora else CONFIG, value_model="separate", value_model_path=str(tmp_path))
    network = PPOTrainer(config, models, world=ONE_PROCESS).network
    ids = torch.arange(3, 11).view(1, 8)
    with torch.no_grad():
        expected = adapted.base_model.model.transformer(input_ids=ids).last_hidden_state
        assert (network.critic(input_ids=ids).last_hidden_state - expected).abs().max() < 1e-4
    assert bool(network.value_head.weight.any()) == scores


def other_vocabulary(folder: Path) -> str:
    GPT2LMHeadModel(GPT2Config(**{**COMMON, "vocab_size": 29})).save_pretrained(folder)
    return str(folder)


def headless(folder: Path) -> str:
    """A classifier saved without the head that its values would come from."""
    model = GPT2ForSequenceClassification(GPT2Config(**COMMON, num_labels=1))
    kept = {name: weight for name, weight in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(folder, state_dict=kept)
    return str(folder)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (headless, "it was saved without score.weight"),
        (other_vocabulary, "its vocabulary has 29 tokens, the policy's 23"),
        (lambda folder: str(folder / "nothing"), "cannot be loaded"),
        (lambda folder: "reward_model", "the task has no reward model"),
    ],
    ids=["headless", "vocabulary", "missing", "no_reward_model"],
)
def test_a_critic_that_cannot_be_is_refused_in_one_line(
    models: TaskModels, tmp_path: Path, path: Callable[[Path], str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"value_model_path = .*{message}") as caught:
        PPOTrainer(replace(SEPARATE, value_model_path=path(tmp_path)), models, world=ONE_PROCESS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("networks", NETWORKS)
def test_a_rate_of_zero_stops_one_network_alone(models: TaskModels, networks: str) -> None:
    """Without units of the returns: these rescale the value head at any rate."""
    for stopped in ("policy", "value"):
        rate = "learning_rate" if stopped == "policy" else "value_learning_rate"
        trainer = PPOTrainer(
            replace(NETWORKS[networks], normalize_values=False, **{rate: 0.0}), models, world=ONE_PROCESS
        )
        network = trainer.network
        start = copies(network)
        list(trainer)
        moved = {name for name, p in network.trained().items() if not torch.equal(p, start[name])}
        mine = {name for name in network.trained() if name.startswith("policy.")}
        assert moved == (set(network.trained()) - mine if stopped == "policy" else mine)


@pytest.mark.parametrize("networks", ["shared", "separate"])
def test_each_network_has_its_own_gradient_clip(models: TaskModels, networks: str) -> None:
    trainer = PPOTrainer(
        replace(NETWORKS[networks], max_grad_norm=1e6, value_max_grad_norm=1e-3), models, world=ONE_PROCESS
    )
    seen: dict[str, list[float]] = {"policy": [], "value": []}
    for name, optimizer in (("policy", trainer.state.optimizers.policy), ("value", trainer.state.optimizers.value)):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.step = lambda name=name, ps=parameters: seen[name].append(
            torch.nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None]).item()
        )
    *_, last = trainer
    assert seen["policy"] and min(seen["policy"]) > 1e-2, "not clipped"
    assert len(seen["value"]) == len(seen["policy"]) and max(seen["value"]) < 1.001e-3
    assert last.metrics["value/grad_norm"] > 1e-2, "the norm before clipping"


@pytest.mark.parametrize("networks", NETWORKS)
def test_the_policy_waits_until_the_critic_is_warm(models: TaskModels, networks: str) -> None:
    trainer = PPOTrainer(replace(NETWORKS[networks], total_episodes=64, critic_warmup=2), models, world=ONE_PROCESS)
    policy, critic = trainer.network.policy, trainer.network.value_parameters()
    start, values = copies(policy), [p.detach().clone() for p in critic]
    for report in trainer:
        if report.step in (1, 2):
            assert_same(start, copies(policy))
            assert any(not torch.equal(p, before) for p, before in zip(critic, values, strict=True))
            assert report.metrics["loss/value_avg"] > 0 and report.metrics["lr"] == 0 < report.metrics["value/lr"]
            assert "loss/policy_avg" not in report.metrics and report.metrics["policy/grad_norm"] == 0
        values = [p.detach().clone() for p in critic]
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert {name for name, p in policy.named_parameters() if not torch.equal(p, start[name])} == trained
    assert report.step == 4 and report.metrics["loss/policy_avg"] != 0


def rates(config: PPOConfig, models: TaskModels) -> list[tuple[float, float]]:
    return [(r.metrics["lr"], r.metrics["value/lr"]) for r in list(PPOTrainer(config, models, world=ONE_PROCESS))[1:]]


def test_each_network_has_its_own_schedule(models: TaskModels) -> None:
    base = replace(CONFIG, total_episodes=64, learning_rate=0.01, value_learning_rate=0.1, num_ppo_epochs=1)
    linear = [0.01, 0.0075, 0.005, 0.0025]
    assert rates(base, models) == [pytest.approx((lr, 10 * lr)) for lr in linear]
    own = replace(base, value_lr_scheduler_type="constant_with_warmup", value_warmup_ratio=0.5)
    assert rates(own, models) == [
        pytest.approx(pair) for pair in zip(linear, [0.1 / 3, 0.2 / 3, 0.1, 0.1], strict=True)
    ]
    late = replace(base, critic_warmup=2, min_lr_rate=0.2)
    floor = [0.1, 0.08, 0.06, 0.04]
    assert rates(late, models) == [pytest.approx(pair) for pair in zip([0, 0, 0.01, 0.006], floor, strict=True)]
