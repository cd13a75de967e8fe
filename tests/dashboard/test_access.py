"""Who may place orders: the token and read-only; and the command that starts a server with safe settings."""

import ast
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import streamlit as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from streamlit.testing.v1 import AppTest

import dashboard
from dashboard import access
from dashboard.access import NotPermitted
from tuner.cli import dashboard as command
from tuner.cli import main as cli
from tuner.environment import READ_ONLY_VARIABLE, TOKEN_VARIABLE

TOKEN = "the token of these tests"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not asked for its token yet."""
    monkeypatch.setattr(access, "_token", None)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.delenv(READ_ONLY_VARIABLE, raising=False)


def test_the_token_is_the_one_handed_over_and_is_handed_to_nobody_else() -> None:
    assert access.token() == TOKEN
    assert TOKEN_VARIABLE not in os.environ
    access.require_order(TOKEN)


def test_a_process_that_was_given_none_makes_one_and_tells_it_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    made = access.token()
    assert len(made) >= 32 and access.token() == made
    assert capsys.readouterr().err == f"dashboard: token for orders: {made}\n"


@pytest.mark.parametrize("given", ["", "x", TOKEN[:-1], f"{TOKEN} ", TOKEN.upper(), "ü\udcff"])
def test_nothing_but_the_token_permits(given: str) -> None:
    with pytest.raises(NotPermitted, match=r"the token is (missing|not this server's); open the link") as caught:
        access.require_order(given)
    assert TOKEN not in str(caught.value)


def test_read_only_refuses_the_right_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    with pytest.raises(NotPermitted, match="read-only"):
        access.require_order(TOKEN)


def link_page() -> None:
    import streamlit as st

    from dashboard import access

    st.text("may" if access.may_order() else "may not")


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


# The cookie


def kept() -> TestClient:
    """A browser's side of a server that shows the address it was asked for."""

    async def shown(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(request.url))

    app = Starlette(routes=[Route("/{path:path}", shown)], middleware=[Middleware(access.TokenKeeper)])
    return TestClient(app, base_url="http://127.0.0.1:8501", follow_redirects=False)


def test_the_right_token_becomes_a_cookie_and_leaves_the_address() -> None:
    answer = kept().get("/control", params={"study": "a b", "token": TOKEN, "trial": ["1", "2"]})
    assert (answer.status_code, answer.headers["location"]) == (303, "/control?study=a+b&trial=1&trial=2")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(answer.headers["set-cookie"].split("; "))
    assert "max-age" not in answer.headers["set-cookie"].lower(), "it ends with the browser's session"
    assert (answer.headers["cache-control"], answer.headers["referrer-policy"]) == ("no-store", "no-referrer")


def test_a_read_only_server_keeps_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    assert "set-cookie" not in kept().get("/", params={"token": TOKEN}).headers


def test_the_redirect_stays_on_this_server() -> None:
    answer = kept().get("http://127.0.0.1:8501//evil.example/x", params={"token": TOKEN})
    assert answer.headers["location"] == "/evil.example/x"


def test_a_typed_token_is_kept_by_a_code_that_works_once() -> None:
    script, client = access.cookie_script(), kept()
    address = script.partition('"')[2].partition('"')[0]
    assert TOKEN not in script
    assert "set-cookie" in client.get(address).headers
    assert "set-cookie" not in kept().get(address).headers


@pytest.mark.parametrize(
    ("origin", "permits"),
    [("http://127.0.0.1:8501", True), ("http://127.0.0.1:9999", False), ("http://evil.example", False), (None, False)],
)
def test_the_cookie_counts_only_for_this_servers_own_pages(
    monkeypatch: pytest.MonkeyPatch, origin: str | None, permits: bool
) -> None:
    """Browsers send a host's cookies to and from all of its ports."""
    headers = {"Host": "127.0.0.1:8501"} | ({"Origin": origin} if origin else {})
    context = SimpleNamespace(headers=headers, cookies={access._cookie_name(): TOKEN})
    monkeypatch.setattr(st, "context", context)
    assert access.may_order() is permits


def test_the_dashboard_reads_no_pickles_draws_no_html_and_starts_nothing() -> None:
    """Names in the source; `st.html` may draw what the dashboard itself wrote."""
    forbidden = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle", "read_pickle", "to_pickle"}
    forbidden |= {
        "subprocess",
        "multiprocessing",
        "Popen",
        "system",
        "popen",
        "execve",
        "posix_spawn",
        "kill",
        "killpg",
    }
    for path in Path(dashboard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            names |= {node.attr} if isinstance(node, ast.Attribute) else set()
            names |= {node.arg or ""} if isinstance(node, ast.keyword) else set()
            found = names & (forbidden | {"unsafe_allow_html", "persist", "allow_pickle", "shell", "eval", "exec"})
            assert not found, f"{path}: {found}"


# The command


class Executed(Exception):
    """In the place of becoming the server."""


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Run the command; return the arguments and the environment of the server that it would become."""

    def execve(_path: str, arguments: list[str], environment: dict[str, str]) -> None:
        raise Executed(arguments, environment)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv(TOKEN_VARIABLE)

    def run(*flags: str) -> tuple[list[str], dict[str, str]]:
        with pytest.raises(Executed) as caught:
            cli.main(["dashboard", "--storage", "sqlite:///made.db", *flags])
        arguments, environment = caught.value.args
        return arguments, environment

    return run


def test_the_command_hands_the_token_over_unseen_and_prints_it_in_the_link(
    become: Callable[..., tuple[list[str], dict[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, environment = become()
    printed = re.search(r"dashboard: http://127\.0\.0\.1:\d+/\?token=([\w-]{32}) ", capsys.readouterr().out)
    assert printed is not None and environment[TOKEN_VARIABLE] == printed[1]
    assert not any(printed[1] in argument for argument in arguments)
    assert READ_ONLY_VARIABLE not in environment
    assert become()[1][TOKEN_VARIABLE] != printed[1]


def test_a_read_only_server_has_no_token(
    become: Callable[..., tuple[list[str], dict[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, environment = become("--read-only")
    assert environment[READ_ONLY_VARIABLE] == "1" and TOKEN_VARIABLE not in environment
    assert "token" not in capsys.readouterr().out


def test_a_plain_streamlit_run_has_the_same_safe_settings() -> None:
    arguments = command.streamlit_command(8501)[3:]
    flags: dict[str, list[str]] = {}
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        flags.setdefault(name.removeprefix("--"), []).append(value)
    config = tomllib.loads((Path(__file__).parents[2] / ".streamlit" / "config.toml").read_text())
    written = {f"{section}.{key}": value for section, values in config.items() for key, value in values.items()}
    of_one_run = {"server.port", "server.corsAllowedOrigins"}
    assert flags.keys() - of_one_run == written.keys()
    for name, value in written.items():
        assert flags[name] == (
            value if isinstance(value, list) else [str(value).lower() if value in (True, False) else value]
        )
    assert written["server.address"] == "127.0.0.1" and written["server.allowedHosts"] == ["127.0.0.1", "localhost"]
