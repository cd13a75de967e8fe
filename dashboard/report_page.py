"""The parts of a report's page as HTML: whatever is not `Html` already is escaped, and nothing is ever fetched.

The page's own scripts carry a nonce, and its content policy allows no other one and no connection: a text that somehow
got through as markup would still be dead.
"""

import html
import secrets
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboard import safe_text

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
GRID = "rgba(128, 128, 128, 0.25)"
CONFIG = "{displaylogo: false, responsive: true, toImageButtonOptions: {format: 'png', scale: 2}}"
LONGEST_CELL = 300
"""Characters of a text in a table."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6470; --line: #d8dde3; --fill: #f4f6f8; --page: #ffffff;
  --link: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa4af; --line: #363d45; --fill: #1e2328; --page: #14171a; --link: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .5rem 0; }
.soft { color: var(--soft); font-size: .9rem; }
.answer { border: 1px solid var(--line); border-left: 4px solid var(--link); border-radius: 6px;
  background: var(--fill); padding: .6rem 1rem; margin: 1rem 0; }
.answer > p:first-child { font-size: 1.1rem; font-weight: 600; }
pre { background: var(--fill); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem;
  overflow-x: auto; font: .85rem/1.5 ui-monospace, Menlo, Consolas, monospace; margin: .5rem 0; }
pre.said { white-space: pre-wrap; }
.scroll { overflow: auto; max-height: 36rem; border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
caption { text-align: left; padding: .5rem .6rem; font-weight: 600; }
th, td { padding: .35rem .6rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
thead th { position: sticky; top: 0; background: var(--fill); border-top: 0; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td:not(.number) { min-width: 4.5rem; overflow-wrap: break-word; }
tr.marked td { background: var(--fill); font-weight: 600; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--link); }
.chart { margin: .6rem 0; min-height: 340px; }
.chart .xtick text, .chart .ytick text, .chart .xtitle, .chart .ytitle, .chart .legendtext, .chart .textpoint text {
  fill: var(--ink) !important; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: 0 1rem; }
@media print { .scroll { max-height: none; overflow: visible; } }
"""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def shown(text: str, limit: int = safe_text.LIMIT) -> Html:
    """Return a text as HTML that shows it as it stands; what is HTML already stays."""
    return text if isinstance(text, Html) else Html(html.escape(safe_text.visible(text, limit)))


def element(tag: str, text: str, of_class: str = "") -> Html:
    """Return one element of our own that holds a text."""
    attribute = f' class="{of_class}"' if of_class else ""
    return Html(f"<{tag}{attribute}>{shown(text)}</{tag}>")


def together(*parts: str) -> Html:
    """Return parts one after the other, the empty ones left out."""
    return Html("\n".join(shown(part) for part in parts if part))


def paragraph(text: str, of_class: str = "") -> Html:
    """Return a paragraph; of an empty text nothing."""
    return element("p", text, of_class) if text else Html("")


def section(title: str, *parts: str) -> Html:
    """Return parts under a heading; nothing where they are all empty."""
    return together(element("h2", title), *parts) if any(parts) else Html("")


def box(*parts: str) -> Html:
    """Return the parts of the page's one box, which holds the answer."""
    return element("div", together(*parts), "answer")


def fold(title: str, *parts: str) -> Html:
    """Return parts that open with a click."""
    return element("details", together(element("summary", title), *parts))


def code(text: str) -> Html:
    """Return lines to copy."""
    return Html(f"<pre>{html.escape(''.join(map(_spelled, text)))}</pre>")


def _spelled(character: str) -> str:
    return character if character == "\n" else safe_text.visible(character)


def said(text: str, limit: int = 600) -> Html:
    """Return what a model was given or answered, line breaks kept."""
    return element("pre", shown(text, limit), "said")


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    marked: int | None = None,
    title: str = "",
) -> Html:
    """Return a table that scrolls where it is too wide; the columns `numbers` are on the right, one row is marked."""
    kinds = [' class="number"' if column in numbers else "" for column in columns]
    heads = "".join(f"<th{kind}>{shown(column)}</th>" for column, kind in zip(columns, kinds, strict=True))
    lines = []
    for place, row in enumerate(rows):
        cells = "".join(f"<td{kind}>{shown(cell, LONGEST_CELL)}</td>" for cell, kind in zip(row, kinds, strict=True))
        lines.append(f'<tr class="marked">{cells}</tr>' if place == marked else f"<tr>{cells}</tr>")
    body = "\n".join(lines)
    caption = element("caption", title) if title else ""
    table = f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return Html(f'<div class="scroll">{table}</div>')


class Page:
    """A page that is being put together: its charts share one copy of the library."""

    def __init__(self) -> None:
        self._nonce = secrets.token_urlsafe(16)
        self._charts: list[str] = []

    def chart(self, figure: go.Figure, alt: str) -> Html:
        """Return the place where a figure is drawn; `alt` says what it shows."""
        axis = {"gridcolor": GRID, "linecolor": GRID, "automargin": True}
        figure.update_layout(
            template="none", paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"family": FONT}
        )
        figure.update_xaxes(axis).update_yaxes(axis)
        self._charts.append(_in_script(figure.to_json()))
        height = int(figure.layout.height or 0)
        return Html(
            f'<div class="chart" id="chart-{len(self._charts)}" role="img" aria-label="{html.escape(alt)}" '
            f'style="height: {height}px"></div>'
        )

    def whole(self, title: str, body: str) -> str:
        """Return the page."""
        scripts, warning = "", ""
        if self._charts:
            drawn = "\n".join(
                f"(f => Plotly.newPlot('chart-{number}', f.data, f.layout, {CONFIG}))({chart});"
                for number, chart in enumerate(self._charts, 1)
            )
            scripts = self._script(_without_end(get_plotlyjs())) + self._script(drawn)
            warning = "<noscript><p>The charts need JavaScript; all else is here without it.</p></noscript>"
        policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'nonce-{self._nonce}'"
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"{element('title', title)}\n<style>{STYLE}</style>\n</head>\n<body>\n{warning}{shown(body)}\n"
            f"{scripts}</body>\n</html>\n"
        )

    def _script(self, text: str) -> str:
        return f'<script nonce="{self._nonce}">{text}</script>\n'


def _in_script(json: str) -> str:
    """Return JSON that no HTML parser sees a tag in."""
    return json.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _without_end(script: str) -> str:
    return script.replace("</script", "<\\/script")
