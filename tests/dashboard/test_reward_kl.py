"""The page Reward and KL: the best under a budget that is asked for, and whether its checkpoint is kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dashboard import data
from dashboard.views import reward_kl
from ppo_core.checkpoint import MANIFEST, step_folder
from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import STUDY
from tests.dashboard.shown import GOOD, page
from tests.tuner import made_study
from tuner.confirm.plan import Plan
from tuner.confirm.result import confirmations
from tuner.control import forks
from tuner.judge.answer import Answer, of_study
from tuner.judge.best import RULE
from tuner.judge.results import StudyView, read_study
from tuner.store import Store

pytestmark = pytest.mark.slow


def test_the_best_checkpoint_is_told_under_the_studys_own_budget(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("reward_kl", built, monkeypatch)
    assert app.slider(key="budget").value == 10
    best = "Highest value in the search: 1.739 ± 0.035, trial 9 at step 18, KL 9.56"
    assert shown.subheaders(app) == ["Reward against KL", "What the KL buys", best]
    assert (
        app.subheader[2].help
        == f"A trial's value is the eval reward of the best checkpoint within the KL budget. {RULE}"
    )
    luck = (
        "The star is the highest of 50 noisy evaluations within the budget, so part of it is luck. Confirm it on fresh"
    )
    assert any(text.startswith(luck) for text in shown.texts(app))
    bought = app.dataframe[0].value.set_index("within")
    assert bought.loc[10, ["reward", "trial", "step"]].tolist() == ["1.739 ± 0.035", 9, 18]
    assert bought.index.tolist() == [2.5, 5, 7.5, 10, 20]
    assert shown.codes(app) == [f"ppo-tuner train --from {STUDY} 9 --storage sqlite:///{built}"]
    assert len(app.get("plotly_chart")) == 1
    assert any("Trial 9 itself ends over the budget, at a KL of 11.9" in text for text in shown.texts(app))


def test_where_a_trial_is_worth_its_best_checkpoint_there_is_one_answer(
    bounded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = page("reward_kl", bounded, monkeypatch)
    assert shown.subheaders(app)[2:] == ["Highest value in the search: 1.744 ± 0.035, trial 5 at step 12, KL 9.68"]
    best = data.snapshot(data.open_store(f"sqlite:///{bounded}"), fake_store.BOUNDED).view.best()
    assert best is not None and (best.number, best.value_step) == (5, 12), "the study's own"
    assert any("Trial 5 itself ends over the budget, at a KL of 14.5" in text for text in shown.texts(app))
    [chart] = app.get("plotly_chart")
    assert {"best checkpoint: trial 5, step 12", "pruned"} <= {
        trace.get("name") for trace in json.loads(chart.proto.spec)["data"]
    }


def test_what_is_confirmed_has_its_mean_on_the_chart_and_beside_the_star(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    store = fake_store.build_bounded(path, courses=fake_store.BOUNDED_DONE)
    made_study.confirm(store, fake_store.BOUNDED, Plan(top=1, seeds=3))
    [one] = [each for each in confirmations(store, read_study(store, fake_store.BOUNDED))[0].configurations
             if not each.is_reference]  # fmt: skip
    assert one.reward is not None and one.kl is not None

    def drawn(**link: str) -> tuple[str, int]:
        app = page("reward_kl", path, monkeypatch, **link)
        [chart] = app.get("plotly_chart")
        means = [trace for trace in json.loads(chart.proto.spec)["data"] if "error_y" in trace]
        return next(text for text in shown.texts(app) if text.startswith("The star is ")), len(means)

    text, means = drawn()
    expected = f"of 3 fresh seeds of trial 5 on the test prompts: {one.reward.text} at a KL of {one.kl.text}."
    assert text.endswith(f"What to expect is the mean {expected}") and means == 2
    app = page("reward_kl", path, monkeypatch)
    assert any("Large diamonds are means of fresh seeds on the test prompts" in one.value for one in app.caption)
    text, means = drawn(budget="3")
    assert text.endswith("Confirm it on fresh seeds before you rely on it.") and means == 0, "another KL budget"


def test_where_another_is_to_launch_that_comes_first(bounded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(store: Store, view: StudyView) -> Answer | None:
        answer = of_study(store, view)
        return answer and replace(answer, trial=view.trials[7])

    monkeypatch.setattr(reward_kl, "of_study", other)
    app = page("reward_kl", bounded, monkeypatch)
    headings = shown.subheaders(app)[2:]
    assert headings == ["What to launch", "Highest value in the search: 1.744 ± 0.035, trial 5 at step 12, KL 9.68"]
    assert any(text.value.startswith("**Trial 7") for text in app.markdown)


def test_another_budget_judges_each_trial_by_what_is_stored(bounded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("reward_kl", bounded, monkeypatch, budget="5")
    assert shown.subheaders(app)[2:] == ["Highest value in the search: 1.470 ± 0.035, trial 9 at step 12, KL 4.70"]
    app.slider(key="budget").set_value(0.1)
    assert shown.subheaders(shown.run(app))[2:] == ["No trained checkpoint within 0.1 nats"]


def test_each_study_begins_with_its_own_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    for name in ("first", "second"):
        fake_store.build(path, courses=(GOOD,), name=name).close()
    shown.change(path, "UPDATE ppo_studies SET spec = json_set(spec, '$.kl.budget', 6.0) WHERE name = ?", "first")
    app = page("reward_kl", path, monkeypatch, study="second")
    assert app.slider(key="budget").value == 10
    app.selectbox(key="study").set_value("first")
    assert shown.run(app).slider(key="budget").value == 6


def test_a_kept_checkpoint_is_shown_with_what_goes_on_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "store.db", tmp_path / "runs" / STUDY
    store = fake_store.build(path, courses=(GOOD,))
    step = step_folder(folder / "0", 12)
    step.mkdir(parents=True)
    shown.change(path, "UPDATE ppo_studies SET folder = ?", str(folder))
    owner = {"study": STUDY, "created_at": store.study(STUDY).created_at}
    (folder / "study.json").write_text(json.dumps(owner))
    assert forks.find(store.study(STUDY), 0, 12).path is None, "a folder without its manifest is none"
    (step / MANIFEST).write_text("{}")
    app = page("reward_kl", path, monkeypatch)
    kept = shown.codes(app)
    assert kept[0] == str(step)
    assert kept[1] == f"ppo-tuner fork {STUDY} 0 --at 1536 --set NAME=VALUE --storage sqlite:///{path}"
    row = store.trials(store.study(STUDY))[0]
    assert " --at 1920 --set total_episodes=3840" in data.go_on(STUDY, row, 1920)  # its end: nothing else to do
    (folder / "study.json").write_text(json.dumps(owner | {"created_at": 1.0}))
    assert "not on this machine" in forks.find(store.study(STUDY), 0, 12).why_not


def test_a_password_never_stands_in_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(GOOD,))
    monkeypatch.setenv("PPO_TUNER_STORAGE", "postgresql://me:hidden@host/db")
    [trial] = store.trials(store.study(STUDY))
    assert "hidden" not in data.go_on(STUDY, trial, 1920)
    monkeypatch.delenv("PPO_TUNER_STORAGE")
    assert data.go_on(STUDY, trial, 1920).endswith("--set total_episodes=3840")
