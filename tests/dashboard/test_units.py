"""One study with its rewards in other units: pages and figures tell its trials apart in each."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dashboard import analysis, data, figures, importance_figures, style
from dashboard.views import trials_table
from tests.dashboard import shown
from tests.dashboard.fake_store import STUDY
from tests.dashboard.shown import change

RESCALED = {
    "ppo_trials": ("value", "value_se", "end_reward"),
    "ppo_steps": ("eval_reward", "eval_reward_se", "objective_scores"),
}
"""The store's columns in reward; those of a standard error have no offset."""


@pytest.fixture(params=[(0.001, 0.0), (1.0, 1000.0), (0.01, -40.0), (100.0, 0.0)], ids=str)
def rescaled(built: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The fake study with each reward times a factor, plus an offset."""
    path, (factor, offset) = tmp_path / "store.db", request.param
    shutil.copy(built, path)
    for table, columns in RESCALED.items():
        for column in columns:
            moved = "" if column.endswith("_se") else f" + {offset}"
            change(path, f"UPDATE {table} SET {column} = {column} * {factor}{moved}")
    return path


def test_figures_and_tables_tell_trials_apart(rescaled: Path) -> None:
    store = data.open_store(f"sqlite:///{rescaled}")
    snapshot = data.snapshot(store, STUDY)
    trials = snapshot.trials
    known = trials.dropna(subset="value").sort_values("value")
    apart = known["value"].diff().dropna() > known["value_se"].iloc[1:]
    assert apart.sum() > 3

    columns = trials_table._columns(trials_table.with_headlines(snapshot, trials))
    places = int(re.fullmatch(r"%\.(\d)f", columns["reward"]["type_config"]["format"])[1])  # type: ignore[index]
    assert (known["value"].round(places).diff().dropna()[apart] > 0).all()
    figure = importance_figures.slices(trials, ["learning_rate"], snapshot.view.spec)
    templates = [trace.hovertemplate for trace in figure.data if trace.hovertemplate]
    [places] = {int(found) for text in templates for found in re.findall(r"one seed: %\{y:\.(\d)f\}", text)}
    assert (known["value"].round(places).diff().dropna()[apart] > 0).all()


@pytest.mark.parametrize("budget", [0.05, 0.5, 50.0])
@pytest.mark.parametrize("log_kl", [False, True])
def test_the_kl_axis_of_trajectories_rises_and_has_the_budget_on_it(built: Path, budget: float, log_kl: bool) -> None:
    store = data.open_store(f"sqlite:///{built}")
    snapshot = data.snapshot(store, STUDY)
    evaluated = analysis.evaluations(data.curves(store, snapshot, analysis.EVALUATED, evaluations_only=True))
    unit = budget / snapshot.view.spec.kl_budget
    evaluated = evaluated.assign(kl=unit * evaluated["kl"], kl_se=unit * evaluated["kl_se"])
    spec = replace(snapshot.view.spec, kl_budget=budget)
    looks = style.looks((0, 3))
    figure = figures.trajectories(evaluated, snapshot.trials, spec=spec, looks=looks, log_kl=log_kl)
    low, high = (10**end if log_kl else end for end in figure.layout.xaxis.range)
    assert low < 0.1 * budget and budget < high


@pytest.mark.slow
def test_pages_tell_trials_apart(rescaled: Path) -> None:
    app = shown.page("compare", rescaled, trial=["0", "1", "3", "9"])
    outcomes = app.dataframe[1].value.set_index("outcome")
    texts = outcomes.loc["Reward"].tolist()
    assert len(set(texts)) == 4 and not any(re.search(r"(^|± )-?0\.0+($| )", text) for text in texts)
    app = shown.page("reward_kl", rescaled)
    bought = app.dataframe[0].value["reward"].dropna()
    assert bought.is_unique and len(bought) > 3
