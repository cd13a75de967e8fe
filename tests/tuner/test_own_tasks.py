"""A task of one's own: written by `new-task`, named or stated by a study file, and trained on as it is."""

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from safetensors.torch import load_file

from ppo_core.config.declare import Range
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import load_task
from ppo_core.loading.task_file import Preparation, get_task
from ppo_core.tasks.arithmetic.reward import exact
from ppo_core.tasks.skeleton import count_weights, example_note, usual_rate
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import small_policy
from tests.tuner.invoke import Invoke, one_error
from tests.tuner.quick_study import quick_table, rows, run
from tuner.control.changes import spec_changes
from tuner.study.spec import StudySpec

TASK = 'policy = "an-org/a-model"\nreward = "ppo_core.tasks.arithmetic.reward:exact"\nprompts = "an-org/data"\n'
STUDY = 'name = "mine"\ntrials = 2\nsearch = { learning_rate = "advised" }\n'


@pytest.fixture
def written(ppo_tuner: Invoke, own_folder: Path) -> Path:
    """A folder that `new-task` wrote."""
    status, stdout, stderr = ppo_tuner("new-task", "sums")
    assert (status, stderr) == (0, "")
    assert "train --task sums\n" in stdout and "run sums/study.toml\n" in stdout
    return own_folder / "sums"


def test_a_new_task_is_whole_and_short(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir() if path.is_file()) == [
        "README.md", "prompts.jsonl", "reward.py", "study.toml", "task.toml",
    ]  # fmt: skip
    assert not list(written.parent.glob(".sums*"))
    for name in ("task.toml", "reward.py", "study.toml"):
        assert len((written / name).read_text().splitlines()) <= 50
    readme = (written / "README.md").read_text()
    assert "ppo-tuner train --task sums\n" in readme and "ppo-tuner run sums/study.toml\n" in readme
    assert "{" not in readme
    told = (written / "study.toml").read_text().partition("ppo-tuner estimate ")[2].split()[0]
    assert Path(told) == Path("sums", "study.toml"), "what tells how long a trial takes"
    study = StudySpec.load(written / "study.toml")
    assert (study.name, study.task) == ("sums", str(written / "task.toml"))
    assert list(study.search) == ["num_ppo_epochs", "cliprange", "kl_step"] and study.keeps_kl_step
    assert get_task(str(written)).advised["learning_rate"].range == Range(3e-5, 3e-3, "log")


def test_a_new_task_trains_as_it_is(written: Path) -> None:
    models = load_task(str(written), "cpu")
    config = PPOConfig.from_dict({**models.task.reference, "total_episodes": 128})
    reports = list(PPOTrainer(config, models, world=ONE_PROCESS))
    assert [report.episode for report in reports] == [0, 64, 128]
    assert 0.2 < reports[0].metrics["eval/reward"] < 0.7
    assert reports[2].metrics["eval/kl"] > 0


def test_a_policy_of_ones_own_has_its_room_and_is_told_of_the_examples(ppo_tuner: Invoke, own_folder: Path) -> None:
    for part in small_policy():
        part.save_pretrained(own_folder / "policy")
    status, stdout, _ = ppo_tuner("new-task", "mine", "--policy", "policy")
    assert status == 0 and "first:      reward.py and prompts.jsonl: still new-task's example" in stdout
    task = get_task("mine")
    assert task.eval_response_length == task.reference["response_length"] == 32 - 8, "32 positions, prompts of 6 bytes"
    assert (task.kl_budget, task.kl_limit) == (10, 25)
    weights = sum(tensor.numel() for tensor in load_file(own_folder / "policy" / "model.safetensors").values())
    rate = usual_rate(weights)
    assert count_weights(str(own_folder / "policy")) == weights and rate > 1e-4
    assert (task.reference["learning_rate"], task.reference["value_learning_rate"]) == (rate, 5 * rate)
    span = task.advised["learning_rate"].range
    assert span == Range(pytest.approx(rate / 10), pytest.approx(10 * rate), "log")
    assert (own_folder / "mine" / "task.toml").read_text().count("EXAMPLE") == 2
    flags = ("--total_episodes", "8", "--batch_size", "8", "--mini_batch_size", "8", "--device", "cpu")
    said = [f"note: {name}: still new-task's example" for name in ("reward.py and prompts.jsonl", "reward.py")]
    status, stdout, stderr = ppo_tuner("train", "--task", "mine", *flags, "--output", "a")
    assert status == 0, stderr
    assert stdout.count("still new-task's") == stdout.count(said[0]) == 1
    (own_folder / "mine" / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "{i}+1=", "answer": ""}}\n' for i in range(40))
    )
    assert ppo_tuner("train", "--task", "mine", *flags, "--output", "b")[1].count(said[1]) == 1
    (own_folder / "mine" / "reward.py").write_text("def exact(responses):\n    return [0.0 for _ in responses]\n")
    assert example_note(get_task("mine")) is None


