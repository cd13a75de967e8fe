"""What only a GPU can show: that it is right there, how fast it is, beside TRL, and as a study.

    make gpu                            # PART=check: correctness against the CPU
    make gpu PART=speed                 # three cells, with the kernels of a decode step
    make gpu PART=sharing WHEELS=dir    # 8 trials of 0.1B on one GPU: in turn, and 8, 4 and 2 at a time
    make gpu PART=sharing-0.5b WHEELS=dir
    make gpu PART=4bit WHEELS=dir       # frozen weights in 4 bits
    make gpu PART=study WHEELS=dir      # a study with a guard stop
    make gpu PART=trl WHEELS=dir        # TRL 1.12.0 on two cells, in the same run as ours
    make gpu PART=sizes                 # more cells, 0.1B to 1.5B

In the order of what they are worth on a short lease. Each part takes less than four minutes, prints what it finds with
the versions of what it ran under, and writes benchmarks/results/<gpu>-<part>.md and .json (RESULTS names another
folder), anew after each cell. What fails is named there, and the rest still runs; the exit status is then 1.
It runs under any python3 with torch, transformers, peft, accelerate and pytest; docs/gpu.md names the wheels
that other parts need. `--rehearse` runs the same code on tiny shapes on the CPU.
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from support.cells import Cell, Measured, Rates, device_rates, measure, rehearsed
from support.limited import Failed, in_own_process, run_limited
from support.part_results import Results
from support.real_task import save_task
from support.trl_cells import measure_trl

from tuner.engine.gpu import mps_line
from tuner.study.rules import RULES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "optuna", "trl")

PART_SECONDS = 225.0
"""A part ends within them, with what it has."""
CELL_SECONDS = 120.0
"""The longest that one cell may take of these."""

SPEED = (
    Cell("qwen2-0.5b", lora=True),
    Cell("gpt2-0.1b", lora=False),
    Cell("llama-8b", lora=True, micro_batch=8, gradient_checkpointing=True, epochs=1),
)
IN_4_BITS = (Cell("qwen2-0.5b", lora=True, in_4bit=True), Cell("qwen2-1.5b", lora=True, in_4bit=True))
SIZES = (
    Cell("qwen2-1.5b", lora=True),
    Cell("qwen2-0.5b", lora=False),
    Cell("gpt2-0.1b", lora=True),
    Cell("qwen2-0.5b", lora=True, new_tokens=512),
    Cell("qwen2-1.5b", lora=False),
)
AGAINST_TRL = (Cell("gpt2-0.1b", lora=False), Cell("qwen2-0.5b", lora=True))


@dataclass
class Setting:
    """Where a part runs, and what it has found so far."""

    device: torch.device
    rehearses: bool
    results: Results

    def cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells as they are run here."""
        return [rehearsed(cell) for cell in cells] if self.rehearses else list(cells)

    def limit(self, most: float = math.inf) -> float:
        """Return how many seconds the next piece may take; Failed where the part's are over."""
        left = PART_SECONDS - self.results.seconds
        if left <= 0:
            raise Failed(f"not run: the part's {PART_SECONDS:.0f} s are over")
        return min(left, most)


def check(setting: Setting) -> None:
    """Run the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", "tests/ppo_core/test_gpu.py"]
    status, output = run_limited(setting.limit(), command, ROOT, os.environ)
    last = output.strip().splitlines()[-1:]
    setting.results.say(f"tests marked gpu: {' '.join(last)}", tests=last)
    if status != 0:
        setting.results.say(output)
        raise Failed(_status(status))


def cells(which: Sequence[Cell], setting: Setting) -> None:
    """Measure every cell."""
    rates = _rates(setting)
    for cell in setting.cells(which):
        _measure_one(setting, measure, cell, rates, 3)


def _rates(setting: Setting) -> Rates:
    rates = Rates(math.nan, math.nan)
    with setting.results.attempt("rates of the device"):
        size, repeats = (64, 2) if setting.rehearses else (None, 10)
        rates = in_own_process(setting.limit(CELL_SECONDS), device_rates, setting.device, size, repeats)
        setting.results.say(
            f"{rates.flops / 1e12:.1f} TFLOP/s in a large product, {rates.bytes / 1e9:.0f} GB/s in a large copy",
            rates={"flops": rates.flops, "bytes": rates.bytes},
        )
    return rates


def _measure_one(
    setting: Setting, measured_by: Callable[..., Measured], cell: Cell, rates: Rates, iterations: int
) -> list[Measured]:
    """Return a cell's result; none where it failed."""
    found: list[Measured] = []
    with setting.results.attempt(f"{cell.name}{' of TRL' if measured_by is measure_trl else ''}"):
        limit, iterations = setting.limit(CELL_SECONDS), 1 if setting.rehearses else iterations
        found.append(in_own_process(limit, measured_by, cell, setting.device, rates, iterations=iterations))
        setting.results.add(found[0])
        if found[0].step_kernels:
            kinds = (f"{kind} {ms:.2f} ms in {count:.0f}" for kind, (ms, count) in found[0].step_kernels.items())
            setting.results.say(f"{cell.name}: kernels of a decode step: {', '.join(kinds)}")
    return found


