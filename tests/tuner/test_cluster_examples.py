"""What examples/cluster holds: it parses, its commands are ours, and the Slurm script runs on stand-ins for Slurm's."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import free_port, spawned
from tests.tuner.invoke import REPOSITORY
from tests.tuner.quick_study import curves, outcomes, quick_spec, run, write_study
from tests.tuner.quick_trainer import FOLDER_VARIABLE
from tests.waiting import SECONDS, until
from tuner.cli.main import build_parser
from tuner.environment import STORAGE_VARIABLE
from tuner.study.spec import StudySpec

EXAMPLES = REPOSITORY / "examples" / "cluster"
SLURM = EXAMPLES / "slurm.sh"


def manifest() -> dict[str, Any]:
    """Return the manifest's objects by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())}


def test_the_manifest_runs_a_study_that_we_read_by_a_command_that_we_take(tmp_path: Path) -> None:
    found = manifest()
    assert list(found) == ["Secret", "ConfigMap", "PersistentVolumeClaim", "RayJob"]
    study = tmp_path / "study.toml"
    study.write_text(found["ConfigMap"]["data"]["study.toml"])
    assert StudySpec.load(study).trials == 24
    assert STORAGE_VARIABLE in found["Secret"]["stringData"]
    shell, option, script = shlex.split(found["RayJob"]["spec"]["entrypoint"])
    assert (shell, option) == ("sh", "-c")
    program, *words = shlex.split(script.partition(" && exec ")[2])
    args = build_parser()[0].parse_args(words)
    assert (program, args.command, args.engine) == ("ppo-tuner", "run", "ray")
    version = found["RayJob"]["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray=={version}\n" in (REPOSITORY / "constraints.txt").read_text()
    assert f"FROM rayproject/ray:{version}-" in (EXAMPLES / "Dockerfile").read_text()


def test_the_slurm_script_parses_and_says_how_it_is_used() -> None:
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    used = subprocess.run(["bash", str(SLURM)], capture_output=True, text=True, check=False)
    assert used.returncode == 1 and "usage: sbatch slurm.sh STUDY.toml" in used.stderr


@contextmanager
def job(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run the script as Slurm runs it, on two nodes that are both this machine."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    stand_ins = {
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": f'echo "$*" >> {folder}/scontrol',
        "ppo-tuner": f'exec {sys.executable} -m tuner.cli.main "$@"',
    }
    for name, script in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "RAY_PORT": str(free_port()),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        FOLDER_VARIABLE: str(folder),
        STORAGE_VARIABLE: str(folder / "store.db"),
    }
    command = ["bash", str(SLURM), "study.toml", "--workers", "2"]
    with (folder / "out").open("a") as out:
        options = {"cwd": folder, "env": os.environ | environment, "stdout": out, "stderr": out, "text": True}
        with spawned(command, **options) as started:
            yield started


@pytest.mark.slow
@pytest.mark.ray
def test_a_slurm_job_whose_time_is_up_is_queued_again_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    run(unbroken, quick_spec())
    write_study(tmp_path / "study.toml", "gated")
    out = tmp_path / "out"
    with job(tmp_path) as first:
        until(lambda: len(list(tmp_path.glob("waiting-*"))) == 2 or first.poll() is not None, out.read_text)
        first.send_signal(signal.SIGTERM)
        until(lambda: "stopping: " in out.read_text(), out.read_text)
        (tmp_path / "gate").touch()
        assert first.wait(SECONDS) == 130, out.read_text()
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    with job(tmp_path) as second:
        assert second.wait(SECONDS) == 0, out.read_text()
    assert "resumes after step" in out.read_text()
    assert curves(tmp_path) == curves(unbroken) and outcomes(tmp_path) == outcomes(unbroken)