def test_ones_own_parts_are_named_and_nothing_is_copied(ppo_tuner: Invoke, own_folder: Path) -> None:
    for part in small_policy():
        part.save_pretrained(own_folder / "policy")
    (own_folder / "rewards.py").write_text(
        "def score(responses):\n    return [0.0 for _ in responses]\ndef length(responses):\n    return map(len, responses)\n"
    )
    (own_folder / "data.jsonl").write_text("".join(f'{{"text": "w{i}"}}\n' for i in range(40)))
    parts = ("--policy", "policy", "--reward", "rewards.py:score", "--prompts", "data.jsonl")
    assert ppo_tuner("new-task", "one", *parts)[0] == 0
    more = ("--reward", "rewards.py:length", "--prompt_column", "text", "--kl_budget", "6")
    status, stdout, _ = ppo_tuner("new-task", "mine", *parts, *more)
    assert status == 0 and "first:" not in stdout
    assert sorted(path.name for path in (own_folder / "mine").iterdir()) == ["study.toml", "task.toml"]
    study, task = StudySpec.load(own_folder / "mine" / "study.toml"), get_task("mine")
    assert (study.kl_budget, study.kl_limit, study.keeps_kl_step) == (6.0, 15.0, True)
    assert isinstance(task.prepare, Preparation) and task.prepare.prompts.column == "text"
    assert [part.where for part in task.prepare.rewards] == [
        f"{own_folder}/rewards.py:score", f"{own_folder}/rewards.py:length",
    ]  # fmt: skip
    assert ppo_tuner("new-task", "half", "--reward", "rewards.py:score")[0] == 2 and not (own_folder / "half").exists()


def test_a_run_by_its_parts_ends_with_the_study_that_looks_further(ppo_tuner: Invoke, own_folder: Path) -> None:
    for part in small_policy():
        part.save_pretrained(own_folder / "policy")
    (own_folder / "rewards.py").write_text(
        "def score(responses):\n    return [float(len(text)) for text in responses]\n"
    )
    (own_folder / "data.jsonl").write_text("".join(f'{{"prompt": "w{i}"}}\n' for i in range(40)))
    (own_folder / "c.yaml").write_text("cliprange: 0.15\nsave_every_seconds: 60\n")
    flags = [*shlex.split("--total_episodes 8 --batch_size 8 --response_length 4 --seed 3 --stop_strings"), '["w5"]']
    parts = ("--policy", "policy", "--reward", "rewards.py:score", "--prompts", "data.jsonl", "--kl_budget", "6")
    others = ("--config", "c.yaml", "--device", "cpu", "--whiten_rewards", "--output", "out")
    status, stdout, stderr = ppo_tuner("train", *parts, *flags, *others)
    assert status == 0, stderr
    line = stdout.splitlines()[-1]
    assert line.startswith("to search for a better configuration: ")
    first, second = (shlex.split(each)[1:] for each in line.partition(": ")[2].split(" && "))
    assert ppo_tuner(*first)[0] == 0 and second == ["run", "out-study", "--checkpoint-seconds", "60"]
    study = StudySpec.load(own_folder / second[1] / "study.toml")
    assert (study.kl_budget, study.device, study.seed) == (6.0, "cpu", 3)
    config = study.config({})
    assert (config.total_episodes, config.batch_size, config.response_length) == (160, 8, 4), "as long as is needed"
    assert (config.cliprange, config.stop_strings, config.whiten_rewards) == (0.15, '["w5"]', True)
    status, stdout, stderr = ppo_tuner("train", "--task", "out-study", *flags, *others[2:5], "--output", "again")
    (line,) = (line for line in stdout.splitlines() if line.startswith("to search for a better configuration: "))
    assert "run out-study/study.toml" in line and "response_length=4" in line, "a study file takes values by hand"


