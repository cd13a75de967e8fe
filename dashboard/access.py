"""Who may place orders: whoever has this server's token, unless the dashboard is read-only.

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

_GIVEN = "permission"
"""Session key of the token that was typed in."""
_lock = threading.Lock()
_token: str | None = None
_codes: set[str] = set()
"""Each stands for the token once."""


class NotPermitted(PPOTunerError, PermissionError):
    """An action was requested without the right to it."""


def token() -> str:
    """Return this server's token: the one from `ppo-tuner dashboard`, else a new one, printed on the terminal."""
    global _token
    with _lock:
        if _token is None:
            # Taken out of the environment, which any process that a library starts would inherit.
            _token = os.environ.pop(TOKEN_VARIABLE, "") or _printed(secrets.token_urlsafe(24))
        return _token


def is_read_only() -> bool:
    """Return whether no orders may be placed from here."""
    return os.environ.get(READ_ONLY_VARIABLE, "") not in ("", "0")


class TokenKeeper:
    """Answers a request whose address has the right token with the same address without it, and the token's cookie."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and not is_read_only():
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            if any(name == TOKEN_PARAMETER and _stands_for_token(value) for name, value in query):
                await _without_token(scope["path"], query)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _stands_for_token(value: str) -> bool:
    if value in _codes:
        _codes.discard(value)
        return True
    return fits(value)


def _without_token(path: str, query: list[tuple[str, str]]) -> RedirectResponse:
    rest = urlencode([(name, value) for name, value in query if name != TOKEN_PARAMETER])
    address = "/" + path.lstrip("/")  # two slashes in front would name another host
    answer = RedirectResponse(f"{address}?{rest}" if rest else address, status_code=303)
    answer.headers.update({"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
    answer.set_cookie(_cookie_name(), token(), path="/", httponly=True, samesite="strict")
    return answer


def _cookie_name() -> str:
    """Return the cookie's name, which has the port: cookies of one host are shared by all of its ports."""
    return f"ppo_tuner_token_{st.get_option('server.port')}"


def give(text: str) -> None:
    """Keep what was typed as the token for this browser's session."""
    st.session_state[_GIVEN] = text


def keep_given() -> str:
    """Return a script that has the browser fetch the cookie for the token that was typed, by a code that works once."""
    code = secrets.token_urlsafe(24)
    _codes.add(code)
    return f'<script>fetch("/?{TOKEN_PARAMETER}={code}")</script>'


def given() -> str:
    """Return the token that this browser's session has: typed, from the address, or from its cookie; else empty."""
    if TOKEN_PARAMETER in st.query_params:  # not the right one, or this server has no `TokenKeeper`
        give(st.query_params.pop(TOKEN_PARAMETER))
    return str(st.session_state.get(_GIVEN, "")) or _from_cookie()


def _from_cookie() -> str:
    headers = st.context.headers
    if urlsplit(headers.get("Origin") or "").netloc != headers.get("Host"):
        return ""  # a page of another server on this host, which the browser sends the cookie for, too
    return st.context.cookies.get(_cookie_name(), "")


def fits(given: str) -> bool:
    """Return whether this is the token, in a time that does not depend on how much of it is right."""
    return hmac.compare_digest(given.encode(errors="replace"), token().encode())


def require_order(given: str) -> None:
    """Raise NotPermitted where this token does not permit placing orders."""
    if is_read_only():
        raise NotPermitted("this dashboard is read-only; start one without --read-only to act on studies")
    if not fits(given):
        what = "is not this server's" if given else "is missing"
        raise NotPermitted(f"the token {what}; open the link that the dashboard printed on its terminal")


def may_order() -> bool:
    """Return whether this browser's session may place orders. The action itself checks again."""
    try:
        require_order(given())
    except NotPermitted:
        return False
    return True


def _printed(made: str) -> str:
    print(f"dashboard: token for orders: {made}", file=sys.stderr, flush=True)
    return made
