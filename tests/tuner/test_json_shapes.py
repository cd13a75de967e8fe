"""Commands print the JSON that the reference says they print."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.shapes import OBJECTS, PRINTED, all_fields
from tests.tuner.exported import enrich
from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import NAME, quick_spec, run, storage
from tests.tuner.trial_rows import trial_row
from tuner.cli import estimate
from tuner.cli.main import COMMANDS, build_parser
from tuner.confirm.result import Confirmed, compared, confirmation_data
from tuner.store import OnTest, Store, TrialRow


@pytest.fixture
def enriched(made: str, own_folder: Path) -> str:
    store = Store.open(str(own_folder / "made.db"))
    enrich(store)
    store.close()
    return made


@pytest.fixture
def said(ppo_tuner: Invoke, enriched: str) -> Callable[..., Any]:
    """Return what a command prints as JSON."""

    def say(*argv: str) -> Any:
        _, out, err = ppo_tuner(*argv, "--json")
        assert out, err
        return json.loads(out)

    return say


def documented(name: str) -> set[str]:
    """Return the keys of an object of the reference."""
    kind, without, more = OBJECTS[name]
    own = set() if kind is None else all_fields(kind).keys() - set(without.split(", "))
    return own | {key for names in more for key in names.split(", ")}


TRIAL = all_fields(TrialRow).keys() - {"id", "study_id", "is_interrupted"}
OF_LIST = {"answer", "reward", "kl", "reward_is"}


def test_every_command_with_json_has_its_shape() -> None:
    _, parsers = build_parser()
    parsers["estimate"] = estimate.build_parser()
    with_json = {name for name, parser in parsers.items() if "--json" in parser._option_string_actions} | {"train"}
    assert {name for names in PRINTED for name in names.split(", ")} == with_json <= set(COMMANDS)


def test_studies(said: Callable[..., Any], enriched: str) -> None:
    assert set(said("list")[0]) == documented("summary")
    study = said("show", enriched)
    assert set(study) == documented("summary") - OF_LIST | documented("study") | {"front", "orders", "answer"}
    assert set(study["answer"]) == documented("answer")
    assert all(set(trial) == TRIAL for trial in study["trials"])
    assert set(study["trials"][5]["reason"]) == documented("reason of a trial's early end")


def test_trials(said: Callable[..., Any], enriched: str) -> None:
    detail = said("show", enriched, "0")
    assert set(detail) == TRIAL | {"steps", "samples", "checkpoints"}
    assert set(said("best", enriched)) == TRIAL | documented("best trial")
    assert set(said("compare", enriched, "0", "2")) == documented("comparison")


def test_orders_and_findings(said: Callable[..., Any], enriched: str) -> None:
    assert set(said("show", enriched)["orders"][0]) == documented("order")
    assert set(said("stop", enriched, "7")) == documented("order")
    assert set(said("doctor")[0]) == {"state", "about", "found"}


def test_what_mattered_and_what_is_wrong(ppo_tuner: Invoke, own_folder: Path) -> None:
    run(own_folder, quick_spec(trials=14))
    where = ["--storage", storage(own_folder), "--json"]
    importance = json.loads(ppo_tuner("importance", NAME, *where)[1])
    assert set(importance) == {"study", "trials", "reward", "KL"}
    assert set(importance["reward"][0]) == documented("importance")
    diagnoses = [one for number in range(14) for one in json.loads(ppo_tuner("diagnose", NAME, str(number), *where)[1])]
    assert diagnoses and all(set(one) == documented("diagnosis") for one in diagnoses)


def test_a_confirmation() -> None:
    read = OnTest(0, 8, 0.5, 0.1, 0.0, 0.0, None, 0.0)
    runs = [Confirmed(trial_row(number), 96, {1: 1.0, 2: 2.0}, {1: 3.0, 2: 4.0}, {1: 96, 2: 96}) for number in (0, 1)]
    data = confirmation_data(compared(96, runs, read))
    assert set(data) == documented("confirmation")
    assert all(set(one) == documented("configuration") for one in data["configurations"])
    assert set(data["configurations"][0]["reward"]) == documented("interval")
