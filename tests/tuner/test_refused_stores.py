"""What is not a store, or not one that can be read: refused in one line, and left as it is."""

import sqlite3
import warnings
from pathlib import Path

import pytest
from sqlalchemy import text

from ppo_core.errors import StoreError
from tests.tuner import stores
from tuner.store import Store
from tuner.store.schema import SCHEMA_VERSION

pytestmark = pytest.mark.slow


def test_what_is_no_store_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    for name, make, message in (
        ("garbage", lambda path: path.write_bytes(b"\x00garbage" * 999), "file is not a database$"),
        ("cut off", cut_off_store, "database disk image is malformed$"),
        ("of others", lambda path: other_database(path, "DELETE"), "is not a PPO Tuner store; name another place"),
        ("with a log", lambda path: other_database(path, "WAL"), "is not a PPO Tuner store; name another place"),
        (
            "newer",
            lambda path: versioned_store(path, "99"),
            f"version 99; .* reads version {SCHEMA_VERSION}: name another store",
        ),
        (
            "older",
            lambda path: versioned_store(path, "7"),
            f"version 7; .* reads version {SCHEMA_VERSION}: name another store",
        ),
        ("no version", lambda path: versioned_store(path, "x"), "is damaged: it has no schema version"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        make(folder / "store.db")
        before = files(folder)
        for create in (False, True):
            with pytest.raises(StoreError, match=message) as caught:
                Store.open(str(folder / "store.db"), create=create)
            assert "\n" not in str(caught.value)
            assert files(folder) == before


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def cut_off_store(path: Path) -> None:
    Store.open(str(path), create=True).close()
    path.write_bytes(path.read_bytes()[:8192])


def other_database(path: Path, mode: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("CREATE TABLE guests (name)")
    connection.close()


def versioned_store(path: Path, version: str) -> None:
    store = Store.open(str(path), create=True)
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE ppo_meta SET value = :version"), {"version": version})
    store.close()


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("mysql://u:secret@host/db", "mysql is not supported"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("no url://", "is not a database URL"),
        ("postgres ql://u:secret@host/db", "is not a database URL"),
        ("postgresql://u:secret@host:port/db", "is not a database URL"),
        ("postgres://u:secret@host/db?sslpassword=secret", "postgres is not supported; use sqlite or postgresql"),
        ("postgresql+nobodys://u:secret@host/db", "names no known driver"),
        ("postgresql+pg8000://u:secret@host/db", r'needs a driver: pip install "ppo-tuner\[postgres\]"'),
        ("postgresql://u:s%65cret@127.0.0.1:1/db", "127.0.0.1.*refused"),
        ("postgresql://u@127.0.0.1:1/db?password=secret&application_name=x", "127.0.0.1.*refused"),
        ("postgresql://u:secret@127.0.0.1:1/db?nothing=1", 'invalid connection option "nothing"'),
        ("postgresql://u:secret@nohost.invalid/db", "nohost.invalid"),
        ("sqlite:///{folder}", "is a folder; name a file in it"),
        ("sqlite:/x.db", "is not a database URL"),
        ("sqlite:x.db", "is not a database URL"),
        ("sqlite:///file::memory:?uri=true", "names no file"),
        ("sqlite:///file:x?mode=memory&cache=shared&uri=true", "names no file"),
        ("{folder}/new/deep/" + "x" * 300, "File name too long"),
        ("/dev/null", "/dev/null is not a regular file"),
        ("sqlite:////proc/nothing/store.db", "cannot use the store /proc/nothing: "),
        ("sqlite:///{folder}/lr?seed=1.db", r"what follows its \? is not allowed; a file with \? in its name"),
        ("sqlite:///{folder}/lr?timeout=x.db", r"what follows its \? is not allowed; a file with \? in its name"),
        ("sqlite://host/lr.db", "names no known driver: Invalid SQLite URL"),
        ("sqlite:///file:{folder}/none.db?mode=ro&uri=true", "unable to open database file"),
    ],
)
def test_a_url_that_is_no_store_is_refused_without_its_password(storage: str, message: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(), pytest.raises(StoreError, match=message) as caught:
        warnings.simplefilter("error")
        Store.open(storage.format(folder=tmp_path), create=True)
    chained: BaseException | None = caught.value
    while chained is not None:
        assert "secret" not in str(chained) and "s%65cret" not in str(chained)
        chained = chained.__cause__ or (None if chained.__suppress_context__ else chained.__context__)
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_server_refuses_a_wrong_database_and_a_wrong_user(tmp_path: Path) -> None:
    url = stores.empty("postgresql", tmp_path)
    with pytest.raises(StoreError, match=r'FATAL:  database "nothing" does not exist$'):
        Store.open(url.replace("/postgres?", "/nothing?"))
    with pytest.raises(StoreError, match=r'FATAL:  role "u" does not exist$') as caught:
        Store.open(url.replace("postgres:@", "u:secret@"))
    assert "secret" not in str(caught.value)
