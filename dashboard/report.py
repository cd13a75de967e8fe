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
from dashboard.data import Snapshot, StepCache
from dashboard.views.answer import changed_settings
from dashboard.views.common import highlighted
from dashboard.views.confirm import table as confirmed_table
from ppo_core import __version__, output
from ppo_core.metrics import METRICS
from tuner.confirm.result import confirmations
from tuner.control import forks
from tuner.judge import results
from tuner.judge.answer import of_study
from tuner.judge.results import StudyView
from tuner.judge.rules import RULES
from tuner.search import importance
from tuner.store import Store, TrialRow

CURVES = ("objective/kl_exact", "eval/reward")
PROMPTS = 3
"""Number of prompts with samples."""
_GRID, _CLEAR = "rgba(128, 128, 128, 0.25)", "rgba(0, 0, 0, 0)"


def report(store: Store, name: str) -> str:
    """Return a study's report as the text of an HTML file."""
    view = results.read_study(store, name)
    found = confirmations(store, view)
    answer = of_study(store, view)
    trial = None if answer is None else answer.trial
    return _template().render(
        store=store,
        view=view,
        spec=view.spec,
        answer=answer,
        confirmations=found,
        figures=_figures(store, view, trial),
        samples=[] if trial is None else _samples(store, view, trial),
        study_file=tomli_w.dumps(stated(view.row.spec)),
    )


def _template() -> Template:
    """Return the page's template; values are made visible and escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda one: one if isinstance(one, Markup) or not isinstance(one, str) else safe_text.spelled(one),
    )
    environment.filters["clock"] = lambda seconds: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    environment.filters["cut"] = safe_text.visible
    environment.globals |= {"data": data, "output": output, "results": results, "style": style, "rules": RULES}
    environment.globals |= {"changed_settings": changed_settings, "confirmed_table": confirmed_table}
    environment.globals |= {"now": time.time(), "program": __version__, "nonce": secrets.token_urlsafe(16)}
    environment.globals["plotly"] = Markup(get_plotlyjs().replace("</script", "<\\/script"))
    return environment.get_template("report.html.jinja")


def _figures(store: Store, view: StudyView, answer: TrialRow | None) -> dict[str, go.Figure]:
    """Return figures by title: the front, curves of the main trials, and what mattered."""
    evaluated = analysis.evaluations(StepCache(analysis.EVALUATED, evaluations_only=True).read(store, view.trials))
    if evaluated.empty:
        return {}
    snapshot, spec, at = Snapshot.of(view), view.spec, None
    chosen = highlighted(snapshot, ())
    if answer is not None and answer.value_step is not None:
        chosen = tuple(dict.fromkeys([answer.number, *chosen]))
        at = analysis.checkpoint_of(evaluated, answer.number, answer.value_step)
    front, star = analysis.front(evaluated), "recommended checkpoint"
    ways = figures.trajectories(evaluated, snapshot.trials, front, spec=spec, chosen=chosen, best=at, star=star)
    found = {"Reward against KL": ways}
    steps = StepCache(CURVES).read(store, [row for row in view.trials if row.number in chosen])
    for metric in CURVES:
        found[f"{METRICS[metric].label} over episodes"] = figures.aligned(steps, metric, sorted(chosen), spec)
    if not importance.refusal(view.trials, spec):
        ranked = importance.importances(importance.usable(view.trials, spec), spec)["reward"]
        found["What mattered for a high reward"] = importance_figures.importance_bars(ranked)
    for figure in found.values():  # for light and dark pages
        figure.update_layout(template="none", paper_bgcolor=_CLEAR, plot_bgcolor=_CLEAR)
        figure.update_xaxes(gridcolor=_GRID, automargin=True).update_yaxes(gridcolor=_GRID, automargin=True)
    return found


def _samples(store: Store, view: StudyView, answer: TrialRow) -> list[tuple[Any, Any]]:
    """Return samples of the recommended checkpoint, each with the SFT policy's of the same prompt, or None."""
    at = forks.value_checkpoint(store, view.row, answer)
    rows = [row for row in store.samples([answer.id]) if at is None or row["step"] <= at.step]
    last = max((row["step"] for row in rows), default=0)
    before = {row["prompt_index"]: row for row in store.samples([view.trials[0].id, answer.id], 0) if last}
    return [(before.get(row["prompt_index"]), row) for row in rows if row["step"] == last][:PROMPTS]


def stated(value: Any) -> Any:
    """Return a stored study as its file states it: without null, which TOML lacks, and without passwords in URLs."""
    if isinstance(value, dict):
        return {key: stated(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [stated(item) for item in value]
    return output.without_secrets(value) if isinstance(value, str) else value


if __name__ == "__main__":
    with closing(Store.open(data.storage())) as opened:
        sys.stdout.buffer.write(report(opened, sys.argv[1]).encode())
