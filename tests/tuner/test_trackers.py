"""A study's trials at trackers: a run each, which goes on where the trial does, and no trial notices a failure."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.tuner import quick_study
from tests.tuner.invoke import Invoke, one_error
from tests.tuner.quick_run import INTERRUPT_ONCE, QUICK_STUDY
from tuner.control.events import StudyWarned
from tuner.exchange.trackers import StudyTrackers


def read(folder: Path) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the steps of every metric, and the texts, in TensorBoard's files."""
    events = EventAccumulator(str(folder)).Reload()
    steps = {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    tags = [name for name in events.Tags()["tensors"] if name.endswith("/text_summary")]
    texts = {name: events.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in tags}
    return steps, texts


def test_each_trial_is_a_run_that_goes_on_after_an_interruption(
    ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    monkeypatch.setenv(INTERRUPT_ONCE, str(own_folder / "interrupted"))
    again = ("run", "--report_to", "tensorboard", "quick.toml")
    status, _, stderr = ppo_tuner(*again)
    assert status == 130 and stderr.rstrip().endswith("run --report_to tensorboard quick.toml")
    assert ppo_tuner(*again)[0] == 0
    for number in range(3):
        steps, texts = read(own_folder / "runs" / "quick" / "trackers" / f"trial-{number}")
        assert steps["objective/scores"] == steps["episode"] == [0, 1, 2, 3, 4]
        assert {0, 4} <= {*steps["eval/kl"]} and steps["trial/value"] == [4]
        assert texts["trial/status/text_summary"] in ("completed", "pruned")
    assert list((own_folder / "runs/quick/trackers/trial-0").rglob("hparams.yml"))


def wandb(calls: list[tuple[Any, ...]]) -> types.ModuleType:
    """Return a module that notes what it is told."""

    class Run:
        def __init__(self, keywords: dict[str, Any]) -> None:
            self.name = keywords["name"]
            calls.append(("init", self.name, keywords))

        def log(self, values: dict[str, Any], step: int) -> None:
            calls.append(("log", self.name, values, step))

        def finish(self) -> None:
            calls.append(("finish", self.name))

    made: Any = types.ModuleType("wandb")
    made.init = lambda **keywords: Run(keywords)
    return made  # type: ignore[no-any-return]


def test_runs_are_grouped_by_study_with_metrics_and_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setitem(sys.modules, "wandb", wandb(calls))
    spec = quick_study.quick_spec()
    with StudyTrackers(("wandb",), tmp_path, lambda event: None) as tracked:
        assert quick_study.run(tmp_path, spec, on_event=tracked)[0]
    begun = {call[1]: call[2] for call in calls if call[0] == "init"}
    assert [*sorted(begun)] == [f"quick/trial-{number}" for number in range(6)]
    assert {each["group"] for each in begun.values()} == {"quick"} and len({e["id"] for e in begun.values()}) == 6
    rows = quick_study.rows(tmp_path)
    for row in rows:
        name = f"quick/trial-{row.number}"
        assert begun[name]["config"]["learning_rate"] == row.config["learning_rate"]
        logged = [call[2:] for call in calls if call[:2] == ("log", name)]
        assert [values["episode"] for values, step in logged[:-1]] == [16 * step for _, step in logged[:-1]]
        verdict, last = logged[-1]
        assert (verdict["trial/status"], verdict.get("trial/value")) == (row.status, row.value)
        assert last == row.episodes // 16 and [call for call in calls if call[1] == name][-1] == ("finish", name)
    reason = rows[5].reason
    assert reason is not None and any(reason.rule in str(call) for call in calls)


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_one_warning_and_no_trial_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no answer")

    fake: Any = wandb([])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    if where == "init":
        monkeypatch.setattr(fake, "init", fail)
    else:
        begin = fake.init
        monkeypatch.setattr(fake, "init", lambda **keywords: types.SimpleNamespace(**{
            "log": begin(**keywords).log, "finish": begin(**keywords).finish, where: fail}))  # fmt: skip
    events: list[Any] = []
    with StudyTrackers(("wandb",), tmp_path, events.append) as tracked:
        assert quick_study.run(tmp_path, quick_study.quick_spec(trials=2), on_event=tracked)[0]
    warned = [event.message for event in events if isinstance(event, StudyWarned)]
    assert len(warned) == 1 and "tracker wandb" in warned[0] and "no answer" in warned[0]
    assert [row.attempts for row in quick_study.rows(tmp_path)] == [1, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandb", "install it with: pip install wandb"),
        ("mlflow", 'unknown tracker "mlflow"; available: tensorboard, trackio, wandb'),
    ],
)
def test_a_tracker_that_is_not_there_is_said_before_anything_starts(
    ppo_tuner: Invoke, own_folder: Path, name: str, message: str
) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    status, stdout, stderr = ppo_tuner("run", "quick.toml", "--report-to", name)
    assert (status, stdout) == (2, "") and message in one_error(stderr)
    assert not (own_folder / "runs").exists()
