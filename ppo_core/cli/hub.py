"""Push a trained model to the Hugging Face Hub. The repository is created before training. Never imports torch."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ppo_core.errors import ConfigError, PPOTunerError, first_line

FLAG = "--push_to_hub"


@dataclass(frozen=True)
class Push:
    """A requested push."""

    repo: str | None
    """`user/name`, or a name; None: the name of the run's folder."""
    private: bool | None
    """None: the user's or the organisation's default."""


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


def create(push: Push, name: str) -> HubRepo:
    """Create the repository unless it exists, and return it; `name` is used if the flags name none.

    Raises:
        ConfigError: the name is not allowed, or there is no token.
        PPOTunerError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi, get_token  # slow to import
    from huggingface_hub.errors import HFValidationError

    if get_token() is None:
        raise ConfigError(f"{FLAG} needs a token that may write: log in with `hf auth login`, or set HF_TOKEN")
    repo = push.repo or name
    try:
        with _one_line(f"{FLAG}: cannot create the repository {repo}"):
            return HubRepo(HfApi().create_repo(repo, private=push.private, exist_ok=True).repo_id, push.private)
    except HFValidationError as error:
        raise ConfigError(f"{FLAG} {repo} is not allowed: {first_line(error)}") from None


def upload(repo: HubRepo, folder: Path, message: str) -> str:
    """Upload a model's folder and return its repository's address.

    Raises:
        PPOTunerError: it did not arrive; the message says where the model is, and how to push it later.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # progress bars would mix with our lines
    try:
        with _one_line(f"pushing the model to {repo.id} failed"):
            api = HfApi()
            api.upload_folder(repo_id=repo.id, folder_path=folder, commit_message=message)
            return f"{api.endpoint}/{repo.id}"
    except PPOTunerError as error:
        command = repo.command(folder)
        raise PPOTunerError(f"{error}; the model stays in {folder}; push it later with: {command}") from error


@contextmanager
def _one_line(failure: str) -> Iterator[None]:
    """Convert errors of the hub's library, or of the connection, to a one-line PPOTunerError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError:
        raise
    except HfHubHTTPError as error:
        answer = error.server_message or first_line(error)
        raise PPOTunerError(f"{failure}: the hub refuses ({error.response.status_code}): {answer}") from error
    except Exception as error:  # connections raise classes of libraries below the hub's own
        raise PPOTunerError(f"{failure}: {first_line(error)}") from error
