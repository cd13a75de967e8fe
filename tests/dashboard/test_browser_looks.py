"""The pages of a running study as different readers see them: on a phone, on a dark page, with the keyboard alone."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.dashboard import browser as real
from tests.dashboard import fake_store
from tests.dashboard.browser import DRAWINGS, Server, Visit, opened
from tests.tuner import made_study
from tests.waiting import until
from tuner.confirm.plan import Plan
from tuner.store import Lease, Store

pytestmark = pytest.mark.browser

RUNS = ("runs", "runs?view=Reward+and+KL", "runs?view=One+trial&n=2", "runs?view=Compare")
PAGES = ("", "why", *RUNS, "samples", "control", "studies")
QUERY = f"?study={fake_store.STUDY}&trial=0&trial=2&trial=13"
BOUNDED_PAGES = ("", "why", *RUNS[:3])
BOUNDED_QUERY = f"?study={fake_store.BOUNDED}&trial=0&trial=5&trial=14"
"""Of the study with a budget: its reference, its best trial, one that runs."""
DONE = "done"
"""The study with a budget, finished and confirmed."""
MOST_WORDS = 80
"""In a window of 1440 by 900 pixels."""
FIRST_SCREENS = {
    "": ".st-key-answer",
    "why": ".js-plotly-plot",
    **dict.fromkeys(RUNS, DRAWINGS),
    "runs?view=One+trial&n=2": '[data-testid="stMetric"]',
    **dict.fromkeys(("control", "control?part=New+trial"), DRAWINGS),
    "samples": "text=Prompt 0",
}
"""Pages, and what each is about; the study of these tests is not confirmed."""
MOST_STOPS = 60
"""Presses of the Tab key."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with closing(fake_store.build(tmp_path_factory.mktemp("looks") / "store.db", held=True)) as built:
        yield built


@pytest.fixture(scope="module")
def server(store: Store) -> Iterator[Server]:
    path = Path(str(store.url.database))
    with (
        closing(fake_store.build_bounded(path, held=True)),
        closing(fake_store.build_bounded(path, courses=fake_store.BOUNDED_DONE, name=DONE)) as done,
        real.serve(f"sqlite:///{path}", path.parent) as served,
    ):
        made_study.confirm(done, DONE, Plan(top=2, seeds=3))
        yield served


@pytest.mark.parametrize(
    ("place", "query"), [*((place, QUERY) for place in PAGES), *((place, BOUNDED_QUERY) for place in BOUNDED_PAGES)]
)
def test_a_phone_shows_the_page_within_its_width(browser: Browser, server: Server, place: str, query: str) -> None:
    with opened(browser, server, _with_query(place, query), width=390, height=844) as visit:
        drawn = visit.page.locator(
            f'{DRAWINGS}, [data-testid="stMetric"], [data-testid="stForm"], [data-testid="stText"], [data-testid="stCode"]'
        )
        drawn.first.wait_for()
        widest = visit.page.evaluate("Math.max(...[document.documentElement, document.querySelector('[data-testid=stMain]')]"
                                     ".map(one => one.scrollWidth)) - innerWidth")  # fmt: skip
        assert widest <= 1
        boxes = [box for box in (one.bounding_box() for one in drawn.all()) if box is not None]
        assert boxes and all(box["x"] >= 0 and box["x"] + box["width"] <= 391 for box in boxes)
        assert _cut_off(visit) == []


def _with_query(place: str, query: str) -> str:
    return f"{place}&{query[1:]}" if "?" in place else f"{place}{query}"


def _cut_off(visit: Visit) -> list[str]:
    """Return the texts of the Plotly figures that do not lie within them."""
    return list(
        visit.page.locator(".js-plotly-plot").evaluate_all(
            """figures => figures.flatMap(figure => {
                const whole = figure.getBoundingClientRect();
                return [...figure.querySelectorAll(".annotation-text, .xtitle, .ytitle, .legendtext")].filter(text => {
                    const own = text.getBoundingClientRect();
                    return own.width && (own.left < whole.left - 1 || own.right > whole.right + 1);
                }).map(text => text.textContent);
            })"""
        )
    )


@pytest.mark.parametrize("place", FIRST_SCREENS)
def test_what_a_page_is_about_begins_in_the_windows_upper_third(browser: Browser, server: Server, place: str) -> None:
    """The first chart, table or figure; on Answer the card, of one trial its numbers, of samples the first prompt."""
    with opened(browser, server, _with_query(place, QUERY), width=1440, height=900) as visit:
        thing = visit.page.locator(FIRST_SCREENS[place]).first
        thing.wait_for()
        until(lambda: 0 < (thing.bounding_box() or {"y": 0})["y"] <= 300)
        assert visit.page.get_by_test_id("stMain").evaluate("main => main.scrollTop") == 0
        status = visit.page.locator('[data-testid="stMain"] .stBadge, [data-testid="stMain"] .stMarkdownBadge').first
        until(lambda: (status.bounding_box() or {"y": 900})["y"] < 200)
        for label in ("Study", "Trials"):
            sidebar = visit.page.get_by_test_id("stSidebar")
            expect(sidebar.get_by_role("combobox", name=label, exact=True)).to_be_visible()
        has_effect = not place.startswith("control")
        expect(sidebar.get_by_role("slider", name="KL budget")).to_have_count(int(has_effect))


@pytest.mark.parametrize("place", PAGES)
def test_a_window_holds_few_words_beside_its_data(browser: Browser, server: Server, store: Store, place: str) -> None:
    for query in (f"?study={fake_store.STUDY}", f"?study={DONE}"):
        store.renew(Lease(store.study(fake_store.STUDY).id, 1))  # a study that runs
        with opened(browser, server, _with_query(place, query), width=1440, height=900) as visit:
            visit.page.wait_for_timeout(500)
            words = visit.words()
            assert 10 < len(words) <= MOST_WORDS, " ".join(words)


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(browser: Browser, server: Server) -> None:
    wanted = {"Study", "Trials", "KL budget", "Curves", "Metrics", "KL by β", "Axes and smoothing"}
    with opened(browser, server, f"runs{QUERY}") as visit:
        visit.sees("Score")  # drawn to the end
        visit.page.add_style_tag(content="* { transition: none !important; animation: none !important }")
        reached, seen = set(), set()
        for _ in range(MOST_STOPS):
            visit.page.keyboard.press("Tab")
            stop = visit.page.evaluate(_FOCUS)
            reached.add(stop["name"])
            seen |= {stop["name"]} if stop["looks"] else set()
            if wanted <= seen:
                break
        assert wanted - reached == set()
        assert wanted - seen == set()


_FOCUS = """async () => {
    const drawn = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    const one = document.activeElement;
    const look = () => {
        const found = [];
        for (let up = one, height = 0; up && height < 4; up = up.parentElement, height += 1) {
            const style = getComputedStyle(up);
            found.push(style.outlineStyle, style.outlineColor, style.boxShadow, style.borderColor, style.background);
        }
        return found.join();
    };
    await drawn();
    const focused = look();
    one.blur();
    await drawn();
    const looks = look() !== focused;
    one.focus({focusVisible: true, preventScroll: true});
    if (!one.closest("[data-testid='stMain'], [data-testid='stSidebarUserContent']")) return {name: "", looks};
    const words = (one.ariaLabel || one.innerText || "").split("\\n").filter(word => word && !/^[a-z_]+$/.test(word));
    return {name: (words.pop() || "").split(":")[0], looks};
}"""
