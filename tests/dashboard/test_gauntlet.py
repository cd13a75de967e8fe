"""The gauntlet's figure: what is drawn at each gate, for few configurations and for 600; and on a page."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plotly.graph_objects as go
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import gauntlet as figures
from dashboard.views import gauntlet as page
from tests.dashboard import fake_store
from tests.dashboard.shown import run
from tests.tuner.trial_rows import trial_row
from tests.waiting import SECONDS
from tuner.confirm.gauntlet import GATES, Gate, Gauntlet, Reading, State, Way
from tuner.study.status import Origin

LIMITS = {Gate.TRAINING: 15.0, Gate.KL: 6.0, Gate.REWARD: 1.8, Gate.HACKING: 1.0, Gate.FRESH: 0.0}
TEXTS = {gate: f"limit of {gate}" for gate in GATES}
PASSING = {Gate.TRAINING: 5.0, Gate.KL: 4.0, Gate.REWARD: 1.9, Gate.HACKING: 0.5, Gate.FRESH: 0.2}
FAILING = {Gate.TRAINING: 45.0, Gate.KL: 9.0, Gate.REWARD: 1.2, Gate.HACKING: 1.4, Gate.FRESH: -0.1}


def reading(value: float, **more: Any) -> Reading:
    return Reading(value, f"{value}", f"{value} nats", **more)


def row(number: int, passed: int, state: State = State.STOPPED, *, is_answer: bool = False, **more: Any) -> Way:
    """A configuration that passed so many gates; `more` is of its last reading."""
    readings = [reading(PASSING[gate]) for gate in GATES[:passed]]
    if state is State.STOPPED:
        readings.append(reading(FAILING[GATES[passed]], **more))
    return Way(trial_row(number), tuple(readings), passed, state, is_answer)


def made(*rows: Way) -> Gauntlet:
    return Gauntlet(rows, LIMITS, TEXTS)


FEW = made(
    row(1, 5, State.PASSED, is_answer=True),
    row(2, 4, low=-0.3, high=0.1, is_close=True),
    row(3, 4, State.OPEN),
    row(4, 2),
    row(5, 1),
    row(6, 0),
)


def drawn(figure: go.Figure) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data if trace.x[0] is not None}


def numbers(trace: Any) -> list[int]:
    return [datum[0] for datum in trace.customdata]


def heads(figure: go.Figure) -> list[str]:
    return [note.text for note in figure.layout.annotations if note.text.startswith("<b>")]


def test_a_cross_marks_where_each_configuration_stopped_with_its_number() -> None:
    traces = drawn(figures.figure(FEW))
    crosses = {name: numbers(trace) for name, trace in traces.items() if name.endswith("stopped")}
    assert crosses == {
        "training KL: stopped": [6],
        "eval KL: stopped": [5],
        "reward: stopped": [4],
        "fresh seeds: stopped": [2],
    }
    assert {traces[name].marker.symbol for name in crosses} == {"x"}
    assert [text.strip() for text in traces["reward: numbers"].text] == ["1.2"]
    assert numbers(traces["training KL: passed"]) == [1, 2, 3, 4, 5]
    assert list(traces["length / hacking: passed"].marker.symbol) == ["circle", "circle", "circle-open"], "3 is open"
    assert list(traces["fresh seeds: close"].x) == [-0.1]
    bars = traces["fresh seeds: stopped"].error_x
    assert (bars.array[0], bars.arrayminus[0]) == pytest.approx((0.2, 0.2))


def test_of_600_the_best_20_have_a_row_and_the_others_ticks() -> None:
    others = [row(number, 2) for number in range(10, 400)] + [row(number, 0) for number in range(400, 604)]
    figure = figures.figure(made(*FEW.rows[:4], *others[:-2]))
    traces, labels = drawn(figure), figure.layout.yaxis.ticktext
    assert len(labels) == 21 and labels[-1] == "576 more" and labels[19] == "trial 25"
    assert numbers(traces["reward: more stopped"]) == list(range(26, 400))
    assert numbers(traces["training KL: more passed"]) == list(range(26, 400))
    assert numbers(traces["training KL: more stopped"]) == list(range(400, 602))
    assert heads(figure)[0] == "<b>training KL</b><br>596 → 394"
    assert figure.layout.height < 800


def test_a_study_without_readings_is_drawn() -> None:
    nothing = Reading(None, "failed", "not read, failed")
    figure = figures.figure(made(Way(trial_row(0, origin=Origin.REFERENCE), (nothing,), 0, State.STOPPED, False)))
    assert numbers(drawn(figure)["training KL: stopped"]) == [0]
    assert json.loads(figure.to_json())["layout"]["xaxis"]["range"][0] is not None
    assert len(figures.figure(made()).data) == 0


def test_the_trial_of_a_page_is_the_one_clicked(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script() -> None:
        import streamlit as st

        from dashboard.views import common, gauntlet
        from tuner.confirm.answer import study_answer

        choice = common.choose()
        answer = study_answer(choice.store, choice.snapshot.view)
        st.text(f"selected {gauntlet.show(choice.store, choice.snapshot, answer)}")

    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{built}")
    app = run(AppTest.from_function(script, default_timeout=SECONDS))
    assert [text.value for text in app.text] == ["selected None"]
    wide, narrow = (json.loads(chart.proto.spec) for chart in app.get("plotly_chart"))
    assert len(wide["layout"]["yaxis"]["ticktext"]) == len(fake_store.COURSES)
    assert "xaxis5" in wide["layout"] and "xaxis3" not in narrow["layout"]
    assert not any(shape["type"] == "rect" and shape.get("xref") == "paper" for shape in wide["layout"]["shapes"])

    clicked = [SimpleNamespace(selection=SimpleNamespace(points=points)) for points in ([{"customdata": [9, ""]}], [])]
    state: dict[str, Any] = {"wide": clicked[0]}
    monkeypatch.setattr(page.st, "session_state", state)
    page._select("chosen", "wide")
    assert state["chosen"] == 9
    state["wide"] = clicked[1]
    page._select("chosen", "wide")
    assert state["chosen"] is None
    monkeypatch.undo()

    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{built}")
    app.session_state["gauntlet 1"] = 9
    run(app)
    assert [text.value for text in app.text] == ["selected 9"]
    wide = json.loads(app.get("plotly_chart")[0].proto.spec)
    (shade,) = (one for one in wide["layout"]["shapes"] if one["type"] == "rect" and one.get("xref") == "paper")
    assert wide["layout"]["yaxis"]["ticktext"][round(shade["y0"] + 0.5)] == "<b>trial 9</b>"
