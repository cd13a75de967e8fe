"""Where prompts come from, and how they are split: a declaration, checked when it is made."""

from dataclasses import dataclass

from ppo_core.errors import TaskError

PROMPT_COLUMNS = ("prompt", "query", "question", "instruction", "text", "messages")
"""Where no column is named, the first of these that the rows have is the prompt."""

SplitChoice = str | float | int | None
"""A split by name ("validation", "train[:90%]"), a share of the rows (0.1), a number of rows (256), or the default."""


@dataclass(frozen=True)
class PromptSource:
    """A dataset of prompts.

    Raises:
        TaskError: a field holds something that is not allowed; the message names it and says what is.
    """

    path: str
    """A .jsonl, .json, .csv, .tsv or .parquet file, a folder of such files, a folder that `datasets` saved, or a
    dataset's id on the hub."""
    config: str | None = None
    """Which of a hub dataset's configurations."""
    column: str | None = None
    """The column with the prompts, texts or chats; unset: the first of PROMPT_COLUMNS that is there."""
    train: SplitChoice = None
    """Unset: all that is in neither of the others."""
    eval: SplitChoice = None
    """Unset: the split called validation, else 256 rows, at most an eighth."""
    test: SplitChoice = None
    """Unset: the split called test, else 256 rows, at most an eighth."""
    seed: int = 0
    """Decides which rows a share or a number of rows takes."""
    max_prompt_tokens: int = 512
    """Rows with more are left out, and counted."""
    system: str | None = None
    """A system message for the chats that do not begin with one."""

    def __post_init__(self) -> None:
        for name in ("path", "config", "column", "system"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and (value is not None or name == "path"):
                raise TaskError(f"prompts: {name} = {value!r} is not allowed: a text")
        for name, least in (("seed", 0), ("max_prompt_tokens", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise TaskError(f"prompts: {name} = {value!r} is not allowed: a whole number from {least} on")
        choices = {name: getattr(self, name) for name in ("train", "eval", "test")}
        for name, choice in choices.items():
            if not _is_allowed(choice):
                raise TaskError(
                    f"prompts: {name} = {choice!r} is not allowed: a split's name, a share between 0 and 1, "
                    "or a number of rows from 1 on"
                )
        shares = {name: choice for name, choice in choices.items() if isinstance(choice, float)}
        if sum(shares.values()) > 1 + 1e-9:  # 0.7 + 0.2 + 0.1 is a little more than 1
            told = " + ".join(f"{name} {share:g}" for name, share in shares.items())
            raise TaskError(f"prompts: the shares {told} are not allowed: at most 1 together")

    @property
    def where(self) -> str:
        """The beginning of every error about these prompts."""
        return f'prompts "{self.path}"'


def _is_allowed(choice: object) -> bool:
    if isinstance(choice, bool):
        return False
    if isinstance(choice, str):
        return bool(choice.strip())
    if isinstance(choice, int):
        return choice >= 1
    return choice is None or (isinstance(choice, float) and 0 < choice < 1)
