"""Make the models and prompts of the built-in tasks, which ship with the package: `python -m tools.make_models [TASK]`.

Trains each task's models by its recipe on one CPU thread, and writes them where the task finds them, with the prompts
and a manifest: the recipe, what was taught, the versions that trained, and every file's SHA-256. Both tasks take about
two and a half minutes of one core. The same versions on the same kind of CPU make the same files, to the byte; others
make other weights, and every number measured with the old ones moves.

Run it after a change to a recipe, to the words or sums that are taught, or to the code that trains; then commit the
files and measure again what the documentation says of these tasks.
"""

import argparse
import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ppo_core.tasks.arithmetic
import ppo_core.tasks.reviews
from ppo_core.data.task import Prompts
from tools import arithmetic, reviews, reviews_corpus

MANIFEST = "manifest.json"
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")
"""Their versions decide the files' content."""


@dataclass(frozen=True)
class Making:
    """The steps that make the data of one task."""

    data: Path
    """The folder that ships."""
    recipe: Any
    build: Callable[[Path, Any], None]
    """Trains by the recipe and saves each model in a folder of its own under the given one."""
    taught: Callable[[Any], Iterable[str]]
    """A sample of what the models learn from, as lines: other lines ask for other models."""
    prompts: Callable[[], Prompts]


MAKINGS: Mapping[str, Making] = {
    "reviews": Making(
        ppo_core.tasks.reviews.DATA, reviews.Recipe(), reviews.build, reviews.taught, reviews_corpus.prompts
    ),
    "arithmetic": Making(
        ppo_core.tasks.arithmetic.DATA, arithmetic.Recipe(), arithmetic.build, arithmetic.taught, arithmetic.prompts
    ),
}


def make(making: Making, folder: Path) -> None:
    """Train the models and write them, the prompts and the manifest into `folder`, in place of what it holds."""
    draft = folder.with_name(f".{folder.name}-being-made")  # an interruption leaves the old files as they are
    shutil.rmtree(draft, ignore_errors=True)
    making.build(draft, making.recipe)
    write_prompts(making.prompts(), draft / "prompts")
    manifest = {"versions": versions(), **description(making), "sha256": hashes(draft)}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    draft.replace(folder)


def write_prompts(prompts: Prompts, folder: Path) -> None:
    """Write each split as JSON lines: the prompt, and the columns of its row."""
    folder.mkdir(parents=True)
    for name in ("train", "eval", "test"):
        lines = [json.dumps({"prompt": prompt.text, **prompt.columns}) for prompt in getattr(prompts, name)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def description(making: Making) -> dict[str, Any]:
    """Return what decides the models: the recipe, and a hash of what is taught; as values of JSON."""
    taught = hashlib.sha256("\n".join(making.taught(making.recipe)).encode())
    return {"recipe": asdict(making.recipe), "taught": taught.hexdigest()}


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in the folder but the manifest, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def versions() -> dict[str, str]:
    """Return what the weights depend on beside the code: Python, the libraries, and the CPU's instructions."""
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in LIBRARIES}, "cpu": cpu}


def main(arguments: Sequence[str]) -> None:
    """Make the data of the named task, or of all."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_models", description="Train the built-in models again.")
    parser.add_argument("task", nargs="?", choices=MAKINGS, help="without it, all")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write to DIR/TASK, not in place of what ships")
    options = parser.parse_args(arguments)
    for name in [options.task] if options.task else MAKINGS:
        folder = options.out / name if options.out else MAKINGS[name].data
        make(MAKINGS[name], folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{name}: {size / 1e6:.1f} MB in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
