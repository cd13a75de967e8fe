"""Prompts from a row's value: a text as it is, a chat under the tokenizer's chat template."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from ppo_core.errors import TaskError
from ppo_core.prompts.rows import Reason
from ppo_core.prompts.source import PromptSource
from ppo_core.task import Prompt

if TYPE_CHECKING:  # importing it loads torch
    from transformers import PreTrainedTokenizerBase

ANSWERED_ROLES = ("user", "tool")
"""Whose message the policy answers: a chat must end with one of theirs."""


class NoPromptError(Exception):
    """A row's value is no prompt; says the reason, and what exactly is wrong."""

    def __init__(self, reason: Reason, why: str = "") -> None:
        super().__init__(reason, why)
        self.reason: Reason = reason
        self.why = why


def make_prompt(
    value: Any, columns: Mapping[str, Any], source: PromptSource, tokenizer: "PreTrainedTokenizerBase"
) -> Prompt:
    """Return the prompt that `value` is; `columns` are the row's others.

    Raises:
        NoPromptError: it is none.
        TaskError: it is a chat, and the tokenizer has no chat template.
    """
    if isinstance(value, list):
        messages = _messages(value, source.system)
        return Prompt(_checked(_rendered(messages, source, tokenizer)), columns, messages)
    return Prompt(_checked(value), columns)


def is_chat(value: object) -> bool:
    """Whether `value` is a list of messages, each a mapping with a role."""
    return isinstance(value, list) and all(isinstance(message, Mapping) and "role" in message for message in value)


def _checked(text: Any) -> str:
    if text is None:
        raise NoPromptError("empty")
    if not isinstance(text, str):
        raise NoPromptError("unreadable", f"no text but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, or bytes that were no UTF-8
        raise NoPromptError("unreadable", "not UTF-8") from None
    if not text.strip():
        raise NoPromptError("empty")
    return text


def _messages(chat: list[Any], system: str | None) -> tuple[Mapping[str, str], ...]:
    if not chat:
        raise NoPromptError("empty")
    if not is_chat(chat):
        raise NoPromptError("unreadable", "no list of messages with role and content")
    messages = [{key: value for key, value in message.items() if value is not None} for message in chat]
    for message in messages:
        if not {"role", "content"} <= message.keys() or not all(isinstance(value, str) for value in message.values()):
            raise NoPromptError("unreadable", "a message with more or less than texts: role and content")
    role, content = messages[-1]["role"], messages[-1]["content"]
    if role not in ANSWERED_ROLES:
        raise NoPromptError("unreadable", f'the chat ends with "{role}", not with {" or ".join(ANSWERED_ROLES)}')
    if not content.strip():
        raise NoPromptError("empty")
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return tuple(messages)


def _rendered(
    messages: tuple[Mapping[str, str], ...], source: PromptSource, tokenizer: "PreTrainedTokenizerBase"
) -> str:
    if tokenizer.chat_template is None:
        raise TaskError(
            f"{source.where}: the prompts are chats, and the policy's tokenizer ({tokenizer.name_or_path}) has no chat "
            "template; set its chat_template and save it, or name a column of texts"
        )
    chat = [dict(message) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:  # templates refuse chats by raising, such as roles that do not alternate
        first_line = str(error).partition("\n")[0]
        raise NoPromptError("unreadable", f"the chat template says: {first_line}") from error
