"""Makes the models of the built-in tasks, which ship with the package: `python -m ppo_core.tasks.make_models [TASK]`.

It trains each task's models by its recipe, on one CPU thread, and puts them where the task finds them, together with a
manifest: the recipe, what was taught, the versions that trained, and every file's SHA-256. Both tasks together take
about two and a half minutes of one core. The same versions on the same kind of CPU make the same files, to the byte;
others make other weights, and every number measured with the old ones moves.

Run it after a change to a recipe, to the words or sums that are taught, or to the code that trains; then commit the
files and measure again what the documentation says of these tasks.
"""

import hashlib
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ppo_core.errors import ConfigError, nearest
from ppo_core.run import command_line
from ppo_core.run.command_line import EXIT_OK, Parser
from ppo_core.task import Progress
from ppo_core.tasks import arithmetic as arithmetic_recipe
from ppo_core.tasks import reviews as reviews_recipe
from ppo_core.tasks.arithmetic import build as arithmetic
from ppo_core.tasks.reviews import build as reviews
from ppo_core.tasks.reviews import build as reviews_training

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

COMMAND = "python -m ppo_core.tasks.make_models"
MANIFEST = "manifest.json"
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")
"""Their versions decide the files' content."""

RecipeT = TypeVar("RecipeT", bound="DataclassInstance")


@dataclass(frozen=True)
class Making(Generic[RecipeT]):
    """How the models of one task are made."""

    models: Path
    """The folder that ships."""
    recipe: RecipeT
    build: Callable[[Path, RecipeT, Progress | None], None]
    """Trains by the recipe and saves each model in a folder of its own under the given one."""
    taught: Callable[[RecipeT], Iterable[str]]
    """A sample of what the models learn from, as lines: other lines ask for other models."""


MAKINGS: Mapping[str, Making[Any]] = {
    "reviews": Making(reviews_recipe.MODELS, reviews_recipe.Recipe(), reviews.build, reviews_training.taught),
    "arithmetic": Making(arithmetic_recipe.MODELS, arithmetic_recipe.Recipe(), arithmetic.build, arithmetic.taught),
}
"""By the task's name."""


def make(making: Making[Any], folder: Path, progress: Progress | None = None) -> None:
    """Train the models and put them with their manifest into `folder`, in place of those it may hold.

    Raises:
        ConfigError: there is something else in the folder.
    """
    require_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        # Moved when whole, so that an interruption leaves the old models as they are.
        made = Path(temporary) / folder.name
        making.build(made, making.recipe, progress)
        manifest = {"command": COMMAND, "versions": versions(), **description(making), "sha256": hashes(made)}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        made.replace(folder)


def require_replaceable(folder: Path) -> None:
    """Raise ConfigError if `folder` is there and is neither empty nor holds models that were made here."""
    if folder.exists() and not (folder / MANIFEST).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not a folder of such models; name another folder")


def description(making: Making[Any]) -> dict[str, Any]:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Make the models of the named task, or of all; return the exit status.

    0: done; 1: it failed; 2: a mistake in the command line; 130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return command_line.run("make_models", lambda: _make(arguments))


def _make(arguments: list[str]) -> int:
    parser = Parser(prog=COMMAND, description="Train the models of the built-in tasks again, as they ship.")
    parser.add_argument("task", nargs="?", metavar="TASK", help=f"{' or '.join(MAKINGS)}; without it, all")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="make them in DIR/TASK, not in place of those that ship"
    )
    args = parser.parse_args(arguments)
    if args.task is not None and args.task not in MAKINGS:
        raise ConfigError(
            f'no models to make for task "{args.task}"; available: {", ".join(MAKINGS)}{nearest(args.task, MAKINGS)}'
        )
    names = [args.task] if args.task else list(MAKINGS)
    folders = {name: args.out / name if args.out else MAKINGS[name].models for name in names}
    for folder in folders.values():
        require_replaceable(folder)
    for name, folder in folders.items():
        make(MAKINGS[name], folder, lambda what, share, name=name: print(f"{name}: {what}, {share:.0%}", flush=True))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{name}: {size / 1e6:.1f} MB in {folder}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
