"""One trial's page: the trial that it is of, what it says of it, and what moved first in it."""

from pathlib import Path

import pytest

from tests.dashboard import fake_store
from tests.dashboard.fake_store import STUDY
from tests.dashboard.shown import GOOD, cards, change, charts, codes, fork, infos, page, run, subheaders, texts
from tuner.files import trial_log
from tuner.study.folder import held_folder

CURVES = ["objective/kl_exact curves", "eval/reward curves"]


def test_it_is_of_the_best_of_the_first_chosen_or_of_the_one_in_the_link(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = page("trial", built, monkeypatch)
    assert cards(app)["Best in the budget"] == ("1.739 ± 0.035", "step 18, KL 9.56")
    assert cards(app)["End KL"] == ("11.89", "over 10")
    app.multiselect(key="trial").set_value([6, 5])
    assert charts(run(app)) == [*CURVES, "incident chart"]
    [told] = [text for text in texts(app) if text.startswith("Trial 6: KL 18.9 nats at step 21, the first step over")]
    assert " moved first, at step 18" in told
    app.selectbox(key="n").set_value(5)
    assert "The KL of trial 5 never went over the budget of 10 nats per response." in infos(run(app))


def test_it_says_how_the_trial_ended_and_how_to_go_on(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("trial", built, monkeypatch, n="2")
    assert "Training KL was over 15 nats per response for 3 steps: 29.4 at step 13" in texts(app)
    assert any(code.startswith(f"ppo-tuner train --from {STUDY} 2 ") for code in codes(app))
    assert any(code.startswith(f"ppo-tuner fork {STUDY} 2 --at ") for code in codes(app))
    assert {"What moved first", "What to change in trial 2", "Samples on the same prompts"} <= set(subheaders(app))


def test_the_end_of_its_log_is_shown_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_store.build(tmp_path / "store.db", courses=(GOOD,)).close()
    app = page("trial", tmp_path / "store.db", monkeypatch)
    assert "Its log is not on this machine." in texts(app)
    folder = tmp_path / "runs" / "0"
    folder.mkdir(parents=True)
    with held_folder(folder):
        trial_log.note(folder, "<b>bold</b>\x1b[31m")
    change(tmp_path / "store.db", "UPDATE ppo_studies SET folder = ?", str(tmp_path / "runs"))
    said = codes(page("trial", tmp_path / "store.db", monkeypatch))
    assert any("<b>bold</b>⟨U+001B⟩[31m" in code for code in said)


def test_a_fork_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(GOOD,))
    fork(store, STUDY, 1, 0, 6, kl_coef=0.2)
    app = page("trial", tmp_path / "store.db", monkeypatch, n="1")
    assert any(text.startswith("Trial 1 is a fork of trial 0 at step 6: kl_coef 0.2") for text in texts(app))
