"""Every page on every kind of store: none, empty, foreign, newer, begun, failed, the whole fake study, a large one."""

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dashboard import data, views
from tests.dashboard import fake_store
from tests.dashboard.shown import FAILED, change, codes, infos, page, run, subheaders, texts
from tuner.store import NewTrial, Store
from tuner.store.schema import SCHEMA_VERSION
from tuner.study.status import Origin

VIEWS = sorted(path.stem for path in Path(views.__file__).parent.glob("*.py") if "\ndef page(" in path.read_text())
LARGE = 2_000
STUDY = {"study": fake_store.STUDY}

every_page = pytest.mark.parametrize("view", VIEWS)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake study's trials over and over, until there are 2,000."""
    path = tmp_path_factory.mktemp("large") / "store.db"
    fake_store.build(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        for table, key in (("ppo_trials", "id"), ("ppo_steps", "trial_id")):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            moved = [
                f"{name} + 14 * again" if name == key else "number + 14 * again" if name == "number" else name
                for name in columns
            ]
            connection.execute(
                "WITH RECURSIVE more(again) AS (SELECT 1 UNION ALL SELECT again + 1 FROM more WHERE again < 142) "
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(moved)} FROM {table}, more"
            )
        connection.execute("UPDATE ppo_studies SET spec = json_set(spec, '$.trials', ?)", [LARGE])
    return path


SHOWS = {
    "answer": "dataframe", "compare": "dataframe", "control": "button", "curves": "echarts_chart",
    "reward_kl": "plotly_chart", "runs": "echarts_chart", "samples": "text", "studies": "dataframe",
    "trial": "echarts_chart", "why": "plotly_chart",
}  # fmt: skip
"""The kind of element that each page is about."""


HEADED = r"(?P<colour>#\w{6});[^>]*><b>Trial (?P<trial>\d+)"


@pytest.mark.parametrize(
    ("view", "kind", "pattern"),
    [
        ("curves", "echarts_chart", r'"name\W+Trial (?P<trial>\d+), line\W+encode[^#(]*color\W+(?P<colour>#\w{6})'),
        ("reward_kl", "plotly_chart", r"Trial (?P<trial>\d+)\W+u003c.*?line\W+color\W+(?P<colour>#\w{6})"),
        ("samples", "html", HEADED),
        ("compare", "html", HEADED),
    ],
)
def test_a_trial_has_the_same_colour_on_every_page(built: Path, view: str, kind: str, pattern: str) -> None:
    """Whatever the order of choice; 9, the answer, has its own, which would be trial 1's, too."""
    app = page(view, built, trial=["9", "1", "5"])
    drawn = [found for one in app.get(kind) for found in re.finditer(pattern, str(one.proto))]
    colour_of = {(int(found["trial"]), found["colour"]) for found in drawn if found["trial"] in ("9", "1", "5")}
    assert colour_of == {(1, "#009E73"), (5, "#D55E00"), (9, "#E69F00")}


def test_every_page_is_here() -> None:
    assert list(SHOWS) == VIEWS


@every_page
def test_without_a_store(view: str, tmp_path: Path) -> None:
    app = page(view, tmp_path / "store.db")
    assert "No store yet" in subheaders(app)
    assert f"ppo-tuner demo --storage sqlite:///{tmp_path / 'store.db'}" in codes(app)


@every_page
def test_with_an_empty_store(view: str, tmp_path: Path) -> None:
    Store.open(f"sqlite:///{tmp_path / 'store.db'}", create=True).close()
    app = page(view, tmp_path / "store.db")
    assert "No studies yet" in subheaders(app)


def foreign(path: Path) -> str:
    change(path, "CREATE TABLE theirs (x)")
    return "is not a PPO Tuner store"


def newer(path: Path) -> str:
    fake_store.build(path, courses=()).close()
    change(path, "UPDATE ppo_meta SET value = '99' WHERE key = 'schema_version'")
    return f"has schema version 99; this PPO Tuner reads version {SCHEMA_VERSION}"


def garbage(path: Path) -> str:
    path.write_bytes(b"not a database at all" * 100)
    return "failed: file is not a database"


def damaged(path: Path) -> str:
    fake_store.build(path, courses=(FAILED,)).close()
    change(path, "DROP TABLE ppo_trials")
    return "no such table: ppo_trials"


@every_page
@pytest.mark.parametrize("spoil", [foreign, newer, garbage, damaged])
def test_with_a_store_that_cannot_be_read(view: str, spoil: Callable[[Path], str], tmp_path: Path) -> None:
    said = spoil(tmp_path / "store.db")
    app = page(view, tmp_path / "store.db")
    assert "This store cannot be shown" in subheaders(app)
    assert sum(said in text for text in texts(app)) == 1


@every_page
def test_a_store_that_goes_away_while_the_page_is_open(view: str, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=fake_store.COURSES[:2]).close()
    app = page(view, path, **STUDY)
    assert "No store yet" not in subheaders(app)
    for file in tmp_path.iterdir():
        file.unlink()
    assert "No store yet" in subheaders(run(app))
    assert data.is_missing(f"sqlite:///{path}")  # and looking made none


@every_page
def test_with_a_study_that_has_not_begun(view: str, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=()).close()
    app = page(view, path, **STUDY)
    if view not in ("control", "studies"):
        assert codes(app) == [f"ppo-tuner run reviews --storage sqlite:///{path}"]


@every_page
def test_with_one_trial_that_has_made_no_step(view: str, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = fake_store.build(path, courses=())
    lease = store.acquire(fake_store.STUDY)
    trial = store.add_trial(lease, NewTrial(0, Origin.REFERENCE, {"total_episodes": 640}, {}, threads=1))
    store.begin_attempt(lease, trial, None)
    app = page(view, path, **STUDY)
    assert [*infos(app), *codes(app), *texts(app), *app.dataframe]
    store.release(lease)
    store.close()


@every_page
def test_with_trials_that_all_failed(view: str, tmp_path: Path) -> None:
    fake_store.build(tmp_path / "store.db", courses=(FAILED, FAILED)).close()
    app = page(view, tmp_path / "store.db", **STUDY)
    if view == "answer":
        assert codes(app)[0].startswith("ppo-tuner retry reviews ")


@every_page
def test_with_the_whole_study(view: str, built: Path) -> None:
    assert page(view, built, **STUDY).get(SHOWS[view])


@every_page
def test_with_a_study_that_has_a_budget(view: str, bounded: Path) -> None:
    app = page(view, bounded, study=fake_store.BOUNDED)
    assert app.get(SHOWS[view])
    told = " ".join([*texts(app), *(caption.value for caption in app.caption), *infos(app)])
    assert "None" not in told and "mean of a trial's last two" not in told


@pytest.mark.slow
@every_page
def test_with_two_thousand_trials(view: str, large: Path) -> None:
    app = page(view, large, **STUDY)
    assert app.get(SHOWS[view])
    if view == "answer":
        assert texts(app)[0].startswith(f"1859 of {LARGE} trials ended")
