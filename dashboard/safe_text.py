"""Text that somebody else wrote (generations, prompts, names, error messages), made safe to look at.

It goes only into elements that never interpret it (`st.text`, `st.code(language=None)`, `st.dataframe`), but for a
button's help (see `in_markdown`) and for texts with parts marked (see `marked`).
What those would draw invisibly, or would let reorder the text around it, is spelled out here.
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
"""Drawn as nothing, though they count as letters, marks or symbols."""
_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are the wide forms, which spreadsheets of some languages take for the others."""
_MARKS = re.compile(r"[!-/:-@\[-`{-~]")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def visible(text: str, limit: int = LIMIT) -> str:
    """Return `text` with control, format and direction characters spelled out as ⟨U+202E⟩.

    Line breaks stay. A text over `limit` characters or `LINES` lines is cut, with a note of its full length.
    """
    shown = "\n".join(text[:limit].split("\n")[:LINES])
    if len(shown) < len(text):
        return f"{spelled(shown)} … [cut: {len(text):,} characters in all]"
    return spelled(shown)


def spelled(text: str) -> str:
    """Return a whole `text` as `visible` does, uncut."""
    return "".join(_spelled(character) for character in text)


Piece = tuple[str, str, str]
"""A part of a text, its CSS, and what is said of it where it is pointed at; the last two are our own words."""


def marked(pieces: Iterable[Piece]) -> str:
    """Return a text as HTML for `st.html`, in which nothing but our own marks is markup; control characters as ever."""
    return "".join(
        f'<span style="{escape(css)}" title="{escape(said)}">{shown}</span>' if css or said else shown
        for shown, css, said in ((escape(spelled(text)), css, said) for text, css, said in pieces)
    )


def one_line(text: str, limit: int = 120) -> str:
    """Return `text` made visible on one line, for a name or a label."""
    return visible(text.replace("\n", "⏎"), limit)


def cell(text: str) -> str:
    """Return `text` made visible for a table that can be exported: no spreadsheet takes it for a formula."""
    shown = one_line(text, LIMIT)
    return f"'{shown}" if shown.lstrip().startswith(_FORMULA_STARTS) else shown


def in_markdown(text: str) -> str:
    """Return `text` made visible on one line, with every mark escaped, for a button's help: that is Markdown."""
    return _MARKS.sub(r"\\\g<0>", one_line(text, LIMIT))


def file_name(text: str) -> str:
    """Return `text` as a part of a file's name: without separators, and not hidden."""
    return _NOT_IN_NAMES.sub("-", text[:100]).lstrip(".-") or "study"


def _spelled(character: str) -> str:
    if character == "\n" or not (character in _BLANK or unicodedata.category(character) in _INVISIBLE):
        return character
    return f"⟨U+{ord(character):04X}⟩"
