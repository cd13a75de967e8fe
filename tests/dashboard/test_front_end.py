"""What the dashboard adds to Streamlit's page, and that its scripts are Streamlit's own."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from streamlit import file_util
from streamlit.web.server.starlette.starlette_static_routes import create_streamlit_static_assets_routes

from dashboard import front_end
from dashboard.front_end import FrontEnd

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "Accept-Encoding": "gzip"}
SCRIPTS = Path(file_util.get_static_dir(), "static", "js")


def client(*middleware: Middleware) -> TestClient:
    def shown(_: object) -> HTMLResponse:
        return HTMLResponse("<head></head> is what it says")

    routes = [Route("/_stcore/health", shown), *create_streamlit_static_assets_routes("")]
    return TestClient(Starlette(routes=routes, middleware=middleware))


@pytest.fixture
def plain() -> Iterator[TestClient]:
    """Streamlit's own files as it serves them."""
    with client() as made:
        yield made


@pytest.fixture
def ours() -> Iterator[TestClient]:
    with client(Middleware(FrontEnd)) as made:
        yield made


@pytest.mark.parametrize("path", ["/", "/curves", "/curves?study=large"])
def test_a_page_starts_the_scripts_that_it_will_draw_with(ours: TestClient, plain: TestClient, path: str) -> None:
    page, own = ours.get(path, headers=BROWSER), plain.get(path, headers=BROWSER)
    added = front_end.head(SCRIPTS)
    assert page.text == own.text.replace("</head>", added + "</head>")
    started = re.findall(r'import\("\./(static/js/[^"]+)"\)', page.text)
    assert [name.rpartition("/")[2].partition(".")[0] for name in started] == list(front_end.SCRIPTS)
    for name in started:
        assert ours.get(f"/{name}").text == (SCRIPTS.parent.parent / name).read_text()


def test_a_page_is_asked_for_again_as_what_is_added_may_change(ours: TestClient) -> None:
    page = ours.get("/curves", headers=BROWSER)
    assert page.headers["Cache-Control"] == "no-cache"
    assert not {"etag", "last-modified"} & set(page.headers)
    assert int(page.headers["Content-Length"]) == len(page.content)


def test_scripts_fonts_and_styles_are_those_of_streamlit(ours: TestClient, plain: TestClient) -> None:
    for name in ("js/index.*.js", "css/*.css", "media/*.woff2"):
        path = f"/static/{next(SCRIPTS.parent.glob(name)).relative_to(SCRIPTS.parent).as_posix()}"
        for _ in range(2):  # read, and from memory
            found, own = ours.get(path), plain.get(path)
            assert found.content == own.content
            assert found.headers["Cache-Control"] == own.headers["Cache-Control"]
            assert found.headers["Content-Type"].partition(";")[0] == own.headers["Content-Type"].partition(";")[0]
            assert found.headers.get("Content-Encoding") is None


def test_what_is_not_there_and_what_is_not_a_page_stay_as_they_are(ours: TestClient, plain: TestClient) -> None:
    assert ours.get("/static/js/nothing.js").text == plain.get("/static/js/nothing.js").text
    assert ours.get("/static/../../index.html").text == plain.get("/static/../../index.html").text
    assert ours.get("/_stcore/health").text == "<head></head> is what it says", "nobody asked for a page"
    assert ours.post("/curves", headers=BROWSER).status_code == plain.post("/curves", headers=BROWSER).status_code


def test_a_script_that_a_version_of_streamlit_lacks_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "Button.abc.js").touch()
    (tmp_path / "ButtonGroup.def.js").touch()
    assert re.findall(r"import\(\"([^\"]+)\"\)", front_end.head(tmp_path)) == [
        "./static/js/ButtonGroup.def.js",
        "./static/js/Button.abc.js",
    ]