def test_prompts_that_are_too_long_are_named_and_left_out_by_a_flag(ppo_tuner: Invoke, own_folder: Path) -> None:
    for part in small_policy():
        part.save_pretrained(own_folder / "policy")
    (own_folder / "rewards.py").write_text(
        "def score(responses):\n    return [float(len(text)) for text in responses]\n"
    )
    prompts = [f"w{i}" if i != 6 else "w1 " * 20 for i in range(20)]
    (own_folder / "data.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in prompts))
    parts = ("--policy", "policy", "--reward", "rewards.py:score", "--prompts", "data.jsonl", "--response_length", "14")
    small = ("--kl_budget", "6", "--total_episodes", "8", "--batch_size", "8", "--device", "cpu")
    refused = one_error(ppo_tuner("train", *parts, *small, "--output", "one")[2])
    assert "too long for it: 1 of 20 prompts, line 7 first; --max_prompt_tokens 18 leaves such out" in refused
    assert "; --max_prompt_tokens 18 leaves" in one_error(ppo_tuner("new-task", "mine", *parts)[2])
    status, stdout, stderr = ppo_tuner("train", *parts, *small, "--max_prompt_tokens", "18", "--output", "two")
    assert status == 0, stderr
    assert "1 over 18 tokens (line 7 first)" in stdout
    first = shlex.split(stdout.splitlines()[-1].partition(": ")[2].partition(" && ")[0])[1:]
    assert ppo_tuner(*first)[0] == 0
    task = get_task("two-study").prepare
    assert isinstance(task, Preparation) and task.prompts.max_prompt_tokens == 18


def test_a_new_task_of_own_parts_has_a_response_length_that_fits(ppo_tuner: Invoke, own_folder: Path) -> None:
    for part in small_policy():
        part.save_pretrained(own_folder / "policy")
    (own_folder / "rewards.py").write_text(
        "def score(responses):\n    return [0.0 for _ in responses]\ndef other(responses, w):\n    return []\n"
    )
    (own_folder / "data.jsonl").write_text("".join(f'{{"prompt": "w{i} w1 w2 w3 w4 w5"}}\n' for i in range(20)))
    parts = ("--policy", "policy", "--prompts", "data.jsonl", "--reward")
    before = sorted(own_folder.rglob("*.*"))
    refused = one_error(ppo_tuner("new-task", "one", *parts, "rewards.py:score", "--response_length", "27")[2])
    assert all(words in refused for words in ("response_length = 27", "32 positions", "takes 6", "at most 26"))
    assert '"w"' in one_error(ppo_tuner("new-task", "one", *parts, "rewards.py:other")[2])
    assert [path for path in sorted(own_folder.rglob("*.*")) if path.suffix != ".pyc"] == before
    assert not (own_folder / "one").exists()
    status, stdout, _ = ppo_tuner("new-task", "one", *parts, "rewards.py:score", "--batch_size", "24")
    assert status == 0 and "response_length = 26" in stdout and "2 eval prompts" in stdout
    task = get_task("one")
    assert (task.eval_response_length, task.reference["response_length"]) == (26, 26)
    assert (task.reference["batch_size"], task.reference["mini_batch_size"]) == (24, 8)


def test_usual_rates_are_the_published_ones_within_a_factor_of_two() -> None:
    published = {
        500_000_000: 1e-6, 3_000_000_000: 1e-6, 8_000_000_000: 3e-7, 13_000_000_000: 4e-7, 70_000_000_000: 1e-7,
    }  # fmt: skip
    assert [usual_rate(weights) for weights in (423_168, 10**9)] == [2e-4, 1e-6]
    assert all(rate / 2 <= usual_rate(weights) <= 2 * rate for weights, rate in published.items())


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"n_positions": 1024}, PPOConfig.response_length),
        ({"text_config": {"max_position_embeddings": 40}}, 32),
        ({"max_position_embeddings": 4}, 1),
        ([], PPOConfig.response_length),
    ],
)
def test_responses_of_a_new_task_fit_into_the_policys_context(
    ppo_tuner: Invoke, own_folder: Path, config: object, length: int
) -> None:
    (own_folder / "model").mkdir()
    (own_folder / "model" / "config.json").write_text(json.dumps(config))
    assert ppo_tuner("new-task", "mine", "--policy", "model")[0] == 0
    assert get_task("mine").eval_response_length == length


