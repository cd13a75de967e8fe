"""A store named by a path: its file is that one, whatever characters are in it."""

import re
from contextlib import closing
from pathlib import Path

import optuna
import pytest

from tests.tuner.invoke import Invoke, one_error
from tuner.store import Store

NAMES = ("lr?seed=1.db", "lr?timeout=x.db", "a%20b.db", "a b%3F.db", "a#b.db", "file:x.db?mode=ro", "a:@b.db", "ä.db")


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_that_file_and_the_stores_url_reads_it_again(name: str, own_folder: Path) -> None:
    for path in (name, f"a/{name}", str(own_folder / "b" / name)):
        with closing(Store.open(path, create=True)) as store:
            store.create_study("one", {})
            with closing(Store.open(store.url.render_as_string())) as again:
                assert [study.name for study in again.studies()] == ["one"]
    made = {path.relative_to(own_folder) for path in own_folder.rglob("*") if path.is_file()}
    assert made == {Path(name), Path("a", name), Path("b", name)}


@pytest.mark.parametrize("storage", ["~/x.db", "sqlite:///~/x.db"])
def test_a_tilde_is_the_users_folder(storage: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(own_folder / "home"))
    Store.open(storage, create=True).close()
    assert [path.name for path in own_folder.iterdir()] == ["home"] and (own_folder / "home/x.db").is_file()


def test_every_command_takes_such_a_path(made: str, ppo_tuner: Invoke, own_folder: Path) -> None:
    assert ppo_tuner("copy", made, "--to", "lr?seed=1.db")[0] == 0
    assert ppo_tuner("list", "--storage", "lr?seed=1.db", "--json")[0] == 0
    assert "no store at lr?seed=2.db" in one_error(ppo_tuner("list", "--storage", "lr?seed=2.db")[2])
    status, told, _ = ppo_tuner("export", made, "--format", "optuna", "-o", "a?b%.db", "--storage", "lr?seed=1.db")
    assert status == 0 and (own_folder / "a?b%.db").is_file()
    url = re.findall("sqlite:///[^\\s:]+", told)[0]
    assert optuna.get_all_study_names(url) == [made]
