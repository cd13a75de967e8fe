"""Samples: the same prompt across trials and evaluations, what each reward was made of, and the tokens behind it."""

import streamlit as st

from dashboard import data
from dashboard.analysis import hacking
from dashboard.data import Snapshot
from dashboard.views import choice, common, renewal, samples
from tuner.store import Store


def page() -> None:
    """Draw the page."""
    common.of_a_study(_study)


def _study(store: Store, snapshot: Snapshot) -> None:
    if not snapshot.view.trials:
        text = "Samples come with a trial's first evaluation, before its first update."
        common.not_begun(snapshot, "No trials yet", text)
        return
    chosen = choice.trials(
        snapshot,
        f"Up to {samples.SIDE_BY_SIDE} trials side by side. Nothing chosen: the reference, the best within the KL "
        "budget and the last one pruned for KL.",
        samples.SIDE_BY_SIDE,
    )
    numbers = (chosen or tuple(snapshot.telling))[: samples.SIDE_BY_SIDE]
    renewal.line(store, snapshot, numbers)
    samples.section(store, snapshot, chosen)
    _hacking(store, snapshot, numbers)


def _hacking(store: Store, snapshot: Snapshot, numbers: tuple[int, ...]) -> None:
    """Say of each shown trial whether its reward rises while something worsens."""
    st.subheader("Does reward rise while something else worsens?", anchor=False, help=hacking.RULE)
    steps = data.curves(store, snapshot, hacking.NEEDED, numbers=numbers)
    for line in hacking.told(hacking.check(steps, snapshot.view.spec.kl_budget)):
        st.text(line)
    st.caption(f"{hacking.RULE} A reason to read the samples above, and no proof.")
