"""The table of reward hacking, and advice on a study. Pure functions."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from dashboard import data
from dashboard.data import Snapshot
from dashboard.health import Card
from ppo_core.output import decimals, plus_minus
from tuner.confirm.answer import Answer
from tuner.judge.diagnose import fresh_curves
from tuner.judge.hacking import Finding, Verdict, check, on_fresh_seeds
from tuner.judge.results import StudyView
from tuner.search.choose import why_early
from tuner.store import Store
from tuner.study.rules import SIGNS
from tuner.study.status import Status


def hacking_of(curves: pd.DataFrame, kl_budget: float) -> list[Finding]:
    """Return the finding on every trial of `curves` (with the metrics `hacking.NEEDED`), by number."""
    return [
        check(int(number), steps.sort_values("step").to_dict("records"), kl_budget)
        for number, steps in curves.groupby("trial")
    ]


def with_fresh_seeds(store: Store, view: StudyView, finding: Finding) -> Finding:
    """Return a trial's finding, given those of its configuration's runs on fresh seeds."""
    fresh = fresh_curves(store, view, finding.trial).values()
    return on_fresh_seeds(finding, [check(0, steps, view.spec.kl_budget) for steps in fresh])


HACKING_TITLES = {
    "verdict": "Verdict",
    "reward": "Rise of reward",
    "KL": "Last eval KL (nats)",
    "length": "Length (tokens)",
    "repetition": "Repetition",
    "entropy": "Entropy (nats)",
}
"""Titles of the readings of `hacking_rows`; KL is per response, entropy per token."""
VERDICTS: Mapping[Verdict, str] = {
    "suspect": "▲ suspect", "repeated": "▲ on fresh seeds too", "borderline": "△ not on fresh seeds",
    "clean": "✓ no sign", "no rise": "– no rise", "too early": "… too early",
}  # fmt: skip


def hacking_rows(findings: Sequence[Finding]) -> pd.DataFrame:
    """Return one row per trial: verdict, rise of reward, and each reading that was measured."""
    places = decimals([one.rise for one in findings], [one.rise_se for one in findings])
    rows = [
        {
            "trial": finding.trial,
            "verdict": VERDICTS[finding.verdict],
            "reward": ""
            if math.isnan(finding.rise)
            else plus_minus(finding.rise, finding.rise_se, places, signed=True),
        }
        | {reading.name: f"{'▲ ' if reading.is_worse else ''}{reading.numbers}" for reading in finding.readings}
        for finding in findings
    ]
    return pd.DataFrame(rows, columns=["trial", "verdict", "reward", "KL", "length", "repetition", "entropy"])


@dataclass(frozen=True)
class Advice:
    """Something to do."""

    level: Literal["error", "warning", "info"]
    text: str
    """Our own words alone."""
    command: tuple[str, ...] = ()
    """Words of the `ppo-tuner` command for it, if any."""


def problems(snapshot: Snapshot, answer: Answer | None, cards: Sequence[Card]) -> list[Advice]:
    """Return what needs a person, the most pressing first; an answer's own doubt is not repeated."""
    view, name = snapshot.view, snapshot.view.row.name
    found = [*_of_state(snapshot, answer), *_of_trials(cards, name)]
    done = [row for row in view.trials if row.status.is_final]
    is_over = view.state == "finished" or ((total := data.total(view)) is not None and view.ended >= total)
    if done and all(row.status is Status.FAILED for row in done):
        found.insert(0, Advice("error", "Every trial that ended has failed. Fix the cause, then:", ("retry", name)))
    elif is_over and answer is None:
        text = f"Nothing is within the KL budget. Try {SIGNS['kl_end'].change}, or accept a higher one:"
        found.append(Advice("warning", text, ("best", name, "--kl-budget", f"{2 * view.spec.kl_budget:g}")))
    elif view.state == "finished" and (early := why_early(view.spec, view.trials)):
        found.append(Advice("info", early))
    return found


def _of_state(snapshot: Snapshot, answer: Answer | None) -> list[Advice]:
    name = snapshot.view.row.name
    silent = Advice("error", "The controller has not responded for over a minute. Check its terminal.")
    commands: dict[data.Shown, tuple[str, ...]] = {"paused": ("resume", name), "unfinished": ("run", name)}
    state = data.shown_state(snapshot.view)
    if state == "stalled":
        return [silent]
    if state not in commands or (answer is not None and answer.remedy == commands[state]):
        return []
    return [Advice("warning", f"The study is {state}. To resume it:", commands[state])]


def _of_trials(cards: Sequence[Card], name: str) -> list[Advice]:
    by_health = defaultdict[str, list[str]](list)
    for card in cards:
        by_health[card.health].append(str(card.number))
    steps = []
    if stalled := by_health["stalled"]:
        text = f"Silent for far longer than a step takes: trial {', '.join(stalled)}. Check its log:"
        steps.append(Advice("error", text, ("logs", name, stalled[0])))
    if over := by_health["over the limit"] + by_health["near the limit"]:
        steps.append(Advice("warning", f"Near or over the guard's KL limit: trial {', '.join(over)}."))
    if paused := by_health["paused"]:
        steps.append(Advice("info", f"Paused by a person: trial {', '.join(paused)}.", ("resume", name, paused[0])))
    return steps
