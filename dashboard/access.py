"""Who may launch and order: whoever has this process's token, unless the dashboard is read-only.

Reading needs no token. What acts asks here itself, so that nothing rests on a button that is hidden: other pages on
this machine, too, can open a connection to the server.
"""

import hmac
import ipaddress
import os
import secrets
import sys
import threading
from collections.abc import Callable

import streamlit as st

from ppo_core.errors import PPOTunerError
from tuner.environment import READ_ONLY_VARIABLE, TOKEN_PARAMETER, TOKEN_VARIABLE

_GIVEN = "permission"
"""Where a browser's session keeps the token that it was given."""
_lock = threading.Lock()
_token: str | None = None


class NotPermitted(PPOTunerError, PermissionError):
    """Something that acts was asked for without the right to it."""


def token() -> str:
    """Return this process's token: the one that `ppo-tuner dashboard` made, else a new one, told on the terminal."""
    global _token
    with _lock:
        if _token is None:
            # Taken out of the environment: what this process starts must not inherit it.
            _token = os.environ.pop(TOKEN_VARIABLE, "") or _told(secrets.token_urlsafe(24))
        return _token


def is_read_only() -> bool:
    """Return whether nothing may be launched or ordered from here."""
    return os.environ.get(READ_ONLY_VARIABLE, "") not in ("", "0")


def is_local() -> bool:
    """Return whether the server listens on this machine alone."""
    address = st.get_option("server.address") or ""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def take_from_link() -> None:
    """Move a token from the link to the session, so that no link that is copied from here holds it."""
    if TOKEN_PARAMETER in st.query_params:
        give(st.query_params[TOKEN_PARAMETER])
        del st.query_params[TOKEN_PARAMETER]


def give(text: str) -> None:
    """Keep what this browser's session was given for a token."""
    st.session_state[_GIVEN] = text


def given() -> str:
    """Return what this browser's session was given for a token; empty where nothing was."""
    return str(st.session_state.get(_GIVEN, ""))


def fits(given: str) -> bool:
    """Return whether this is the token, in a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode(errors="replace"), token().encode())


def require_order(given: str) -> None:
    """Raise NotPermitted where no order may be placed with what was given for a token."""
    if is_read_only():
        raise NotPermitted("this dashboard is read-only; start one without --read-only to give orders")
    if not fits(given):
        what = "is not this server's" if given else "is missing"
        raise NotPermitted(f"the token {what}; it stands in the link that the dashboard printed on its terminal")


def require_launch(given: str) -> None:
    """Raise NotPermitted where nothing may be launched or ended with what was given for a token."""
    require_order(given)
    if not is_local():
        raise NotPermitted("launching is off: this server listens beyond 127.0.0.1; use ppo-tuner run there")


def may_order() -> bool:
    """Return whether this browser's session may give orders: what acts asks again."""
    return _allows(require_order)


def may_launch() -> bool:
    """Return whether this browser's session may launch: what acts asks again."""
    return _allows(require_launch)


def _allows(require: Callable[[str], None]) -> bool:
    try:
        require(given())
    except NotPermitted:
        return False
    return True


def _told(made: str) -> str:
    print(f"dashboard: token for launching and orders: {made}", file=sys.stderr, flush=True)
    return made
