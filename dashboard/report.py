"""One study as one HTML page that needs no network, for a colleague or a ticket: what to launch, how sure, and why.

`python -m dashboard.report STUDY` fills `report.html.jinja` and prints it; the store is that of PPO_TUNER_STORAGE.
`ppo-tuner report` starts this. Never imports torch.
"""

import secrets
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import tomli_w
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from dashboard import analysis, data, figures, importance_figures, safe_text, style
from dashboard import gauntlet as gauntlet_figure
from dashboard.data import Snapshot, StepCache
from dashboard.views.common import highlighted
from dashboard.views.confirm import table as confirmed_table
from dashboard.views.settings import changed_settings
from ppo_core import __version__, output
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from tuner.confirm import gauntlet
from tuner.confirm.answer import Answer, study_answer
from tuner.confirm.headline import headlines
from tuner.confirm.result import confirmations
from tuner.judge import forks, results
from tuner.judge.results import StudyView
from tuner.search import importance
from tuner.store import Store, TrialRow
from tuner.study.rules import RULES
from tuner.study.study_file import DECLARED

CURVES = ("objective/kl_exact", "eval/reward")
PROMPTS = 3
"""Number of prompts with samples."""
Drawn = tuple[dict[str, go.Figure], str]
"""A figure for each width of a screen, and a sentence on it or none."""
ANY, WIDE, NARROW = "any", "wide", "narrow"
"""Widths: of any screen, of all but phones, and of phones."""


def report(store: Store, name: str) -> str:
    """Return a study's report as the text of an HTML file."""
    view = results.read_study(store, name)
    answer = study_answer(store, view)
    trial = None if answer is None else answer.trial
    return _template().render(
        store=store,
        view=view,
        spec=view.spec,
        answer=answer,
        confirmations=confirmations(store, view),
        headlines=headlines(store, view),
        figures=_gates(store, view, answer) | _figures(store, view, trial),
        samples=[] if trial is None else _samples(store, view, trial),
        study_file=tomli_w.dumps(as_toml({key: value for key, value in view.row.spec.items() if key != DECLARED})),
    )


def _template() -> Template:
    """Return the page's template; values are made visible and escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda text: (
            safe_text.spelled(text) if isinstance(text, str) and not isinstance(text, Markup) else text
        ),
    )
    environment.filters["clock"] = lambda seconds: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    environment.filters["cut"] = safe_text.visible
    environment.globals.update(
        data=data, output=output, results=results, style=style, rules=RULES, changed_settings=changed_settings,
        confirmed_table=confirmed_table, now=time.time(), program=__version__, nonce=secrets.token_urlsafe(16),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
    )  # fmt: skip
    return environment.get_template("report.html.jinja")


def reward_against_kl(store: Store, view: StudyView, trial: TrialRow | None) -> go.Figure | None:
    """Return the figure of all evaluations with the recommended trial's checkpoint; None: nothing was evaluated yet."""
    evaluated = analysis.evaluations(StepCache(analysis.EVALUATED, evaluations_only=True).read(store, view.trials))
    if evaluated.empty:
        return None
    snapshot, checkpoint = Snapshot.of(view), None
    chosen = _chosen(snapshot, trial)
    if trial is not None and trial.value_step is not None:
        checkpoint = analysis.checkpoint_of(evaluated, trial.number, trial.value_step)
    return figures.trajectories(
        evaluated, snapshot.trials, spec=view.spec, looks=style.looks(chosen), best=checkpoint,
        star="recommended checkpoint",
    )  # fmt: skip


def _chosen(snapshot: Snapshot, trial: TrialRow | None) -> tuple[int, ...]:
    """Return the main trials, the recommended one among them."""
    also = [] if trial is None or trial.value_step is None else [trial.number]
    return tuple(dict.fromkeys([*highlighted(snapshot, ()), *also]))


def _figures(store: Store, view: StudyView, trial: TrialRow | None) -> dict[str, Drawn]:
    """Return figures by title: trajectories, curves of the main trials, and what mattered."""
    trajectories = reward_against_kl(store, view, trial)
    if trajectories is None:
        return {}
    spec, chosen = view.spec, _chosen(Snapshot.of(view), trial)
    figure_by_title = {"Reward against KL": (trajectories, "")}
    steps = StepCache(CURVES).read(store, [row for row in view.trials if row.number in chosen])
    for metric in CURVES:
        curves = figures.aligned(steps, metric, chosen, spec)
        figure_by_title[f"{METRICS[metric].label} over episodes"] = curves, ""
    if not importance.refusal(view.trials, spec):
        usable = importance.usable(view.trials, spec)
        ranked = importance.importances(usable, spec)["reward"]
        certainty = importance.certainty(ranked, len(usable), lambda name: HYPERPARAMETERS[name].label)
        figure_by_title["What mattered for a high reward"] = importance_figures.importance_bars(ranked), certainty
    for figure, _ in figure_by_title.values():
        axis = {"gridcolor": "rgba(128, 128, 128, 0.25)", "automargin": True}
        _for_any_page(figure).update_xaxes(axis).update_yaxes(axis)
    return {title: ({ANY: figure}, text) for title, (figure, text) in figure_by_title.items()}


def _gates(store: Store, view: StudyView, answer: Answer | None) -> dict[str, Drawn]:
    """Return the figure of the gates that stopped trials, by its title; empty before any has begun."""
    found = gauntlet.study_gauntlet(store, view, answer)
    if not found.rows:
        return {}
    drawn = {width: gauntlet_figure.figure(found, is_narrow=width == NARROW) for width in (WIDE, NARROW)}
    text = f"Left at first, and after each gate: {found.line}."
    return {"Where each trial stopped": ({width: _for_any_page(one) for width, one in drawn.items()}, text)}


def _for_any_page(figure: go.Figure) -> go.Figure:
    """Make a figure fit light and dark pages."""
    clear = "rgba(0, 0, 0, 0)"
    return figure.update_layout(template="none", paper_bgcolor=clear, plot_bgcolor=clear)


def _samples(store: Store, view: StudyView, trial: TrialRow) -> list[tuple[Any, Any]]:
    """Return samples of the recommended checkpoint, each after the SFT policy's of the same prompt, or None."""
    kept = forks.value_checkpoint(store, view.row, trial)
    rows = [row for row in store.samples([trial.id]) if kept is None or row["step"] <= kept.step]
    last = max((row["step"] for row in rows), default=0)
    before = {row["prompt_index"]: row for row in store.samples([view.trials[0].id, trial.id], 0) if last}
    return [(before.get(row["prompt_index"]), row) for row in rows if row["step"] == last][:PROMPTS]


def as_toml(value: Any) -> Any:
    """Return a stored study's value for its file: without null, which TOML lacks, and without passwords in URLs."""
    if isinstance(value, dict):
        return {key: as_toml(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [as_toml(item) for item in value]
    return output.without_secrets(value) if isinstance(value, str) else value


if __name__ == "__main__":
    with closing(Store.open(data.storage())) as opened:
        sys.stdout.buffer.write(report(opened, sys.argv[1]).encode())
