"""Draw KL, learning rate and β of runs that keep their own pace, from eight learning rates over four powers of ten.

    .venv/bin/python docs/pace.py

Trains the reference of `reviews` eight times (five minutes on two CPU cores), prints what became of each run, and
writes docs/images/pace.png with a browser as docs/screenshots.py does.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.kl_by_beta import draw
from docs.screenshots import IMAGES
from ppo_core.metrics import METRICS
from tuner.study.spec import StudySpec

STUDY = Path(__file__).parents[1] / "studies" / "reviews.toml"
PICTURE = IMAGES / "pace.png"
WIDTH, HEIGHT = 1000, 420
FACTORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Rates from which the runs begin, as multiples of the task's."""
DRAWN = ("objective/kl_exact", "lr", "objective/kl_coef")
Rows = Sequence[dict[str, float]]


def train(factor: float) -> list[dict[str, float]]:
    """Return a run's metrics, a row a step."""
    import torch

    from ppo_core.trainer import ppo_trainer

    torch.set_num_threads(1)
    spec = StudySpec.load(STUDY)
    reference = spec.config(spec.reference_params())
    config = replace(reference, learning_rate=factor * reference.learning_rate)
    return [dict(report.metrics, episode=report.episode) for report in ppo_trainer(config, spec.task, device="cpu")]


def table(runs: Sequence[Rows], budget: float) -> str:
    """Return a line a run: its best reward within the KL budget, its KL, and the rate that it came to."""
    lines = [f"{'rate':>8}{'reward':>10}{'KL at the end':>16}{'last third':>13}{'rate used':>12}"]
    for factor, rows in zip(FACTORS, runs, strict=True):
        read = [row for row in rows if "eval/reward" in row and row["eval/kl"] + row["eval/kl_se"] <= budget]
        kls = [row["objective/kl_exact"] for row in rows[1:]]
        third = kls[-(len(kls) // 3) :]
        rates = sorted(row["lr"] for row in rows[len(rows) // 2 :])
        lines.append(
            f"{f'x {factor:g}':>8}{max(row['eval/reward'] for row in read):>10.2f}{rows[-1]['eval/kl']:>16.2f}"
            f"{sum(third) / len(third):>13.2f}{rates[len(rates) // 2]:>12.2g}"
        )
    return "\n".join(lines)


def figure(runs: Sequence[Rows], budget: float) -> go.Figure:
    """Return the three charts over episodes."""
    made = make_subplots(1, len(DRAWN), subplot_titles=[METRICS[name].title for name in DRAWN], horizontal_spacing=0.07)
    for number, rows in enumerate(runs):
        shade = f"hsl({220 - 25 * number}, 60%, 45%)"
        for column, name in enumerate(DRAWN, 1):
            points = [(row["episode"], row[name]) for row in rows if row.get(name)]
            made.add_scatter(
                x=[episode for episode, _ in points], y=[value for _, value in points], row=1, col=column,
                name=f"rate x {FACTORS[number]:g}", line={"color": shade, "width": 1.5}, mode="lines",
                showlegend=column == 1,
            )  # fmt: skip
    made.add_hline(y=budget, line={"color": "#888", "dash": "dash", "width": 1}, row=1, col=1)
    made.update_yaxes(type="log", exponentformat="power", row=1, col=2)
    made.update_yaxes(type="log", row=1, col=3)
    made.update_xaxes(title="episodes")
    made.update_layout(
        template="plotly_white", width=WIDTH, height=HEIGHT, margin={"l": 50, "r": 20, "t": 40, "b": 90},
        legend={"orientation": "h", "y": -0.25},
    )  # fmt: skip
    return made


def main() -> None:
    budget = StudySpec.load(STUDY).kl_budget
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(train, FACTORS))
    print(table(runs, budget))
    draw(figure(runs, budget), PICTURE)


if __name__ == "__main__":
    main()
