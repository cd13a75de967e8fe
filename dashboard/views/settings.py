"""A trial's settings: those that differ from the reference, and all."""

import pandas as pd
import streamlit as st

from dashboard import safe_text
from dashboard.figures import title_of
from dashboard.views import common
from ppo_core.output import short
from tuner.judge import results
from tuner.judge.results import StudyView
from tuner.store import TrialRow
from tuner.study.status import Origin


def draw(view: StudyView, trial: TrialRow) -> None:
    """Draw the settings in which a trial differs from the reference, and on request all."""
    changed = changed_settings(view, trial)
    if isinstance(changed, str):
        st.text(changed)
    else:
        common.table(changed, key="changed settings")
    with st.expander("All settings"):
        common.table(all_settings(view, trial), key="all settings")


def _reference(view: StudyView) -> tuple[TrialRow, str]:
    """Return the reference, or the first trial where there is none, and what it is called."""
    first = next((row for row in view.trials if row.origin is Origin.REFERENCE), view.trials[0])
    return first, "the reference" if first.origin is Origin.REFERENCE else f"trial {first.number}"


def all_settings(view: StudyView, trial: TrialRow) -> pd.DataFrame:
    """Return every hyperparameter of a trial, with the value of the reference (or the first trial) where it differs."""
    first, name = _reference(view)
    rows = [
        (title_of(key), safe_text.cell(key), safe_text.cell(short(own, 4)),
         "" if own == first.config.get(key) else safe_text.cell(short(first.config.get(key), 4)))
        for key, own in trial.config.items()
    ]  # fmt: skip
    return pd.DataFrame(
        rows, columns=["Setting", "Name", f"Trial {trial.number}", f"{name.capitalize()}, if different"]
    )


def changed_settings(view: StudyView, trial: TrialRow) -> pd.DataFrame | str:
    """Return the settings that differ from the reference (or the first trial), or a sentence if none do."""
    first, name = _reference(view)
    changed = {setting: pair for setting, pair in results.differences([first, trial]).items() if setting != "seed"}
    if not changed:
        return f"Trial {trial.number} is {name}." if trial.number == first.number else f"Its settings are {name}'s."
    rows = [
        (title_of(key), *(safe_text.cell(short(one, 4)) for one in (new, old))) for key, (old, new) in changed.items()
    ]
    return pd.DataFrame(rows, columns=["Changed setting", f"Trial {trial.number}", name.capitalize()])
