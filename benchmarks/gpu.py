"""What only a GPU can show: that it is right there, how fast it is, beside TRL, and as a study.

    make gpu                        # PART=check: correctness, and one cell of 0.5B with LoRA; three minutes
    make gpu PART=speed             # tokens a second, memory and share of the floor, 0.1B to 8B
    make gpu PART=trl WHEELS=dir    # TRL 1.12.0 on two cells, in the same run as ours
    make gpu PART=study WHEELS=dir  # a study with a guard stop, and several trials on one GPU

Each part takes less than nine minutes, prints a table, and writes benchmarks/results/<gpu>-<part>.md and .json. It runs
under any python3 with torch, transformers, peft, accelerate and pytest; `trl` also needs TRL and datasets, `study`
Optuna and SQLAlchemy. `--rehearse` runs the same code on tiny shapes on the CPU.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from support.cells import Cell, Measured, Rates, device_rates, measure, rehearsed, table
from support.real_task import save_task

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "optuna", "trl")

CHECK = (Cell("qwen2-0.5b", lora=True),)
SPEED = (
    Cell("gpt2-0.1b", lora=False),
    Cell("gpt2-0.1b", lora=True),
    Cell("qwen2-0.5b", lora=True),
    Cell("qwen2-0.5b", lora=False),
    Cell("qwen2-0.5b", lora=True, new_tokens=512),
    Cell("qwen2-1.5b", lora=True),
    Cell("qwen2-1.5b", lora=False),
    Cell("llama-8b", lora=True, micro_batch=8, gradient_checkpointing=True, epochs=1),
)
AGAINST_TRL = (Cell("gpt2-0.1b", lora=False), Cell("qwen2-0.5b", lora=True))


@dataclass
class Setting:
    """Where a part runs, and what it has found so far."""

    device: torch.device
    rehearses: bool
    lines: list[str]
    data: dict[str, Any]

    def say(self, line: str) -> None:
        """Print a line, and keep it for the file."""
        print(line, flush=True)
        self.lines.append(line)

    def cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells as they are run here."""
        return [rehearsed(cell) for cell in cells] if self.rehearses else list(cells)


def check(setting: Setting) -> bool:
    """Run the tests that need a GPU, and one cell."""
    arguments = ["-p", "no:cacheprovider", "tests/ppo_core/test_gpu.py"]
    if setting.rehearses:
        torch.set_num_threads(1)
    ended = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True)
    setting.say(f"tests marked gpu: {ended.stdout.strip().splitlines()[-1] if ended.stdout.strip() else ended.stderr}")
    setting.data["tests"] = ended.stdout.strip().splitlines()[-1:]
    if ended.returncode:
        setting.say(ended.stdout)
    _measure(setting, CHECK, _rates(setting))
    return ended.returncode == 0


def speed(setting: Setting) -> bool:
    """Measure every cell; one that fails is named, and the others still run."""
    return _measure(setting, SPEED, _rates(setting))


def _rates(setting: Setting) -> Rates:
    rates = device_rates(setting.device, 64 if setting.rehearses else None, repeats=2 if setting.rehearses else 10)
    setting.say(f"{rates.flops / 1e12:.1f} TFLOP/s in a large product, {rates.bytes / 1e9:.0f} GB/s in a large copy")
    setting.data["rates"] = {"flops": rates.flops, "bytes": rates.bytes}
    return rates


