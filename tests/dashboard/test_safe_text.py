"""Other people's text: literal, visible, bounded, and no formula in a spreadsheet."""

import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dashboard import safe_text
from tests.dashboard.fake_store import HOSTILE


def test_markup_stays_and_what_would_be_invisible_is_spelled_out() -> None:
    assert safe_text.visible(HOSTILE) == (
        "<script>alert(1)</script>![x](http://127.0.0.1:9/x.png) **bold** $x^2$ "
        "⟨U+202E⟩txt.exe⟨U+202C⟩ ⟨U+001B⟩[31mred⟨U+0000⟩ end"
    )
    assert safe_text.visible("a\u200bb\tc\r\nd\ue000") == "a⟨U+200B⟩b\tc⟨U+000D⟩\nd⟨U+E000⟩"
    assert safe_text.visible("naïve 日本語 🙂") == "naïve 日本語 🙂"


def test_a_long_text_is_cut_and_its_length_told() -> None:
    assert safe_text.visible("x" * 2_000) == "x" * 2_000
    assert safe_text.visible("x" * 2_001) == "x" * 2_000 + " … [cut: 2,001 characters in all]"
    assert safe_text.visible("\n" * 60) == "\n" * 39 + " … [cut: 60 characters in all]"


def test_a_name_is_one_line() -> None:
    assert safe_text.one_line("a\nb\tc") == "a⏎b⇥c"
    assert safe_text.one_line("x" * 130) == "x" * 120 + " … [cut: 130 characters in all]"


def test_a_megabyte_in_one_line_is_cut_at_once() -> None:
    shown = safe_text.visible("\u202e" + "x" * 1_000_000)
    assert shown.startswith("⟨U+202E⟩xxx") and shown.endswith("… [cut: 1,000,001 characters in all]")
    assert len(shown) < 2_100
    assert len(safe_text.visible("\x00" * 1_000_000)) < 20_000


@pytest.mark.parametrize("blank", ["\u3164", "\u115f", "\u2800", "\u034f", "\u00ad", "\ufeff", "\U000e0041"])
def test_what_is_drawn_as_nothing_is_spelled_out(blank: str) -> None:
    assert safe_text.visible(f"a{blank}b") == f"a⟨U+{ord(blank):04X}⟩b"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("reviews", "reviews"),
        ("../../etc/passwd", "etc-passwd"),
        (".hidden", "hidden"),
        ("a b\0c", "a-b-c"),
        ("…", "study"),
    ],
)
def test_a_files_name_stays_one(text: str, name: str) -> None:
    assert safe_text.file_name(text) == name


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "＝", "＋", "－", "＠", " =", "\u3000+"])
def test_no_spreadsheet_takes_a_cell_for_a_formula(start: str) -> None:
    assert safe_text.cell(f"{start}cmd()") == f"'{start}cmd()"
    assert safe_text.cell(f"a{start}b") == f"a{start}b"


@given(some.text())
def test_any_text_is_visible_and_bounded(text: str) -> None:
    shown = safe_text.one_line(text, limit=20)
    assert all(unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"} for character in shown)
    assert safe_text.one_line(shown, limit=1_000) == shown
    assert not safe_text.cell(text).startswith(("=", "+", "-", "@", "\t", "\r"))


def test_nothing_is_markup_in_markdown() -> None:
    assert safe_text.in_markdown("![x](http://a.b/c) :red[$y$] <i>") == (
        r"\!\[x\]\(http\:\/\/a\.b\/c\) \:red\[\$y\$\] \<i\>"
    )
    assert safe_text.in_markdown("a\nb\u202e") == r"a⏎b⟨U\+202E⟩"


@given(some.lists(some.tuples(some.text(), some.sampled_from(["", "color: red"]), some.text())))
def test_in_a_marked_text_nothing_but_its_marks_is_markup(pieces: list[safe_text.Piece]) -> None:
    read: list[str] = []
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_data = read.append  # type: ignore[method-assign]
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(safe_text.marked(pieces))
    parser.close()
    assert "".join(read) == "".join(safe_text.spelled(text) for text, *_ in pieces)
    assert tags == ["span"] * sum(bool(css or said) for _, css, said in pieces)
