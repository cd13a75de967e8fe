"""B responses to score, as the kinds of reward see them and as their errors name them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_core.task import Prompt

SHOWN = 60
"""Most characters of a prompt, a response or an answer in an error."""
MESSAGES = "messages"
"""The column that chats stand under."""


def cut(value: object) -> str:
    """Return the start of a value, quoted as Python writes it."""
    text = repr(value[:SHOWN]) if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def one_line(error: BaseException) -> str:
    """Return an error's class and the start of its message, without line breaks."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}" if message else type(error).__name__


def column_names(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Return every column that a prompt has, in the order of first sight; `messages` where one is a chat."""
    names: dict[str, None] = {}
    for prompt in prompts:
        names |= dict.fromkeys(prompt.columns)
        if prompt.messages is not None:
            names[MESSAGES] = None
    return tuple(names)


@dataclass(frozen=True)
class Batch:
    """B prompts, their responses, the texts of the responses' tokens, and which responses ended by themselves."""

    prompts: Sequence[Prompt]
    responses: Sequence[str]
    tokens: Sequence[Sequence[str]]
    ended: Sequence[bool]
    first: int = 0
    """Where the first row stands in the batch that this one was cut from."""

    def __len__(self) -> int:
        return len(self.responses)

    def rows(self, start: int, stop: int) -> "Batch":
        """Return some of the rows; errors go on naming them as rows of the whole."""
        part = slice(start, stop)
        return Batch(self.prompts[part], self.responses[part], self.tokens[part], self.ended[part], self.first + start)

    @property
    def texts(self) -> list[str]:
        """[B]: the prompts as the policy read them."""
        return [prompt.text for prompt in self.prompts]

    def sample(self, row: int) -> str:
        """Return how an error names a row: its index and the start of prompt and response."""
        return f"sample {self.first + row} (prompt {cut(self.prompts[row].text)}, response {cut(self.responses[row])})"

    def columns(self, known: Sequence[str] = ()) -> dict[str, list[Any]]:
        """Return [B] values by column, of the rows' columns and the `known` ones; None where a row lacks one."""
        names = dict.fromkeys((*known, *column_names(self.prompts)))
        return {name: [_value(prompt, name) for prompt in self.prompts] for name in names}


def _value(prompt: Prompt, name: str) -> Any:
    if name == MESSAGES and prompt.messages is not None:
        return [dict(message) for message in prompt.messages]
    return prompt.columns.get(name)
