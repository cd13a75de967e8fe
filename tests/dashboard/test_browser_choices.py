"""What a reader chooses in a real browser, and where Back, the table and a chart's zoom lead."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.dashboard import browser as real
from tests.dashboard.browser import Server, Visit, opened
from tests.dashboard.fake_store import STUDY

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with real.serve(f"sqlite:///{built}", tmp_path_factory.mktemp("served")) as served:
        yield served


def go(visit: Visit, page: str) -> None:
    visit.page.get_by_test_id("stSidebarNav").get_by_role("link", name=page, exact=True).click()
    visit.page.wait_for_url(lambda url: f"/{page.lower()}" in url)
    read(visit)


def read(visit: Visit) -> None:
    """Look at a page for a second once it is drawn: Streamlit loses a step back that is taken while it draws."""
    visit.settle()
    visit.page.wait_for_timeout(1_000)
    visit.settle()


def test_back_comes_to_each_page_as_it_was_and_then_leaves(browser: Browser, server: Server) -> None:
    with opened(browser, server, f"?study={STUDY}") as visit:
        page, budget = visit.page, visit.page.locator('input[type="range"][aria-label="KL budget"]')
        visit.slide("KL budget", "ArrowLeft", "ArrowLeft")
        page.wait_for_url(lambda url: "budget=9.8" in url)
        go(visit, "Runs")
        go(visit, "Samples")
        visit.pick("Trials", "4")
        page.wait_for_url(lambda url: "trial=4" in url)
        read(visit)
        for place, what in (("/runs?", "Axes and smoothing"), ("/?", "leads")):
            page.go_back()
            visit.sees(what)
            read(visit)
            assert place in page.url and "budget=9.8" in page.url and f"study={STUDY}" in page.url
            assert "trial=4" not in page.url
            expect(budget).to_have_value("9.8")
            expect(page.get_by_test_id("stMultiSelect").first).not_to_contain_text("4")
        page.go_forward()
        visit.sees("Axes and smoothing")
        read(visit)
        assert "/runs?" in page.url
        page.go_back()
        visit.sees("leads")
        read(visit)
        page.go_back()
        assert page.url == "about:blank", "no page holds the reader"


def test_ticking_rows_of_the_table_chooses_trials_on_every_page(browser: Browser, server: Server) -> None:
    with opened(browser, server, f"?study={STUDY}") as visit:
        table = visit.page.locator('.st-key-all-trials [data-testid="stDataFrame"]')
        visit.scroll_to(table)
        box = table.bounding_box()
        assert box is not None
        for row in (0, 2):  # the best, which is the first, and trial 6
            visit.page.mouse.click(box["x"] + 12, box["y"] + 36 + 35 * row + 17)
            visit.page.wait_for_url(lambda url, row=row: ("trial=6" if row else "trial=9") in url)
            visit.settle()
        chosen = visit.page.get_by_test_id("stMultiSelect").first
        expect(chosen).to_contain_text("9")
        visit.pick("Trials", "5")
        expect(table.locator('tr[aria-selected="true"] td:first-child')).to_have_text(["9", "6", "5"])
        go(visit, "Runs")
        visit.page.locator('[aria-label*="in colour: trials 5, 6, 9"]').first.wait_for()


def test_typing_a_number_and_enter_chooses_that_trial_alone(browser: Browser, server: Server) -> None:
    with opened(browser, server, f"runs?study={STUDY}&view=One+trial") as visit:
        for label, chosen in (("Trials", "trial=0"), ("Trial", "n=0")):
            visit.page.get_by_role("combobox", name=label, exact=True).press_sequentially("0")
            visit.page.keyboard.press("Enter")
            visit.page.wait_for_url(lambda url, chosen=chosen: chosen in url)
            visit.page.keyboard.press("Escape")
            visit.settle()
        assert visit.page.url.count("trial=") == 1


def test_a_zoom_is_the_same_on_all_charts_and_pages_until_all_is_shown(browser: Browser, server: Server) -> None:
    with opened(browser, server, f"?study={STUDY}") as visit:
        real.zoom(visit)
        shown = visit.page.get_by_role("button", name="of the run: show all")
        label = shown.inner_text()
        go(visit, "Runs")
        assert shown.inner_text() == label
        visit.page.wait_for_url(lambda url: url.count("window=") == 2)
        shown.click()
        expect(shown).to_have_count(0)
        visit.page.wait_for_url(lambda url: "window=" not in url)


def test_a_box_over_points_marks_their_trials_in_every_figure(browser: Browser, server: Server) -> None:
    with opened(browser, server, f"why?study={STUDY}&more=true", width=1440) as visit:
        figures = visit.page.locator(
            '.js-plotly-plot:has(.scatterlayer):not([class*="-narrow-only"] *, [class*="st-key-gauntlet"] *)'
        )
        expect(figures).to_have_count(3)  # panels, the KL's slice, a pair
        panels = figures.first
        visit.scroll_to(panels)
        visit.page.mouse.wheel(0, -150)  # the bar of marked trials stays over it
        read(visit)
        area = panels.locator(".nsewdrag").first.bounding_box()
        assert area is not None
        visit.page.mouse.move(area["x"] + 3, area["y"] + 3)
        visit.page.mouse.down()
        visit.page.mouse.move(area["x"] + area["width"] - 3, area["y"] + 0.4 * area["height"], steps=8)
        visit.page.mouse.up()
        use = visit.page.get_by_role("button", name="Use th")
        use.wait_for()
        read(visit)
        marked = figures.evaluate_all(
            """all => all.map(one => [...new Set(one._fullData.flatMap(trace => Array.from(trace.selectedpoints || [])
                .map(place => trace.customdata[place]).map(one => typeof one === "number" ? one : one[0])))].sort((a, b) => a - b).join())"""
        )
        assert marked[0] and len(set(marked)) == 1
        use.click()
        visit.page.wait_for_url(lambda url: all(f"trial={number}" in url for number in marked[0].split(",")))
        read(visit)
        go(visit, "Runs")
        assert all(f"trial={number}" in visit.page.url for number in marked[0].split(","))
        visit.page.go_back()
        visit.sees("Reward over each hyperparameter")
        read(visit)
        visit.page.go_back()  # Streamlit adds the page without its own choices to the history as one leaves it
        read(visit)
        visit.page.go_back()
        visit.page.wait_for_url(lambda url: "trial=" not in url)
