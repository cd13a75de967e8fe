"""Permission to place orders: whoever has this server's token, unless the dashboard is read-only.

Reading needs no token. Every action checks the token itself, so that nothing depends on a button being hidden: other
pages on this machine can also open a connection to the server.

The link that the terminal shows carries the token. `TokenKeeper` moves it into a cookie before the page loads, so that
the address never shows it, a reload does not ask for it, and no script can read it. The cookie ends with the browser's
session, is sent by this site's own pages only, and counts only where the request comes from this very server.
"""

import hmac
import os
import secrets
import sys
import threading
from urllib.parse import parse_qsl, urlencode, urlsplit

import streamlit as st
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ppo_core.errors import PPOTunerError
from tuner.environment import READ_ONLY_VARIABLE, TOKEN_PARAMETER, TOKEN_VARIABLE

_TYPED = "permission"
"""Session key of the token that was typed in."""
_lock = threading.Lock()
_token: str | None = None
_codes: set[str] = set()
"""One-time codes, each accepted once in place of the token."""


class NotPermitted(PPOTunerError, PermissionError):
    """An action was requested without the right to it."""


def token() -> str:
    """Return this server's token: the one from `ppo-tuner dashboard`, else a new one, printed on the terminal."""
    global _token
    with _lock:
        if _token is None:
            # Removed from the environment, so that child processes do not inherit it.
            _token = os.environ.pop(TOKEN_VARIABLE, "")
            if not _token:
                _token = secrets.token_urlsafe(24)
                print(f"dashboard: token for orders: {_token}", file=sys.stderr, flush=True)
        return _token


def is_read_only() -> bool:
    """Return whether no orders may be placed from here."""
    return os.environ.get(READ_ONLY_VARIABLE, "") not in ("", "0")


class TokenKeeper:
    """Middleware: replaces the right token in an address with a cookie, by a redirect."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and not is_read_only():
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            if any(name == TOKEN_PARAMETER and _is_accepted(value) for name, value in query):
                await _redirect(scope["path"], query)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_accepted(value: str) -> bool:
    if value in _codes:
        _codes.discard(value)
        return True
    return is_token(value)


def _redirect(path: str, query: list[tuple[str, str]]) -> RedirectResponse:
    """Return a redirect to the same address without the token, which sets the cookie."""
    rest = urlencode([(name, value) for name, value in query if name != TOKEN_PARAMETER])
    address = "/" + path.lstrip("/")  # two slashes in front would name another host
    response = RedirectResponse(f"{address}?{rest}" if rest else address, status_code=303)
    response.headers.update({"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
    response.set_cookie(_cookie_name(), token(), path="/", httponly=True, samesite="strict")
    return response


def _cookie_name() -> str:
    """Return the cookie's name. It contains the port, because cookies are shared by all ports of a host."""
    return f"ppo_tuner_token_{st.get_option('server.port')}"


def remember(text: str) -> None:
    """Remember the typed token for this browser session."""
    st.session_state[_TYPED] = text


def cookie_script() -> str:
    """Return a script that fetches the cookie for a typed token, with a one-time code."""
    code = secrets.token_urlsafe(24)
    _codes.add(code)
    return f'<script>fetch("/?{TOKEN_PARAMETER}={code}")</script>'


def session_token() -> str:
    """Return this session's token: typed, from the address, or from its cookie; empty if there is none."""
    if TOKEN_PARAMETER in st.query_params:  # a wrong token, or a server without `TokenKeeper`
        remember(st.query_params.pop(TOKEN_PARAMETER))
    if typed := st.session_state.get(_TYPED):
        return str(typed)
    headers = st.context.headers
    if urlsplit(headers.get("Origin") or "").netloc != headers.get("Host"):
        return ""  # another server on this host: the browser sends it the same cookie
    return st.context.cookies.get(_cookie_name(), "")


def is_token(text: str) -> bool:
    """Compare with the token in constant time."""
    return hmac.compare_digest(text.encode(errors="replace"), token().encode())


def require_order(text: str) -> None:
    """Raise NotPermitted unless `text` is the token and orders may be placed from here."""
    if is_read_only():
        raise NotPermitted("this dashboard is read-only; start one without --read-only to act on studies")
    if not is_token(text):
        problem = "is not this server's" if text else "is missing"
        raise NotPermitted(f"the token {problem}; open the link that the dashboard printed on its terminal")


def may_order() -> bool:
    """Return whether this browser's session may place orders. The action itself checks again."""
    try:
        require_order(session_token())
    except NotPermitted:
        return False
    return True
