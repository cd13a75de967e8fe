"""The report of a study as one HTML file: what it says, that nothing in it is live, and that it opens without a network."""

import itertools
import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tomli_w
from playwright.sync_api import Browser, expect

from dashboard import report
from ppo_core.report import SplitReading
from tests.dashboard import browser as real
from tests.dashboard import fake_store
from tests.dashboard.fake_store import COURSES, HOSTILE, SPEC, STUDY, Course
from tests.tuner.invoke import one_error
from tuner.cli import main as cli
from tuner.store import NewTrial, Outcome, Store
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Role, Status

FINISHED = tuple(course for course in COURSES if course.status is not Status.RUNNING)
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"


BOXES = """all => all.filter(one => one.querySelector('tspan')).map(one => one.getBoundingClientRect()).map(box => [box.left, box.right])"""
"""Ends of the figure's headings, which have two lines."""


class Read(HTMLParser):
    """What a browser makes of a page: its words in order, its tags, and what its scripts are allowed by."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.nonces: list[str | None] = []
        self.fetched: list[str] = []
        self.handlers: list[str] = []
        self._words: list[str] = []
        self._in: str = ""
        self.feed(page)

    @property
    def text(self) -> str:
        """All that it shows, with single blanks."""
        return " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        """Note a tag, and what it could fetch or run."""
        self.tags.append(tag)
        self._in = tag
        given = dict(attrs)
        if tag == "script":
            self.nonces.append(given.get("nonce"))
        self.fetched += [f"{tag} {name}" for name in ("src", "href", "srcset") if name in given]
        self.handlers += [name for name in given if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        """Leave a script or a style."""
        self._in = ""

    def handle_data(self, data: str) -> None:
        """Note a text."""
        if self._in not in ("script", "style"):
            self._words.append(data)


def read(store: Store, name: str = STUDY) -> Read:
    return Read(report.report(store, name))


def confirm(
    store: Store,
    number: int,
    runs: Sequence[tuple[int, float, float]],
    length: int | None = None,
    over: int | None = None,
) -> None:
    """Add confirming runs of a trial: seed, reward and KL on the test prompts; that on the seed `over` ends over it."""
    study = store.study(STUDY)
    lease = store.acquire(STUDY)
    parent = store.trial(study, number)
    for seed, reward, kl in runs:
        config = {**parent.config, "seed": seed, "total_episodes": length or parent.config["total_episodes"]}
        row = store.add_trial(
            lease,
            NewTrial(
                len(store.trials(study)), parent.origin, config, parent.params, 1, parent=number, role=Role.CONFIRM
            ),
        )
        row = store.begin_attempt(lease, row, None)
        store.finish_trial(
            lease,
            row.id,
            Outcome(Status.COMPLETED, None, reward, 0.03, kl, -0.1, 5, end_kl=12.0 if seed == over else kl),
        )
        store.add_test_reading(lease, row.id, 5, SplitReading(256, reward, 0.03, kl, 0.1), None)
    store.add_test_reading(lease, store.trial(study, 0).id, 0, SplitReading(256, 0.4, 0.03, 0.0, 0.0), None)
    store.release(lease)


# What it says


def test_a_finished_study_leads_with_its_best_trial_not_confirmed(tmp_path: Path) -> None:
    with closing(fake_store.build(tmp_path / "s.db", courses=FINISHED)) as store:
        page = read(store)
        best = store.trial(store.study(STUDY), 9)
    text = page.text
    assert text.index("Study reviews: finished") < text.index("Recommendation") < text.index("Trials Trial Status")
    assert f"Best in budget, one seed: eval reward {best.value:.3f} ± 0.035 at KL " in text
    assert "Launch trial 9, which is not confirmed." in text
    assert "To settle the doubt ppo-tuner confirm reviews" in text
    assert "ppo-tuner train --from reviews 9 " in text
    assert "13 of 14 trials ended. Spent: 247 device-seconds" in text
    assert "Policy learning rate 0.00036 0.0001" in text, "against the reference"
    figures = text.split(" Figures ")[1].split(" Trials ")[0]
    left = "Left at first, and after each gate: 13 → 10 → 10 → 4 → 4."
    assert figures.startswith(f"Where each trial stopped {left} Reward against KL ")
    assert figures.endswith("Training KL over episodes Eval reward over episodes")


def test_confirmed_lengths_have_tables_and_the_longest_is_recommended(tmp_path: Path) -> None:
    with closing(fake_store.build(tmp_path / "s.db", courses=FINISHED)) as store:
        confirm(store, 9, [(8, 1.9, 6.0), (9, 2.0, 7.0), (10, 1.95, 6.5)])
        confirm(store, 0, [(8, 1.4, 4.0), (9, 1.5, 4.5), (10, 1.45, 4.2)])
        confirm(store, 9, [(8, 2.4, 8.0), (9, 2.5, 9.0), (10, 2.45, 8.5)], 9_600, over=9)
        text = read(store).text
    recommended = text.split("Confirmed on fresh seeds")[0]
    assert "is not confirmed" not in recommended and "To settle the doubt" not in recommended
    assert "On 3 fresh seeds: reward 2.45 [2.33, 2.57] at KL " in recommended
    assert "ppo-tuner train --from reviews 9 --total_episodes 9600" in recommended
    assert "1920 episodes each, evaluated on 256 test prompts" in text and "9600 episodes each" in text
    assert "reference (0) 3 1.45 [1.37, 1.53]" in text
    trials = text.split(" Trials ")[1]
    assert "0 ✓ completed 1.45 [1.37, 1.53] 4.23 mean of 3 fresh seeds 1920 " in trials
    assert "9 ✓ completed 2.45 [2.33, 2.57] 8.50 mean of 3 fresh seeds 1920 " in trials
    assert " ± 0.035 " in trials and "best in budget, one seed 1920 " in trials, "what none has confirmed"
    assert "Launch trial 9: +0.50 [0.36, 0.64] over the reference." in text
    assert "The SFT policy scores 0.400 ± 0.030 on the same prompts" in text


def test_why_trials_failed_is_told_by_rule_with_an_examples_evidence(tmp_path: Path) -> None:
    with closing(fake_store.build(tmp_path / "s.db", courses=FINISHED)) as store:
        row = store.trial(store.study(STUDY), 2)
        text = read(store).text.split("Why the others failed")[1]
    assert row.reason is not None and row.reason.metric is not None
    assert f"Trial 2: {row.reason.message}" in text
    assert f"rule {row.reason.rule}; metric {row.reason.metric}; value 29.4; limit 15.0; step {row.reason.step}" in text
    assert "step=13 episode=832 objective/kl_exact=29.4" in text
    assert "out_of_memory: 1 trial (8)" in text and "CUDA out of memory: 9.1 GiB" in text


def test_samples_stand_beside_the_untrained_policys(tmp_path: Path) -> None:
    with closing(fake_store.build(tmp_path / "s.db", courses=FINISHED)) as store:
        text = read(store).text.split("Samples Prompt")[1]
    assert text.startswith(" the film was SFT policy okay . reward 0.270, KL 0.00 nats/response, 2 tokens")
    assert "Trial 9 at step 18 good , really good . trial 9 says so ." in text


def test_the_study_file_in_it_makes_the_same_study(tmp_path: Path) -> None:
    with closing(fake_store.build(tmp_path / "s.db", courses=FINISHED)) as store:
        stored = store.study(STUDY).spec
        text = read(store).text
    shown = text.split("The whole study file, reviews.toml ")[1]
    assert 'name = "reviews"' in shown
    assert StudySpec.from_dict(tomllib.loads(tomli_w.dumps(report.as_toml(stored))), "again") == SPEC
    assert report.as_toml({"urls": ["http://me:secret@host/x", None]}) == {"urls": ["http://me:***@host/x", None]}, (
        "mailed"
    )
    assert "Seed 7, device auto, threads of a trial: 1." in text
    assert "ppo-tuner run reviews.toml" in text


# Every state of a study


@pytest.mark.parametrize(
    ("courses", "told"),
    [
        ((), "No trial has begun yet, so there is nothing to recommend."),
        ((Course(1e-3, 0.05, 4.0, Status.FAILED, ends_at=2),) * 2, "Every trial failed"),
        ((Course(1e-3, 0.05, 4.0, Status.RUNNING, ends_at=0),), "No trial is within the KL budget"),
        (
            (replace(FINISHED[0], level=400.0, status=Status.PRUNED),),
            "No trial is within the KL budget of 10 nats/response",
        ),
    ],
)
def test_where_nothing_is_to_recommend_it_says_why(tmp_path: Path, courses: tuple[Course, ...], told: str) -> None:
    with closing(fake_store.build(tmp_path / "s.db", courses=courses)) as store:
        text = read(store).text
    assert told in text and "How to reproduce it" in text


# Nothing in it is live


def test_what_others_wrote_is_shown_and_never_live(tmp_path: Path) -> None:
    only = (FINISHED[0], FINISHED[1], FINISHED[7])
    with closing(fake_store.build(tmp_path / "s.db", courses=only)) as store:
        lease = store.acquire(STUDY)
        config = store.trial(store.study(STUDY), 0).config
        row = store.add_trial(lease, NewTrial(3, Origin.ENQUEUED, config, {}, 1, label=SCRIPT))
        store.begin_attempt(lease, row, None)
        why = Reason("error", f"RuntimeError: {SCRIPT}", evidence=({SCRIPT: 1.0},), log=f"Traceback {SCRIPT}\x1b[31m")
        store.finish_trial(lease, row.id, Outcome(Status.FAILED, why))
        store.release(lease)
        page = report.report(store, STUDY)
    read = Read(page)
    assert HOSTILE[:20] in read.text, "the response of trial 2, the best one"
    assert read.text.count("<script>alert(1)</script>") == 6, "response, label, reason twice, evidence, log"
    assert (read.tags.count("script"), len(set(read.nonces)), None in read.nonces) == (6, 1, False)
    assert "img" not in read.tags and read.handlers == [] and read.fetched == []
    assert "⟨U+202E⟩" in read.text and "\u202e" not in page and "\x1b" not in page
    assert "default-src 'none'" in page and len(page.encode()) < 6e6


# The command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a study in the default storage."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPO_TUNER_STORAGE", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(real.ROOT))
    Path("runs").mkdir()
    fake_store.build(Path("runs/ppo-tuner.db"), courses=FINISHED[:2]).close()
    return tmp_path


def test_the_command_replaces_a_file_only_when_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", STUDY]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("wrote reviews-report.html (4.") and err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["reviews-report.html", "runs"]
    Path("reviews-report.html").write_text("mine")
    assert cli.main(["report", STUDY]) == 2
    assert one_error(capfd.readouterr().err) == (
        "reviews-report.html already exists; replace it with --force, or name another with -o"
    )
    assert Path("reviews-report.html").read_text() == "mine"
    assert cli.main(["report", STUDY, "--force"]) == 0
    assert Read(Path("reviews-report.html").read_text()).tags[0] == "html"


def test_a_report_that_is_not_finished_replaces_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("reviews-report.html").write_text("mine")
    monkeypatch.setattr("sys.executable", "false")
    assert cli.main(["report", STUDY, "--force"]) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["reviews-report.html", "runs"]
    assert Path("reviews-report.html").read_text() == "mine"


# In a browser


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_it_opens_from_a_file_without_a_network_and_draws_its_charts(
    browser: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    path = tmp_path / "report.html"
    with closing(fake_store.build(tmp_path / "s.db", courses=FINISHED)) as store:
        confirm(store, 9, [(8, 1.9, 6.0), (9, 2.0, 7.0)])
        path.write_text(report.report(store, STUDY))
    with real.visit(browser, width=width, dark=dark) as visit:
        visit.page.context.set_offline(True)
        visit.page.goto(path.as_uri())
        drawn = visit.page.locator(".chart .js-plotly-plot, .chart.js-plotly-plot")
        expect(drawn).to_have_count(5)
        shown = [drawn.nth(place) for place in range(5) if drawn.nth(place).is_visible()]
        assert len(shown) == 4, "one of the two figures of the gates"
        heads = sorted(shown[0].locator(".annotation-text").evaluate_all(BOXES))
        assert len(heads) > 1 and all(one[1] <= other[0] for one, other in itertools.pairwise(heads)), "none overlap"
        expect(visit.page.locator(".chart .scatterlayer .trace path").first).to_be_attached()
        wide = visit.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert (visit.errors, wide) == ([], 0)
        assert [url for url in visit.requests if not url.startswith(("file:", "data:", "blob:"))] == []
