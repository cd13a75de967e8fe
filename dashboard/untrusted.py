"""Text that somebody else wrote (generations, prompts, names, error messages), made safe to look at.

It goes only into elements that never interpret it (`st.text`, `st.code(language=None)`, `st.dataframe`).
What those would draw invisibly, or would let reorder the text around it, is spelled out here.
"""

import unicodedata

LIMIT = 2_000
"""Characters of one text that a page shows."""
LINES = 40
"""Lines of one text that a page shows."""

_INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
_FORMULA_STARTS = ("=", "+", "-", "@")


def visible(text: str, limit: int = LIMIT) -> str:
    """Return `text` with control, format and direction characters spelled out as ⟨U+202E⟩.

    Line breaks stay. A text over `limit` characters or `LINES` lines is cut, and its length told.
    """
    shown = "\n".join(text[:limit].split("\n")[:LINES])
    spelled = "".join(_spelled(character) for character in shown)
    if len(shown) < len(text):
        return f"{spelled} … [cut: {len(text):,} characters in all]"
    return spelled


def one_line(text: str, limit: int = 120) -> str:
    """Return `text` made visible on one line, for a name or a label."""
    return visible(text.replace("\n", "⏎"), limit)


def cell(text: str) -> str:
    """Return `text` made visible for a table that can be exported: no spreadsheet takes it for a formula."""
    shown = one_line(text, LIMIT)
    return f"'{shown}" if shown.startswith(_FORMULA_STARTS) else shown


def _spelled(character: str) -> str:
    if character == "\n" or unicodedata.category(character) not in _INVISIBLE:
        return character
    return f"⟨U+{ord(character):04X}⟩"
