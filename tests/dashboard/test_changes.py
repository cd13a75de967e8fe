"""What to change in a trial: on the page of a trial, with a button that asks before it orders."""

from pathlib import Path

import pytest

from dashboard import access
from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import STUDY
from tests.dashboard.shown import page
from tuner.environment import READ_ONLY_VARIABLE
from tuner.store import Order, Store

TOKEN = "a token"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake study, on a server that has a token; trial 2 was pruned for its KL."""
    monkeypatch.setattr(access, "_token", TOKEN)
    monkeypatch.delenv(READ_ONLY_VARIABLE, raising=False)
    fake_store.build(tmp_path / "store.db").close()
    return tmp_path / "store.db"


def orders(path: Path) -> list[Order]:
    store = Store.open(f"sqlite:///{path}")
    try:
        return store.orders(store.study(STUDY))
    finally:
        store.close()


def test_each_change_is_told_with_its_command(path: Path) -> None:
    app = page("trial", path, n="2")
    assert "What to change" in shown.subheaders(app)
    assert any(one.value.startswith("**KL too high.** ") and " Try " in one.value for one in app.markdown)
    assert any(code.startswith(f"ppo-tuner enqueue {STUDY} --set ") for code in shown.codes(app))
    assert not [button for button in app.button if button.label.startswith("Add to queue")], (
        "without the token it only tells"
    )
    fine = page("trial", path, n="0")
    assert not [name for name in shown.subheaders(fine) if name.startswith("What to change")]


def test_the_button_asks_and_then_orders_the_trial(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "session_token", lambda: TOKEN)
    app = page("trial", path, n="2")
    button = next(button for button in app.button if button.label.startswith("Add to queue: "))
    button.click()
    app = shown.run(app)
    assert orders(path) == [], "it asks first"
    confirm = next(button for button in app.button if button.label == "Do it")
    confirm.click()
    shown.run(app)
    (order,) = orders(path)
    assert order.kind == "enqueue" and order.arguments["label"].startswith("trial 2, ")
