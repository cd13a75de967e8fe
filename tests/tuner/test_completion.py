"""Completion: each shell gets its script, and is answered with commands, flags, studies, trials and tasks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tuner.invoke import REPOSITORY, Invoke, one_error
from tuner.cli.arguments import SHELLS

MAIN = "from tuner.cli.main import main; main()"


def completed(folder: Path, line: str, **env: str) -> list[str]:
    """Return what the command answers where a shell holds `line` with the cursor at its end."""
    answers = folder / "answers"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answers)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line.encode())), "COMP_TYPE": "9"}
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **asked, **env}
    subprocess.run([sys.executable, "-c", MAIN], env=environment, cwd=folder, check=True)
    return answers.read_text().replace("\\ ", " ").split("\n")


def test_commands_are_completed(tmp_path: Path) -> None:
    assert completed(tmp_path, "ppo-tuner di") == ["diagnose "]
    assert {"run", "show", "train", "completion"} < set(completed(tmp_path, "ppo-tuner "))


def test_flags_are_completed_those_of_hyperparameters_too(tmp_path: Path) -> None:
    assert completed(tmp_path, "ppo-tuner confirm --to") == ["--top", "--total-episodes"]
    assert completed(tmp_path, "ppo-tuner train --learn") == ["--learning_rate "]
    assert completed(tmp_path, "ppo-tuner train --advantage_estimator ") == ["gae", "rloo", "grpo"]
    assert completed(tmp_path, "ppo-tuner export made --to op") == ["openrlhf "]


def test_studies_and_trials_come_from_the_store(made: str, own_folder: Path) -> None:
    assert completed(own_folder, "ppo-tuner show ") == ["made "]
    assert completed(own_folder, "ppo-tuner show made ") == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert completed(own_folder, "ppo-tuner train --from m") == ["made "]
    elsewhere = {"PPO_TUNER_STORAGE": "nowhere.db"}
    assert completed(own_folder, "ppo-tuner show m", **elsewhere) == [""]
    assert completed(own_folder, f"ppo-tuner show --storage {own_folder}/made.db ", **elsewhere) == ["made "]


def test_run_offers_study_files_and_tasks_their_names(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "sub").mkdir()
    assert completed(tmp_path, "ppo-tuner run ") == ["mine.toml", "sub/"]
    assert completed(tmp_path, "ppo-tuner train --task ") == ["reviews", "arithmetic", "mine.toml", "sub/"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_that_it_can_read(ppo_tuner: Invoke, shell: str) -> None:
    status, script, _ = ppo_tuner("completion", shell)
    assert status == 0 and "ppo-tuner" in script
    if shutil.which(shell):  # bash is on every machine that runs the tests
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_completes_after_reading_the_script(ppo_tuner: Invoke, tmp_path: Path) -> None:
    binary = tmp_path / "ppo-tuner"
    binary.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} -c "{MAIN}" "$@"\n')
    binary.chmod(0o755)
    script = ppo_tuner("completion", "bash")[1]
    asks = """
        COMP_LINE='ppo-tuner impor'; COMP_POINT=15; COMP_WORDS=(ppo-tuner impor); COMP_CWORD=1; COMP_TYPE=9
        _python_argcomplete ppo-tuner impor ppo-tuner; printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    answer = subprocess.run(["bash", "-c", script + asks], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["import-config", "importance"]


def test_another_shell_is_refused_with_those_there_are(ppo_tuner: Invoke) -> None:
    status, _, stderr = ppo_tuner("completion", "tcsh")
    assert status == 2 and "bash" in one_error(stderr)
