"""Reading a source's prompts: what is no prompt is left out and told, and the splits are disjoint."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppo_core.errors import TaskError, nearest
from ppo_core.prompts.chat import NoPromptError, make_prompt
from ppo_core.prompts.encoding import prompt_lengths
from ppo_core.prompts.loading import load_splits
from ppo_core.prompts.rows import LeftOut, Reason, Row
from ppo_core.prompts.source import PROMPT_COLUMNS, PromptSource
from ppo_core.prompts.splits import draw, make_plan, rows_of
from ppo_core.task import Prompt, Prompts

if TYPE_CHECKING:  # importing it loads torch
    from transformers import PreTrainedTokenizerBase

UNREADABLE_AT_MOST = 0.5
"""Of the rows; with more, it is the wrong file or column."""


@dataclass(frozen=True)
class _Kept:
    position: int
    """Of the row in what was read for its split."""
    where: str
    prompt: Prompt


def read_prompts(source: PromptSource, tokenizer: "PreTrainedTokenizerBase") -> tuple[Prompts, tuple[str, ...]]:
    """Return the source's prompts, and what there is to tell, a line each: rows left out and why, the splits' sizes.

    A text stands in one split, and there once: a named test split keeps it before eval does, and eval before train;
    the first row stays. Train and named splits are in the order of their rows; a drawn one is in the order of the
    draw, so that its first prompts are a sample of all.

    Raises:
        TaskError: there is no such source, split or column; chats, and no chat template; more than half of the rows
            unreadable; nothing left in a split.
    """
    splits, told = load_splits(source)
    plan = make_plan(source, list(splits))
    specs = {"test": plan.test, "eval": plan.eval, "pool": plan.pool}  # in the order of who keeps a repeated text
    rows = {role: rows_of(spec, splits, source) for role, spec in specs.items() if spec is not None}
    everything = [row for part in rows.values() for row in part]
    column = _column(everything, source)
    left_out: list[LeftOut] = []
    seen: set[str] = set()
    kept: dict[str, list[_Kept]] = {}
    for role, part in rows.items():
        read = _without_long(_read(part, column, source, tokenizer, left_out), source, tokenizer, left_out)
        kept[role] = _without_repeated(read, seen, left_out)
    _check_readable(left_out, len(everything), source)
    drawn = draw([row.position for row in kept["pool"]], plan, source)
    parts = {role: kept[role] if role in kept else [kept["pool"][i] for i in drawn[role]] for role in drawn}
    prompts = Prompts(**{role: tuple(row.prompt for row in part) for role, part in parts.items()})
    _check_filled(parts, left_out, len(everything), source)
    if source.system is not None and all(row.prompt.messages is None for part in kept.values() for row in part):
        raise TaskError(f'{source.where}: system is for chats, and the column "{column}" holds texts')
    unused = len(kept["pool"]) - sum(map(len, drawn.values()))
    sizes = ", ".join(f"{len(part)} {role}" for role, part in parts.items())
    return prompts, (
        *told,
        *((f"prompts: {_told(left_out, len(everything), source)}",) if left_out else ()),
        *((f"prompts: {unused} rows are in no split",) if unused else ()),
        f'prompts: {sizes}, from the column "{column}"',
    )


def _column(rows: Sequence[Row], source: PromptSource) -> str:
    names = list(dict.fromkeys(name for row in rows if row.values is not None for name in row.values))
    if not names:  # nothing was readable, which is told as such
        return source.column or PROMPT_COLUMNS[0]
    has = f"it has: {', '.join(names)}"
    if source.column is not None:
        if source.column not in names:
            raise TaskError(f'{source.where}: no column "{source.column}"; {has}{nearest(source.column, names)}')
        return source.column
    for name in PROMPT_COLUMNS:
        if name in names:
            return name
    raise TaskError(f"{source.where}: none of the columns {', '.join(PROMPT_COLUMNS)}; {has}; name the prompts' column")


def _read(
    rows: Sequence[Row],
    column: str,
    source: PromptSource,
    tokenizer: "PreTrainedTokenizerBase",
    left_out: list[LeftOut],
) -> list[_Kept]:
    kept = []
    for position, row in enumerate(rows):
        if row.values is None or column not in row.values:
            left_out.append(LeftOut(row.where, "unreadable", row.fault or f'no column "{column}"'))
            continue
        others = {name: value for name, value in row.values.items() if name != column}
        try:
            kept.append(_Kept(position, row.where, make_prompt(row.values[column], others, source, tokenizer)))
        except NoPromptError as error:
            left_out.append(LeftOut(row.where, error.reason, error.why))
    return kept


def _without_long(
    rows: Sequence[_Kept], source: PromptSource, tokenizer: "PreTrainedTokenizerBase", left_out: list[LeftOut]
) -> list[_Kept]:
    kept = []
    for row, length in zip(rows, prompt_lengths([row.prompt for row in rows], tokenizer), strict=True):
        if 0 < length <= source.max_prompt_tokens:
            kept.append(row)
        else:  # a tokenizer can make no token of a text
            left_out.append(LeftOut(row.where, "too long" if length else "empty"))
    return kept


def _without_repeated(rows: Sequence[_Kept], seen: set[str], left_out: list[LeftOut]) -> list[_Kept]:
    kept = []
    for row in rows:
        if row.prompt.text in seen:
            left_out.append(LeftOut(row.where, "repeated"))
        else:
            seen.add(row.prompt.text)
            kept.append(row)
    return kept


def _check_readable(left_out: Sequence[LeftOut], count: int, source: PromptSource) -> None:
    unreadable = [row for row in left_out if row.reason == "unreadable"]
    if len(unreadable) > UNREADABLE_AT_MOST * count:
        raise TaskError(
            f"{source.where}: {len(unreadable)} of {count} rows are unreadable, {unreadable[0].where} first: "
            f"{unreadable[0].why}"
        )


def _check_filled(
    parts: Mapping[str, Sequence[_Kept]], left_out: Sequence[LeftOut], count: int, source: PromptSource
) -> None:
    for role, part in parts.items():
        if not part:
            sizes = ", ".join(f"{name} {len(rows)}" for name, rows in parts.items())
            why = f"; {_told(left_out, count, source)}" if left_out else ""
            raise TaskError(f"{source.where}: nothing is left for {role} of {count} rows ({sizes}){why}")


def _told(left_out: Sequence[LeftOut], count: int, source: PromptSource) -> str:
    names: dict[Reason, str] = {
        "empty": "empty",
        "too long": f"over {source.max_prompt_tokens} tokens",
        "unreadable": "unreadable",
        "repeated": "with the text of another",
    }
    counts = Counter(row.reason for row in left_out)
    first: dict[Reason, LeftOut] = {}
    for row in left_out:
        first.setdefault(row.reason, row)
    reasons = []
    for reason, name in names.items():
        if counts[reason]:
            why = f": {first[reason].why}" if first[reason].why else ""
            reasons.append(f"{counts[reason]} {name} ({first[reason].where} first{why})")
    return f"{len(left_out)} of {count} rows left out: {', '.join(reasons)}"
