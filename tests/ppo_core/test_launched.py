"""`python -m ppo_core` under torchrun and `accelerate launch`, with two processes on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from ppo_core.distributed import launch as launched
from ppo_core.distributed import rank_zero
from ppo_core.distributed.world import init_process_group
from ppo_core.errors import OUT_OF_MEMORY, ConfigError
from tests.ppo_core.command_folder import EXHAUST_AT, KILL_AT, KILL_RANK, PARTS, REPOSITORY, SMALL, fill, process, steps
from tests.processes import spawned
from tests.waiting import until

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "ppo_core")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2")
SECONDS = 240


@pytest.fixture
def folder(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which is the working directory."""
    fill(tmp_path, tiny_folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    fill(folder, tiny_folder)
    assert process(folder, *PARTS, *SMALL, "--output", "run").returncode == 0
    return folder / "run"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def launch(launcher: tuple[str, ...], *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with spawned([*launcher, *argv], env=environment(**env), **pipes) as process:
        stdout, stderr = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def require_alike(found: Path, expected: Path) -> None:
    """Require the same steps but for rounding; shares of tokens may differ by one that lies on an edge."""
    ours, theirs = steps(found), steps(expected)
    assert [step["step"] for step in ours] == [step["step"] for step in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in ("objective/kl_exact", "objective/scores", "eval/reward", "eval/kl", "loss/policy_avg"):
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=0.05, abs=5e-3), f"step {one['step']}, {name}"


@pytest.mark.slow
def test_two_processes_train_what_one_does(folder: Path, whole: Path) -> None:
    two = launch(TORCHRUN, *PARTS, *SMALL, "--per_device_train_batch_size", "2", "--output", "two")
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("2 processes\n") == 1, "rank 0 alone speaks"
    assert two.stdout.count("saved the model in two/model") == 1
    require_alike(Path("two"), whole)


@pytest.mark.slow
def test_a_process_that_dies_ends_all_and_one_process_resumes(folder: Path, whole: Path) -> None:
    flags = (*PARTS, *SMALL, "--save_every_episodes", "16")
    began = time.monotonic()
    killed = launch(TORCHRUN, *flags, "--output", "killed", **{KILL_AT: "6", KILL_RANK: "1"})
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr
    assert time.monotonic() - began < SECONDS / 2, "the other one does not wait for it"
    assert 0 < len(steps(Path("killed"))) < 7
    resumed = process(folder, "--resume", "killed")
    assert resumed.returncode == 0, resumed.stderr
    require_alike(Path("killed"), whole)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_memory_that_runs_out_in_the_middle_of_a_step_ends_all_processes(folder: Path, rank: str) -> None:
    ended = launch(TORCHRUN, *PARTS, *SMALL, "--output", "run", **{EXHAUST_AT: "3", KILL_RANK: rank})
    assert ended.returncode != 0
    assert ended.stderr.splitlines().count(f"ppo_core: error: {OUT_OF_MEMORY}") == 1


@pytest.mark.slow
def test_an_interrupt_that_the_launcher_passes_on_saves_once(folder: Path) -> None:
    flags = (*PARTS, *SMALL, "--total_episodes", "4000", "--output", "run")
    restored = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    output = Path("output.txt")
    with output.open("w") as file:
        pipes = {"stdout": file, "stderr": subprocess.STDOUT}
        with spawned(
            [sys.executable, "-c", restored, *TORCHRUN, *flags], env=environment(), start_new_session=True, **pipes
        ) as running:
            until(lambda: "\nstep   2/" in output.read_text(), output.read_text)
            os.killpg(running.pid, signal.SIGINT)  # the terminal's Ctrl-C, which torchrun sends to them again
            running.wait(SECONDS)
    said = output.read_text()
    assert "ppo_core: interrupted; " in said and "torchrun --nproc_per_node 2 -m ppo_core --resume run" in said
    newest = max(saved.name for saved in Path("run/checkpoints").iterdir())
    assert newest == f"step-{steps(Path('run'))[-1]['step']:06d}"


@pytest.mark.slow
def test_a_signal_to_one_process_is_an_orderly_stop_of_all(folder: Path) -> None:
    output = Path("output.txt")
    flags = (*PARTS, *SMALL, "--total_episodes", "4000", "--output", "run")
    with (
        output.open("w") as file,
        spawned([*TORCHRUN, *flags], env=environment(), stdout=file, stderr=subprocess.STDOUT) as running,
    ):
        until(lambda: "\nstep   2/" in output.read_text(), output.read_text)
        (other,) = (child for child in psutil.Process(running.pid).children() if child.environ().get("RANK") == "1")
        other.send_signal(signal.SIGTERM)
        running.wait(SECONDS)
    said = output.read_text()
    assert said.count("ppo_core: ended by SIGTERM; to resume: ") == 1, said
    newest = max(saved.name for saved in Path("run/checkpoints").iterdir())
    assert newest == f"step-{steps(Path('run'))[-1]['step']:06d}"


@pytest.mark.slow
def test_accelerate_launch_starts_two_without_its_cpu_flag(folder: Path) -> None:
    flags = (*PARTS, *SMALL, "--total_episodes", "16", "--output", "run")
    done = launch((*ACCELERATE, "--multi_gpu", "-m", "ppo_core"), *flags)
    assert done.returncode == 0, done.stderr
    assert "2 processes\n" in done.stdout
    alone = launch((*ACCELERATE, "--cpu", "-m", "ppo_core"), *flags)
    assert alone.returncode != 0
    assert "ppo_core: error: accelerate launch was asked for several processes and started one" in alone.stderr


@pytest.mark.slow
def test_accelerates_fsdp2_shards_and_saves_whole_models(folder: Path) -> None:
    flags = (*PARTS, *SMALL, "--adam_epsilon", "1e-3")
    assert process(folder, *flags, "--output", "one").returncode == 0
    fsdp = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "NO_WRAP", "-m", "ppo_core")
    done = launch((*ACCELERATE, *fsdp), *flags, "--output", "two")
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("two/ppo_config.json").read_text())["use_fsdp"] is True
    require_alike(Path("two"), Path("one"))
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f"{run}/model") for run in ("two", "one"))
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert float((weight - other).abs().max()) < 1e-3, name


def test_accelerates_flags_for_fsdp_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched.fsdp() == {}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert launched.fsdp() == {"use_fsdp": True}
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")  # accelerate's default
    assert launched.fsdp() == {"use_fsdp": True}
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    assert launched.fsdp() == {"use_fsdp": True, "fsdp_reshard_after_forward": False}


@pytest.mark.parametrize(
    ("variable", "what"),
    [
        ("ACCELERATE_USE_FSDP", "FSDP version 1"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "a parallelism_config"),
    ],
)
def test_what_launchers_ask_in_vain_is_refused(variable: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ConfigError, match=f"{what} is not supported"):
        rank_zero.drive(lambda: 0)
    with pytest.raises(ConfigError, match=f"{what} is not supported"):  # in a script of one's own
        init_process_group.__wrapped__()
