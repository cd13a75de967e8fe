"""Who may act: the token, read-only, and a server that is for this machine alone."""

import ast
import hmac
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import dashboard
from dashboard import permission
from dashboard.permission import NotPermitted
from tuner.commands.dashboard import READ_ONLY_VARIABLE, TOKEN_VARIABLE

TOKEN = "the token of these tests"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not asked for its token yet, and listens on this machine alone."""
    monkeypatch.setattr(permission, "_token", None)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.delenv(READ_ONLY_VARIABLE, raising=False)
    listens_at(monkeypatch, "127.0.0.1")


def listens_at(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.setattr(st, "get_option", lambda name: address if name == "server.address" else None)


def test_the_token_is_the_one_that_was_handed_over_and_is_handed_to_nobody_else() -> None:
    assert permission.token() == TOKEN
    assert TOKEN_VARIABLE not in os.environ
    permission.require_order(TOKEN)
    permission.require_launch(TOKEN)


def test_a_process_that_was_given_none_makes_one_and_tells_it_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    made = permission.token()
    assert len(made) >= 32 and permission.token() == made
    assert capsys.readouterr().err == f"dashboard: token for launching and orders: {made}\n"


@pytest.mark.parametrize("given", ["", "x", TOKEN[:-1], f"{TOKEN} ", TOKEN.upper(), "ü\udcff"])
@pytest.mark.parametrize("require", [permission.require_order, permission.require_launch])
def test_nothing_but_the_token_permits(require: Callable[[str], None], given: str) -> None:
    with pytest.raises(
        NotPermitted, match=r"the token is (missing|not this server's); it stands in the link"
    ) as caught:
        require(given)
    assert TOKEN not in str(caught.value)


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or True)
    assert permission.fits("anything")
    assert compared == [(b"anything", TOKEN.encode())]


def test_read_only_refuses_the_right_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    for require in (permission.require_order, permission.require_launch):
        with pytest.raises(NotPermitted, match="read-only"):
            require(TOKEN)


@pytest.mark.parametrize("address", [None, "", "0.0.0.0", "::", "192.168.1.5", "example.org", "unix:///tmp/socket"])
def test_launching_is_off_beyond_this_machine_and_orders_are_not(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    listens_at(monkeypatch, address)
    with pytest.raises(NotPermitted, match=r"launching is off: this server listens beyond 127\.0\.0\.1"):
        permission.require_launch(TOKEN)
    permission.require_order(TOKEN)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_every_address_of_this_machine_alone_permits_launching(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    listens_at(monkeypatch, address)
    permission.require_launch(TOKEN)


def link_page() -> None:
    import streamlit as st

    from dashboard import permission

    permission.take_from_link()
    st.text("may" if permission.may_order() else "may not")


@pytest.mark.parametrize(("token", "told"), [(TOKEN, "may"), ("another", "may not")])
def test_a_token_in_the_link_moves_to_the_session(token: str, told: str) -> None:
    app = AppTest.from_function(link_page)
    app.query_params.update({"token": token, "study": "reviews"})
    app.run()
    assert [text.value for text in app.text] == [told]
    assert app.query_params == {"study": ["reviews"]} or app.query_params == {"study": "reviews"}
    app.run()
    assert [text.value for text in app.text] == [told]


def test_another_session_has_no_share_in_it() -> None:
    first = AppTest.from_function(link_page)
    first.query_params["token"] = TOKEN
    assert [text.value for text in first.run().text] == ["may"]
    assert [text.value for text in AppTest.from_function(link_page).run().text] == ["may not"]


def test_nothing_of_the_dashboard_reads_pickles_or_draws_html_of_others() -> None:
    """Names in the source; `st.html` may draw what the dashboard itself wrote."""
    forbidden = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle", "read_pickle", "to_pickle"}
    for path in Path(dashboard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            names |= {node.attr} if isinstance(node, ast.Attribute) else set()
            names |= {node.arg or ""} if isinstance(node, ast.keyword) else set()
            found = names & (forbidden | {"unsafe_allow_html", "persist", "allow_pickle", "shell", "eval", "exec"})
            assert not found, f"{path}: {found}"