def trl(setting: Setting) -> None:
    """Run TRL and ours on the same cells, one after the other, ours first and last."""
    rates, ratios = _rates(setting), {}
    for cell in setting.cells(AGAINST_TRL):
        ours = _measure_one(setting, measure, cell, rates, 3)
        theirs = _measure_one(setting, measure_trl, cell, rates, 2)
        ours += _measure_one(setting, measure, cell, rates, 3)
        if ours and theirs:
            speed_of_ours = sum(one.tokens_per_second for one in ours) / len(ours)
            ratio = ratios[cell.name] = speed_of_ours / theirs[0].tokens_per_second
            setting.results.say(f"{cell.name}: ours {ratio:.2f} times TRL's tokens a second", ratios=ratios)


def study(setting: Setting) -> None:
    """Run a study of `reviews` in which the guard stops a trial."""
    budget, episodes = ("3", "96") if setting.rehearses else ("4", "1920")
    text = (ROOT / "studies" / "reviews.toml").read_text()
    text = re.sub(r"(?m)^budget = .*$", f"budget = {budget}", text, count=1)
    text = re.sub(r"(?m)^device = .*$", f'device = "{setting.device.type if setting.rehearses else "auto"}"', text)
    text = text.replace("[fixed]", f"[fixed]\ntotal_episodes = {episodes}", 1)
    if setting.rehearses:  # so few steps reach no limit for certain: any step of any size is over this one
        text = re.sub(r"(?m)^budget = .*\nlimit = .*$", r"budget = 0.01\nlimit = 0.01", text)
    with tempfile.TemporaryDirectory() as folder:
        trials, seconds = _run_study(setting.limit(), Path(folder).resolve(), "reviews", text)
    stopped = [trial for trial in trials if trial["status"] == "pruned" and trial["reason"]["rule"].startswith("kl")]
    best = max((trial["value"] for trial in trials if trial["value"] is not None), default=None)
    setting.results.say(
        f"{len(trials)} trials in {seconds:.0f} s; {len(stopped)} stopped for their KL; best value {best}",
        seconds=seconds,
        trials=trials,
    )
    _require_none_failed(trials)
    if not stopped:
        raise Failed("no trial was stopped for its KL")


SHARING = """\
name = "{name}"
task = "{task}"
trials = {trials}
threads = 1
[fixed]
total_episodes = {episodes}
eval_every_episodes = {episodes}
batch_size = {batch}
mini_batch_size = {mini}
num_ppo_epochs = 2
stop_token = "none"
use_peft = true
lora_target_modules = "all-linear"
[search]
learning_rate = {{ low = 1e-7, high = 1e-5, scale = "log" }}
[sampler]
name = "random"
[workers]
checkpoint_seconds = 3600
[guard]
{rules_off}
"""
"""As many trials as the most that share the GPU, equally long but for their rates: the guard ends none.

They are to measure the GPU, not the disk: a checkpoint of adapters is small, and each trial saves only two.
"""


def sharing_text(name: str, task: Path, trials: int, batch: int, iterations: int) -> str:
    """Return the study file."""
    rules_off = "\n".join(f"{rule} = false" for rule in RULES)
    return SHARING.format(
        name=name, task=task, trials=trials, episodes=iterations * batch, batch=batch, mini=batch // 4,
        rules_off=rules_off,
    )  # fmt: skip


