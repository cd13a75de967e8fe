"""A study from a plain script: interrupted, killed, resumed, and confirmed by the command line; and bad calls."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import ppo_tuner as pt
from ppo_core import checkpoint
from ppo_core.errors import PPOTunerError
from ppo_tuner.study import _call
from tests.processes import spawned
from tests.tuner.invoke import process
from tests.tuner.quick_run import NAME, TRAINER
from tests.waiting import until
from tuner.store import Store, TrialRow
from tuner.study.status import Role, Status

SCRIPT = Path(__file__).with_name("plain.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, with the default storage in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPO_TUNER_STORAGE", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def lines_until(script: "subprocess.Popen[str]", wanted: str) -> Iterator[str]:
    """Yield the script's lines up to the wanted one."""
    assert script.stdout is not None
    for line in script.stdout:
        yield line
        if wanted in line:
            return
    raise AssertionError(f"the script ended before it said {wanted!r}")


def test_a_script_is_interrupted_killed_resumed_and_confirmed(tiny_folder: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tiny_folder), "32"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with spawned(command, **options) as script:
        list(lines_until(script, "[1/2]"))
        os.kill(script.pid, signal.SIGINT)
        _, stderr = script.communicate()
        assert script.returncode == -signal.SIGINT
        assert stderr.splitlines()[-1].startswith("KeyboardInterrupt: interrupted: 1 of 2 trials ended")
    with spawned(command, **options) as script:
        list(lines_until(script, "checkpoints of"))
        script.kill()
    other = subprocess.run([*command[:-1], "48"], capture_output=True, text=True)
    assert other.returncode == 1 and "reference.total_episodes: 48, was 32" in other.stderr.splitlines()[-1]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    study = pt.Study("plain")
    assert study.state == "finished" and str(study.answer) in done.stdout
    assert list(study.trials["status"]) == [Status.COMPLETED] * 2
    # Another program, without the script's module, loads the reward by its file.
    confirmed = process("confirm", "plain", "--seeds", "2", "--workers", "2")
    assert confirmed.returncode == 0, confirmed.stderr
    store = Store.open()
    runs = [row for row in store.trials(store.study("plain")) if row.role is Role.CONFIRM]
    store.close()
    assert len(runs) >= 2 and {row.status for row in runs} == {Status.COMPLETED}
    answer = study.confirm(seeds=3, workers=2)
    assert answer == study.answer and answer.evidence.startswith("On 3 fresh seeds")


def running_trial() -> TrialRow | None:
    """Return trial 0 once it has learned in this run of its study."""
    try:
        with closing(Store.open()) as store:
            study = store.study("plain")
            rows = store.trials(study)
    except PPOTunerError:  # there is no store yet, or no study
        return None
    is_learning = rows and study.has_controller and rows[0].status is Status.RUNNING and rows[0].episodes >= 16
    return rows[0] if is_learning else None


