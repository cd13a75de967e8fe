"""The limits of control groups: of both versions, of ancestors, and where a container sees its own root alone."""

from pathlib import Path

import pytest

from ppo_core import containers

GIB = 2**30


def files(folder: Path, names: tuple[str, str], limit: object, used: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(containers, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(containers, "SELF", tmp_path / "self")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def test_in_version_2_the_group_and_all_above_it_bind(root: Path) -> None:
    (root / "cgroup.controllers").touch()
    (root.parent / "self").write_text("0::/slurm/job_7/step_0\n")
    files(root / "slurm", containers.V2, 64 * GIB, 40 * GIB)
    files(root / "slurm/job_7", containers.V2, 8 * GIB, 2 * GIB)
    files(root / "slurm/job_7/step_0", containers.V2, "max", GIB)
    files(root / "slurm/job_8", containers.V2, GIB, 0)
    assert containers.memory_limits() == [(8 * GIB, 2 * GIB), (64 * GIB, 40 * GIB)]


@pytest.mark.parametrize("controllers", ["memory", "cpuset,memory"])
def test_in_version_1_the_memory_controllers_group_binds(root: Path, controllers: str) -> None:
    (root.parent / "self").write_text(f"11:cpu,cpuacct:/user.slice\n4:{controllers}:/docker/abc\n0::/user.slice\n")
    files(root / "memory", containers.V1, 9223372036854771712, 90 * GIB)  # as v1 says that there is none
    files(root / "memory/docker/abc", containers.V1, 3 * GIB, GIB)
    assert containers.memory_limits() == [(3 * GIB, GIB)]


@pytest.mark.parametrize(
    ("line", "mount", "names"),
    [("0::/", "", containers.V2), ("0::/../abc", "", containers.V2), ("4:memory:/docker/abc", "memory", containers.V1)],
)
def test_a_container_that_sees_its_own_root_alone_reads_that(
    root: Path, line: str, mount: str, names: tuple[str, str]
) -> None:
    if names is containers.V2:
        (root / "cgroup.controllers").touch()
    (root.parent / "self").write_text(f"{line}\n")
    files(root / mount, names, 2 * GIB, GIB)
    assert containers.memory_limits() == [(2 * GIB, GIB)]


def test_without_control_groups_nothing_binds(root: Path) -> None:
    assert containers.memory_limits() == []
    (root.parent / "self").write_text("0::/\n")
    assert containers.memory_limits() == []
