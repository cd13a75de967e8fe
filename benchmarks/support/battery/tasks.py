"""The battery's tasks of both makers, and the files of one: its folder, and a study for each start."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import tomli_w

from . import pairs, words
from .recipes import BATCH, MAKES, POLICY, PROMPTS, Group, Make, Recipe

Start = Literal["fair", "rate ÷ 10", "rate × 10", "β ÷ 10", "β × 10"]
STARTS: Mapping[Start, tuple[str, float]] = {
    "fair": ("learning_rate", 1.0),
    "rate ÷ 10": ("learning_rate", 0.1),
    "rate × 10": ("learning_rate", 10.0),
    "β ÷ 10": ("kl_coef", 0.1),
    "β × 10": ("kl_coef", 10.0),
}
"""How far off the reference is."""
TRAINER = "support.battery.trainer:battery_trainer"


def recipes(group: Group, makes: Sequence[Make] = MAKES) -> list[Recipe]:
    """Return the tasks of a group, of those makers."""
    return [task for of_make in (words.recipes(group), pairs.recipes(group)) for task in of_make if task.make in makes]


def make_task(recipe: Recipe, folder: Path) -> dict[Start, Path]:
    """Make a task in `folder`, unless it lies there, and return the study file of each start."""
    stamp, content = folder / "recipe.json", json.dumps({"make": recipe.make, **asdict(recipe)})
    if not stamp.exists() or stamp.read_text() != content:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        recipe.write(folder)
        stamp.write_text(content)
    return {start: _write_study(recipe, folder, start) for start in STARTS}


def _write_study(recipe: Recipe, folder: Path, start: Start) -> Path:
    path = folder / f"{list(STARTS).index(start)}.toml"
    path.write_bytes(tomli_w.dumps(study_table(recipe, folder, start)).encode())
    return path


def study_table(recipe: Recipe, folder: Path, start: Start) -> dict[str, Any]:
    """Return a study of the task: the shipped search over the usual ranges, around the start's reference."""
    name, factor = STARTS[start]
    reference = fair_reference(recipe)
    task = {
        "policy": str(folder / POLICY),
        "reward": str(folder / recipe.reward),
        "prompts": {"path": str(folder / PROMPTS), "train": "train", "eval": "validation", "test": "test"},
        "kl_budget": recipe.kl_budget,
        "kl_limit": 2.5 * recipe.kl_budget,
        "reference": {**reference, name: factor * reference[name]},
    }
    rate, β = reference["learning_rate"], reference["kl_coef"]
    search = {
        "learning_rate": {"low": rate / 20, "high": 15 * rate, "scale": "log"},
        "value_learning_rate": {"low": 1e-4, "high": 1e-2, "scale": "log"},
        "mini_batch_size": {"low": BATCH // 4, "high": BATCH, "scale": "log2"},
        "num_ppo_epochs": {"low": 1, "high": 4},
        "cliprange": "advised",
        "lam": "advised",
        "vf_coef": {"low": 0.1, "high": 1.0},
        "kl_coef": {"low": β / 20, "high": 20 * β, "scale": "log"},
        "kl_target": {"low": recipe.kl_budget / 3, "high": recipe.kl_budget * 4 / 3, "scale": "log"},
    }
    return {
        "name": recipe.name,
        "task": task,
        "trainer": TRAINER,
        "budget": 12,
        "device": "cpu",
        "threads": 1,
        "fixed": recipe.fixed,
        "search": search,
    }


def fair_reference(recipe: Recipe) -> dict[str, float]:
    """Return what somebody who knows such policies would begin with: a rate for its size, β for the reward's scale."""
    return {
        "total_episodes": recipe.iterations * BATCH,
        "learning_rate": recipe.rate,
        "value_learning_rate": 1e-3,
        "batch_size": BATCH,
        "mini_batch_size": BATCH // 2,
        "response_length": recipe.response_length,
        "temperature": 1.0,
        "kl_coef": 0.05 * recipe.scale,
    }
