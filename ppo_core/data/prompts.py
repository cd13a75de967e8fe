"""Prompts as declared, as rows, in splits and as token ids. Never imports torch.

A split is named, or drawn from the rows of train: each row has a random key, a pure function of the seed and its
position (Philox: Salmon et al. 2011), and the rows with the smallest keys are test, the next ones eval. So a row
left out, or added at the end, does not change the order of the others: it moves at most one row over each border
(and if sizes are shares, the borders move with the number of rows).

Only `encode`, `prompt_lengths` and `tokenised` decide about special tokens.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from jinja2 import TemplateError

from ppo_core.config import checks
from ppo_core.config.checks import Bounds
from ppo_core.data.task import Prompt
from ppo_core.errors import ConfigError, TaskError, first_line, nearest

if TYPE_CHECKING:  # importing it loads torch
    from transformers import PreTrainedTokenizerBase


PROMPT_COLUMNS = ("prompt", "query", "question", "instruction", "text", "messages")
"""Default prompt columns: the first of these that the rows have."""

DATE = "2024-07-26"
"""Date that chat templates print, the same on every day; what Llama's print where they are told none."""
NOW = "strftime_now"
"""Name of the function that templates call for the date."""
_DATED = re.compile(rf"{NOW}\(\s*(['\"])(.*?)\1\s*\)")
_OURS = ("conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict")

SplitChoice = str | float | int | None
"""A split by name ("validation", "train[:90%]"), a share of the rows (0.1), a number of rows (256), or the default; for
eval and test also a data file's path."""


@dataclass(frozen=True)
class PromptSource:
    """A dataset of prompts; ConfigError names a field whose value is not allowed, and the allowed ones."""

    path: str
    """A .jsonl, .json, .csv, .tsv or .parquet file, a folder of such files, a folder that `datasets` saved, or a
    dataset's id on the hub."""
    config: str | None = None
    """Configuration of a hub dataset."""
    column: str | None = None
    """Column with the prompts, texts or chats; unset: the first of prompt, query, question, instruction, text and
    messages that the rows have."""
    train: SplitChoice = None
    """Prompts to train on; unset: all rows in neither of the others."""
    eval: SplitChoice = None
    """Prompts to judge trials on, all of them at each evaluation; unset: the split called validation, else 256 rows, at
    most an eighth."""
    test: SplitChoice = None
    """Prompts used once, for the answer and by `confirm`; unset: the split called test, else 256 rows, at most an
    eighth."""
    seed: int = 0
    """Seed of the random splits."""
    max_prompt_tokens: int = 512
    """Most tokens of a prompt, 512 unless given; longer rows are left out, and counted."""
    system: str | None = None
    """System message of chats that begin without one."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`; its `strftime_now` is the date that it
    prints, 2024-07-26 unless given."""

    def __post_init__(self) -> None:
        checks.text(self.path, "prompts: path", "a string")
        for name in ("config", "column", "system"):
            if getattr(self, name) is not None:
                checks.text(getattr(self, name), f"prompts: {name}", "a string")
        checks.integer(self.seed, Bounds(0), "prompts: seed")
        checks.integer(self.max_prompt_tokens, checks.AT_LEAST_ONE, "prompts: max_prompt_tokens")
        check_template_kwargs(self.chat_template_kwargs, "prompts: chat_template_kwargs")
        for name in ("train", "eval", "test"):
            choice = getattr(self, name)
            if not _is_allowed(choice):
                raise ConfigError(
                    f"prompts: {name} = {choice!r} is not allowed; expected a split's name, a share between 0 and 1, "
                    "or a number of rows from 1 on"
                )

    @property
    def where(self) -> str:
        """Prefix of every error about these prompts."""
        return f'prompts "{self.path}"'


def check_template_kwargs(given: object, where: str) -> None:
    """Raise ConfigError unless `given` is what a chat template may be given."""
    for name, value in checks.table(given, where).items():
        if name in _OURS:
            raise ConfigError(f"{where}.{name} is not allowed: it is set by the task")
        if name == NOW:
            try:
                date.fromisoformat(str(value))
            except ValueError:
                raise ConfigError(
                    f"{where}.{name} = {value!r} is not allowed; expected a date such as {DATE}"
                ) from None


def rendered(
    chat: Sequence[Mapping[str, str]],
    tokenizer: "PreTrainedTokenizerBase",
    chat_template_kwargs: Mapping[str, Any],
    **options: Any,
) -> str:
    """Return a chat under the tokenizer's template, on the task's date."""
    day = date.fromisoformat(str(chat_template_kwargs.get(NOW, DATE)))
    template = _DATED.sub(lambda call: repr(day.strftime(call[2])), tokenizer.get_chat_template())
    given = {name: value for name, value in chat_template_kwargs.items() if name != NOW}
    messages = [dict(message) for message in chat]
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options, **given))


