"""`python -m ppo_core` with real small models in a folder of its own."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

from ppo_core import PPOConfig
from ppo_core.__main__ import main
from ppo_core.cli import new_run, publish
from ppo_core.cli.arguments import core_parser
from ppo_core.cli.ending import Ending
from ppo_core.cli.run_folder import Run
from ppo_core.config import lookup
from ppo_core.data.task import Prompts, RewardPart, TaskAssets
from ppo_core.errors import TaskError
from ppo_core.loading.task_file import get_task
from ppo_core.sampling.generation import Rollouts, TransformersGenerator
from ppo_core.tasks.skeleton import usual_rate
from tests.ppo_core.command_folder import KILL_AT, PARTS, REPOSITORY, SMALL, fill, process, steps
from tests.ppo_core.conftest import TINY_TASK

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which is the working directory."""
    fill(tmp_path, tiny_folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in this process; returns its exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the command adds the working folder to

    def invoke(*argv: str) -> tuple[int, str, str]:
        status = main(argv)
        return status, *capsys.readouterr()

    return invoke


def front_matter(card: str) -> Mapping[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def scalars(folder: Path, name: str) -> dict[int, float]:
    """The values of a metric in TensorBoard's event files, by step; each step once."""
    events = EventAccumulator(str(folder)).Reload().Scalars(name)
    assert len({event.step for event in events}) == len(events)
    return {event.step: event.value for event in events}


def test_a_task_given_by_its_parts(run: Command, folder: Path) -> None:
    status, stdout, _ = run(*PARTS, "--reward", "rewards.py:length", *SMALL, "--output", "out")
    assert status == 0
    assert 'preparing: prompts: 60 train, 10 eval, 10 test, from the column "prompt"' in stdout
    assert [line.split()[1] for line in stdout.splitlines() if line.startswith("step ")] == [f"{i}/6" for i in range(7)]
    recorded = steps(folder / "out")
    assert recorded[0]["eval/reward"] > 0, "a length"
    shown = [line for line in stdout.splitlines() if line.startswith("Samples at step ")]
    assert [line.split()[3] for line in shown] == ["0,", "4,", "6,"], "before, halfway and at the end"
    samples = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().split("\n")[:-1]]
    assert [one["step"] for one in samples] == [step for step in (0, 2, 4, 6) for _ in range(8)]
    assert {*samples[0]["parts"]} == {"count", "length"} and samples[0]["prompt"] in stdout
    assert f"{samples[-8]['reward']:#.3g} (count {samples[-8]['parts']['count']:#.3g}, length " in stdout
    assert recorded[0]["eval/length"] <= 6, "evaluations sample as the run does"
    model = AutoModelForCausalLM.from_pretrained(folder / "out" / "model")
    assert AutoTokenizer.from_pretrained(folder / "out" / "model").eos_token_id == 1
    assert not torch.equal(
        model.transformer.wte.weight, AutoModelForCausalLM.from_pretrained("policy").transformer.wte.weight
    )
    # The task is written beside the run: it may be trained again by its path, and is the same on any day.
    assert "strftime_now" not in (folder / "out" / "task.toml").read_text()
    status, stdout, _ = run("--task", "out/task.toml", *SMALL, "--total_episodes", "8", "--device", "cpu", "--json")
    data = json.loads(stdout)
    assert status == 0 and data["config"]["total_episodes"] == 8
    assert data["steps"][0]["eval/reward"] == recorded[0]["eval/reward"]


def test_a_sampler_that_disagrees_is_warned_of(run: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(TransformersGenerator):
        def generate(self, *args: Any) -> Rollouts:
            rollouts = super().generate(*args)
            wrong = rollouts.sampler_logprobs + 1.5 * rollouts.sequences.response_mask
            return replace(rollouts, sampler_logprobs=wrong)

    monkeypatch.setattr("ppo_core.trainer.TransformersGenerator", Wrong)
    status, stdout, _ = run(*PARTS, *SMALL, "--output", "out")
    assert status == 0
    (warning,) = [line for line in stdout.splitlines() if line.startswith("warning: sampler")]
    assert "mismatch of 1.5 nats at step 1" in warning


@pytest.mark.parametrize(("policy", "base"), [("openai/gpt-2", "openai/gpt-2"), ("policy", None), ("/a|b", None)])
def test_only_a_hub_id_is_the_cards_base_model(folder: Path, policy: str, base: str | None) -> None:
    path = folder / "out"
    run = Run("t", PPOConfig(), "cpu", path, 1, (), "a|`b`", "id", None, 300.0, "python -m ppo_core")
    run.model.mkdir(parents=True)
    part = RewardPart("r", "http", "http://localhost/score")
    assets = TaskAssets(policy, (part,), Prompts.of_texts("a", "b", "c"))
    publish.write_card(run.model, run, TINY_TASK, assets, [], Ending(kl_budget=10.0))
    card = (run.model / "README.md").read_text()
    assert front_matter(card).get("base_model") == base
    assert f"- Base model: `{policy}`" in card and "No evaluation." in card


def test_the_card_holds_no_password(folder: Path) -> None:
    url = "https://me:hidden@host/score?api_key=hidden&n=1"
    command = f"python -m ppo_core --reward '{url}' --reward https://hidden@host --run_name me@home"
    run = Run("t", PPOConfig(), "cpu", folder / "out", 1, (), "mine", "id", None, 300.0, command)
    run.model.mkdir(parents=True)
    assets = TaskAssets("policy", (RewardPart("r", "http", url),), Prompts.of_texts("a", "b", "c"))
    publish.write_card(run.model, run, TINY_TASK, assets, [], Ending(kl_budget=10.0))
    card = (run.model / "README.md").read_text()
    assert "hidden" not in card and "`https://me:***@host/score?api_key=***&n=1`" in card
    assert "'https://me:***@host/score?api_key=***&n=1' --reward 'https://***@host' --run_name me@home" in card


def test_flags_win_over_the_file_over_the_defaults(run: Command, folder: Path) -> None:
    (folder / "c.toml").write_text(
        'policy = "policy"\nreward = ["rewards.py:length"]\nprompts = "prompts.jsonl"\ndevice = "cpu"\n'
        'output = "there"\n'
        "total_episodes = 8\nbatch_size = 8\nresponse_length = 6\nlam = 0.9\nkl_coef = 0.1\nsave_every_episodes = 8\n"
    )
    status, stdout, stderr = run("--config", "c.toml", "--kl-coef=0.2", "--reward", "rewards.py:count", "--json")
    assert status == 0, stderr
    data = json.loads(stdout)
    config = data["config"]
    assert (config["kl_coef"], config["lam"], config["cliprange"]) == (0.2, 0.9, 0.2)
    assert data["output"] == "there" and 'name = "count"' in (folder / "there" / "task.toml").read_text()
    assert json.loads((folder / "there" / "ppo_config.json").read_text()) == config
    stored = json.loads((folder / "there" / "run.json").read_text())
    assert (stored["save_every_episodes"], stored["finished"], stored["threads"]) == (8, True, 1)


def test_with_a_kl_target_but_no_rate_the_run_finds_its_own(run: Command, folder: Path) -> None:
    """The wanted KL step is a tenth of the target in each of ten iterations."""
    (folder / "c.toml").write_text("total_episodes = 80\nbatch_size = 8\nresponse_length = 6\nkl_target = 2.0\n")
    status, stdout, _ = run(*PARTS, "--config", "c.toml", "--output", "out")
    stored = json.loads((folder / "out" / "run.json").read_text())["config"]
    assert status == 0 and (stored["lr_controller"], stored["learning_rate"]) == ("kl_step", 3e-6)
    rates = [step["lr"] for step in steps(folder / "out")[1:]]
    assert rates[:2] == [pytest.approx(3e-8), pytest.approx(3e-6)], "a hundredfold while it is searched"
    assert "0.2 nats/response" in stdout and "begins at 3e-08" in stdout
    # Its task has a rate: the search begins there.
    task = (folder / "out" / "task.toml").read_text()
    (folder / "own.toml").write_text(f"{task}\n[reference]\nlearning_rate = 1e-3\nkl_coef = 0.5\n")
    values = planned("--task", "own.toml", "--kl_target", "2")
    assert (values.lr_controller, values.learning_rate, values.kl_coef) == ("kl_step", 1e-3, 0.05)


@pytest.mark.parametrize(
    ("flags", "controller"),
    [
        ("", "schedule"),
        ("--kl_target 2", "kl_step"),
        ("--kl_target 2 --kl_controller hold", "kl_step"),
        ("--kl_target 2 --learning_rate 1e-3 --lr_controller kl_step", "kl_step"),
        ("--kl_target 2 --learning_rate 1e-3", "schedule"),
        ("--kl_target 2 --lr_controller schedule", "schedule"),
        ("--kl_target 2 --kl_controller adaptive", "schedule"),
        ("--kl_target 2 --config rate.toml", "schedule"),
        ("--kl_target 2 --config trl.yaml", "schedule"),
        ("--kl_budget 2", "kl_step"),
        ("--config budget.toml", "kl_step"),
        ("--kl_budget 2 --learning_rate 1e-3", "schedule"),
        ("--kl_budget 2 --kl_coef 0.1", "schedule"),
        ("--kl_budget 2 --kl_target none", "schedule"),
        ("--kl_budget 2 --config trl.yaml", "schedule"),
    ],
)
def test_a_rate_that_is_given_is_followed(folder: Path, flags: str, controller: str) -> None:
    (folder / "rate.toml").write_text("learning_rate = 1e-3\n")
    (folder / "budget.toml").write_text("kl_budget = 2.0\n")
    (folder / "trl.yaml").write_text("dataset_name: prompts.jsonl\ntotal_episodes: 64\n")
    assert planned(*PARTS, *flags.split()).lr_controller == controller


def test_a_kl_budget_is_all_the_numbers_that_a_run_needs(run: Command, folder: Path) -> None:
    alone = planned(*PARTS, "--kl_budget", "5")
    assert (alone.kl_target, alone.kl_coef, alone.total_episodes, alone.batch_size) == (4.0, 0.05, 2048, 64)
    weights = sum(tensor.numel() for tensor in load_file(folder / "policy" / "model.safetensors").values())
    assert alone.learning_rate == usual_rate(weights) and alone.value_learning_rate == 5 * usual_rate(weights)
    assert (
        planned("--task", "reviews", "--kl_budget", "5").learning_rate == get_task("reviews").reference["learning_rate"]
    )
    flags = ("--total_episodes", "64", "--batch_size", "8", "--response_length", "6", "--num_mini_batches", "2")
    status, stdout, _ = run(*PARTS, "--kl_budget", "5", *flags, "--output", "out")
    assert status == 0
    stored = json.loads((folder / "out" / "run.json").read_text())
    assert (stored["kl_budget"], stored["config"]["kl_target"], stored["config"]["num_mini_batches"]) == (5, 4.0, 2)
    evaluations = [line for line in steps(folder / "out") if "eval/reward" in line]
    chosen = stored["ending"]["best"] or evaluations[-1]
    assert f"of 5, at episode {chosen['episode']}; the SFT policy: reward" in stdout
    samples = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    table = stdout[stdout.index("In answer to: ") :]
    shown = [each for each in samples if each["step"] in (0, chosen["step"]) and each["prompt"] == samples[0]["prompt"]]
    assert len(shown) == 2 and all(each["response"].strip() in table for each in shown)


def planned(*argv: str) -> PPOConfig:
    """The configuration of a run that is given these flags."""
    return new_run.plan(core_parser().parse_args(argv), "a command").run.config


def test_a_yaml_of_trls_trains(run: Command, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained("policy")
    config = GPT2Config.from_pretrained("policy", num_labels=1)
    GPT2ForSequenceClassification(config).save_pretrained(folder / "rm")
    tokenizer.save_pretrained(folder / "rm")
    (folder / "ppo.yaml").write_text(
        "sft_model_path: policy\nreward_model_path: rm\ndataset_name: prompts.jsonl\noutput_dir: out\nuse_cpu: true\n"
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nnum_mini_batches: 2\nnum_train_epochs: 0.4\n"
        "response_length: 6\nlearning_rate: 1e-3\nnum_sample_generations: 3\nwarmup_steps: 1\nmax_grad_norm: 0.5\n"
    )
    status, stdout, stderr = run("--config", "ppo.yaml", "--learning_rate", "2e-3", "--json")
    assert status == 0, stderr
    data = json.loads(stdout)
    values = data["config"]
    assert values["total_episodes"] == 24, "0.4 passes over 60 training prompts"
    assert (values["value_model"], values["value_model_path"]) == ("separate", "reward_model")
    assert values["value_learning_rate"] == values["learning_rate"] == 2e-3
    assert (values["eval_every_episodes"], values["warmup_ratio"]) == (8, pytest.approx(1 / 3))
    assert [step["step"] for step in data["steps"] if "eval/reward" in step] == [0, 1, 2, 3]
    assert "max_grad_norm: TRL's PPO declared it and never applied it; here it is applied" in stderr


def test_a_tracker_that_fails_costs_a_run_nothing(run: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("ppo_core.cli.training.Tracker.finish", fail)
    status, stdout, _ = run(*PARTS, *SMALL, "--report_to", "tensorboard", "--output", "out")
    assert status == 0 and "warning: a tracker failed, and gets no more metrics of this run: no route" in stdout
    assert (folder / "out" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_been(run: Command, folder: Path) -> None:
    flags = (*PARTS, *SMALL, "--save_every_episodes", "16", "--report_to", "tensorboard")
    whole = process(folder, *flags, "--output", "whole")  # not here, where an earlier test may have set other threads
    assert whole.returncode == 0, whole.stderr
    # Evaluated at steps 0, 2, 4 and saved after 2 and 4: the sixth call scores the rollouts of step 4.
    killed = process(folder, *flags, "--output", "killed", **{KILL_AT: "6"})
    assert killed.returncode == -9, killed.stderr
    assert len(steps(folder / "killed")) == 4 and not (folder / "killed" / "model").exists()
    (folder / "killed" / "steps.jsonl").open("a").write('{"step": 4, "epis')  # a line that was not written to its end
    resumed = process(folder, "--resume", "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from killed/checkpoints/step-000002" in resumed.stdout
    assert steps(folder / "killed") == steps(folder / "whole")
    assert (folder / "killed" / "samples.jsonl").read_text() == (folder / "whole" / "samples.jsonl").read_text()
    weights = [(folder / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert weights[0] == weights[1]
    assert "| before training |" in (folder / "killed" / "model" / "README.md").read_text()
    # The tracker's run goes on, too: every step once.
    logged = [scalars(folder / name / "trackers" / name, "objective/scores") for name in ("killed", "whole")]
    assert list(logged[0]) == [1, 2, 3, 4, 5, 6] and logged[0] == logged[1]
    assert scalars(folder / "whole" / "trackers" / "whole", "episode")[6] == 48
    assert "holds a finished run" in one_error(run("--resume", "killed"), 1)


def test_a_run_without_a_checkpoint_begins_again(run: Command, folder: Path) -> None:
    assert run(*PARTS, *SMALL, "--total_episodes", "8", "--output", "out")[0] == 0
    whole = steps(folder / "out")
    stored = json.loads((folder / "out" / "run.json").read_text())
    (folder / "out" / "run.json").write_text(json.dumps(stored | {"finished": False}))
    status, stdout, _ = run("--resume", "out")
    assert status == 0 and "resuming from" not in stdout
    assert steps(folder / "out") == whole and [line["step"] for line in whole] == [0, 1]


def test_a_better_checkpoint_within_the_budget_is_saved_as_a_model(run: Command, folder: Path) -> None:
    assert run(*PARTS, *SMALL, "--total_episodes", "8", "--output", "a")[0] == 0
    task = (folder / "a" / "task.toml").read_text()
    assert not (folder / "a" / "best_model").exists() and "Warning" not in (folder / "a/model/README.md").read_text()
    (folder / "strict.toml").write_text(f"kl_budget = 1e-9\n{task}")
    # Only the SFT policy is within a budget of nothing; it has no checkpoint, so none can be saved.
    status, stdout, _ = run("--task", "strict.toml", *SMALL, "--device", "cpu", "--output", "b")
    assert status == 0 and "is over the budget of 1e-09; no checkpoint was within the budget\n" in stdout
    assert {path.name for path in (folder / "b").iterdir()} == {
        "model", "ppo_config.json", "run.json", "samples.jsonl", "steps.jsonl",
    }  # fmt: skip
    assert "Warning: be careful with the trained policy: its KL" in (folder / "b" / "model" / "README.md").read_text()

    (folder / "wide.toml").write_text(f"kl_budget = 9.0\n{task}")
    flags = ("--learning_rate", "1e-2", "--device", "cpu", "--output", "c")
    status, stdout, _ = run("--task", "wide.toml", *SMALL, *flags)
    assert status == 0 and "KL budget 9 nats/response" in stdout
    within = [line for line in steps(folder / "c")[1:] if line.get("eval/kl", 10) + line.get("eval/kl_se", 0) <= 9]
    best = max(within, key=lambda line: line["eval/reward"])
    assert best["step"] < 6 and steps(folder / "c")[-1]["eval/kl"] > 9, "a policy that leaves the budget in the end"
    assert f"is that of episode {best['episode']}: reward {best['eval/reward']:.2f}" in stdout
    assert re.search(r"\nKL (left|was over) the budget of 9 nats/response (for good )?at step \d", stdout)
    card = (folder / "c" / "best_model" / "README.md").read_text()
    assert "\nOver the whole run, KL " in card
    assert f"| after {best['episode']} episodes |" in card and "| after 48 episodes |" not in card
    # It is that checkpoint's policy: evaluated as a policy to begin with, it reads what the run read.
    policy = str(folder / "policy")
    assert policy in task
    (folder / "again.toml").write_text(task.replace(policy, str(folder / "c" / "best_model")))
    again = ("--total_episodes", "8", "--device", "cpu", "--output", "d")
    assert run("--task", "again.toml", *SMALL, *again)[0] == 0
    assert steps(folder / "d")[0]["eval/reward"] == best["eval/reward"]


def test_a_run_that_is_to_stop_early_is_the_whole_run_up_to_there(run: Command, folder: Path) -> None:
    assert run(*PARTS, *SMALL, "--output", "whole")[0] == 0
    status, stdout, _ = run(*PARTS, *SMALL, "--stop_at_episode", "20", "--output", "early")
    assert status == 0 and "evaluated every 16; ends after 3 (episode 24)" in stdout
    assert [line.split()[1] for line in stdout.splitlines() if line.startswith("step ")] == ["0/3", "1/3", "2/3", "3/3"]
    early, whole = steps(folder / "early"), steps(folder / "whole")[:4]
    assert "eval/reward" in early[3] and "eval/reward" not in whole[3], "the last step is evaluated"
    assert [{name: line[name] for name in other} for line, other in zip(early, whole, strict=True)] == whole
    stored = json.loads((folder / "early" / "run.json").read_text())
    assert (stored["stop_at_episode"], stored["finished"]) == (20, True)

    (folder / "early" / "run.json").write_text(json.dumps(stored | {"finished": False}))  # as if killed at its end
    assert run("--resume", "early")[0] == 0
    assert steps(folder / "early") == early
    assert run(*PARTS, *SMALL, "--stop_at_episode", "1000", "--total_episodes", "8", "--output", "short")[0] == 0
    assert len(steps(folder / "short")) == 2


def test_best_model_keeps_to_the_kl_budget_that_is_given(run: Command, folder: Path) -> None:
    flags = (*PARTS, *SMALL, "--total_episodes", "16", "--output")
    status, stdout, _ = run(*flags, "given", "--kl_budget", "0.5")
    assert status == 0 and "KL budget 0.5 nats/response" in stdout
    assert json.loads((folder / "given" / "run.json").read_text())["ending"]["kl_budget"] == 0.5
    (folder / "mine.toml").write_text("kl_budget = 0.25\n")
    assert run(*flags, "file", "--config", "mine.toml")[0] == 0
    assert json.loads((folder / "file" / "run.json").read_text())["kl_budget"] == 0.25
    for wrong in ("0", "-1", "nan", "much"):
        assert run(*flags, "never", "--kl_budget", wrong)[0] == 2
    (folder / "mine.toml").write_text('kl_budget = "much"\n')
    status, _, stderr = run(*flags, "never", "--config", "mine.toml")
    assert status == 2 and "kl_budget = 'much' is not allowed" in stderr and not (folder / "never").exists()


def test_an_installed_command_finds_a_module_of_the_working_folder(run: Command, folder: Path) -> None:
    assert not {"", str(folder)} & set(sys.path), "as where a console script was started"
    (folder / "my_own_rewards.py").write_text((folder / "rewards.py").read_text())
    flags = ("--reward", "my_own_rewards:length", "--total_episodes", "8", "--output", "out")
    status, _, stderr = run(*PARTS, *SMALL, *flags)
    assert status == 0, stderr
    assert '"my_own_rewards:length"' in (folder / "out" / "task.toml").read_text()
    assert sys.path[0] == str(folder)


def test_an_error_in_the_middle_of_a_run_says_how_to_go_on(run: Command, folder: Path) -> None:
    rewards = (folder / "rewards.py").read_text()
    (folder / "failing.py").write_text(
        rewards.replace("    calls += 1\n", "    calls += 1\n    assert calls < 6 or os.path.exists('mended')\n")
    )
    parts = [part.replace("rewards.py", "failing.py") for part in PARTS]
    result = run(*parts, *SMALL, "--output", "out")
    assert one_error(result, 1).endswith("; to resume: python -m ppo_core --resume out")
    (folder / "mended").touch()
    status, stdout, _ = run("--resume", "out")
    assert status == 0 and "resuming from out/checkpoints/step-000002" in stdout


def test_a_policy_that_is_neither_here_nor_on_a_hub_that_answers(
    run: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    flags = ("--policy", "polcy", *PARTS[2:], *SMALL)
    message = one_error(run(*flags), 2)  # one line, without those of repeated requests
    assert message.startswith("--policy = 'polcy': folder polcy not found, and the hub cannot be reached: ")
    # What is in the cache is left to the loading.
    cached = folder / "cache" / "models--polcy"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(folder / "policy", cached / "snapshots" / "abc")
    lookup.require_reachable("polcy", "--policy")
    with pytest.raises(TaskError):
        lookup.require_reachable("polcy-2", "--policy")


def test_the_readmes_python_run_again_goes_on(run: Command, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*PARTS, *SMALL, "--total_episodes", "8", "--output", "a")[0] == 0
    readme = (REPOSITORY / "README.md").read_text()
    (code,) = [text.split("```")[0] for text in readme.split("```python\n")[1:] if "ppo_trainer" in text]
    small = (
        code.replace("1920", "160").replace("batch_size=64", "batch_size=8").replace("batch_size=16", "batch_size=8")
    )
    small = small.replace("response_length=24", "response_length=6").replace('"reviews"', '"a/task.toml"')
    (folder / "example.py").write_text(small)

    def again() -> list[int]:
        capsys.readouterr()
        runpy.run_path("example.py")
        return [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]

    assert again() == list(range(21))
    weights = (folder / "runs/mine/model/model.safetensors").read_bytes()
    assert again() == [], "it has ended"
    (folder / "runs/mine/step-000020/manifest.json").unlink()  # as if the power had failed while it was saved
    assert again() == list(range(11, 21))
    assert (folder / "runs/mine/model/model.safetensors").read_bytes() == weights


def one_error(result: tuple[int, str, str], status: int) -> str:
    """The message of the one line that the command says in an error."""
    assert result[0] == status, result
    (line,) = result[2].splitlines()
    assert line.startswith("ppo_core: error: ")
    return line.removeprefix("ppo_core: error: ")


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--learnin_rate", "1"], 2, 'unknown flag "--learnin_rate"; did you mean "--learning_rate"?'),
        (["--policy", "policy"], 2, "--policy alone is not a task: --reward, --prompts is missing (or name a --task)"),
        (["--task", "reviews", "--policy", "policy"], 2, "flags: a task and policy are both given"),
        (["--task", "no.toml"], 2, "task file no.toml not found"),
        ([*PARTS, "--policy", "broken"], 2, 'the tokenizer of policy "'),
        ([*PARTS, "--reward", "rewards.py:cout"], 2, "cout"),
        ([*PARTS, "--report_to", "tensorbord"], 2, 'unknown tracker "tensorbord"'),
        ([*PARTS, "--report_to", "wandb"], 2, 'tracker "wandb" is not installed; install it with: pip install wandb'),
        ([*PARTS, "--device", "gpu"], 2, "--device = 'gpu' is not allowed; expected auto or cpu"),
        ([*PARTS, "--save_every_seconds", "soon"], 2, "'soon' is not allowed; expected a number over 0"),
        ([*PARTS, "--response_length", "40"], 2, "response_length = 40 is not allowed: the policy has 32 positions"),
        (["--config", "broken.yaml"], 2, "broken.yaml: not valid YAML: "),
        (["--config", "typo.yaml"], 2, 'typo.yaml: unknown hyperparameter "polcy"; did you mean "policy"?'),
        (
            ["--config", "type.yaml"],
            2,
            "type.yaml: save_every_episodes = 'x' is not allowed; expected a whole number over 0",
        ),
        (["--resume", "nowhere"], 1, "nowhere is not a run's folder: it has no run.json"),
        (["--resume", "nowhere", "--lam", "0.9"], 2, "so it does not take --lam"),
    ],
)
def test_a_mistake_leaves_nothing(run: Command, folder: Path, argv: list[str], status: int, message: str) -> None:
    files = {"broken.yaml": "a: b: c", "typo.yaml": "polcy: x", "type.yaml": "save_every_episodes: x"}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    before = sorted(folder.iterdir())
    result = run(*argv)
    assert message in one_error(result, status)
    assert "output" not in result[1], "a run that never began is not announced"
    assert "task.toml" not in one_error(result, status), "which nobody wrote"
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == before


def test_help_is_by_group_and_needs_no_torch() -> None:
    code = (
        "import sys; from ppo_core.__main__ import main\n"
        "try: main(['--help'])\n"
        "finally: print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n")
    text = " ".join(done.stdout.split())
    headings = [line for line in done.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[1:3] == ["the run:", "Length, evaluation and seed:"] and "KL from the reference:" in headings
    assert "--cliprange X" in text and "[1-ε, 1+ε]. [a number in (0, 1); default: 0.2]" in text
    assert "the task's reference (values that suit the size of its policy)" in text
    assert "default: None" not in text


def test_an_error_cannot_write_control_characters_to_the_terminal(run: Command) -> None:
    status, _, stderr = run("--task", "no\x1b[31mred")
    assert status == 2
    assert r"no\x1b[31mred" in stderr and "\x1b" not in stderr
