"""The page Compare: what differs, what it is worth, where it comes from, and how to train it for real."""

import json
import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import BOUNDED, STUDY
from tests.dashboard.shown import page
from tests.tuner import made_study
from tuner.confirm.headline import ONE_SEED
from tuner.confirm.plan import Plan
from tuner.confirm.result import confirmations
from tuner.judge.results import read_study

pytestmark = pytest.mark.slow


def colours(app: AppTest, place: int) -> dict[str, str]:
    """The styles of a table's cells, by row and column."""
    css = app.dataframe[place].proto.arrow_data.styler.styles
    rules = re.findall(r"(#[^{]*?) \{ (.*?) \}", css)
    return {cell: rule for cells, rule in rules for cell in re.findall(r"row\d+_col\d+", cells)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole fake study with a fork of trial 7, which no test changes."""
    path = tmp_path_factory.mktemp("store") / "store.db"
    store = fake_store.build(path)
    shown.fork(store, STUDY, 14, 7, 12, kl_coef=0.09)
    store.close()
    return path


def test_only_the_differing_settings_are_shown(built: Path) -> None:
    app = page("compare", built, trial=["7", "14"])
    settings = app.dataframe[0].value
    assert settings.to_numpy().tolist() == [
        ["Line", "━━━", "━━━"],
        ["KL coefficient β (reward per nat)", "0.045", "0.09 (×2)"],
    ]


@pytest.mark.parametrize(("trial", "columns"), [("7", ["trial 7", "trial 9"]), ("9", ["trial 0", "trial 9"])])
def test_a_trial_chosen_alone_is_beside_answer_or_reference(built: Path, trial: str, columns: list[str]) -> None:
    app = page("compare", built, trial=[trial, trial])
    assert list(app.dataframe[1].value.columns) == ["outcome", *columns]


def test_outcomes_are_one_number_a_trial_and_its_difference(built: Path) -> None:
    app = page("compare", built, trial=["7", "0", "2", "8"])
    outcomes = app.dataframe[1].value.set_index("outcome")
    assert list(outcomes.columns) == ["trial 0", "trial 7", "trial 2", "trial 8"]
    assert outcomes.loc["Status"].tolist() == ["✓ completed", "✓ completed", "✕ pruned", "▲ failed"]
    assert outcomes.loc["Measured as"].tolist()[0] == ONE_SEED and outcomes.loc["Reward"].iloc[3] == "-"
    assert outcomes.loc["Reason"].iloc[3] == "'=cmd() CUDA out of memory: 9.1 GiB asked for, 3.2 GiB free"
    said = [text for text in shown.texts(app) if " against trial 0" in text]
    assert len(said) == 2, "trial 8 has no value"
    assert said[0].startswith("Trial 7 against trial 0: +0.298 ± 0.049 reward")


def test_what_ran_on_fresh_seeds_has_their_means_and_their_difference(tmp_path: Path) -> None:
    store = fake_store.build_bounded(tmp_path / "store.db", courses=fake_store.BOUNDED_DONE)
    made_study.confirm(store, BOUNDED, Plan(top=1, seeds=3))
    [confirmation] = confirmations(store, read_study(store, BOUNDED))
    best, reference = confirmation.best, confirmation.reference
    assert best is not None and best.reward is not None and best.kl is not None and reference is not None
    lead = confirmation.lead(best, reference)
    assert lead is not None
    app = page("compare", tmp_path / "store.db", trial=["1", str(best.trial.number), "0"])
    outcomes = app.dataframe[1].value.set_index("outcome")[["trial 1", f"trial {best.trial.number}"]]
    assert outcomes.loc["Reward"].iloc[1] == best.reward.text
    assert outcomes.loc["Eval KL (nats)"].iloc[1] == f"{best.kl.mean:.2f}"
    assert outcomes.loc["Measured as"].tolist() == [ONE_SEED, "mean of 3 fresh seeds"]
    told = f"Trial {best.trial.number} against trial 0: {lead.signed} reward on 3 fresh seeds."
    assert told in shown.texts(app)


def test_each_trial_has_the_command_that_trains_it_for_real(built: Path) -> None:
    app = page("compare", built, trial=["7", "0"])
    where = f"--storage sqlite:///{built}"
    assert shown.codes(app) == [f"ppo-tuner train --from {STUDY} {number} {where}" for number in (0, 7)]
    headers = [
        one["label"] for name, one in json.loads(app.dataframe[1].proto.columns).items() if name.startswith("trial")
    ]
    assert headers == ["Trial 0", "Trial 7"]
    assert app.dataframe[1].value.loc[1].tolist() == ["Role", "reference", ""]


def test_nothing_chosen_compares_the_default_ones(built: Path) -> None:
    app = page("compare", built)
    assert list(app.dataframe[1].value.columns) == ["outcome", "trial 0", "trial 9"]
    assert not app.get("plotly_chart")
    assert "Different settings" in shown.subheaders(app)


def test_more_than_six_trials_are_cut_and_that_is_said(built: Path) -> None:
    app = page("compare", built, trial=[str(number) for number in range(8)])
    assert len(app.dataframe[1].value.columns) == 7
    assert "Showing 6 of 8 trials. Choose others in the sidebar." in shown.infos(app)
