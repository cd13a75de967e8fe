"""Make text from outside (generations, prompts, names, error messages) safe to show.

It is shown only by elements that do not interpret it (`st.text`, `st.code(language=None)`, `st.dataframe`), except in a
button's help (see `in_markdown`) and in marked text (see `marked`). Characters that would be invisible, or reorder
text, are spelled out.
"""

import re
import unicodedata
from collections.abc import Iterable
from html import escape

LIMIT = 2_000
"""Characters of one text that a page shows."""
WHOLE = 20_000
"""Characters of one text that opens in full."""
LINES = 40
"""Lines of one text that a page shows."""

_INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
"""Invisible, though classed as letters, marks or symbols."""
_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are full-width forms, which some spreadsheets treat the same."""
_MARKS = re.compile(r"[!-/:-@\[-`{-~]")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def visible(text: str, limit: int = LIMIT) -> str:
    """Return `text` with control, format and direction characters spelled out as ⟨U+202E⟩.

    Line breaks and tabs stay. A text over `limit` characters or `LINES` lines is cut, with a note of its full length.
    """
    kept = "\n".join(text[:limit].split("\n")[:LINES])
    if len(kept) < len(text):
        return f"{spelled(kept)} … [cut: {len(text):,} characters in all]"
    return spelled(kept)


def spelled(text: str) -> str:
    """Return a whole `text` as `visible` does, uncut."""
    return "".join(_spelled(character) for character in text)


Piece = tuple[str, str, str]
"""A piece of text, its CSS and its tooltip; the last two are our own words."""


def marked(pieces: Iterable[Piece]) -> str:
    """Return HTML for `st.html` in which only our own marks are markup."""
    spans = ((escape(spelled(text)), escape(css), escape(tooltip)) for text, css, tooltip in pieces)
    return "".join(
        f'<span style="{css}" title="{tip}">{text}</span>' if css or tip else text for text, css, tip in spans
    )


def one_line(text: str, limit: int = 120) -> str:
    """Return `text` made visible on one line, for a name or a label."""
    return visible(text.replace("\n", "⏎").replace("\t", "⇥"), limit)


def cell(text: str) -> str:
    """Return `text` made visible for an exportable table: no spreadsheet will read it as a formula."""
    kept = one_line(text, LIMIT)
    return f"'{kept}" if kept.lstrip().startswith(_FORMULA_STARTS) else kept


def in_markdown(text: str) -> str:
    """Return `text` made visible on one line, with Markdown escaped, for a button's help."""
    return _MARKS.sub(r"\\\g<0>", one_line(text, LIMIT))


def file_name(text: str) -> str:
    """Return `text` as part of a file name: no separators, not hidden."""
    return _NOT_IN_NAMES.sub("-", text[:100]).lstrip(".-") or "study"


def _spelled(character: str) -> str:
    if character in "\n\t" or not (character in _BLANK or unicodedata.category(character) in _INVISIBLE):
        return character
    return f"⟨U+{ord(character):04X}⟩"
