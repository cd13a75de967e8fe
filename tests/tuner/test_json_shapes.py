"""Commands print the JSON that docs/json_shapes.py, and with it the reference, says they print."""

import ast
import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs import json_shapes as shapes
from ppo_core.cli import training
from tests.tuner.exported import enrich
from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import NAME, quick_spec, run, storage
from tuner.cli import estimate
from tuner.cli.main import COMMANDS, build_parser
from tuner.confirm import result as confirmed
from tuner.store import Store


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


def keys(found: dict[str, Any]) -> set[str]:
    return set(found)


def test_every_command_with_json_has_its_shape() -> None:
    _, parsers = build_parser()
    parsers["estimate"] = estimate.build_parser()
    with_json = {name for name, parser in parsers.items() if "--json" in parser._option_string_actions} | {"train"}
    assert set(shapes.COMMANDS) == with_json <= set(COMMANDS)


def test_studies(said: Callable[..., Any], enriched: str) -> None:
    assert keys(said("list")[0]) == keys(shapes.LISTED)
    study = said("show", enriched)
    assert keys(study) == keys(shapes.STUDY) | {"front", "orders", "answer"}
    assert keys(study["answer"]) == keys(shapes.ANSWER)
    assert all(keys(trial) == keys(shapes.TRIAL) for trial in study["trials"])
    assert keys(study["trials"][5]["reason"]) == keys(shapes.REASON)


def test_trials(said: Callable[..., Any], enriched: str) -> None:
    detail = said("show", enriched, "0")
    assert keys(detail) == keys(shapes.DETAIL)
    assert keys(detail["samples"][0]) == keys(shapes.SAMPLE)
    assert keys(said("best", enriched)) == keys(shapes.BEST)
    assert keys(said("compare", enriched, "0", "2")) == keys(shapes.COMPARISON)


def test_orders_and_findings(said: Callable[..., Any], enriched: str) -> None:
    assert keys(said("show", enriched)["orders"][0]) == keys(shapes.ORDER)
    assert keys(said("stop", enriched, "7")) == keys(shapes.ORDER)
    assert keys(said("doctor")[0]) == keys(shapes.FINDING)


def test_what_mattered_and_what_is_wrong(ppo_tuner: Invoke, own_folder: Path) -> None:
    run(own_folder, quick_spec(trials=14))
    where = ["--storage", storage(own_folder), "--json"]
    importance = json.loads(ppo_tuner("importance", NAME, *where)[1])
    assert keys(importance) == keys(shapes.IMPORTANCE)
    assert all(f"`{key}`" in shapes.IMPORTANCE["reward"] for key in importance["reward"][0])
    diagnoses = [one for number in range(14) for one in json.loads(ppo_tuner("diagnose", NAME, str(number), *where)[1])]
    assert diagnoses and all(keys(one) == keys(shapes.DIAGNOSIS) for one in diagnoses)


def returned(function: Callable[..., Any]) -> set[str]:
    """Return the keys of the dict that a function returns, and the names that a `**{... for name in ...}` has."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    (answer,) = [node.value for node in ast.walk(definition) if isinstance(node, ast.Return)]
    assert isinstance(answer, ast.Dict)
    return {key.value for key in answer.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def test_what_takes_minutes_to_print() -> None:
    """Their keys are read from the code, since a confirmation, an estimate or a run takes long."""
    assert returned(training._result_dict) | {"hub"} == keys(shapes.TRAINING)
    assert returned(estimate._data) == keys(shapes.ESTIMATE)
    assert returned(confirmed.confirmation_data) == keys(shapes.CONFIRMATION)
    by_name = {"reward", "kl", "over_reference", "over_baseline", "under_best", "lost", "failed", "stopped", "open"}
    assert returned(confirmed._configuration_data) | by_name == keys(shapes.CONFIGURATION)
