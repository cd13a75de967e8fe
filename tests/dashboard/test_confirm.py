"""The page Confirm: before, in the middle of and after a confirmation."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dashboard import data, style
from dashboard.views import confirm as view
from dashboard.views import sidebar
from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import BOUNDED
from tests.dashboard.shown import page
from tests.tuner import made_study
from tests.tuner.trial_rows import trial_row
from tuner.confirm.plan import Plan
from tuner.confirm.result import Confirmation, Confirmed, compared, confirmations
from tuner.environment import to_copy
from tuner.judge.answer import of_study
from tuner.judge.results import read_study, under_budget
from tuner.store import OnTest, Store
from tuner.study.status import Origin


def confirm(store: Store, plan: Plan, read: int | None = None) -> None:
    made_study.confirm(store, BOUNDED, plan, read)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fake_store.build_bounded(tmp_path / "store.db", courses=fake_store.BOUNDED_DONE).close()
    return tmp_path / "store.db"


def opened(path: Path) -> Store:
    return Store.open(f"sqlite:///{path}")


def test_the_trials_to_choose_from_leave_out_confirming_runs(path: Path) -> None:
    with closing(opened(path)) as store:
        trials = [row.number for row in data.snapshot(store, BOUNDED).view.trials]
        confirm(store, Plan(seeds=1))
        snapshot = data.snapshot(store, BOUNDED)
    assert sidebar._numbers(snapshot) == trials
    study = replace(snapshot.view.spec, trials=len(trials) + 2, budget=None)
    to_start = [len(trials) + len(snapshot.view.confirming) + more for more in (0, 1)]
    assert sidebar._numbers(replace(snapshot, view=replace(snapshot.view, spec=study))) == [*trials, *to_start]


def test_before_a_confirmation_the_page_names_the_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("confirm", path, monkeypatch)
    assert shown.subheaders(app)[0] == "Not confirmed yet"
    assert shown.codes(app) == [f"ppo-tuner confirm {BOUNDED} --storage sqlite:///{path}"]


def test_before_a_confirmation_the_page_shows_what_would_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("confirm", path, monkeypatch)
    assert "20 runs of 1,920 episodes will confirm trial 5, trial 6, trial 7 and the reference; about" in (
        app.markdown[1].value
    )
    assert shown.subheaders(app)[1:] == ["Different settings", "Outcomes"]
    settings, outcomes = (table.value for table in app.dataframe)
    assert list(outcomes.columns) == ["outcome", "trial 5", "trial 6", "trial 7", "trial 0"]
    values = ["★ 1.744 ± 0.035", "1.738 ± 0.035", "1.721 ± 0.035", "1.423 ± 0.035"]
    assert outcomes.set_index("outcome").loc["Value ± SE (reward)"].tolist() == values
    assert outcomes.set_index("outcome").loc["Eval KL there (nats)"].tolist() == [
        "9.68",
        "8.03",
        "9.12",
        "4.12",
    ]
    assert settings.iloc[2].tolist() == [
        "Policy learning rate", "0.00036", "0.00075 (×2.1)", "0.00028 (×0.78)", "0.0001 (×0.28)"
    ]  # fmt: skip


def test_a_search_that_found_nothing_has_nothing_to_confirm(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown.change(path, "UPDATE ppo_trials SET value = NULL, kl = NULL")
    app = page("confirm", path, monkeypatch)
    assert "nothing to confirm: no trial has a checkpoint within the KL budget" in shown.texts(app)
    assert shown.codes(app) == [] and not app.dataframe


@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("UPDATE ppo_studies SET finished_at = NULL", "run"),
        ("UPDATE ppo_studies SET finished_at = NULL, paused_at = 1", "resume"),
    ],
)
def test_a_search_that_has_not_ended_is_to_finish_first(
    path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, word: str
) -> None:
    shown.change(path, statement)
    assert shown.codes(page("confirm", path, monkeypatch)) == [f"ppo-tuner {word} {BOUNDED} --storage sqlite:///{path}"]


def test_a_search_that_runs_needs_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(fake_store.build_bounded(tmp_path / "live.db", courses=fake_store.BOUNDED_COURSES[:2], held=True)):
        app = page("confirm", tmp_path / "live.db", monkeypatch)
    assert shown.codes(app) == [] and shown.subheaders(app) == ["Not confirmed yet"]


def test_device_time_tells_confirming_runs_from_the_search(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(path)
    confirm(store, Plan(top=1, seeds=3))
    store.close()
    shown.change(path, "UPDATE ppo_trials SET seconds = 100 WHERE role = 'confirm'")
    app = page("overview", path, monkeypatch)
    assert shown.cards(app)["Device time"][1].endswith(" s per ended trial, 10 min more to confirm")
    app.session_state["cost"] = True
    spent = next(one.value for one in shown.run(app).dataframe if "on" in one.value).set_index("on")
    assert spent.loc["confirming runs", ["trials", "seconds"]].tolist() == [6, 600]
    assert spent["share"].sum() == pytest.approx(100)
    assert any(one.value.endswith("of the search's time went into evaluations.") for one in app.caption)


def test_a_confirmation_is_shown_with_its_verdict_intervals_and_command(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(path)
    confirm(store, Plan(top=2, seeds=3))
    (found,) = confirmations(store, read_study(store, BOUNDED))
    store.close()
    app = page("confirm", path, monkeypatch)
    assert found.best is not None and any(text.endswith(found.verdict) for text in shown.texts(app))
    assert shown.codes(app) == [
        f"ppo-tuner train --from {BOUNDED} {found.best.trial.number} --storage sqlite:///{path}"
    ]
    table = app.dataframe[0].value
    assert table["configuration"].tolist()[0] == f"trial {found.best.trial.number}"
    assert table["seeds"].tolist() == [3, 3, 3] and len(table) == 3
    assert table["reward over the reference"].tolist().count("–") == 1, "of the reference itself"
    assert table["best over this one"].tolist()[0] == "–", "of the best itself"
    assert set(table["ends within budget"]) <= {"0 of 3", "1 of 3", "2 of 3", "3 of 3"}
    assert len(app.get("plotly_chart")) == 1
    assert "evaluated once on 64 test prompts" in (app.subheader[0].help or "")
    assert any("The SFT policy scores 0.25" in text for text in shown.texts(app))


def made(kls: Sequence[float], baseline: float | None = None) -> Confirmation:
    """Trial 5 a reward of 1 over the reference on each seed, with some spread, and trial 7 as good as it."""
    spread = {8: 0.0, 9: 0.1, 10: 0.2}
    first = {seed: 1 + more for seed, more in spread.items()}
    rewards = {5: {8: 2.0, 9: 2.1, 10: 2.3}, 7: {8: 1.1, 9: 1.0, 10: 1.2}, 0: first}
    confirmed = [
        Confirmed(
            trial_row(number, origin=Origin.SAMPLED if number else Origin.REFERENCE), 1_920, values,
            dict(zip(values, kls, strict=True)), {},
        )
        for number, values in rewards.items()
    ]  # fmt: skip
    on_test = None if baseline is None else OnTest(0, 64, baseline, 0.03, 0.0, 0.0, None, 0.0)
    return compared(1_920, confirmed, on_test)


def test_the_figure_has_reward_its_difference_to_the_reference_and_kl() -> None:
    found = made([4.0, 5.0, 6.5], baseline=0.5)
    reward, over, kl = view.panels(found, 6.0)
    assert [one.label for one, _, _ in reward.rows] == ["reference (0)", "trial 7", "trial 5"], "the best on top"
    assert reward.levels == {"the reference's mean": pytest.approx(1.1), "SFT policy": 0.5}
    assert [(one.label, {seed: round(more, 3) for seed, more in values.items()}) for one, values, _ in over.rows] == [
        ("trial 7", {8: 0.1, 9: -0.1, 10: 0.0}),
        ("trial 5", {8: 1.0, 9: 1.0, 10: 1.1}),
    ]
    assert over.levels == {"no difference": 0.0}
    assert kl.levels == {"KL budget 6": 6.0}
    figure = view.intervals(found, style.looks([0, 5, 7]), 6.0)
    colours = {(trace.y[0], trace.marker.color) for trace in figure.data}
    assert colours == {("reference (0)", "#0072B2"), ("trial 5", "#D55E00"), ("trial 7", "#A04060")}
    assert [axis.title.text for axis in figure.select_xaxes()] == [reward.title, over.title, kl.title]
    assert [list(trace.x) for trace in figure.data if trace.yaxis == "y3" and len(trace.x) > 1] == [[4.0, 5.0, 6.5]] * 3
    [shaded] = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert (shaded.xref, shaded.x0) == ("x3", 6.0) and shaded.x1 > 7


def test_an_sft_policy_far_below_does_not_flatten_the_rewards() -> None:
    assert "SFT policy" not in view.panels(made([4.0, 5.0, 5.5], baseline=-5.0), 6.0)[0].levels


@pytest.mark.parametrize(
    ("kls", "said"),
    [
        ([4.0, 5.0, 6.5], "6 of 9 runs are within the KL budget on the test prompts: the highest KL is 6.50"),
        ([4.0, 5.0, 5.5], "9 of 9 runs are within the KL budget on the test prompts: the highest KL is 5.50"),
    ],
)
def test_a_sentence_says_what_to_see(kls: list[float], said: str) -> None:
    text = view.what_to_see(made(kls), 6.0)
    assert text == f"Trial 5 beats the reference. {said} nats/response."


def test_what_is_not_decided_has_the_command_that_runs_more_seeds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(path)
    confirm(store, Plan(top=1, seeds=3))
    store.close()
    shown.change(path, "UPDATE ppo_test_readings SET reward = 1 + 0.03 * (trial_id % 3) WHERE step > 0")
    app = page("confirm", path, monkeypatch)
    assert [code.split(" --storage")[0] for code in shown.codes(app)] == [
        f"ppo-tuner confirm {BOUNDED} --seeds 6", f"ppo-tuner train --from {BOUNDED} 0"
    ]  # fmt: skip


def test_a_confirmation_under_way_is_shown_as_far_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(path)
    confirm(store, Plan(top=1, seeds=3), read=0)
    store.close()
    app = page("confirm", path, monkeypatch)
    assert any("No confirming run has been evaluated on the test prompts yet." in one.value for one in app.markdown)
    assert len(app.get("plotly_chart")) == 0
    assert app.dataframe[0].value["note"].tolist() == ["3 not evaluated yet", "3 not evaluated yet"]


def test_each_length_has_a_confirmation_of_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(path)
    confirm(store, Plan(top=1, seeds=3))
    confirm(store, Plan(top=1, seeds=3, total_episodes=9_600))
    store.close()
    app = page("confirm", path, monkeypatch)
    assert any("--total_episodes 9600" in code for code in shown.codes(app))
    linked = page("confirm", path, monkeypatch, length="1,920")
    assert any("--total_episodes 9600" in code for code in shown.codes(linked)), "the answer is one"


def test_the_first_page_says_what_to_launch_and_how_sure_that_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("overview", path, monkeypatch)
    assert any("which is not confirmed." in one.value for one in app.text)
    store = opened(path)
    confirm(store, Plan(top=1, seeds=3))
    store.close()
    app = page("overview", path, monkeypatch)
    assert any(one.value.startswith("On 3 fresh seeds: ") for one in app.text)


@pytest.mark.parametrize("budget", [None, 3.0, 4.5, 6.5, 9.0, 14.0])
def test_the_first_page_has_one_answer_under_any_budget(
    path: Path, monkeypatch: pytest.MonkeyPatch, budget: float | None
) -> None:
    """The cards, what to launch, and what commands print agree, whatever was confirmed for the study's own budget."""
    store = opened(path)
    confirm(store, Plan(top=2, seeds=3))
    view = read_study(store, BOUNDED)
    found = of_study(store, view if budget is None else under_budget(store, view, budget))
    store.close()
    assert found is not None
    app = page("overview", path, monkeypatch, **({} if budget is None else {"budget": f"{budget:g}"}))
    (card,) = [one for one in app.metric if one.label in (f"Reward of trial {found.number}", "Highest value")]
    assert card.delta.startswith(found.badge if found.confirmed is None else "95% interval 1.")
    [headline] = [one.value for one in app.markdown if one.value.startswith("**Trial ")]
    assert headline.strip("*").split(", step")[0] == f"Trial {found.number}"
    assert f"{to_copy(found.launch)} --storage sqlite:///{path}" in shown.codes(app)
    assert (found.confirmed is None) == (budget is not None)
