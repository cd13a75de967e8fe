"""`run` and `demo`, with a quick trainer in real worker processes."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from rich.console import Console

from ppo_core.report import StepReport
from tests.tuner import made_study, quick_run
from tests.tuner.invoke import CONTROL, REPOSITORY, Invoke
from tests.tuner.quick_run import QUICK_STUDY
from tests.tuner.trial_rows import pruned, trial_row
from tuner.cli.progress import StudyProgress
from tuner.cli.run import DEMO_PLAN
from tuner.control.events import (
    Emit,
    Preparing,
    Stop,
    StudyStarted,
    StudyStopped,
    StudyStopping,
    TrialEnded,
    TrialStarted,
    TrialStepped,
)
from tuner.judge.scoring import Tally
from tuner.store import Outcome
from tuner.study.spec import StudySpec
from tuner.study.status import Status

pytestmark = pytest.mark.slow


def test_run_goes_to_the_end_and_again_prints_its_result(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    status, stdout, stderr = ppo_tuner("run", "quick.toml", "--trials", "4")
    assert (status, stderr) == (0, "")
    assert not CONTROL.search(stdout)
    assert [line.split("]")[0] for line in stdout.splitlines() if line.startswith("[")] == [
        "[1/4",
        "[2/4",
        "[3/4",
        "[4/4",
    ]
    assert re.search(
        r"\[1/4\] trial +0  completed +best in budget, one seed 0\.650 ± 0\.050 +at KL 0\.800 .*learning_rate=0\.0002",
        stdout,
    )
    assert "preparing: making nothing" in stdout
    assert "which is not confirmed." in stdout
    end = stdout.partition("[4/4]")[2].splitlines()[1:]
    assert len(end) <= 25 and [line for line in end if line.endswith(" ppo-tuner confirm quick")]
    assert any(line.endswith(": ppo-tuner show quick") for line in end) and "Searched values" not in stdout

    status, stdout, stderr = ppo_tuner("run", "quick.toml", "--trials", "4", "--json")
    study = json.loads(stdout)
    assert status == 0
    assert "preparing" not in stderr
    assert (study["state"], study["finished"], len(study["trials"])) == ("finished", 4, 4)
    assert study["trials"][0]["value"] == pytest.approx(0.65)  # 0.25 + 0.8 / 2


def test_on_a_terminal_what_runs_is_seen_and_the_end_is_short(own_folder: Path) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 100))
    command = [sys.executable, "-m", "tuner.cli.main", "run", "quick.toml", "--trials", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color"}
    text = b""
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        with suppress(OSError):  # EIO: it has ended
            while read := os.read(ours, 4096):
                text += read
    os.close(ours)
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode())
    assert process.returncode == 0
    assert re.search(r"trial 0 +step 1/4", seen) and "best      within the KL budget of" in seen
    assert len(seen[seen.index(", which is not confirmed.") :].splitlines()) <= 24


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_for_terminals_and_lines_for_all(is_terminal: bool) -> None:
    out = io.StringIO()
    spec = StudySpec.from_dict(made_study.SPEC, "made")
    row = trial_row(0, status=Status.RUNNING)
    report = StepReport(3, 96, {"objective/scores": 0.5, "objective/kl_exact": 2.0})
    with StudyProgress(Console(file=out, force_terminal=is_terminal, width=200)) as progress:
        progress(StudyStarted(spec, Tally(4, 8, 4.0, None), ("search.lam: not searched, was 0.9 to 1",)))
        progress(Preparing("the \x1b[31mmodels", 0.5))
        progress(TrialStarted(row, 2))
        progress(TrialStepped(0, report, 8))
        progress(
            TrialStepped(0, StepReport(4, 128, {"eval/reward": 0.75, "eval/kl": 4.0, "objective/kl_exact": 16}), 8)
        )
        progress(TrialEnded(pruned(0, value_step=4, params={"lam": 0.95}), Tally(5, 8, 5.0, None)))
        progress(StudyStopping(1, "interrupted"))
        progress(StudyStopped(Tally(5, 8, 5.0, None), Stop("interrupted")))
    text = out.getvalue()
    assert progress.stopped == StudyStopped(Tally(5, 8, 5.0, None), Stop("interrupted"))
    for line in (
        "4 of 8 trials ended; KL budget 10, limit 15 nats/response",
        "note: search.lam: not searched, was 0.9 to 1",
        r"preparing: the \x1b[31mmodels",
        "trial 0 resumes after step 2",
        "[5/8] trial   0  pruned     best in budget, one seed 1.00 ± 0.10   at KL  5.00     10 s  made up: kl_limit  lam=0.95",
        "stopping: interrupted; running trials save a checkpoint first",
    ):
        assert line in text
    assert bool(CONTROL.search(text)) == is_terminal
    for seen in (
        "5 of 8 trials",
        "step 3/8  reward 0.500  KL 2.00",
        "over the limit",
        "best      within the KL budget of 10: ",
    ):
        assert (seen in text) == is_terminal
    assert "\x1b[33mstudy" not in text  # the line's colour is not the bar's


def test_a_study_of_a_module_in_the_working_folder_runs_in_its_workers(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "own_quick.py").write_text(
        "from dataclasses import replace\nfrom tests.tuner.quick_run import TASK as QUICK, quick_trainer as make\n"
        "TASK = replace(QUICK, name='own_quick:TASK')\n"
        f"def trainer(config, name, **kw):\n    return make(config, {quick_run.NAME!r}, **kw)\n"
    )
    study = QUICK_STUDY.replace(quick_run.NAME, "own_quick:TASK").replace(quick_run.TRAINER, "own_quick:trainer")
    (own_folder / "own.toml").write_text(study)
    status, stdout, stderr = ppo_tuner("run", "own.toml", "--trials", "1")
    assert (status, stderr) == (0, ""), stdout
    assert "[1/1] trial   0  completed" in stdout


def test_a_study_whose_trials_all_fail_exits_1(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "own_failing.py").write_text("def trainer(*_, **__):\n    raise RuntimeError('no such column')\n")
    (own_folder / "failing.toml").write_text(QUICK_STUDY.replace(quick_run.TRAINER, "own_failing:trainer"))
    status, stdout, stderr = ppo_tuner("run", "failing.toml", "--trials", "2")
    assert (status, stderr) == (1, "")
    assert 'All 2 trials of study "quick" failed: RuntimeError: no such column' in " ".join(stdout.split())
    assert "train --from" not in stdout


def test_timeout_is_no_failure_and_tells_how_to_go_on(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    status, _, stderr = ppo_tuner("run", "quick.toml", "--timeout", "0.001s")
    assert status == 0
    assert "0 of 3 trials ended; to resume: ppo-tuner run quick.toml" in stderr
    assert ppo_tuner("run", "quick.toml")[0] == 0


def test_an_interrupted_run_goes_on(ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    monkeypatch.setenv(quick_run.INTERRUPT_ONCE, str(own_folder / "marker"))
    status, stdout, stderr = ppo_tuner("run", "quick.toml", "--storage", "sqlite:///other.db")
    assert status == 130
    assert stderr == (
        "ppo-tuner: interrupted: 0 of 3 trials ended; to resume: "
        "ppo-tuner run quick.toml --storage sqlite:///other.db\n"
    )
    assert "Next:" not in stdout
    status, stdout, _ = ppo_tuner("run", "quick.toml", "--storage", "sqlite:///other.db")
    assert status == 0
    assert "trial 0 resumes after step 2" in stdout


def test_the_command_that_resumes_repeats_the_flags_on_workers(
    ppo_tuner: Invoke, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, on_event: Emit, **__: object) -> None:
        on_event(StudyStopped(Tally(0, 3, 0.0, None), Stop("interrupted")))

    monkeypatch.setattr("tuner.cli.run.run_study", stop)
    monkeypatch.setattr("tuner.cli.run.require_gpus", lambda _: None)
    flags = "--gpus 0,1 --trials-per-gpu 2 --checkpoint-seconds 5"
    for command in (f"run {made} --trials 9 {flags}", f"confirm {made} --top 1 --seeds 3 {flags}"):
        status, _, stderr = ppo_tuner(*command.split())
        assert status == 130 and stderr.endswith(f"to resume: ppo-tuner {command}\n")


def test_finished_demo_prints_its_result(ppo_tuner: Invoke, own_folder: Path) -> None:
    with resources.as_file(resources.files("studies") / "reviews.toml") as path:
        packaged = StudySpec.load(path)
    ended = [outcome or Outcome(Status.COMPLETED, None, 0.5, kl=1.0) for outcome in made_study.OUTCOMES]
    ended[4] = replace(ended[4], value=5.0)
    (own_folder / "runs").mkdir()
    store = made_study.make(own_folder / "runs" / "ppo-tuner.db", replace(packaged, trials=len(ended)), ended)
    made_study.confirm(store, packaged.name, DEMO_PLAN)
    store.close()
    status, stdout, stderr = ppo_tuner("demo", "--trials", str(len(ended)))
    assert (status, stderr) == (0, "")
    assert packaged.kl_budget == 6, "within it a checkpoint of the made-up trial 4, which the guard ended, is the best"
    assert "\nLaunch trial 4: " in stdout and len(stdout.splitlines()) <= 25
    assert "On fresh seeds, 1920 episodes each, evaluated on 64 test prompts" in stdout
    assert "\nLaunch: ppo-tuner train --from " in stdout
    assert "preparing" not in stdout