def _measure(setting: Setting, cells: Sequence[Cell], rates: Rates) -> bool:
    found: list[Measured] = []
    failed = False
    for cell in setting.cells(cells):
        begin = time.monotonic()
        try:
            found.append(measure(cell, setting.device, rates, iterations=1 if setting.rehearses else 3))
        except Exception as error:  # another size may well run
            failed = True
            setting.say(f"{cell.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        print(f"{cell.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    setting.data["cells"] = [one.to_dict() for one in found]
    setting.say(table(found))
    return not failed


def trl(setting: Setting) -> bool:
    """Run TRL and ours on the same cells, one after the other, ours first and last."""
    from support.trl_cells import measure_trl

    rates, ratios, found = _rates(setting), {}, []
    for cell in setting.cells(AGAINST_TRL):
        ours = measure(cell, setting.device, rates, iterations=1 if setting.rehearses else 3)
        theirs = measure_trl(cell, setting.device, rates, iterations=1 if setting.rehearses else 2)
        again = measure(cell, setting.device, rates, iterations=1 if setting.rehearses else 3)
        found += [ours, theirs, again]
        ratios[cell.name] = (ours.tokens_per_second + again.tokens_per_second) / 2 / theirs.tokens_per_second
    setting.say(table(found))
    for name, ratio in ratios.items():
        setting.say(f"{name}: ours {ratio:.2f} times TRL's tokens a second")
    setting.data |= {"cells": [one.to_dict() for one in found], "ratios": ratios}
    return True


def study(setting: Setting) -> bool:
    """Run a study of `reviews` in which the guard stops a trial, then the same trials in turn and side by side."""
    with tempfile.TemporaryDirectory() as folder:
        return _stopped_by_the_guard(setting, Path(folder)) and _sharing(setting, Path(folder))


def _stopped_by_the_guard(setting: Setting, folder: Path) -> bool:
    budget, episodes = ("3", "96") if setting.rehearses else ("6", "1920")
    text = (ROOT / "studies" / "reviews.toml").read_text()
    text = re.sub(r"(?m)^budget = .*$", f"budget = {budget}", text)
    text = re.sub(r"(?m)^device = .*$", f'device = "{setting.device.type if setting.rehearses else "auto"}"', text)
    text = text.replace("[fixed]", f"[fixed]\ntotal_episodes = {episodes}", 1)
    trials, seconds = _run_study(setting, folder, "reviews", text)
    if trials is None:
        return False
    stopped = [trial for trial in trials if trial["status"] == "pruned" and trial["reason"]["rule"].startswith("kl")]
    best = max((trial["value"] for trial in trials if trial["value"] is not None), default=None)
    setting.say(f"{len(trials)} trials in {seconds:.0f} s; {len(stopped)} stopped for their KL; best value {best}")
    setting.data |= {"seconds": seconds, "trials": trials}
    return True


SHARING = """\
name = "{name}"
task = "{task}"
trials = {trials}
strategy = "full"
[fixed]
total_episodes = {episodes}
batch_size = {batch}
mini_batch_size = {mini}
num_ppo_epochs = 2
stop_token = "none"
[search]
learning_rate = {{ low = 1e-7, high = 1e-5, scale = "log" }}
[sampler]
name = "random"
"""
"""As many trials as the most that share the GPU, equally long but for their rates."""


def _sharing(setting: Setting, folder: Path) -> bool:
    """Run the same study with 1, 2, 4 and 8 trials at a time on one GPU; rehearsed with 1 and 2 on the CPU."""
    size, tokens, counts = ("tiny", 8, (1, 2)) if setting.rehearses else ("gpt2-0.1b", 128, (1, 2, 4, 8))
    task = save_task(folder.resolve(), size, tokens, tokens)
    batch = 8 if setting.rehearses else 64
    seconds: dict[int, float] = {}
    for count in counts:
        name = f"sharing-{count}"
        text = SHARING.format(
            name=name, task=task, trials=counts[-1], episodes=24 * batch, batch=batch, mini=batch // 4
        )
        flag = "--workers" if setting.rehearses else "--trials-per-gpu"
        trials, seconds[count] = _run_study(setting, folder, name, text, flag, str(count))
        if trials is None:
            return False
        failed = [trial["number"] for trial in trials if trial["status"] == "failed"]
        setting.say(
            f"{counts[-1]} trials of {size}, {count} at a time: {seconds[count]:.0f} s, "
            f"{seconds[1] / seconds[count]:.2f} times as fast as in turn" + (f"; failed: {failed}" if failed else "")
        )
    has_mps = shutil.which("nvidia-cuda-mps-control") is not None
    setting.say(f"MPS: {'there' if has_mps else 'not installed'}")
    setting.data |= {"sharing_seconds": seconds, "has_mps": has_mps}
    return True


def _run_study(
    setting: Setting, folder: Path, name: str, text: str, *flags: str
) -> tuple[list[dict[str, Any]] | None, float]:
    """Run a study file as a user would; return its trials, None where it ended with an error, and the seconds."""
    (folder / f"{name}.toml").write_text(text)
    command = [sys.executable, "-m", "tuner.cli.main"]
    options = {"cwd": folder, "capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": _path()}}
    begin = time.monotonic()
    ended = subprocess.run([*command, "run", f"{name}.toml", *flags], **options)
    seconds = time.monotonic() - begin
    shown = subprocess.run([*command, "show", name, "--json"], **options)
    if ended.returncode or shown.returncode:
        setting.say((ended.stdout + ended.stderr + shown.stderr)[-3000:])
        return None, seconds
    return json.loads(shown.stdout)["trials"], seconds


def _path() -> str:
    """Return where this process found its modules, for those that it starts."""
    return os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])


PARTS: dict[str, Callable[[Setting], bool]] = {"check": check, "speed": speed, "trl": trl, "study": study}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU; says nothing of speed")
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=RESULTS, help="where to write (here)")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("gpu.py: torch finds no CUDA device here; --rehearse runs tiny shapes on the CPU", file=sys.stderr)
        return 1
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    name = "cpu" if arguments.rehearse else torch.cuda.get_device_name()
    setting = Setting(device, arguments.rehearse, [], {"part": arguments.part, "device": name, "versions": _versions()})
    command = f"make gpu PART={arguments.part}"
    setting.say(f"# {arguments.part} on {name}\n")
    setting.say(f"`{command}`; Python {platform.python_version()}, {', '.join(map(' '.join, _versions().items()))}\n")
    begin = time.monotonic()
    good = PARTS[arguments.part](setting)
    setting.say(f"\n{'Done' if good else 'FAILED'} after {time.monotonic() - begin:.0f} s.")
    arguments.results.mkdir(parents=True, exist_ok=True)
    file = arguments.results / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}-{arguments.part}"
    file.with_suffix(".md").write_text("\n".join(setting.lines) + "\n")
    file.with_suffix(".json").write_text(json.dumps(setting.data | {"passed": good}, indent=1) + "\n")
    return 0 if good else 1


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    sys.exit(main())
