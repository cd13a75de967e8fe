"""The page Why: refused where it would be chance, and what was ended early."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import Course
from tests.dashboard.shown import page

pytestmark = pytest.mark.slow
GATES = ("gauntlet wide", "gauntlet narrow")
SLICES = ("slices of value", "slices of value narrow")


def test_under_ten_trials_importance_is_refused_and_the_rest_is_drawn(built: Path) -> None:
    app = page("why", built)
    assert [text for text in shown.infos(app) if text.endswith("importance needs 10, so 1 more is needed.")]
    assert [chart.key for chart in app.get("plotly_chart")] == [*GATES, *SLICES]
    app = page("why", built, more="true")
    assert [chart.key for chart in app.get("plotly_chart")] == [
        *GATES, *SLICES, "slice of kl", "pair", "parallel coordinates"
    ]  # fmt: skip
    assert "Different settings" not in shown.subheaders(app)


def test_with_enough_trials_importance_is_told_with_how_sure_it_is(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    levels = random.uniform(1, 9, 24)
    courses = tuple(
        Course(float(10 ** (level / 4 - 5)), float(random.uniform(0.02, 0.2)), float(level), batch=128,
               cliprange=float(random.uniform(0.1, 0.3)), epochs=int(random.integers(2, 9)))
        for level in levels
    )  # fmt: skip
    fake_store.build(tmp_path / "store.db", courses=courses).close()
    app = page("why", tmp_path / "store.db", more="true")
    assert [chart.key for chart in app.get("plotly_chart")][2:4] == ["importance for reward", "importance for KL"]
    [best] = [text for text in shown.texts(app) if text.startswith("Policy learning rate: the 5 best lie at ")]
    assert best.endswith(" next.")
    assert app.selectbox(key="setting").value == "learning_rate", "the one that mattered most comes first"
    drawn, options = figures_of(app), app.selectbox(key="setting").options
    ranked = {
        outcome: [
            label
            for title in drawn[f"importance for {outcome}"]["data"][0]["y"][::-1]
            if (label := title.partition(" (")[0]) in options
        ]
        for outcome in ("reward", "KL")
    }
    assert options == ranked["KL"] != ranked["reward"] == app.selectbox(key="across").options


def test_only_trials_that_have_ended_are_compared_and_by_their_ends(tmp_path: Path) -> None:
    fake_store.build_bounded(tmp_path / "store.db").close()
    app = page("why", tmp_path / "store.db", more="true", setting="learning_rate")
    drawn = figures_of(app)
    assert drawn["slices of value"]["layout"]["annotations"][0]["text"] == "Best in budget, one seed"
    columns = [len({axis["anchor"] for name, axis in drawn[key]["layout"].items() if name.startswith("yaxis")
                    and axis["domain"][1] == 1.0}) for key in SLICES]  # fmt: skip
    assert columns == [4, 2], "panels side by side, and on a phone"
    kl = drawn["slice of kl"]
    assert {trace["name"] for trace in kl["data"] if "name" in trace} == {"completed", "pruned", "failed"}
    assert kl["layout"]["yaxis"]["title"]["text"] == "Eval KL at the end (nats per response)"


def figures_of(app: AppTest) -> dict[str, Any]:
    return {chart.key: json.loads(chart.proto.spec) for chart in app.get("plotly_chart")}


def test_what_ended_trials_early(built: Path) -> None:
    app = page("why", built)
    [rules] = (table.value for table in app.dataframe if "rule" in table.value)
    assert rules[["rule", "trials"]].to_numpy().tolist() == [["KL over the limit", 2], ["Not a number", 1]]


def test_two_hyperparameters_are_chosen_in_the_link(built: Path) -> None:
    app = page("why", built, across="cliprange", up="learning_rate", of="KL", setting="cliprange", more="true")
    assert (app.selectbox(key="across").value, app.selectbox(key="up").value) == ("cliprange", "learning_rate")
    assert app.selectbox(key="setting").value == "cliprange"
    assert app.selectbox(key="setting").options[:2] == ["Policy learning rate", "Rollout batch"]
    assert "Clip range ε" in app.multiselect(key="axes").options
    app.selectbox(key="up").set_value("cliprange")
    assert "Choose two different hyperparameters." in shown.infos(shown.run(app))
