"""Draw KL over training under a low, a high and an adaptive β, from runs of our own.

    .venv/bin/python docs/kl_by_beta.py

Runs studies/kl_by_beta.toml in the default store (or resumes it, or takes it as it is where it is done),
prints what became of each trial, and writes docs/images/kl_by_beta.png with a browser as docs/screenshots.py does.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.screenshots import IMAGES
from ppo_core import output
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.metrics import METRICS
from tests.chromium import launch
from tuner.cli.progress import StudyProgress
from tuner.control.run import run_study
from tuner.environment import RUNS_FOLDER
from tuner.judge.results import StudyView, read_study
from tuner.store import Store, location
from tuner.study.spec import StudySpec

STUDY = Path(__file__).parents[1] / "studies" / "kl_by_beta.toml"
PICTURE = IMAGES / "kl_by_beta.png"
WIDTH, HEIGHT = 1000, 560
KL, BETA = "objective/kl_exact", "objective/kl_coef"
COLOURS = ("#d1495b", "#2a7f9e", "#3a8f4f")


@dataclass(frozen=True)
class Curve:
    """One trial over its rollout batches."""

    label: str
    target: float | None
    """Where an adaptive β is to keep KL, in nats per response."""
    episodes: Sequence[int]
    kls: Sequence[float]
    betas: Sequence[float]

    @classmethod
    def of(cls, label: str, config: PPOConfig, steps: Sequence[tuple[int, float, float]]) -> "Curve":
        """Return the curve of (episode, KL, β) a rollout batch."""
        episodes, kls, betas = zip(*steps, strict=True)
        return cls(label, config.kl_target, episodes, kls, betas)

    @property
    def settled(self) -> float:
        """Mean KL over the last third of the run."""
        last = self.kls[-max(1, len(self.kls) // 3) :]
        return sum(last) / len(last)


def run(spec: StudySpec, where: str) -> list[Curve]:
    """Run what is left of the study and return the curves of its trials."""
    with StudyProgress(output.console()) as progress:
        finished = run_study(spec, storage=where, runs_folder=RUNS_FOLDER, on_event=progress)
    if not finished:
        raise SystemExit("stopped before the end; the same command resumes it")
    with closing(Store.open(where)) as store:
        return _read(store, read_study(store, spec.name))


def _read(store: Store, view: StudyView) -> list[Curve]:
    curves = []
    for trial in view.trials:
        rows = [row for row in store.steps([trial.id], (KL, BETA)) if row[KL] is not None]
        steps = [(row["episode"], row[KL], row[BETA]) for row in rows]
        label = trial.label or f"trial {trial.number}"
        curves.append(Curve.of(label, PPOConfig.from_dict(trial.config), steps))
    return curves


def figure(curves: Sequence[Curve]) -> go.Figure:
    """Return KL over episodes, one line per curve with its β, and the adaptive one's target."""
    chart = go.Figure()
    for curve, colour in zip(curves, COLOURS, strict=False):
        name = f"β {curve.label}: {_beta(curve)}"
        chart.add_scatter(x=curve.episodes, y=curve.kls, name=name, mode="lines", line={"color": colour, "width": 2.5})
        if curve.target is not None:
            text = f"target {curve.target:g} nats"
            chart.add_hline(
                y=curve.target,
                line={"color": colour, "dash": "dash", "width": 1.5},
                annotation={"text": text, "font": {"color": colour}},
                annotation_position="top left",
            )
    chart.update_layout(
        template="plotly_white",
        width=WIDTH,
        height=HEIGHT,
        title={"text": "KL from the reference during PPO training, by β"},
        xaxis={"title": {"text": "Episodes"}},
        yaxis={"title": {"text": METRICS[KL].title}, "rangemode": "tozero"},
        legend={"x": 0.01, "y": 0.99, "bgcolor": "rgba(255,255,255,0.8)"},
        margin={"l": 60, "r": 20, "t": 60, "b": 50},
    )
    return chart


def table(curves: Sequence[Curve]) -> Table:
    """Return what became of each curve: β at the end, and KL at the end, at most and over the last third."""
    shown = Table("β", "at the end", "final KL", "highest KL", "mean KL, last third", "target")
    for curve in curves:
        numbers = (curve.betas[-1], curve.kls[-1], max(curve.kls), curve.settled, curve.target)
        shown.add_row(curve.label, *map(output.measured, numbers))
    return shown


def _beta(curve: Curve) -> str:
    low, high = min(curve.betas), max(curve.betas)
    return f"{low:g}" if low == high else f"{low:.2g} to {high:.2g}"


def draw(chart: go.Figure, path: Path) -> None:
    """Write the chart as a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page_text = chart.to_html(include_plotlyjs=True, config={"displayModeBar": False})
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(viewport={"width": WIDTH + 20, "height": int(chart.layout.height) + 20})
        page.set_content(page_text)
        plot = page.locator(".plotly-graph-div")
        page.locator(".plotly-graph-div .scatterlayer .trace").first.wait_for(timeout=60_000)
        plot.screenshot(path=str(path))
        browser.close()


def main() -> None:
    """Run the study, print its table and draw its chart."""
    curves = run(StudySpec.load(STUDY), location(None))
    Console().print(table(curves))
    draw(figure(curves), PICTURE)
    print(f"wrote {PICTURE.relative_to(Path.cwd()) if PICTURE.is_relative_to(Path.cwd()) else PICTURE}")


if __name__ == "__main__":
    main()
