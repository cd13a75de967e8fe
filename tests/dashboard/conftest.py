"""What the dashboard's tests share: a browser, a server's folder and study, and pages kept apart from each other."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from dashboard import access
from tests.chromium import NoBrowser
from tests.dashboard import browser as real
from tests.dashboard import fake_store
from tests.dashboard.control_page import COURSES, TOKEN
from tests.dashboard.fake_store import STUDY
from tuner.environment import READ_ONLY_VARIABLE
from tuner.judge.results import StudyView, read_study
from tuner.store import Store


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; without one its tests are skipped, and counted at the end."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(real.chromium())
        except NoBrowser as error:
            pytest.skip(str(error))
        yield started


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole fake study, which no test changes."""
    path = tmp_path_factory.mktemp("store") / "store.db"
    fake_store.build(path).close()
    return path


@pytest.fixture(scope="session")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake study with a budget, which no test changes."""
    path = tmp_path_factory.mktemp("bounded") / "store.db"
    fake_store.build_bounded(path).close()
    return path


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`page` leaves its storage."""
    monkeypatch.setenv("PPO_TUNER_STORAGE", "sqlite:///none.db")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's folder; the server has a token."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(access, "_token", TOKEN)
    monkeypatch.delenv(READ_ONLY_VARIABLE, raising=False)
    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{tmp_path / 'store.db'}")
    return tmp_path


@pytest.fixture
def store(folder: Path) -> Store:
    """A study with a trial that completed, one that failed and one that was interrupted; nothing runs it."""
    return fake_store.build(folder / "store.db", courses=COURSES)


@pytest.fixture
def view(store: Store) -> StudyView:
    return read_study(store, STUDY)
