"""Pushing a trained model to the Hugging Face Hub; whether that can work is checked before training. No torch."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core.errors import ConfigError, PPOTunerError

FLAG = "--push_to_hub"


@dataclass(frozen=True)
class Push:
    """What the flags say of a push."""

    repo: str | None
    """`user/name`, or a name; None: the name of the run's folder."""
    private: bool | None
    """None: what the user's or the organisation's default is."""


@dataclass(frozen=True)
class HubRepo:
    """A model repository on the hub."""

    id: str
    """`user/name`."""
    private: bool | None = None

    def command(self, folder: Path) -> str:
        """Return the command that pushes a folder to it."""
        private = ["--private"] if self.private else []
        return shlex.join(["hf", "upload", self.id, str(folder), ".", *private])


def checked(push: Push, name: str) -> HubRepo:
    """Return the repository to push to; `name` is that of one that the flags do not name.

    Raises:
        ConfigError: the name is not allowed, or there is no token that may write.
        PPOTunerError: the hub cannot be reached, or refuses the token.
    """
    from huggingface_hub import HfApi, get_token  # which takes a while to import
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    wanted = push.repo or name
    try:
        validate_repo_id(wanted)
    except HFValidationError as error:
        raise ConfigError(f"{FLAG} {wanted} is not allowed: {_line(error)}") from None
    if get_token() is None:
        raise ConfigError(
            f"{FLAG} needs a token of the hub that may write: log in with `hf auth login`, or set HF_TOKEN"
        )
    with _refusals(f"{FLAG}, before the training:"):
        user: dict[str, Any] = HfApi().whoami()
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError(f"{FLAG}: the token of the hub may only read; make one that may write, and log in with it")
    return HubRepo(wanted if "/" in wanted else f"{user['name']}/{wanted}", push.private)


def make(repo: HubRepo) -> None:
    """Make the repository if there is none.

    Raises:
        PPOTunerError: the hub cannot be reached, or refuses: no right to it, or its name is not allowed.
    """
    from huggingface_hub import HfApi

    with _refusals(f"{FLAG}, before the training: the repository {repo.id} cannot be made:"):
        HfApi().create_repo(repo.id, private=repo.private, exist_ok=True)


def why_not(repo: HubRepo) -> str:
    """Return why a push would fail now, in one line; empty: it would not. An interrupted run resumes all the same."""
    try:
        make(checked(Push(repo.id, repo.private), repo.id))
    except PPOTunerError as error:
        return str(error)
    return ""


def upload(repo: HubRepo, folder: Path, message: str) -> str:
    """Push a model's folder, and return the address of its repository.

    Raises:
        PPOTunerError: it did not arrive; the message says where the model is, and how to push it later.
    """
    from huggingface_hub import HfApi

    later = f"the model stays in {folder}; push it later with: {repo.command(folder)}"
    with _quiet(), _refusals(f"pushing the model to {repo.id} failed:", f"; {later}"):
        api = HfApi()
        api.upload_folder(repo_id=repo.id, folder_path=folder, commit_message=message)
        return f"{api.endpoint}/{repo.id}"


@contextmanager
def _refusals(before: str, after: str = "") -> Iterator[None]:
    """Raise whatever the hub's own libraries raise as one line, with what stands before and after the reason."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        meaning = {401: "the token is not valid", 403: "the token has no right to it"}.get(status)
        said = error.server_message or _line(error)
        reason = f"the hub refuses ({status}): {f'{meaning}: ' if meaning else ''}{said}"
        raise PPOTunerError(f"{before} {reason}{after}") from error
    except PPOTunerError:
        raise
    except ValueError as error:  # what is wrong with the card's metadata
        raise PPOTunerError(f"{before} {_line(error)}{after}") from error
    except Exception as error:  # connections raise what libraries below the hub's own define
        raise PPOTunerError(f"{before} the hub cannot be reached: {_line(error)}{after}") from error


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the hub's own bars and notes from running into our lines."""
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    level, had_bars = logging.get_verbosity(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            enable_progress_bars()
