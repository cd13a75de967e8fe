"""New trials on the control page: forks at a checkpoint, and copies with other values."""

from pathlib import Path

import pytest

from dashboard import steering
from ppo_core import checkpoint
from tests.dashboard.control_page import orders, page, press, texts
from tests.dashboard.fake_store import HOSTILE, STUDY
from tests.dashboard.shown import run
from tuner.files import folder as study_folder
from tuner.judge.results import read_study
from tuner.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]


def test_the_checkpoints_to_fork_at_are_those_in_the_trials_folder(folder: Path, store: Store) -> None:
    assert steering.fork_episodes(read_study(store, STUDY), 0) == []
    for step, episode in ((4, 512), (8, 1024)):
        path = checkpoint.step_folder(folder / "runs" / STUDY / "0", step)
        checkpoint.write(path, {}, state={}, extra={"episode": episode})
    lease = store.acquire(STUDY)
    store.update_study(lease, folder=str(folder / "runs" / STUDY))
    store.release(lease)
    assert steering.fork_episodes(read_study(store, STUDY), 0) == []  # not marked as this study's
    (folder / "runs" / STUDY / "study.json").write_text(
        f'{{"study": "{STUDY}", "created_at": {store.study(STUDY).created_at!r}}}'
    )
    assert study_folder.is_of(folder / "runs" / STUDY, store.study(STUDY))
    view = read_study(store, STUDY)
    assert steering.fork_episodes(view, 0) == [1024, 512]
    app = page(part="New trial", way="Fork at a checkpoint")
    app.selectbox(key="from").set_value(0)
    run(app)
    assert app.selectbox(key="at 0").options == ["1024", "512"]
    offered = app.multiselect(key="forked 0").options
    assert "kl_coef (KL coefficient β)" in offered and not any(name.startswith("batch_size") for name in offered)
    app.selectbox(key="at 0").set_value(512)
    app.multiselect(key="forked 0").set_value(["kl_coef"])
    run(app)
    app.text_input(key="fork 0 kl_coef").set_value("0.2")
    app.text_input(key="fork 0 label").set_value(HOSTILE)
    press(app, "Fork")
    assert 'Fork trial 0 of study "reviews"' in texts(app) and "kl_coef = 0.2" in texts(app)
    press(app, "Do it")
    [order] = orders(store)
    assert (order.kind, order.trial) == ("fork", 0)
    assert order.arguments["values"] == {"kl_coef": "0.2"} and order.arguments["episode"] == 512
    assert "\u202e" not in order.arguments["label"]


def test_a_fork_at_the_last_episode_is_offered_with_more_of_them(folder: Path, store: Store) -> None:
    for step, episode in ((8, 1024), (15, 1920)):
        path = checkpoint.step_folder(folder / "runs" / STUDY / "0", step)
        checkpoint.write(path, {}, state={}, extra={"episode": episode})
    lease = store.acquire(STUDY)
    store.update_study(lease, folder=str(folder / "runs" / STUDY))
    store.release(lease)
    (folder / "runs" / STUDY / "study.json").write_text(
        f'{{"study": "{STUDY}", "created_at": {store.study(STUDY).created_at!r}}}'
    )
    app = page(part="New trial", way="Fork at a checkpoint", **{"from": "0"})
    assert "at the trial's last episode, 1,920" in "".join(text.value for text in app.markdown)
    press(app, "Fork")
    press(app, "Do it")
    assert [order.arguments for order in orders(store)] == [{"values": {"total_episodes": "3840"}}]
    app.selectbox(key="at 0").set_value(1024)
    run(app)
    assert app.multiselect(key="forked 0").value == []
    assert "last episode" not in "".join(text.value for text in app.markdown)


def test_a_copy_has_the_trials_values_and_the_changed_ones(store: Store) -> None:
    app = page(part="New trial")
    app.selectbox(key="from").set_value(2)
    run(app)
    fields = {field.label: field.value for field in app.text_input}
    assert fields["Policy learning rate: 1e-05 to 0.003"] == "0.0003"
    assert fields["Rollout batch (episodes): 64 to 128, a power of two"] == "64"
    assert fields["KL coefficient β (reward per nat): 0.01 to 0.3"] == ""
    app.text_input(key="copy 2 learning_rate").set_value("2")
    press(app, "Add to queue")
    assert "learning_rate = '2' is not allowed" in texts(app)
    app.text_input(key="copy 2 learning_rate").set_value("5e-4")
    press(press(app, "Add to queue"), "Do it")
    values = orders(store)[0].arguments["values"]
    assert values["learning_rate"] == "5e-4" and values["kl_target"] == "5.2" and "kl_coef" not in values
