"""What to launch, on the Overview: the best trial and checkpoint, how sure that is, its settings, and its command."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import data, diagnosis, safe_text
from dashboard.data import Snapshot
from dashboard.figures import title_of
from dashboard.health import Card
from dashboard.views import by_beta, common
from ppo_core.output import KL_UNIT, plus_minus, short
from tuner import forks, results
from tuner.confirmed import Confirmation, confirmations, launch_words, longest_read, recommendation
from tuner.results import StudyView
from tuner.scoring import ends_within
from tuner.status import Origin
from tuner.store import Store, TrialRow


def draw(store: Store, snapshot: Snapshot, baseline: float | None, running: Sequence[Card]) -> None:
    """Draw the answer, and the next steps beside it."""
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _answer(store, snapshot.view, baseline)
    with right:
        next_steps(snapshot, running)


def next_steps(snapshot: Snapshot, running: Sequence[Card]) -> None:
    """Draw what to do next."""
    st.subheader("Next steps", anchor=False)
    boxes = {"error": st.error, "warning": st.warning, "info": st.info}
    for one in diagnosis.next_steps(snapshot, running):
        boxes[one.level](one.text)
        if one.command:
            st.code(data.command(one.command), language=None, wrap_lines=True)
    by_beta.link(snapshot)


def _answer(store: Store, view: StudyView, baseline: float | None) -> None:
    confirmation = longest_read(confirmations(store, view))
    launch = None if confirmation is None else confirmation.best
    best = view.best() if launch is None else launch.trial
    st.subheader(
        "What to launch" if view.state == "finished" or launch is not None else "Best so far",
        anchor=False,
        help="The trial with the highest eval reward whose eval KL is within the KL budget. ± is one standard error "
        "over the eval prompts, of one run.",
    )
    if best is None:
        st.info(f"No trial is within the KL budget of {view.spec.kl_budget:g} {KL_UNIT} yet.")
        return
    st.markdown(_reads(best, baseline))
    st.markdown(_certainty(store, view))
    if ends_within(best, view.spec) is False:
        st.markdown(
            f":orange[▲] Trained to its end its KL is {best.end_kl:.2f}, over the budget; the command below "
            "stops at the checkpoint."
        )
    changed = changed_settings(view, best)
    if isinstance(changed, str):
        st.text(changed)
    else:
        common.table(changed, key="changed settings")
    _commands(store, view, best, confirmation)


def _reads(best: TrialRow, baseline: float | None) -> str:
    """Return which checkpoint it is and what it reads, in our own words."""
    at = "" if best.value_step is None else f", step {best.value_step}"
    gain = "" if baseline is None or best.value is None else f", {best.value - baseline:+.2f} over SFT"
    kl = "" if best.kl is None else f" at a KL of **{best.kl:.2f}** {KL_UNIT}"
    return f"**Trial {best.number}{at}**: eval reward **{plus_minus(best.value, best.value_se)}**{kl}{gain}."


def _certainty(store: Store, view: StudyView) -> str:
    """Return how sure the answer is, in our own words."""
    said = recommendation(store, view) or ""
    return said if view.state == "finished" or view.confirming else f"{said} The search is not finished."


def changed_settings(view: StudyView, best: TrialRow) -> pd.DataFrame | str:
    """Return the settings in which a trial differs from the reference, or from the first trial; or that none do."""
    first = next((row for row in view.trials if row.origin is Origin.REFERENCE), view.trials[0])
    name = "the reference" if first.origin is Origin.REFERENCE else f"trial {first.number}"
    changed = {one: pair for one, pair in results.differences([first, best]).items() if one != "seed"}
    if not changed:
        return f"Trial {best.number} is {name}." if best.number == first.number else f"Its settings are {name}'s."
    return pd.DataFrame(
        {
            "Changed setting": [title_of(one) for one in changed],
            f"Trial {best.number}": [safe_text.cell(short(new, 4)) for _, new in changed.values()],
            name.capitalize(): [safe_text.cell(short(old, 4)) for old, _ in changed.values()],
        }
    )


def _commands(store: Store, view: StudyView, best: TrialRow, confirmation: Confirmation | None) -> None:
    """Draw the command that launches the configuration, and where its checkpoint is."""
    st.code(data.command(launch_words(store, view, best, confirmation)), language=None, wrap_lines=True)
    kept = forks.answer(store, view.row, best) if confirmation is None else None
    if kept is not None and kept.kept.path is not None:
        st.text("Its checkpoint:")
        st.code(safe_text.one_line(str(kept.kept.path), data.MOST_OF_A_COMMAND), language=None, wrap_lines=True)
