"""What a run needs at the least: beside the trainer, and where it is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppo_core import PPOConfig
from ppo_core.data.task import Prompts, TaskAssets
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import OutOfMemory
from ppo_core.loading.fits import Least, largest, least
from ppo_core.models import memory
from ppo_core.models.memory import Room, group_limits
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import TINY_TASK, tiny_models
from tests.ppo_core.test_networks import NETWORKS

CONFIG = PPOConfig(batch_size=8, mini_batch_size=4, response_length=6, bf16=False)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def assets(folder: Path) -> TaskAssets:
    texts = ["w1 w2", "w1 w2 w3"]
    return TaskAssets(str(folder), (), Prompts.of_texts(texts, texts[:1], ()))


def needs(folder: Path, config: PPOConfig, device: torch.device = CPU) -> Least:
    return least(config, TINY_TASK, assets(folder), device)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_gradients_and_moments_are_those_of_a_run(tiny_folder: Path, name: str) -> None:
    trainer, found = (
        PPOTrainer(NETWORKS[name], tiny_models(tiny_folder), world=ONE_PROCESS),
        needs(tiny_folder, NETWORKS[name]),
    )
    trained = sum(p.nbytes for p in trainer.network.trained().values())
    assert found.checkpoint == trainer.checkpoint_bytes() == 3 * trained
    assert found.parts["optimizer moments"] == 2 * trained
    own = {p.data_ptr(): p.nbytes for p in (*trainer.models.reference.parameters(), *trainer.network.parameters())}
    assert found.parts["reference"] + found.parts["policy and critic"] == sum(own.values())
    larger = {name: size for name, size in found.parts.items() if name in ("gradients", "KV cache")}
    assert len(larger) == 1 and (larger.get("gradients", trained) == trained)
    assert found.total == sum(found.parts.values())


def test_the_cache_is_rows_times_tokens_times_layers_keys_and_values(tiny_folder: Path) -> None:
    long = replace(CONFIG, response_length=50, batch_size=4096, local_rollout_forward_batch_size=512)
    layers, width = 2, 32
    assert needs(tiny_folder, long).parts["KV cache"] == 512 * 50 * layers * 2 * width * 4
    assert needs(tiny_folder, replace(long, batch_size=256)).parts["KV cache"] == 256 * 50 * layers * 2 * width * 4
    on_gpu = needs(tiny_folder, long, GPU).parts
    assert "KV cache" not in on_gpu, "a single row, less than the gradients: rows that do not fit are halved"


def test_precision_of_weights_and_moments(tiny_folder: Path) -> None:
    whole, lora = (needs(tiny_folder, replace(CONFIG, use_peft=on)).parts for on in (False, True))
    assert lora["reference"] == whole["reference"] and lora["policy and critic"] < whole["policy and critic"] / 4
    half = needs(tiny_folder, replace(CONFIG, bf16=True, use_peft=True)).parts
    assert half["reference"] == whole["reference"] / 2 and half["policy and critic"] == lora["policy and critic"]
    packed = needs(tiny_folder, replace(CONFIG, bf16=True, use_peft=True, load_in_4bit=True)).parts
    assert packed["reference"] < half["reference"] and packed["policy and critic"] == lora["policy and critic"]
    small = needs(tiny_folder, replace(CONFIG, optim="adamw_8bit")).parts
    assert small["optimizer moments"] < whole["optimizer moments"]


@pytest.mark.parametrize(("spare", "words"), [(0, None), (-1, "less: use_peft, bf16, load_in_4bit, a smaller policy")])
def test_only_what_cannot_fit_is_refused(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, spare: int, words: str | None
) -> None:
    total = needs(tiny_folder, CONFIG).total + 1000 + spare
    monkeypatch.setattr("ppo_core.loading.fits.room", lambda _: Room("cpu", "the device", total, total, 1000))
    configs = [replace(CONFIG, use_peft=True), CONFIG]
    if words is None:
        found = largest(configs, TINY_TASK, assets(tiny_folder), "cpu")
        assert found is not None and found[0].config is CONFIG
    else:
        with pytest.raises(OutOfMemory, match=words):
            largest(configs, TINY_TASK, assets(tiny_folder), "cpu")


def test_of_equal_weights_the_run_that_learns_from_more_tokens_is_largest(tiny_folder: Path) -> None:
    configs = [CONFIG, replace(CONFIG, mini_batch_size=8), CONFIG]
    found = largest(configs, TINY_TASK, assets(tiny_folder), "cpu")
    assert found is not None and found[0].config is configs[1]


def test_what_cannot_be_read_is_left_to_loading(tmp_path: Path) -> None:
    assert largest([CONFIG], TINY_TASK, assets(tmp_path / "none"), "cpu") is None


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OWN_GROUP", tmp_path / "self")
    return tmp_path / "cgroup"


def limit(folder: Path, most: object, used: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")


def test_the_control_group_and_all_above_it_bind(groups: Path) -> None:
    (groups.parent / "self").write_text("0::/slurm/job_7/step_0\n")
    limit(groups / "slurm", 64, 40)
    limit(groups / "slurm/job_7", 8, 2)
    limit(groups / "slurm/job_7/step_0", "max", 1)
    limit(groups / "slurm/job_8", 1, 0)
    assert list(group_limits()) == [(8, 2), (64, 40)]


@pytest.mark.parametrize("path", ["", "../abc"])
def test_a_container_that_sees_its_own_root_alone_reads_that(groups: Path, path: str) -> None:
    (groups.parent / "self").write_text(f"0::/{path}\n")
    limit(groups, 2, 1)
    assert list(group_limits()) == [(2, 1)]


def test_a_group_of_version_1_binds_beside_the_one_of_version_2_without_a_limit(groups: Path) -> None:
    (groups.parent / "self").write_text("5:cpu:/job\n4:memory,hugetlb:/job\n0::/job\n")
    (groups / "memory/job").mkdir(parents=True)
    (groups / "memory/job/memory.limit_in_bytes").write_text("16\n")
    (groups / "memory/job/memory.usage_in_bytes").write_text("3\n")
    assert list(group_limits()) == [(16, 3)]


@pytest.mark.parametrize("lines", [None, "4:memory:/docker/abc\n", "0::/\n"])
def test_without_control_groups_nothing_binds(groups: Path, lines: str | None) -> None:
    if lines is not None:
        (groups.parent / "self").write_text(lines)
    assert list(group_limits()) == []
