"""One trial's KL and its signals over the same steps: what moved first."""

import streamlit as st

from dashboard import data, incident
from dashboard.data import Snapshot
from dashboard.incident import SIGNALS, Incident
from dashboard.views import common, curve_charts
from ppo_core.metrics import METRICS
from tuner.store import Store
from tuner.study.rules import KL
from tuner.study.spec import StudySpec

METRICS_READ = (KL, *(signal.metric for signal in SIGNALS))


def _text(found: Incident, number: int, spec: StudySpec) -> str:
    line = f"guard's limit of {spec.kl_limit:g}" if found.line == "limit" else f"KL budget of {spec.kl_budget:g}"
    return (
        f"Trial {number}: {METRICS[KL].label} was {found.kl:.3g} nats at step {found.step}, the first step over "
        f"the {line}. {incident.text(found)}"
    )


def draw(store: Store, snapshot: Snapshot, number: int) -> None:
    """Draw what moved first in trial `number`, if its KL crossed a limit after enough steps to know what is usual."""
    spec, steps = snapshot.view.spec, data.curves(store, snapshot, METRICS_READ, numbers=[number])
    found = None if steps.empty else incident.find(steps, limit=spec.kl_limit, budget=spec.kl_budget)
    if found is None or not found.moves:
        return
    named = " and ".join(METRICS[move.signal.metric].label for move in found.first)
    common.heading(f"Moved first: {named or 'nothing'}", f"{_text(found, number, spec)} {_RULE}")
    colour, lines = common.looks(snapshot, [number])[number].colour, curve_charts.levels(snapshot, KL)
    chart = incident.chart(steps, found, colour=colour, lines=lines)
    alt = f"Trial {number}: KL and {len(SIGNALS)} signals by step"
    st.echarts_chart(chart, key="incident chart", height=incident.height(chart), alt=alt)


_RULE = (
    f"The usual range is the median of the first third of the steps before the crossing, plus or minus "
    f"{incident.SPREADS:g} spreads or {incident.SHARE:.0%}, whichever is more. A signal has moved once it stays "
    f"outside for {incident.STAYS} steps. What moved first is a lead to follow, not a proof."
)
