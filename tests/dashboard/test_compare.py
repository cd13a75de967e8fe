"""The page Compare: what differs, what it is worth, where it comes from, and how to train it for real."""

import json
import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import BOUNDED, STUDY
from tests.dashboard.shown import GOOD, page
from tests.tuner import made_study
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


def test_only_the_differing_settings_are_shown(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("compare", built, monkeypatch, trial=["7", "14"])
    settings = app.dataframe[0].value
    assert settings.to_numpy().tolist() == [
        ["Line", "━━━", "━━━"],
        ["KL coefficient β (reward per nat)", "0.045", "0.09 (×2)"],
    ]


def test_each_trial_has_the_line_that_it_has_in_the_charts(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("compare", built, monkeypatch, trial=["0", "8"])
    assert colours(app, 0) == {"row0_col1": "color: #0072B2", "row0_col2": "color: #806020"}


def test_the_highest_value_is_marked_not_by_colour_alone(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("compare", built, monkeypatch, trial=["0", "7", "2", "8"])
    outcomes = app.dataframe[1].value.set_index("outcome")
    assert [cell[:1] for cell in outcomes.loc["Value ± SE (reward)"]] == ["1", "★", "1", "-"]
    assert sorted(colours(app, 1)) == ["row0_col1", "row0_col2", "row0_col3", "row0_col4", "row3_col2"]


@pytest.mark.parametrize(("trial", "beside"), [("7", "0"), ("0", "9")])
def test_a_trial_chosen_alone_is_beside_the_reference_and_the_reference_beside_the_best(
    built: Path, monkeypatch: pytest.MonkeyPatch, trial: str, beside: str
) -> None:
    app = page("compare", built, monkeypatch, trial=[trial, trial])
    assert list(app.dataframe[1].value.columns) == ["outcome", "trial 0", f"trial {max(trial, beside)}"]
    said = "Only one trial is chosen, so another is beside it: the reference, or the best one."
    assert said in [caption.value for caption in app.caption]


def test_outcomes_are_told_with_the_difference_and_its_noise(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("compare", built, monkeypatch, trial=["0", "7", "2", "8"])
    outcomes = app.dataframe[1].value.set_index("outcome")
    assert outcomes.loc["Status"].tolist() == ["✓ completed", "✓ completed", "✕ pruned", "▲ failed"]
    assert outcomes.loc["Ends within 10 nats"].tolist() == ["yes", "yes", "no", "-"]
    assert "Reason" not in outcomes.index, "a cell would cut it off"
    assert "Trial 8: =cmd() CUDA out of memory: 9.1 GiB asked for, 3.2 GiB free" in shown.texts(app)
    said = [text for text in shown.texts(app) if " against trial 0" in text]
    assert len(said) == 2, "trial 8 has no value"
    assert said[0].startswith(
        "Trial 7 against trial 0 (the reference): +0.298 ± 0.049 reward, more than the noise of the prompts (6.0 standard errors, not paired"
    )
    assert any("one run of each trial" in (heading.help or "") for heading in app.subheader)


def test_values_of_best_checkpoints_are_told_with_their_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_store.build_bounded(tmp_path / "store.db").close()
    app = page("compare", tmp_path / "store.db", monkeypatch, trial=["5", "13", "7"])
    outcomes = app.dataframe[1].value.set_index("outcome")
    assert outcomes.loc["Status"].tolist() == ["✓ completed", "‖ paused", "✓ completed"]
    assert outcomes.loc["Read at episode"].tolist() == ["768 (step 12)", "128 (step 2)", "1,920 (step 30)"]
    assert outcomes.loc["Ends within 10 nats"].tolist() == ["no", "-", "yes"]
    assert len([text for text in shown.texts(app) if " against trial 5" in text]) == 2
    assert any("the highest of several evaluations" in (heading.help or "") for heading in app.subheader)


def test_each_trial_has_the_command_that_trains_it_for_real(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("compare", built, monkeypatch, trial=["7", "0"])
    where = f"--storage sqlite:///{built}"
    assert shown.codes(app) == [f"ppo-tuner train --from {STUDY} {number} {where}" for number in (7, 0)]
    headers = [
        one["label"] for name, one in json.loads(app.dataframe[1].proto.columns).items() if name.startswith("trial")
    ]
    assert headers == ["Trial 7", "Trial 0"]
    assert app.dataframe[1].value.loc[1].tolist() == ["Role", "", "reference"]
    assert [one.value for one in app.caption][:2] == ["Train it again"] * 2
    known = "The results above are of runs of 1,920 episodes; how longer runs end is not known, so watch their KL."
    assert known in [one.value for one in app.caption]


def test_what_the_trials_reached_on_fresh_seeds_is_beside_their_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fake_store.build_bounded(tmp_path / "store.db", courses=fake_store.BOUNDED_DONE)
    made_study.confirm(store, BOUNDED, Plan(top=1, seeds=3))
    [confirmation] = confirmations(store, read_study(store, BOUNDED))
    best = confirmation.best
    assert best is not None and best.reward is not None and best.kl is not None
    [other] = [one for one in confirmation.configurations if one is not best]
    lead = confirmation.lead(other, best)
    assert lead is not None
    numbers = [str(number) for number in (best.trial.number, other.trial.number, 1)]
    app = page("compare", tmp_path / "store.db", monkeypatch, trial=numbers)
    outcomes = app.dataframe[1].value.set_index("outcome")
    assert outcomes.loc["Fresh seeds: reward"].iloc[[0, 2]].tolist() == [best.reward.text, ""]
    assert outcomes.loc["Fresh seeds: KL"].iloc[[0, 2]].tolist() == [best.kl.text, ""]
    assert outcomes.loc["Fresh seeds: within budget"].iloc[[0, 2]].tolist() == [f"{best.ends_within} of 3", ""]
    told = (
        f"On 3 fresh seeds, trial {numbers[1]} against trial {numbers[0]}: {lead.text} reward, with its 95% interval."
    )
    assert told in shown.texts(app)


def test_a_trial_that_the_guard_ended_has_a_change_to_try_instead(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("compare", built, monkeypatch, trial=["2", "0"])
    change, again = shown.codes(app)
    assert again.startswith(f"ppo-tuner train --from {STUDY} 0 ")
    assert change.startswith(f"ppo-tuner enqueue {STUDY} --set ") and "trial 2, " in change
    told = "The guard ended trial 2, so it is not worth training longer. Try a change of it instead:"
    assert told in shown.texts(app)


def test_nothing_chosen_compares_the_default_ones(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("compare", built, monkeypatch)
    assert list(app.dataframe[1].value.columns) == ["outcome", "trial 0", "trial 9", "trial 6"]
    assert not app.get("plotly_chart")
    assert "Different settings" in shown.subheaders(app)


def test_more_than_six_trials_are_cut_and_that_is_said(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("compare", built, monkeypatch, trial=[str(number) for number in range(8)])
    assert len(app.dataframe[1].value.columns) == 7
    assert "Shown are 6 of 8 trials. Choose others in the sidebar." in shown.infos(app)


def test_few_trials_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_store.build(tmp_path / "one.db", courses=(GOOD,)).close()
    assert shown.infos(page("compare", tmp_path / "one.db", monkeypatch)) == [
        "Choose at least two trials in the sidebar to compare them."
    ]
    fake_store.build(tmp_path / "none.db", courses=()).close()
    assert shown.subheaders(page("compare", tmp_path / "none.db", monkeypatch)) == ["No trials yet"]
    fake_store.build(tmp_path / "same.db", courses=(GOOD, GOOD)).close()
    app = page("compare", tmp_path / "same.db", monkeypatch, trial=["0", "1"])
    assert "Their configurations are equal." in shown.infos(app)
