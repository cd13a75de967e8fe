"""Tasks of one's own: TOML files, Python files and folders, and what is said of mistakes in them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_core.config.declare import Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.data.prompts import PromptSource
from ppo_core.data.task import Advised, Prompt, RewardPart, TaskAssets
from ppo_core.errors import TaskError
from ppo_core.loading.load import load_task
from ppo_core.loading.task_file import get_task, make_task
from tests.ppo_core.conformance import WORDS

REWARD = """
def wanted(prompts, responses, word):
    return [float(response.split().count(w)) for response, w in zip(responses, word)]

def short(responses):
    return [-float(len(response.split())) for response in responses]
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
PLAIN = 'policy = "model"\nreward = "reward.py:wanted"\nprompts = "prompts.jsonl"\n'
PYTHON = """
from ppo_core.loading.task_file import make_task

def wanted(prompts, responses, word):
    return [float(response.split().count(w)) for response, w in zip(responses, word)]

TASK = make_task(policy="model", reward=wanted, prompts="prompts.jsonl", kl_budget=4, reference={"response_length": 6})
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_folder: Path) -> Path:
    """A folder with a policy, a reward's functions and 80 prompts; the tests write the task."""
    (tmp_path / "model").symlink_to(tiny_folder)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{WORDS[i % 20]} {WORDS[i // 20]}", "word": WORDS[i % 7]} for i in range(80)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write(folder: Path, text: str, name: str = "task.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def prepared(name: str) -> TaskAssets:
    return get_task(name).prepare(None)


# What is read


def test_a_short_file_is_a_whole_task(folder: Path) -> None:
    path = write(folder, PLAIN)
    task = get_task(path)
    assert (task.name, task.kl_budget, task.kl_limit, task.eval_seed) == (path, 10, 25, 0)
    assert task.eval_temperature == HYPERPARAMETERS["temperature"].default
    assert task.eval_response_length == HYPERPARAMETERS["response_length"].default
    assert task.doc == "Prompts of prompts.jsonl, rewarded by wanted."
    assets = task.prepare(None)
    assert assets.policy == str(folder / "model")
    assert assets.rewards == (RewardPart("wanted", "function", f"{folder}/reward.py:wanted"),)
    splits = assets.prompts
    assert (len(splits.train), len(splits.eval), len(splits.test)) == (60, 10, 10)
    assert splits.train[0].columns.keys() == {"word"}


def test_every_key_arrives(folder: Path) -> None:
    path = write(
        folder,
        PLAIN.replace('"prompts.jsonl"', '{ path = "prompts.jsonl", eval = 20, seed = 3, max_prompt_tokens = 9 }')
        + 'doc = "Mine."\nkl_budget = 20\n'
        "eval = { temperature = 0.5, response_length = 7, seed = 8, prompts = 12 }\n"
        'reference = { temperature = 0.9, learning_rate = "1e-4", kl_target = 6 }\n'
        '[search]\nlearning_rate = { low = 1e-5, high = 1e-3, why = "small" }\nlam = { low = 0.9, high = 0.999 }\n',
    )
    task = get_task(path)
    assert (task.doc, task.kl_budget, task.kl_limit) == ("Mine.", 20, 50)
    assert (task.eval_temperature, task.eval_response_length, task.eval_seed) == (0.5, 7, 8)
    assert task.reference == {"temperature": 0.9, "learning_rate": 1e-4, "kl_target": 6.0}
    assert task.advised["learning_rate"] == Advised(Range(1e-5, 1e-3, "log"), "small")
    assert task.advised["lam"].range == Range(0.9, 0.999, "log_from_1")
    assert len(task.prepare(None).prompts.eval) == 12


def test_an_evaluation_is_as_the_reference_trains_by_default(folder: Path) -> None:
    task = get_task(write(folder, PLAIN + "reference = { temperature = 0.9, response_length = 5 }\n"))
    assert (task.eval_temperature, task.eval_response_length) == (0.9, 5)


def test_rewards_of_every_kind(folder: Path) -> None:
    (folder / "judge").mkdir()
    (folder / "judge" / "config.json").write_text("{}")
    path = write(
        folder,
        'policy = "an-org/a-model"\nprompts = "an-org/a-dataset"\n'
        'reward = ["judge", { where = "an-org/a-judge", append_eos = false }, { where = "reward.py:short", weight = -0.5 }, '
        '{ where = "https://me:secret@host/score", name = "judge.2", timeout = 5, retries = 0, batch_size = 8, concurrency = 2 }, '
        '{ name = "sum", where = "ppo_core.tasks.arithmetic.reward:exact", kind = "function" }]\n',
    )
    preparation = get_task(path).prepare
    assert preparation.rewards == (  # type: ignore[attr-defined]
        RewardPart("judge", "model", str(folder / "judge")),
        RewardPart("a-judge", "model", "an-org/a-judge", append_eos=False),
        RewardPart("short", "function", f"{folder}/reward.py:short", weight=-0.5),
        RewardPart(
            "judge.2", "http", "https://me:secret@host/score", timeout=5, retries=0, batch_size=8, concurrency=2
        ),
        RewardPart("sum", "function", "ppo_core.tasks.arithmetic.reward:exact"),
    )
    assert preparation.policy == "an-org/a-model"  # type: ignore[attr-defined]
    assert preparation.prompts == PromptSource("an-org/a-dataset")  # type: ignore[attr-defined]


def test_a_folder_is_its_task_file_and_a_table_task_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder, PLAIN)
    study = write(folder, 'name = "s"\n[task]\n' + PLAIN, "study.toml")
    monkeypatch.chdir(folder.parent)
    assert get_task(str(folder)) == get_task(folder.name) == get_task(f"{folder.name}/task.toml") == get_task(path)
    assert get_task(study).name == study
    assert get_task(study).reference == get_task(path).reference


@pytest.mark.parametrize("in_table", [False, True])
def test_eval_and_test_prompts_may_be_files_beside_the_task(folder: Path, in_table: bool) -> None:
    for name, words in (("eval.csv", WORDS[:12]), ("test.csv", WORDS[12:16])):
        (folder / name).write_text("prompt,word\n" + "".join(f"{word},{word}\n" for word in words))
    beside = PLAIN + 'eval_prompts = "eval.csv"\ntest_prompts = "test.csv"\neval = { prompts = 10 }\n'
    table = '{ path = "prompts.jsonl", eval = "eval.csv", test = "test.csv" }'
    inside = PLAIN.replace('"prompts.jsonl"', table) + "eval = { prompts = 10 }\n"
    splits = prepared(write(folder, inside if in_table else beside)).prompts
    assert [prompt.text for prompt in splits.eval] == list(WORDS[:10])
    assert [prompt.text for prompt in splits.test] == list(WORDS[12:16])
    assert len(splits.train) == 80


def test_what_was_left_out_of_the_prompts_is_told(folder: Path) -> None:
    with (folder / "prompts.jsonl").open("a") as file:
        file.write("no JSON\n")
    told: list[tuple[str, float]] = []
    get_task(write(folder, PLAIN)).prepare(lambda what, share: told.append((what, share)))
    assert [(share, "1 of 81" in what) for what, share in told if "unreadable" in what] == [(1.0, True)]


# Python files


def test_a_python_file_makes_a_task_with_a_function_of_its_own(folder: Path) -> None:
    path = write(folder, PYTHON, "task.py")
    task = get_task(str(folder))
    assert (task.name, task.kl_budget, task.eval_response_length) == (path, 4, 6)
    models = load_task(path, "cpu")
    scored = models.reward([Prompt("w1", {"word": "w3"})], ["w3 w4 w3"], [["w3", "w4", "w3"]], [True])
    assert (scored.totals, dict(scored.parts)) == ([2.0], {"wanted": [2.0]})


def test_an_edited_task_is_loaded_again(folder: Path) -> None:
    first = load_task(write(folder, PYTHON, "task.py"), "cpu")
    assert load_task(str(folder), "cpu") is first
    path = write(
        folder, PYTHON + "\nfrom dataclasses import replace\nTASK = replace(TASK, eval_response_length=5)\n", "task.py"
    )
    assert load_task(path, "cpu").task.eval_response_length == 5


WORKER = """
import sys
from ppo_core.rewards.function import load_function
from ppo_core.loading.task_file import get_task
wanted = load_function(get_task(sys.argv[1]).prepare.rewards[0])
print(wanted(prompts=["w1"], responses=["w3 w4 w3"], word=["w3"]), "torch" in sys.modules)
"""


def test_another_process_finds_task_and_function_by_path_without_torch(folder: Path) -> None:
    name = get_task(write(folder, PYTHON, "task.py")).name
    command = [sys.executable, "-c", WORKER, name]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout == "[2.0] False\n", done.stderr


SCRIPT = f"""{PYTHON}
import json
from pathlib import Path
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.trainer import ppo_trainer

config = PPOConfig(total_episodes=16, batch_size=8, num_mini_batches=1, response_length=6)
for task in (TASK, Path("task.py"), "task.py"):
    trainer = ppo_trainer(config, task, device="cpu")
    print(json.dumps([trainer.models.task.name, [report.metrics.get("objective/scores") for report in trainer]]))
"""


def test_a_trainer_takes_a_task_its_path_or_its_name(folder: Path) -> None:
    write(folder, PYTHON, "task.py")
    script = write(folder, SCRIPT, "script.py")
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    (own, scores), *others = [json.loads(line) for line in done.stdout.splitlines()]
    assert own == script and len(scores) == 3
    assert others == [[str(folder / "task.py"), scores]] * 2


def test_a_function_that_no_other_process_could_find_is_refused() -> None:
    def inner(responses: list[str]) -> list[float]:
        return [0.0 for _ in responses]

    for function in (inner, lambda responses: [0.0 for _ in responses]):
        with pytest.raises(TaskError, match=r"reward = .* cannot be found by other processes: a function that is def"):
            make_task(policy="an-org/model", reward=function, prompts="an-org/data")


# Mistakes

MISTAKES = [  # one of each class
    ("", "policy is missing; a task has policy, reward, prompts"),
    (PLAIN + "kl_buget = 3\n", 'kl_buget: unknown key; .*; did you mean "kl_budget"?'),
    (PLAIN + "kl_budget = 0\n", "kl_budget = 0 is not allowed; expected a number over 0"),
    (PLAIN + "kl_limit = 4\n", "kl_limit = 4 is below kl_budget = 10"),
    (PLAIN + "doc = 3\n", "doc = 3 is not allowed; expected a string in quotes"),
    (PLAIN + "eval = { lenght = 3 }\n", "eval.lenght: unknown key; allowed: temperature, response_length"),
    (PLAIN + "eval = 3\n", "eval = 3 is not allowed; expected a table"),
    (PLAIN + "reference = { learning_rat = 1 }\n", 'reference: unknown hyperparameter .* "learning_rate"?'),
    (PLAIN + 'reference = { lr_scheduler_type = "constant", warmup_ratio = 0.1 }\n', "reference: .* has no warm-up"),
    (PLAIN + "search = { kl_coef = { low = 2, high = 1 } }\n", "search.kl_coef: low = 2 must be below high = 1"),
    (PLAIN + "search = { seed = { low = 1, high = 2 } }\n", "search.seed: cannot be searched"),
    (PLAIN.replace('"model"', '"./modle"'), "policy = './modle': /.*/modle not found; did you mean \"model\"?"),
    (PLAIN.replace('"model"', '"reward.py"'), "policy = 'reward.py' is not a saved model"),
    (PLAIN.replace('"model"', '"."'), "policy = '.' is not a saved model: .* has no config.json"),
    (PLAIN.replace('"model"', '"task:arithmatic"'), 'policy = .*task:reviews.*; did you mean "task:arithmetic"?'),
    (PLAIN.replace('"prompts.jsonl"', '{ column = "x" }'), "prompts.path is missing"),
    (PLAIN.replace('"prompts.jsonl"', '{ path = "prompts.jsonl", eval = 0 }'), "prompts: eval = 0 is not allowed"),
    (PLAIN + 'eval_prompts = "evl.jsonl"\n', "eval_prompts = 'evl.jsonl': /.*/evl.jsonl not found"),
    (PLAIN + 'eval_prompts = "reward.py"\n', "eval_prompts = 'reward.py' is not allowed; expected a data file: .jsonl"),
    (PLAIN + "test_prompts = 3\n", "test_prompts = 3 is not allowed; expected a data file: .jsonl, .json, .csv"),
    (
        PLAIN.replace('"prompts.jsonl"', '{ path = "prompts.jsonl", eval = 9 }') + 'eval_prompts = "prompts.jsonl"\n',
        "eval_prompts: prompts.eval is given as well; remove one of them",
    ),
    (PLAIN + "reference = { lam = 2 }\n", "reference.lam = 2 is not allowed; expected a number in [0, 1]"),
    (PLAIN + "eval = { prompts = 0 }\n", "eval.prompts = 0 is not allowed; expected a whole number of at least 1"),
    (PLAIN.replace("reward.py:wanted", "reward.py:wantd"), 'reward: .* no function "wantd".*; did you mean "wanted"?'),
    (
        PLAIN.replace("reward.py:wanted", "reward.py"),
        "reward = 'reward.py' is a file of Python; name .*reward.py:score",
    ),
    (PLAIN.replace("reward.py:", "no_such_module:"), 'reward: .*module "no_such_module" not found'),
    (PLAIN.replace("reward.py:", "broken.py:"), "reward: .*importing .*broken.py raised ZeroDivisionError"),
    (PLAIN.replace("reward.py:wanted", "http://"), "reward: reward part"),
    (PLAIN.replace('"reward.py:wanted"', "[]"), "reward is empty"),
    (PLAIN.replace('"reward.py:wanted"', '["reward.py:wanted", "reward.py:wanted"]'), 'reward: two .* "wanted"'),
    (PLAIN.replace('"reward.py:wanted"', '[{ where = "model", kind = "modell" }]'), 'reward[0].kind = .* "model"?'),
    (PLAIN.replace('"reward.py:wanted"', '{ where = "model", name = "a b" }'), "reward.name = 'a b' is not allowed"),
    ("policy = = 3\n", "not valid TOML: .*line 1"),
    ("[task]\n" + PLAIN + "kl_buget = 3\n", "task.kl_buget: unknown key"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_a_mistake_is_one_line_that_names_file_and_key(folder: Path, text: str, message: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    path = write(folder, text)
    with pytest.raises(TaskError) as caught:
        get_task(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ") and "\n" not in said
    pattern = message.replace("?", r"\?").replace("[", r"\[")
    assert re.match(pattern, said.removeprefix(f"{path}: ")), said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import a_missing_library\n",
            "task.py: ModuleNotFoundError: No module named 'a_missing_library' at .*/task.py:1$",
        ),
        ("x = 1\nTASK = = 3\n", r"task.py: SyntaxError: invalid syntax \(task.py, line 2\)"),
        ("raise SystemExit('enough')\n", "task.py: SystemExit: enough at .*/task.py:1$"),
        ("x = 1\n", "task.py: a task file defines TASK, a Task such as make_task returns; it defines none"),
        (PYTHON.replace("TASK =", "TSAK ="), "task.py: a task file defines TASK, .*; it has: TSAK"),
        (PYTHON.replace("kl_budget=4", "kl_budgt=4"), "task.py: TypeError: .*kl_budgt.* at .*/task.py:7$"),
        (
            PYTHON.replace("kl_budget=4", "kl_budget=-4"),
            "task.py: kl_budget = -4 is not allowed; expected a number over 0",
        ),
        (PYTHON.replace('"model"', '"./modle"'), "task.py: policy = './modle': .*/modle not found"),
    ],
)
def test_a_mistake_in_a_python_file_is_one_line(folder: Path, text: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        get_task(write(folder, text, "task.py"))
    assert re.match(f"{folder}/{message}", str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


def test_a_path_without_a_task_says_what_is_wrong(folder: Path) -> None:
    write(folder, PLAIN)
    for name, message in (
        (str(folder / "taks.toml"), r'task file .*taks\.toml not found; did you mean "task.toml"\?'),
        (str(folder / "model"), r"holds neither of task\.toml, task\.py"),
        (str(folder / "modle"), r'task .*modle not found; did you mean "model"\?'),
        (str(folder / "prompts.jsonl"), r"is not a task file: its name ends in \.toml or \.py"),
    ):
        with pytest.raises(TaskError, match=message):
            get_task(name)
    write(folder, PYTHON, "task.py")
    with pytest.raises(TaskError, match=r"holds both of task\.toml, task\.py"):
        get_task(str(folder))


def test_a_policy_without_a_tokenizer_says_what_to_do(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text("{}")
    path = write(folder, PLAIN.replace('"model"', '"empty"'))
    with pytest.raises(TaskError) as caught:
        prepared(path)
    assert re.match(f'{path}: the tokenizer of policy "{folder}/empty" cannot be loaded .*; a pol', str(caught.value))
    assert "\n" not in str(caught.value)
