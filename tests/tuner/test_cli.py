"""The commands that read, and the mistakes of all but `train`."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from ppo_core import checkpoint
from tests.processes import free_port, spawned
from tests.tuner.invoke import CONTROL, REPOSITORY, Invoke, one_error, process
from tests.waiting import SECONDS, until
from tuner.cli import main as cli
from tuner.environment import to_copy
from tuner.files.folder import claim
from tuner.store import Store, storage_flags

# Mistakes: see test_bad_input.py


# What people read


LISTINGS = (
    ["list"],
    ["show", "made"],
    ["show", "made", "4"],
    ["show", "made", "6"],
    ["compare", "made", "0", "3", "6"],
)


def test_texts_are_not_obeyed(ppo_tuner: Invoke, made: str) -> None:
    for argv in LISTINGS:
        status, stdout, stderr = ppo_tuner(*argv)
        assert (status, stderr) == (0, "")
        assert not CONTROL.search(stdout), argv


def test_show_study_tells_all_kinds_of_trials(ppo_tuner: Invoke, made: str) -> None:
    stdout = ppo_tuner("show", made)[1]
    trials = stdout.split("Searched values")[0]
    rows = {row.split()[0]: row for row in trials.splitlines() if re.match(r" {5}\d ", row)}
    assert re.search(r"0 +completed +1\.000 ± 0\.030 +4\.00 +4\.00 ", rows["0"])
    assert re.search(r"4 +pruned +0\.900 ± 0\.030 +3\.00 .*KL 21\.5 over the ", rows["4"])
    assert re.search(r"6 +failed +- +- ", rows["6"])
    assert re.search(r"7 +interrupted +0\.500 ± 0\.030 +1\.00 ", rows["7"])


def keep_checkpoint(folder: Path, trial: int, step: int) -> Path:
    """Give the study `made` a folder of checkpoints with one in it, and return where that is."""
    store = Store.open(str(folder / "made.db"))
    lease, runs = store.acquire("made"), folder / "runs" / "made"
    store.update_study(lease, folder=str(runs))
    store.release(lease)
    runs.mkdir(parents=True, exist_ok=True)
    claim(runs, store.study("made"))
    store.close()
    path = checkpoint.step_folder(runs / str(trial), step)
    checkpoint.write(path, {}, state={}, extra={"episode": 64 * step})
    return path


def test_best_tells_its_checkpoint_and_the_seconds(ppo_tuner: Invoke, made: str, own_folder: Path) -> None:
    """Trial 2 was last evaluated at step 4, its end."""
    again = "ppo-tuner train --from made 2"
    stdout = ppo_tuner("best", made)[1]
    assert "In the search it ran for 8 s, evaluations included." in stdout  # five steps of 1.5 s
    assert "\nCheckpoint of step 4, episode 256: not kept here (" in stdout
    assert f"\nLaunch: {again}\n" in stdout
    assert "each gate (training KL, eval KL, reward, length / hacking): 8 → 6 → 5 → 4 → 4\n" in stdout
    data = json.loads(ppo_tuner("best", made, "--json")[1])
    found = data["checkpoint"]
    assert (found["step"], found["episode"], found["path"], found["again"]) == (4, 256, None, again)
    assert found["why_not"] and data["seconds"] == 7.5
    assert (data["sft_reward"], data["improvement"], data["kl_se"]) == (0.25, 1.75, 0.2)

    path = keep_checkpoint(own_folder, 2, 4)
    assert "\nCheckpoint of step 4, episode 256: runs/made/2/step-000004\n" in ppo_tuner("best", made)[1]
    found = json.loads(ppo_tuner("best", made, "--json")[1])["checkpoint"]
    assert (found["path"], found["why_not"]) == (str(path), None)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--version"], ["--help"], ["best", "--help"]):
        with pytest.raises(SystemExit) as end:
            cli.main(argv)
        assert end.value.code == 0
    stdout = capsys.readouterr().out
    assert stdout.startswith("ppo-tuner 0.1.0\n")
    assert all(name in stdout for name in cli.COMMANDS)
    assert "a later checkpoint may be over the budget." in " ".join(stdout.split())


def test_passwords_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_flags("postgresql://me:secret@host/db") == ["--storage", "postgresql://me:***@host/db"]
    assert storage_flags("x.db") == ["--storage", "x.db"]
    monkeypatch.setenv("PPO_TUNER_STORAGE", "x.db")
    assert storage_flags("x.db") == []


# In processes of their own


def test_reading_commands_load_no_training_libraries(made: str) -> None:
    code = (
        "import sys, tuner.cli.main; heavy = {'torch', 'transformers', 'pandas', 'streamlit'};"
        "light = heavy | {'sqlalchemy', 'optuna', 'yaml'};"
        "assert not light & set(sys.modules), light & set(sys.modules);"
        f"assert tuner.cli.main.main(['show', {made!r}, '4']) == 0;"
        "import tuner.cli.run, tuner.cli.dashboard;"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_what_reads_the_output_may_end_first(own_folder: Path, made: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tuner.cli.main", "show", made]
    with os.fdopen(writing, "wb", 0) as closed:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_process_prints_plain_json_and_plain_errors(made: str) -> None:
    done = process("show", made, "4", "--json", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["number"] == 4
    done = process("show", made, "44")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no trial 44" in one_error(done.stderr)


def test_the_dashboard_is_served_on_this_machine_alone(made: str) -> None:
    port = free_port()
    flags = ["--storage", "sqlite:///made.db", "--port", str(port)]
    command = [sys.executable, "-m", "tuner.cli.main", "dashboard", *flags]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with spawned(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        said = re.escape(f"dashboard: http://127.0.0.1:{port}/?token=") + r"[\w-]{20,} \(Ctrl-C ends it\)\n"
        assert re.fullmatch(said, server.stdout.readline())
        assert _answer(f"http://127.0.0.1:{port}/_stcore/health", server) == b"ok"
        listening = [c for c in psutil.Process(server.pid).net_connections("tcp") if c.status == "LISTEN"]
        assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", port)]
        assert psutil.Process(server.pid).environ()["PPO_TUNER_STORAGE"] == "sqlite:///made.db"


def _answer(url: str, server: "subprocess.Popen[str]") -> bytes:
    """Return what the server answers, once it listens."""

    def answer() -> bytes:
        assert server.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as response:
                return bytes(response.read())
        except urllib.error.URLError as error:
            assert isinstance(error.reason, ConnectionRefusedError)
            return b""

    return until(answer)


def test_commands_to_copy_name_a_program_that_the_shell_finds(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(own_folder / ".venv/bin/ppo-tuner"), "demo"])
    monkeypatch.setenv("PATH", str(own_folder))
    assert to_copy(["show", "my study"]) == ".venv/bin/ppo-tuner show 'my study'"
    (own_folder / "ppo-tuner").touch(mode=0o755)
    assert to_copy(["demo"]) == "ppo-tuner demo"