# Studies


def test_a_study_states_its_task_in_a_table(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(f"{STUDY}[task]\n{TASK}kl_budget = 4\nreference = {{ learning_rate = 1e-4 }}\n")
    study = StudySpec.load(path)
    assert (study.task, study.kl_budget, study.kl_limit) == (str(path), 4, 10)
    assert study.config({}).learning_rate == 1e-4
    stored = StudySpec.from_dict(json.loads(json.dumps(study.to_dict())), "the store")
    assert stored == study and not spec_changes(study, stored).refused


def test_a_study_without_a_file_states_its_task_as_well(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tomllib.loads((written / "task.toml").read_text())
    table["prompts"] = f"{written.name}/{table['prompts']}"
    table["reward"] = f"{written.name}/{table['reward']}"
    content = quick_table(task=table, trials=1)
    spec = StudySpec.from_dict(content, "my label")
    (written.parent / "study.toml").write_text(tomli_w.dumps({**content, "task": {**table, "kl_budget": 3.0}}))
    assert StudySpec.from_dict(content, "study.toml") == spec, "and not as a file of that name states it now"
    assert StudySpec.load("study.toml").task == str(written.parent / "study.toml")
    of_file = get_task(str(written))
    monkeypatch.chdir("/")
    assert StudySpec.from_dict(spec.to_dict(), "store") == spec
    assert replace(get_task(spec.task), name=of_file.name) == of_file
    finished, _ = run(written.parent, spec)  # its workers find the task, too
    assert finished and rows(written.parent)[0].episodes > 0


def test_a_study_without_a_file_may_state_a_function_as_its_reward(written: Path) -> None:
    table = {"policy": "task:arithmetic", "reward": exact, "prompts": f"{written.name}/prompts.jsonl"}
    spec = StudySpec.from_dict(quick_table(task=table), "my label")
    (part,) = get_task(StudySpec.from_dict(spec.to_dict(), "store").task).prepare(None).rewards
    assert part.where == "ppo_core.tasks.arithmetic.reward:exact"


def test_a_study_names_a_task_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tasks" / "mine").mkdir(parents=True)
    (tmp_path / "tasks" / "mine" / "task.toml").write_text(TASK)
    for name in ("tasks/mine", "tasks/mine/task.toml", "./tasks/mine"):
        (tmp_path / "study.toml").write_text(f'task = "{name}"\n{STUDY}')
        assert StudySpec.load(tmp_path / "study.toml").task == str(tmp_path / "tasks" / "mine" / "task.toml")
    (tmp_path / "tasks" / "study.toml").write_text(f'task = "mine"\n{STUDY}')
    assert StudySpec.load(tmp_path / "tasks" / "study.toml").task == str(tmp_path / "tasks" / "mine" / "task.toml")
