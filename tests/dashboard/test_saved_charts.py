"""The live charts' copies to keep, against literal numbers, and what a running study's page hands out in a browser."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import pytest
from playwright.sync_api import Browser, Page

from dashboard import chart_parts, charts, figures, style
from dashboard.charts import Drawing
from tests.dashboard import browser as real
from tests.dashboard import fake_store
from tests.dashboard.browser import Server
from tests.dashboard.shown import FAILED, GOOD, change
from tests.dashboard.test_charts import FOUND, LEVELS, QUARTERS, SCORE, shown, steps, trial
from tests.dashboard.test_curves_incident import found
from tests.dashboard.test_curves_incident import steps as signals
from tests.waiting import until
from tuner.search.fidelity import Rest
from tuner.status import Status

NAN = math.nan
MARKUP = "</script><script>alert(1)</script><b>x</b> & $1$"


def copy(chart: chart_parts.Chart) -> go.Figure:
    return figures.saved(chart, "reviews: KL")


def named(figure: go.Figure, name: str) -> go.Scatter:
    [trace] = [trace for trace in figure.data if trace.name == name]
    return trace


def shapes(figure: go.Figure, kind: str) -> list[go.layout.Shape]:
    return [shape for shape in figure.layout.shapes if shape.type == kind]


def note(figure: go.Figure, text: str) -> go.layout.Annotation:
    [found] = [note for note in figure.layout.annotations if note.text == text]
    return found


# One chart


def test_a_line_keeps_every_number_its_gap_its_look_and_the_number_at_its_end() -> None:
    line = named(copy(shown(steps(7, [0, 2, 1 / 3, NAN]), chosen=(7,))), "Trial 7")
    assert list(line.x) == [0, 1, 2, 3]
    assert list(line.y)[:3] == [0, 2, 1 / 3] and math.isnan(line.y[3])
    assert (line.line.color, line.line.dash, line.line.width) == (style.colour(7), "dash", 2)
    assert (list(line.text), line.textposition, line.mode) == (["", "", "7", ""], "middle right", "lines+text")


def test_a_grey_line_is_grey_and_in_no_legend_and_a_single_point_is_seen() -> None:
    figure = copy(shown(pd.concat([steps(0, [1, 2]), steps(1, [3])]), chosen=(0,)))
    grey = named(figure, "Trial 1")
    assert (grey.line.color, grey.showlegend, grey.hoverinfo) == (chart_parts.FAINT, False, "skip")
    assert (grey.mode, named(figure, "Trial 0").mode) == ("lines+markers", "lines+text")


def test_a_band_lies_between_its_edges() -> None:
    frame = pd.concat([steps(number, [float(number)]) for number in range(26)])
    figure = copy(shown(frame, metric=SCORE, chosen=(0,)))
    low, high = named(figure, "Other trials, lower edge"), named(figure, "Other trials")
    assert [*low.y, *high.y] == pytest.approx([-22.6, -3.4])
    assert (low.fill, high.fill) == (None, "tonexty")
    assert high.fillcolor == "rgba(128, 128, 128, 0.225)"
    assert [trace.name for trace in figure.data[:2]] == [low.name, high.name], "what a fill ends at is drawn before it"


def test_a_spread_is_stacked_from_its_minimum_to_its_maximum() -> None:
    columns = {f"{SCORE}_{name}": [-2.0 + place, 10.0 * place] for place, name in enumerate(QUARTERS)}
    figure = copy(shown(steps(0, [0, 1], **columns), metric=SCORE, chosen=(0,)))
    areas = figure.data[:4]
    assert [list(area.y) for area in areas] == [[-2, 0], [-1, 10], [1, 30], [2, 40]]
    assert [area.fill for area in areas] == [None, "tonexty", "tonexty", "tonexty"]
    assert areas[2].fillcolor == "rgba(0, 114, 178, 0.2)"
    assert {area.line.width for area in areas} == {0}


def test_budget_and_limit_are_named_and_what_lies_over_the_budget_is_shaded() -> None:
    figure = copy(shown(steps(0, [0, 2, 4])))
    assert [(line.y0, line.y1, line.xref) for line in shapes(figure, "line")] == [
        (10, 10, "x domain"),
        (15, 15, "x domain"),
    ]
    [shade] = shapes(figure, "rect")
    assert (shade.y0, shade.y1, shade.layer) == (10, 15, "below")
    assert (note(figure, "KL budget 10").y, note(figure, "Guard's limit 15").y) == (10, 15)


def test_axes_have_their_titles_and_ends() -> None:
    figure = copy(shown(steps(0, [0, 1, 2, 3, 4]), window=(50, 75)))
    assert figure.layout.xaxis.title.text == "Step (PPO iterations)"
    assert (list(figure.layout.xaxis.range), list(figure.layout.yaxis.range)) == ([2, 3], [0, 15])
    title = note(figure, "nats per response")
    assert (title.x, title.xanchor, title.yanchor, title.y) == (0, "left", "bottom", figure.layout.yaxis.domain[1])
    assert figure.layout.title.text == "reviews: KL"
    assert figure.layout.margin.r == 40, "room for a name at a line's end"
    assert copy(shown(steps(0, [0, 1]), metric=SCORE)).layout.yaxis.range is None


def test_a_logarithmic_axis_holds_lines_and_their_names_at_one_height() -> None:
    figure = copy(shown(steps(0, [0, 9, 188]), log_kl=True))
    assert figure.layout.yaxis.type == "log"
    assert list(figure.layout.yaxis.range) == pytest.approx([-1, math.log10(200)])
    assert [line.y0 for line in shapes(figure, "line")] == [10, 15]
    assert (note(figure, "KL budget 10").y, note(figure, "Guard's limit 15").y) == (1, pytest.approx(math.log10(15)))
    assert figure.data[0].y[0] == 0.1


def test_early_ends_have_their_symbol_and_the_chosen_ones_their_text() -> None:
    early = [trial(0, Status.PRUNED, rule="kl_hard", stop_step=2), trial(1, Status.PRUNED), trial(2, Status.FAILED)]
    frame = pd.concat([steps(0, [0, 9, 188]), steps(1, [0, 1]), steps(2, [0])])
    grey, failed, bright, *legend = copy(shown(frame, *early, chosen=(0,))).data[3:]
    assert (list(grey.x), list(grey.y), list(grey.text), grey.marker.symbol) == ([1], [1], [""], "x")
    assert (list(failed.x), failed.marker.symbol) == ([0], "triangle-up")
    assert (list(bright.x), list(bright.y)) == ([2], [25])
    assert (list(bright.text), list(bright.textposition)) == (["0 KL far over the limit: 188"], ["middle left"])
    assert (list(bright.marker.color), list(grey.marker.color)) == ([style.colour(0)], [chart_parts.FAINT])
    assert [entry.name for entry in legend] == ["pruned", "failed"]


def test_a_pause_at_a_rung_keeps_its_words_and_its_score() -> None:
    rested = trial(3, Status.PAUSED, kind=style.RESTING)
    frame = pd.concat([steps(3, [0, 1, 2, 3]), steps(4, [0, 1, 2, 3])])
    rests = {number: (Rest(192, 0.67),) for number in (3, 4)}
    figure = copy(shown(frame, rested, trial(4), chosen=(3,), rests=rests))
    pause, grey = named(figure, "Trial 3 paused at rung, score"), named(figure, "others")
    assert (list(pause.x), list(pause.y), list(pause.text)) == ([3], [3], ["3 paused at rung (score 0.67)"])
    assert pause.hovertemplate.startswith("Trial 3 paused at rung, score: 0.670")
    assert (list(grey.x), grey.hoverinfo) == ([3], "skip")
    assert (named(figure, "Trial 3").opacity, named(figure, "Trial 3").line.width) == (0.6, 1.2)
    assert [trace.name for trace in figure.data if trace.x[0] is None] == ["paused at rung"], "in the legend"


def test_the_best_so_far_is_saved_as_steps() -> None:
    figure = copy(charts.progress(FOUND, 80, 0.42))
    line = named(figure, "Best so far")
    assert (list(line.x), list(line.y), line.line.shape) == ([0, 10, 30, 80], [0.42, 1, 1.5, 1.5], "hv")
    assert note(figure, "SFT baseline 0.42").y == 0.42
    assert figure.layout.xaxis.title.text == "Device-seconds of all trials"


def test_an_early_end_named_by_a_setting_reads_as_on_the_live_chart() -> None:
    early = pd.DataFrame([trial(9, Status.PRUNED, rule="kl_limit", stop_step=2)])
    chart = charts.curve(
        steps(9, [0, 9, 16]), early, "objective/kl_exact", chosen=(9,), drawing=Drawing(by="kl_coef"),
        levels=LEVELS, names={9: "β 0.0103"},
    )  # fmt: skip
    [end] = [trace for trace in copy(chart).data if trace.mode == "markers+text"]
    assert list(end.text) == ["9: β 0.0103 KL over the limit"]
    assert figures.saved(chart, "{a|b}").layout.title.text == "{a|b}", "a study's name is not a pattern"


def test_no_text_becomes_html_or_a_formula() -> None:
    figure = figures.saved(shown(steps(0, [0, 1]), chosen=(0,), levels={MARKUP: 10.0}), MARKUP)
    escaped = "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;b&gt;x&lt;/b&gt; &amp; &#36;1&#36;"
    assert figure.layout.title.text == escaped
    assert note(figure, escaped).y == 10
    assert "<b>" not in figure.to_json() and "alert(1)</script>" not in figure.to_html(include_plotlyjs=False)


# Several charts over each other


def test_the_incidents_panels_lie_over_each_other_on_the_same_steps() -> None:
    frame = signals(clip=[0.1] * 9 + [0.5] * 4, length=[20.0] * 13)
    figure = copy(charts.incident(frame, found(frame), number=3, lines={"Budget": 10, "Limit": 15}))
    assert [(trace.xaxis, trace.yaxis) for trace in figure.data] == [("x", "y"), ("x2", "y2"), ("x3", "y3")]
    layout = figure.layout
    # Panels of 92 pixels, 30 apart: 336 in all.
    domains = [*layout.yaxis.domain, *layout.yaxis2.domain, *layout.yaxis3.domain]
    assert domains == pytest.approx([244 / 336, 1, 122 / 336, 214 / 336, 0, 92 / 336])
    assert layout.height - layout.margin.t - layout.margin.b == 336
    assert (layout.xaxis.matches, layout.xaxis2.matches, layout.xaxis3.matches) == ("x3", "x3", None)
    assert {(*axis.range, axis.showticklabels) for axis in (layout.xaxis, layout.xaxis2)} == {(0, 12, False)}
    assert (layout.xaxis3.title.text, layout.xaxis3.showticklabels) == ("Step (PPO iterations)", None)
    assert note(figure, "KL (nats per response)").y == layout.yaxis.domain[1]
    assert note(figure, "Clip fraction (share)").y == layout.yaxis2.domain[1]


def test_the_incidents_crossing_and_moves_are_drawn_in_their_panels() -> None:
    frame = signals(clip=[0.1] * 9 + [0.5] * 4, length=[20.0] * 13)
    figure = copy(charts.incident(frame, found(frame), number=3, lines={"Budget": 10, "Limit": 15}))
    upright = [(line.xref, line.x0, line.line.color) for line in shapes(figure, "line") if line.yref.endswith("domain")]
    grey = style.NEUTRAL
    assert upright == [("x", 11, grey), ("x2", 11, grey), ("x2", 9, charts.MOVED), ("x3", 11, grey)]
    moved = note(figure, "step 9")
    assert (moved.x, moved.xref, moved.yref) == (9, "x2", "y2 domain")
    usual = {shade.yref: (shade.y0, shade.y1) for shade in shapes(figure, "rect")}
    assert usual["y2"] == pytest.approx((0.09, 0.11))
    assert (note(figure, "Budget 10").x, note(figure, "Limit 15").x) == (0, 1)
    assert all(note.text for note in figure.layout.annotations), "Plotly writes a text of its own where there is none"


# In a browser, while the study runs


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("running")
    store = fake_store.build(folder / "store.db", courses=(GOOD, FAILED), held=True)
    change(folder / "store.db", "UPDATE ppo_trials SET params = json_set(params, '$.kl_control', ?)", "@SUM(1)")
    with real.serve(f"sqlite:///{folder / 'store.db'}", folder) as server:
        yield server
    store.close()


def freshness(page: Page) -> str:
    return page.get_by_text("Updated").first.inner_text()


@pytest.mark.browser
def test_a_live_chart_is_saved_as_a_page_that_needs_nothing_else_and_stays_while_it_refreshes(
    running: Server, browser: Browser, tmp_path: Path
) -> None:
    name, what = "reviews-incident_1.html", "what moved first in trial 1"
    with real.visit(browser) as visit:
        visit.open(f"{running.address}/curves?study={fake_store.STUDY}&view=What moved first")
        canvas = visit.page.locator("[data-testid=stEChartsChart] canvas").first
        canvas.evaluate("canvas => { canvas.isFirst = true }")
        for _ in range(2):
            before = freshness(visit.page)
            until(lambda before=before: freshness(visit.page) != before)
        assert canvas.evaluate("canvas => canvas.isFirst")
        with visit.page.expect_download() as download:
            visit.page.get_by_role("button", name=f"Save as HTML: {what}").click()
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / name)
        assert visit.errors == []
    opened(browser, tmp_path / name, f"reviews: {what}")


def opened(browser: Browser, path: Path, title: str) -> None:
    """Open a saved page and find its chart drawn, with nothing asked for elsewhere."""
    with real.visit(browser) as visit:
        visit.page.goto(path.as_uri())
        visit.page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for()
        assert visit.page.locator(".gtitle").text_content() == title
        height, of = visit.page.evaluate("[document.querySelector('.js-plotly-plot').clientHeight, innerHeight]")
        assert 0.9 * of <= height <= of
        assert [url for url in visit.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        assert visit.errors == []


@pytest.mark.browser
def test_a_tables_tool_bar_saves_it_as_csv_and_no_cell_is_a_formula(
    running: Server, browser: Browser, tmp_path: Path
) -> None:
    with real.visit(browser) as visit:
        visit.page.add_init_script("delete window.showSaveFilePicker")  # which would wait for a person
        visit.open(f"{running.address}/?study={fake_store.STUDY}")
        table = visit.page.locator('.st-key-all-trials [data-testid="stDataFrame"]')
        table.scroll_into_view_if_needed()
        table.hover()
        with visit.page.expect_download() as download:
            visit.page.get_by_role("button", name="Download as CSV").last.evaluate("button => button.click()")
        download.value.save_as(tmp_path / "trials.csv")
    rows = list(csv.DictReader((tmp_path / "trials.csv").open(encoding="utf-8-sig")))
    assert [row["number"] for row in rows] == ["0", "1"]
    assert rows[1]["note"].startswith("'=cmd() CUDA")
    assert {row["params_kl_control"] for row in rows} == {"'@SUM(1)"}
