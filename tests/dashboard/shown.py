"""Running one page on a store, for the tests of the analysis pages."""

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from streamlit.testing.v1 import AppTest

from tests.dashboard.fake_store import Course
from tests.waiting import SECONDS
from tuner.store import NewTrial, Outcome, Store
from tuner.study.status import Origin, Role, Status

PAGES = Path(__file__).parents[2] / "dashboard" / "pages.py"
GOOD = Course(1e-4, 0.05, 4.0, batch=128)
FAILED = Course(1e-4, 0.05, 4.0, Status.FAILED, batch=128, ends_at=4)


def page(module: str, path: Path, **query: str | list[str]) -> AppTest:
    """Return the page `module` on the store at `path`, which becomes the default, with a link's query, run once."""
    script = f"from dashboard.views import common, {module}\n{module}.page(common.choose())"
    return on(path, AppTest.from_string(script, default_timeout=SECONDS), query)


def app(path: Path, **query: str | list[str]) -> AppTest:
    """Return the same of the whole dashboard, whose first page is the answer."""
    return on(path, AppTest.from_file(PAGES, default_timeout=SECONDS), query)


def on(path: Path, app: AppTest, query: Mapping[str, str | list[str]]) -> AppTest:
    os.environ["PPO_TUNER_STORAGE"] = f"sqlite:///{path}"
    app.query_params.update(query)
    return run(app)


def run(app: AppTest) -> AppTest:
    app.run()
    assert not app.exception
    return app


def texts(app: AppTest) -> list[str]:
    return [element.value for element in app.text]


def codes(app: AppTest) -> list[str]:
    return [element.value for element in app.code]


def infos(app: AppTest) -> list[str]:
    return [element.value for element in app.info]


def subheaders(app: AppTest) -> list[str]:
    return [element.value for element in app.subheader]


def cards(app: AppTest) -> dict[str, tuple[str, str]]:
    return {metric.label: (metric.value, metric.delta) for metric in app.metric}


def charts(app: AppTest) -> list[str]:
    return [chart.key for chart in app.get("echarts_chart")]


def kinds_with(app: AppTest, marker: str) -> set[str]:
    """The kinds of elements that hold `marker` anywhere in what is sent to the browser."""
    return {node.type for node in app.main if node.type != "main" and marker in str(node.proto)}


def change(path: Path, statement: str, *values: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement, values)
    connection.close()


def fork(store: Store, study: str, number: int, parent: int, step: int, **changed: float) -> None:
    """Add a completed fork of trial `parent` at `step`, whose own steps are its parent's up to there."""
    lease = store.acquire(study)
    row = store.trial(store.study(study), parent)
    new = NewTrial(number, Origin.FORKED, {**row.config, **changed}, {**row.params, **changed}, 1,
                   label="<b>gentler</b>", parent=parent, fork_step=step, role=Role.FORK)  # fmt: skip
    trial = store.begin_attempt(lease, store.add_trial(lease, new), None)
    store.finish_trial(lease, trial.id, Outcome(Status.COMPLETED, None, 1.5, 0.03, 6.0, 0.0))
    store.release(lease)
