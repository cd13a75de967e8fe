"""The models of the built-in tasks: how they are made, and that those that ship are what the recipes ask for."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ppo_core.data.task import BUILT_IN
from ppo_core.loading.task_file import get_task
from tools import arithmetic, reviews
from tools.make_models import MAKINGS, MANIFEST, description, hashes, make

ROOT = Path(__file__).parents[2]
TINY = {
    "reviews": replace(
        MAKINGS["reviews"],
        recipe=reviews.Recipe(
            layers=1, heads=2, policy_width=16, reward_width=16, batch_size=4, policy_steps=3, reward_steps=3
        ),
    ),
    "arithmetic": replace(
        MAKINGS["arithmetic"], recipe=arithmetic.Recipe(layers=1, heads=2, width=16, batch_size=4, steps=3)
    ),
}
FILES = {
    "reviews": {"policy/model.safetensors", "reward_model/model.safetensors"},
    "arithmetic": {"policy/model.safetensors"},
}


@pytest.fixture(params=TINY)
def task(request: pytest.FixtureRequest) -> str:
    """The name of a built-in task."""
    return str(request.param)


def manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return content


# How they are made


def test_a_recipe_makes_the_same_files_each_time_and_leaves_torch_alone(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(TINY[task], tmp_path / "one")
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "training the SFT policy, 33%" and told[-1].endswith(", 100%")
    torch.manual_seed(7)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    make(TINY[task], tmp_path / "two")
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    make(replace(TINY[task], recipe=replace(TINY[task].recipe, seed=2)), tmp_path / "other")
    one, two, other = (hashes(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two and one.keys() == other.keys() > FILES[task]
    assert all(one[name] != other[name] for name in FILES[task])


def test_the_manifest_tells_what_was_made_and_the_models_load(task: str, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    make(TINY[task], folder)
    told = manifest(folder)
    assert told.items() > description(TINY[task]).items()
    version = torch.__version__.partition("+")[0]  # builds for GPUs have one of their own after it
    assert (told["sha256"], told["versions"]["torch"].partition("+")[0]) == (hashes(folder), version)
    assert told["recipe"]["layers"] == 1
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert policy.dtype == torch.float32
    assert len(AutoTokenizer.from_pretrained(folder / "policy")) == policy.config.vocab_size
    if task == "reviews":
        assert AutoModelForSequenceClassification.from_pretrained(folder / "reward_model").config.num_labels == 1


def test_models_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    class Cancelled(Exception): ...

    def cancelled(folder: Path, recipe: object) -> None:
        TINY["arithmetic"].build(folder, recipe)
        raise Cancelled

    folder = tmp_path / "models"
    make(TINY["arithmetic"], folder)
    before = hashes(folder)
    (folder / "policy" / "pytorch_model.bin").write_bytes(b"from elsewhere")
    with pytest.raises(Cancelled):
        make(replace(TINY["arithmetic"], build=cancelled), folder)
    assert hashes(folder).items() > before.items()
    make(TINY["arithmetic"], folder)
    assert hashes(folder) == before


# Those that ship


def test_what_ships_was_made_by_this_recipe_of_what_is_taught_now(task: str) -> None:
    told = manifest(MAKINGS[task].data)
    wanted = description(MAKINGS[task])
    assert {key: told[key] for key in wanted} == wanted, f"{task} changed: make its models again, and commit them"
    assert told["sha256"] == hashes(MAKINGS[task].data)
    assert get_task(task).prepare(None).prompts == MAKINGS[task].prompts()


@pytest.mark.parametrize(
    ("task", "what", "value"),
    [
        ("reviews", "reviews_corpus.THINGS", ("camera", "lamp")),
        ("reviews", "reviews_corpus.REPEATED", 0.3),
        ("reviews", "reviews._CORPUS_SHARE", 0.5),
        ("arithmetic", "arithmetic.SLIPS", 0.5),
        ("arithmetic", "arithmetic.CHARACTERS", "0123456789+-="),
    ],
)
def test_other_words_sums_or_scores_ask_for_other_models(
    task: str, what: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = description(MAKINGS[task])
    monkeypatch.setattr(f"tools.{what}", value)
    after = description(MAKINGS[task])
    assert after["taught"] != before["taught"] and after["recipe"] == before["recipe"]


def test_what_ships_is_small_and_in_the_wheel() -> None:
    assert MAKINGS.keys() == BUILT_IN.keys()
    package = ROOT / "ppo_core"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["ppo_core"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    files = {path for making in MAKINGS.values() for path in making.data.rglob("*") if path.is_file()}
    assert {"model.safetensors", MANIFEST} < {path.name for path in files}
    assert files <= packed
    assert sum(path.stat().st_size for path in files) < 6e6
