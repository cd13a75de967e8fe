"""One trial's page: the trial that it is of, what it says of it, and what moved first in it."""

from contextlib import closing
from pathlib import Path

from tests.dashboard import fake_store
from tests.dashboard.fake_store import BOUNDED, STUDY
from tests.dashboard.shown import GOOD, cards, change, charts, codes, fork, page, run, subheaders, texts
from tests.tuner import made_study
from tuner.confirm.headline import ONE_SEED, UNTRAINED
from tuner.confirm.plan import Plan
from tuner.confirm.result import confirmations
from tuner.files import trial_log
from tuner.files.folder import held_folder
from tuner.judge.results import read_study

CURVES = ["objective/kl_exact curves", "eval/reward curves"]


def test_it_is_of_the_answer_of_the_first_chosen_or_of_the_one_in_the_link(built: Path) -> None:
    app = page("trial", built)
    assert cards(app)["Reward"] == ("1.739 ± 0.035", ONE_SEED) and cards(app)["Eval KL"] == ("9.56", "budget 10")
    app.multiselect(key="trial").set_value([6, 5])
    assert charts(run(app)) == [*CURVES, "incident chart"]
    [told] = [one.help for one in app.subheader if one.value == "Moved first: Clip fraction and Entropy"]
    assert told.startswith(
        "Trial 6: Training KL was 18.9 nats at step 21, the first step over the guard's limit of 15. "
    )
    assert " moved first, at step 18" in told
    app.selectbox(key="n").set_value(5)
    assert charts(run(app)) == CURVES, "its KL stayed low"


def test_of_what_ran_on_fresh_seeds_its_number_is_their_mean(tmp_path: Path) -> None:
    store = fake_store.build_bounded(tmp_path / "store.db", courses=fake_store.BOUNDED_DONE)
    made_study.confirm(store, BOUNDED, Plan(top=1, seeds=3))
    [confirmation] = confirmations(store, read_study(store, BOUNDED))
    best = confirmation.best
    assert best is not None and best.reward is not None
    number = str(best.trial.number)
    assert cards(page("trial", tmp_path / "store.db", n=number))["Reward"] == (
        best.reward.text, "mean of 3 fresh seeds"
    )  # fmt: skip
    for link in ({"n": number, "budget": "3"}, {"n": "1"}):
        assert cards(page("trial", tmp_path / "store.db", **link))["Reward"][1] != "mean of 3 fresh seeds"


def test_the_kl_step_of_a_trial_that_keeps_it_is_charted(tmp_path: Path) -> None:
    fake_store.build(tmp_path / "store.db", courses=(GOOD, GOOD)).close()
    change(
        tmp_path / "store.db",
        "UPDATE ppo_steps SET policy_kl_step = 0.2, policy_kl_step_wanted = 0.25 "
        "WHERE step > 0 AND trial_id = (SELECT id FROM ppo_trials WHERE number = 1)",
    )
    paced = page("trial", tmp_path / "store.db", n="1")
    pace = ["policy/kl_step pace", "lr pace", "objective/kl_coef pace"]
    assert charts(paced) == [*CURVES, *pace]
    assert "KL step, learning rate and β" in subheaders(paced)
    assert charts(page("trial", tmp_path / "store.db", n="0")) == CURVES


def test_a_trial_without_a_trained_checkpoint_in_the_budget_has_no_value(tmp_path: Path) -> None:
    fake_store.build(tmp_path / "store.db", courses=(GOOD, GOOD)).close()
    change(tmp_path / "store.db", "UPDATE ppo_trials SET value_step = 0, value = 0.42 WHERE number = 1")
    app = page("trial", tmp_path / "store.db", n="1")
    assert cards(app)["Reward"] == ("-", UNTRAINED), "its value is the SFT policy's"


def test_a_running_trial_says_how_far_it_is_and_how_long_it_still_takes(tmp_path: Path) -> None:
    with closing(fake_store.build(tmp_path / "store.db", held=True)):
        shown = cards(page("trial", tmp_path / "store.db", n="13"))
        assert shown["Episodes"] == ("1,088 of 1,920", "14 s, 11 s left")
    shown = cards(page("trial", tmp_path / "store.db", n="12"))
    assert shown["Episodes"] == ("1,920 of 1,920", "25 s")


def test_it_says_how_the_trial_ended_and_how_to_go_on(built: Path) -> None:
    app = page("trial", built, n="2")
    assert "Training KL was over 15 nats per response for 3 steps: 29.4 at step 13" in texts(app)
    words = [code.split()[1:3] for code in codes(app)]
    assert words == [["enqueue", STUDY]], "one command, and no more training of what the guard ended"
    kl = str(app.get("echarts_chart")[0].proto.spec)
    assert "Guard stops after 3 steps over 15" in kl and "Training KL (line) and Eval KL (points), nats per" in kl
    [again] = codes(page("trial", built, n="0"))
    assert again == f"ppo-tuner train --from {STUDY} 0 --storage sqlite:///{built}"
    assert {"What to change", "Samples"} <= set(subheaders(app))


def test_the_end_of_its_log_is_shown_as_text(tmp_path: Path) -> None:
    fake_store.build(tmp_path / "store.db", courses=(GOOD,)).close()
    app = page("trial", tmp_path / "store.db")
    assert "Its log is not on this machine." in texts(app)
    folder = tmp_path / "runs" / "0"
    folder.mkdir(parents=True)
    with held_folder(folder):
        trial_log.note(folder, "<b>bold</b>\x1b[31m")
    change(tmp_path / "store.db", "UPDATE ppo_studies SET folder = ?", str(tmp_path / "runs"))
    said = codes(page("trial", tmp_path / "store.db"))
    assert any("<b>bold</b>⟨U+001B⟩[31m" in code for code in said)


def test_a_fork_says_where_it_comes_from(tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(GOOD,))
    fork(store, STUDY, 1, 0, 6, kl_coef=0.2)
    app = page("trial", tmp_path / "store.db", n="1")
    assert any(text.startswith("Trial 1 is a fork of trial 0 at step 6: kl_coef 0.2") for text in texts(app))


def test_all_settings_are_listed_with_the_references_where_they_differ(built: Path) -> None:
    app = page("trial", built, n="3")
    [table] = [one.value for one in app.dataframe if "Name" in one.value]
    assert table.set_index("Name").drop(columns="Setting").T.to_dict("list") == {
        "total_episodes": ["1920", ""],
        "response_length": ["24", ""],
        "seed": ["7", ""],
        "learning_rate": ["0.00016", "0.0001"],
        "batch_size": ["128", "64"],
        "num_ppo_epochs": ["4", ""],
        "cliprange": ["0.2", ""],
        "kl_coef": ["0.032", "0.05"],
    }