def sharing(size: str, iterations: int, setting: Setting) -> None:
    """Run the same study with 1, 8, 4 and 2 trials at a time on one GPU; rehearsed with 1 and 2 on the CPU.

    In this order: if time runs out, the ends are known.
    """
    size, tokens, counts = ("tiny", 8, (1, 2)) if setting.rehearses else (size, 128, (1, 8, 4, 2))
    batch, flag = (8, "--workers") if setting.rehearses else (64, "--trials-per-gpu")
    setting.results.say(mps_line())
    seconds: dict[int, float] = {}
    each: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        task = save_task(folder, size, tokens, tokens)
        for count in counts:
            what = f"{max(counts)} trials of {size}, {count} at a time"
            with setting.results.attempt(what):
                text = sharing_text(f"sharing-{count}", task, max(counts), batch, iterations)
                trials, took = _run_study(setting.limit(), folder, f"sharing-{count}", text, flag, str(count))
                _require_none_failed(trials)
                seconds[count], each[count] = took, statistics.median(trial["seconds"] for trial in trials)
                beside = f", {seconds[1] / took:.2f} times as fast as in turn" if 1 in seconds else ""
                setting.results.say(
                    f"{what}: {took:.0f} s with the start of all processes{beside}; {each[count]:.1f} s a trial",
                    sharing_seconds=seconds,
                    sharing_trial_seconds=each,
                )


def _require_none_failed(trials: Sequence[dict[str, Any]]) -> None:
    failed = [trial for trial in trials if trial["status"] == "failed"]
    if failed:
        raise Failed("; ".join(f"trial {trial['number']}: {trial['reason']['message']}" for trial in failed))


def _run_study(limit: float, folder: Path, name: str, text: str, *flags: str) -> tuple[list[dict[str, Any]], float]:
    """Run a study file as a user would; return its trials, and the seconds. Its store and checkpoints are removed.

    Raises:
        Failed: it ended with an error, or took longer than `limit` seconds.
    """
    (folder / f"{name}.toml").write_text(text)
    command = [sys.executable, "-m", "tuner.cli.main"]
    environment = os.environ | {"PYTHONPATH": _path()}
    begin = time.monotonic()
    try:
        status, output = run_limited(limit, [*command, "run", f"{name}.toml", *flags], folder, environment)
        seconds = time.monotonic() - begin
        if status != 0:
            print(output[-3000:], file=sys.stderr, flush=True)
            raise Failed(f"{_status(status)}: {' '.join(output.strip().splitlines()[-1:])}")
        shown = subprocess.run(
            [*command, "show", name, "--json"], cwd=folder, env=environment, capture_output=True, timeout=60, check=True
        )
    finally:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    trials: list[dict[str, Any]] = json.loads(shown.stdout)["trials"]
    return trials, seconds


def _status(status: int | None) -> str:
    return "did not end in time" if status is None else f"ended with status {status}"


def _path() -> str:
    """Return where this process found its modules, for those that it starts."""
    return os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])


PARTS: dict[str, Callable[[Setting], None]] = {
    "check": check,
    "speed": partial(cells, SPEED),
    "sharing": partial(sharing, "gpt2-0.1b", 6),
    "sharing-0.5b": partial(sharing, "qwen2-0.5b", 4),
    "4bit": partial(cells, IN_4_BITS),
    "study": study,
    "trl": trl,
    "sizes": partial(cells, SIZES),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU; says nothing of speed")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", default=RESULTS, help="where to write (benchmarks/results)"
    )
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("gpu.py: torch finds no CUDA device here; --rehearse runs tiny shapes on the CPU", file=sys.stderr)
        return 1
    name, part = "cpu" if arguments.rehearse else torch.cuda.get_device_name(), arguments.part
    versions = _versions()
    found = f"Python {platform.python_version()}, {', '.join(map(' '.join, versions.items()))}"
    results = Results(
        arguments.results / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}-{part}",
        [f"# {part} on {name}", "", f"`make gpu PART={part}`; {found}", ""],
        {"part": part, "device": name, "versions": versions},
    )
    with results.attempt(part):
        PARTS[part](Setting(torch.device("cpu" if arguments.rehearse else "cuda"), arguments.rehearse, results))
    return 0 if results.finish() else 1


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    sys.exit(main())