def lives(process: psutil.Process) -> bool:
    """Return True if a process runs; one that has ended may still wait for its parent to ask for its status."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("how", ["the stop button", "kill -9"])
def test_a_call_ended_in_a_trial_leaves_no_worker_and_goes_on_there(
    tiny_folder: Path, own_folder: Path, how: str
) -> None:
    """A notebook's stop button signals the whole group of processes, as Ctrl-C in a terminal."""
    command = [sys.executable, str(SCRIPT), str(tiny_folder), "4096"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["start_new_session"] = True
    with spawned(command, **options) as script:
        until(running_trial)
        if how == "kill -9":
            until(lambda: checkpoint.complete(own_folder / "runs" / "plain" / "0"))
        below = psutil.Process(script.pid).children(recursive=True)
        assert below, "trials run in processes of their own"
        if how == "kill -9":
            script.kill()
            script.communicate()
        else:
            os.killpg(script.pid, signal.SIGINT)
            _, stderr = script.communicate()
            assert script.returncode == -signal.SIGINT
            assert stderr.splitlines()[-1].startswith("KeyboardInterrupt: interrupted: 0 of 2 trials ended")
        until(lambda: not any(map(lives, below)))
    with closing(Store.open()) as store:
        row = store.trial(store.study("plain"), 0)
    kept = checkpoint.complete(own_folder / "runs" / "plain" / "0")
    last = checkpoint.step_of(kept[-1])
    if how == "the stop button":
        assert (row.shown_status, row.episodes) == ("interrupted", 8 * last), "not a step is lost"
    with spawned(command, **options) as script:
        resumed = list(lines_until(script, "trial 0 resumes after step"))[-1]
        assert int(resumed.split()[-1]) == last
        until(running_trial)
        script.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pt.Study:
    """A finished study of the quick trainer."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    return pt.tune(task=NAME, trainer=TRAINER, name="quick", kl_budget=4, kl_limit=60, trials=3, search=SEARCH)


SEARCH = {"learning_rate": {"low": 1e-4, "high": 1e-2, "scale": "log"}, "kl_coef": "advised"}


def test_a_study_tells_its_answer_its_trials_and_its_figure(quick: pt.Study, own_folder: Path) -> None:
    answer = quick.answer
    assert answer.trial in quick.trials.index and answer.command.startswith(
        f"ppo-tuner train --from quick {answer.trial}"
    )
    assert (
        answer.config is not None
        and answer.config["learning_rate"] == quick.trials["params_learning_rate"][answer.trial]
    )
    assert quick.trials["value"].max() == quick.trials["value"][answer.trial]
    html = answer._repr_html_()
    assert answer.remedy == "study.confirm()" and "study.train()" in str(answer) and "study.train()" in html
    assert "ppo-tuner" not in str(answer) and "ppo-tuner" not in html
    assert "<code>" in html and answer.evidence in html and answer.evidence in repr(quick)
    figure = quick.plot_reward_kl()
    assert figure.layout.yaxis.title.text and len(figure.data) > 1
    text = quick.export("yaml", own_folder / "config.yaml")
    assert text == (own_folder / "config.yaml").read_text() and "learning_rate" in text


def test_the_same_call_resumes_and_another_one_says_what_changed(
    quick: pt.Study, capsys: pytest.CaptureFixture[str]
) -> None:
    call: dict[str, Any] = {
        "task": NAME,
        "trainer": TRAINER,
        "name": "quick",
        "kl_limit": 60,
        "trials": 3,
        "search": SEARCH,
    }
    before = quick.trials
    assert pt.tune(kl_budget=4, **call).trials.equals(before)
    capsys.readouterr()
    pt.tune(kl_budget=3, **call)
    assert "kl.budget: 3.0, was 4.0" in capsys.readouterr().out
    with pytest.raises(pt.ConfigError, match="seed: 7, was 0; give the study another name"):
        pt.tune(kl_budget=3, seed=7, **call)


def test_another_function_of_the_same_name_is_refused_by_keyword_and_name(tiny_folder: Path, own_folder: Path) -> None:
    def call(by: float, prompts: list[str]) -> pt.Study:
        def my_reward(responses: list[str]) -> list[float]:
            return [by * len(text) for text in responses]

        parts: dict[str, Any] = {"policy": str(tiny_folder), "reward": my_reward, "prompts": prompts}
        return pt.tune(**parts, trainer=TRAINER, trials=1, name="mine", batch_size=8, response_length=4, device="cpu")

    prompts = [f"w{i % 20} w{i // 20}" for i in range(64)]
    call(1.0, prompts)
    with pytest.raises(pt.ConfigError, match="reward: not the same my_reward as before; give") as caught:
        call(2.0, prompts)
    assert ".pkl" not in str(caught.value)
    with pytest.raises(pt.ConfigError, match="changed: prompts: not the same prompts as before; give") as caught:
        call(1.0, prompts[1:])


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (("confirm", "x"), "study.confirm()"),
        (("confirm", "x", "--top", "1", "--total-episodes", "640"), "study.confirm(top=1, total_episodes=640)"),
        (("run", "x"), 'pt.tune(..., name="x")'),
    ],
)
def test_a_commands_call_has_its_flags_as_keywords(quick: pt.Study, words: tuple[str, ...], call: str) -> None:
    with closing(Store.open()) as store:
        assert _call(words, store) == call
        assert "ppo-tuner" in _call(("diagnose", "x", "1"), store)


def test_a_stop_in_advance_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    study = pt.tune(task=NAME, trainer=TRAINER, name="short", kl_limit=60, trials=3, search=SEARCH, timeout=0.001)
    assert study.state == "unfinished" and "run this again to resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "key"),
    [
        ({}, "policy, reward, prompts"),
        ({"task": "reviews", "reward": "x"}, "task"),
        ({"task": "reviews", "bugdet": 3}, 'did you mean "budget"'),
        ({"task": "reviews", "kl_bugdet": 6}, 'did you mean "kl_budget"'),
        ({"task": "reviews", "storge": "x.db"}, 'did you mean "storage"'),
        ({"task": "reviews", "budget": 1, "name": "a/b"}, "name"),
        ({"task": "reviews"}, "budget"),
        ({"task": "reviews", "budget": 1, "workers": 0}, "workers"),
        ({"task": "reviews", "budget": 1, "kl_budget": 0}, "kl.budget"),
        ({"task": "reviews", "budget": 1, "search": {"lamda": "advised"}}, "lam"),
        ({"task": "reviews", "budget": 1, "fixed": {"lam": 3}}, "lam"),
    ],
)
def test_a_bad_call_is_one_line_and_leaves_nothing(own_folder: Path, call: dict[str, Any], key: str) -> None:
    with pytest.raises(pt.ConfigError, match=key) as caught:
        pt.tune(**call)
    assert "\n" not in str(caught.value) and not list(own_folder.iterdir())
    assert "--" not in str(caught.value), "keywords were given, not flags"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"kl_bugdet": 6}, 'keyword "kl_bugdet"; did you mean "kl_budget"'),
        ({"device": "gpu"}, "device = 'gpu' is not allowed"),
        ({"save_every_episodes": 0}, "save_every_episodes: '0' is not allowed"),
        ({"output": "full"}, "output full is not empty"),
    ],
)
def test_a_bad_run_is_told_in_keywords(own_folder: Path, call: dict[str, Any], words: str) -> None:
    (own_folder / "full").mkdir()
    (own_folder / "full" / "file").touch()
    with pytest.raises(pt.ConfigError) as caught:
        pt.train(task="arithmetic", **call)
    assert words in str(caught.value) and "--" not in str(caught.value)


def test_commands_name_a_store_and_a_program_that_are_not_the_default(
    quick: pt.Study, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = str(own_folder / "runs" / "ppo-tuner.db")
    monkeypatch.setenv("PPO_TUNER_STORAGE", "other.db")
    study = pt.Study("quick", storage=where)
    monkeypatch.setenv("PATH", str(own_folder))
    program = shlex.join([str(Path(sys.executable).with_name("ppo-tuner"))])
    if not Path(program).exists():
        program = shlex.join([sys.executable, "-m", "tuner.cli.main"])
    monkeypatch.setattr(sys, "argv", ["script.py"])
    assert study.answer.command.startswith(f"{program} train --from quick ")
    assert study.answer.command.endswith(f"--storage sqlite:///{where}")
    text = study.export("yaml")
    assert f"{program} train --from quick" in text and f"sqlite:///{where}" in text
    monkeypatch.setattr(sys, "executable", str(own_folder / "python3"))
    assert study.answer.command.startswith(f"{own_folder}/python3 -m tuner.cli.main train --from quick ")


def test_a_study_that_is_not_there_is_refused(quick: pt.Study) -> None:
    with pytest.raises(pt.StudyError, match="quick"):
        pt.Study("quik")


def test_the_public_names_are_few_and_documented() -> None:
    assert len(pt.__all__) <= 15
    for name in set(pt.__all__) - {"__version__"}:
        assert getattr(pt, name).__doc__, name


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"response_length": 60}, ("response_length = 60", "32 positions", "so at most")),
    ({"response_length": 4, "reward": lambda responses, answr: [0.0] * len(responses)}, ('"answr"', '"answer"')),
    ({"response_length": 4, "reward": lambda responses: [0.0]}, ("1 score for 3",)),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_no_trial_could_do_is_refused_and_nothing_is_stored(
    tiny_folder: Path, call: dict[str, Any], words: tuple[str, ...]
) -> None:
    parts: dict[str, Any] = {
        "policy": str(tiny_folder),
        "reward": lambda responses: [0.0] * len(responses),
        "prompts": [{"prompt": f"w{i % 20} w{i // 20}", "answer": "w3"} for i in range(64)],
    }
    with pytest.raises(pt.PPOTunerError) as caught:
        pt.tune(**{**parts, **call}, trials=3, name="mine", batch_size=8, device="cpu")
    assert all(each in str(caught.value) for each in words) and "\n" not in str(caught.value)
    with pytest.raises(pt.StudyError, match="mine"):
        pt.Study("mine")
