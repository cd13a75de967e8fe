"""The control page in a test: the study that it is about, opened by a link, its buttons pressed, its texts read."""

from streamlit.testing.v1 import AppTest

from tests.dashboard.fake_store import STUDY, Course
from tests.dashboard.shown import run
from tests.waiting import SECONDS
from tuner.store import Order, Store
from tuner.study.status import Status

TOKEN = "a token"
DONE = Course(1e-4, 0.05, 4.0, batch=128)
COURSES = (
    DONE,
    Course(2e-4, 0.05, 4.0, Status.FAILED, batch=128, ends_at=4),
    Course(3.0e-4, 5.2, 5.3, Status.RUNNING, adaptive=True, ends_at=5),
)
"""Of a study with a trial that completed, one that failed and one that runs."""


def orders(store: Store) -> list[Order]:
    return store.orders(store.study(STUDY))


def control_page() -> None:
    from dashboard.views import common, control

    control.page(common.choose(with_budget=False))


def page(token: str = TOKEN, **link: str) -> AppTest:
    app = AppTest.from_function(control_page, default_timeout=SECONDS)
    app.query_params.update(link | ({"token": token} if token else {}))
    return run(app)


def press(app: AppTest, label: str) -> AppTest:
    """Press the button of this key, or else of this label."""
    found = [button for button in app.button if button.key == label] or [b for b in app.button if b.label == label]
    found[0].proto.disabled = False  # as for a client that does not mind
    found[0].click()
    return run(app)


def texts(app: AppTest) -> str:
    return "\n".join(text.value for text in app.text)


def badges(app: AppTest) -> str:
    return "\n".join(markdown.value for markdown in app.markdown)