def date_note(source: PromptSource, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return a line on the date that the tokenizer's chat template prints; None if it prints none."""
    day = source.chat_template_kwargs.get(NOW, DATE)
    if NOW not in str(tokenizer.chat_template):
        return None
    return f"prompts: the chat template prints the date, {day} on every day; chat_template_kwargs.{NOW} sets it"


def _is_allowed(choice: object) -> bool:
    if isinstance(choice, bool):
        return False
    if isinstance(choice, str):
        return bool(choice.strip())
    if isinstance(choice, int):
        return choice >= 1
    return choice is None or (isinstance(choice, float) and 0 < choice < 1)


Reason = Literal["empty", "too long", "unreadable", "repeated"]


@dataclass(frozen=True)
class PromptRow:
    """One row of a dataset as read, valid or not."""

    where: str
    """Its name in messages: "line 17", or "row 3 of validation"."""
    values: Mapping[str, Any] | None
    """Plain values by column; None if the row could not be read."""
    fault: str = ""


def plain(value: Any) -> Any:
    """Return `value` as None, bool, int, float, str, bytes, list or dict: NaN is None, a date or decimal its text."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value)


DRAWN_BY_DEFAULT = 256
"""Default rows of eval, and of test, if the dataset has no such split."""
DRAWN_ONE_IN = 8
"""Draw at most one row in this many by default."""
EVAL_NAMES = ("validation", "valid", "val", "dev", "eval")
TEST_NAMES = ("test",)


class Split(Protocol):
    """A split's rows: a list, or a dataset that reads the rows of a slice, as it may be larger than the part in use."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Sequence[PromptRow]: ...


@dataclass(frozen=True)
class SplitPlan:
    """Choice of splits to read; the rest are drawn from `pool`."""

    pool: str
    eval: str | None
    test: str | None


def make_plan(source: PromptSource, names: Sequence[str]) -> SplitPlan:
    """Assign the dataset's splits to train, eval and test; TaskError if there are several and none is called train."""
    named = {choice for choice in (source.eval, source.test) if isinstance(choice, str)}
    pool = source.train if isinstance(source.train, str) else _default_pool(source, names, named)
    taken = {name for spec in (pool, *named) for name in _split_names(spec, names)}
    return SplitPlan(pool, _named(source.eval, EVAL_NAMES, names, taken), _named(source.test, TEST_NAMES, names, taken))


def rows_of(spec: str, splits: Mapping[str, Split], source: PromptSource) -> Sequence[PromptRow]:
    """Return the rows of "train", "train[:90%]" or "train+extra", as `datasets` writes splits, or raise TaskError."""
    for name in _split_names(spec, splits):
        if name not in splits:
            raise TaskError(
                f'{source.where}: split "{name}" not found; available: {", ".join(splits)}{nearest(name, splits)}'
            )
    if spec in splits:  # also a name that the library would not take, and what needs no import of it
        return splits[spec][:]
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(spec).to_absolute({name: len(split) for name, split in splits.items()})
    except (ValueError, AssertionError) as error:
        raise TaskError(f'{source.where}: "{spec}" is not a split such as train, train[:90%] or train[100:]') from error
    return [row for part in parts for row in splits[part.splitname][part.from_ : part.to]]


def draw(positions: Sequence[int], plan: SplitPlan, source: PromptSource) -> dict[str, list[int]]:
    """Return the pool's rows for train, in their own order, and for eval and test, in the order of the draw.

    `positions` are the kept rows' positions in the pool; the results index them. A named split draws none. Raises
    TaskError if the sizes take more rows than there are.
    """
    keys = np.random.Generator(np.random.Philox(source.seed)).random(max(positions, default=0) + 1)
    order, count = sorted(range(len(positions)), key=lambda i: float(keys[positions[i]])), len(positions)
    test = 0 if plan.test is not None else _size(source.test, count)
    eval_ = 0 if plan.eval is not None else _size(source.eval, count)
    train = count - test - eval_ if isinstance(source.train, str | None) else _size(source.train, count)
    if train < 0 or test + eval_ + train > count:
        sizes = ", ".join(f"{name} {n}" for name, n in (("train", max(train, 0)), ("eval", eval_), ("test", test)) if n)
        raise TaskError(f"{source.where}: the sizes take more rows than the {count} there are: {sizes}")
    rest = order[test + eval_ :]
    return {"train": sorted(rest[:train]), "eval": order[test : test + eval_], "test": order[:test]}


def _default_pool(source: PromptSource, names: Sequence[str], named: set[str]) -> str:
    if "train" in names:
        return "train"
    taken = {name for spec in named for name in _split_names(spec, names)}
    free = [name for name in names if name not in taken] or list(names)
    if len(free) > 1:
        raise TaskError(f"{source.where}: no split is called train; name the training split, one of: {', '.join(free)}")
    return free[0]


def _named(choice: SplitChoice, defaults: Sequence[str], names: Sequence[str], taken: set[str]) -> str | None:
    if choice is not None:
        return choice if isinstance(choice, str) else None
    return next((name for name in defaults if name in names and name not in taken), None)


def _split_names(spec: str, names: Collection[str]) -> list[str]:
    return [spec] if spec in names else [part.split("[")[0].split("(")[0].strip() for part in spec.split("+")]


def _size(choice: SplitChoice, count: int) -> int:
    if choice is None:
        return min(DRAWN_BY_DEFAULT, count // DRAWN_ONE_IN)
    # 0.29 * 100 is a little less than 29
    return int(choice * count + 1e-9) if isinstance(choice, float) else int(choice)


ANSWERED_ROLES = ("user", "tool")
"""Roles whose messages the policy answers: a chat must end with one."""


class NoPromptError(Exception):
    """A row's value that is not a prompt, with the reason and details."""

    def __init__(self, reason: Reason, why: str = "") -> None:
        super().__init__(reason, why)
        self.reason: Reason = reason
        self.why = why


def make_prompt(
    value: Any, columns: Mapping[str, Any], source: PromptSource, tokenizer: "PreTrainedTokenizerBase"
) -> Prompt:
    """Return the prompt made from `value`; `columns` are the row's others.

    Raises:
        NoPromptError: it is none.
        TaskError: it is a chat, and the tokenizer has no chat template.
    """
    if isinstance(value, list):
        messages = _messages(value, source.system)
        return Prompt(_checked(_rendered(messages, source, tokenizer)), columns, messages)
    return Prompt(_checked(value), columns)


def is_chat(value: object) -> bool:
    """Return True for a list of messages, each a mapping with a role."""
    return isinstance(value, list) and all(isinstance(message, Mapping) and "role" in message for message in value)


def _checked(text: Any) -> str:
    if text is None:
        raise NoPromptError("empty")
    if not isinstance(text, str):
        raise NoPromptError("unreadable", f"not a text but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, or bytes that were not UTF-8
        raise NoPromptError("unreadable", "not UTF-8") from None
    if not text.strip():
        raise NoPromptError("empty")
    return text


def _messages(chat: list[Any], system: str | None) -> tuple[Mapping[str, str], ...]:
    if not chat:
        raise NoPromptError("empty")
    if not is_chat(chat):
        raise NoPromptError("unreadable", "not a list of messages with role and content")
    messages = [{key: value for key, value in message.items() if value is not None} for message in chat]
    for message in messages:
        if not {"role", "content"} <= message.keys() or not all(isinstance(value, str) for value in message.values()):
            raise NoPromptError("unreadable", "a message is not just role and content, both texts")
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
    try:
        return rendered(messages, tokenizer, source.chat_template_kwargs, add_generation_prompt=True)
    except TemplateError as error:  # templates refuse chats by raising, such as roles that do not alternate
        raise NoPromptError("unreadable", f"the chat template says: {first_line(error)}") from error


BATCH = 1024
"""Prompts per call of the tokenizer: many at once are fast, all at once may not fit."""


def encode(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the prompt's token ids; a chat gets no special tokens here, since its template wrote them."""
    return _encode_all([prompt.text], prompt.messages is not None, tokenizer)[0]


def prompt_lengths(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the number of tokens in each prompt, as `encode` makes them."""
    lengths: dict[int, int] = {}
    for chats in (False, True):
        rows = [row for row, prompt in enumerate(prompts) if (prompt.messages is not None) == chats]
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            ids = _encode_all([prompts[row].text for row in batch], chats, tokenizer)
            lengths |= zip(batch, map(len, ids), strict=True)
    return [lengths[row] for row in range(len(prompts))]


def _encode_all(texts: list[str], chats: bool, tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    rows = tokenised(texts, tokenizer, special_tokens=not chats)
    closing = 0 if chats else len(_added(texts[0], tokenizer)[1])  # a response must not follow an EOS
    return [row[: len(row) - closing] for row in rows]


def tokenised(
    texts: list[str], tokenizer: "PreTrainedTokenizerBase", *, special_tokens: bool, **options: Any
) -> list[list[int]]:
    """Return the texts' ids, with the tokenizer's own special tokens or without.

    A text that begins with them by itself, as a rendered chat does, gets no second ones before it.
    """
    # Not verbose: the callers report texts that are too long.
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=special_tokens, verbose=False, **options)["input_ids"]
    opening = _added(texts[0], tokenizer)[0] if special_tokens else []
    return [_once(row, opening) for row in rows] if opening else rows


def repeated_opening(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the special tokens that the tokenizer puts before a text, if one of the texts has them already, or ""."""
    opening = _added(texts[0], tokenizer)[0] if texts else []
    words = "".join(tokenizer.convert_ids_to_tokens(opening))
    return words if any(text.startswith(words) for text in texts) else ""


def _once(row: list[int], opening: list[int]) -> list[int]:
    while row[len(opening) : 2 * len(opening)] == opening:
        row = row[len(opening) :]
    return row


def _added(text: str, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before a text, and after it."""
    whole, bare = (tokenizer(text, add_special_tokens=added, verbose=False)["input_ids"] for added in (True, False))
    ends = [end for end in range(len(whole), 0, -1) if whole[:end][-len(bare) :] == bare] if bare else []
    return (whole[: ends[0] - len(bare)], whole[ends[0] :]) if ends else ([], [])
