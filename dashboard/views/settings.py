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
    pairs = {setting: (trial.config[setting], first.config.get(setting)) for setting in trial.config}
    return pd.DataFrame(
        {
            "Setting": [title_of(setting) for setting in pairs],
            "Name": [safe_text.cell(setting) for setting in pairs],
            f"Trial {trial.number}": [safe_text.cell(short(own, 4)) for own, _ in pairs.values()],
            f"{name.capitalize()}, if different": [
                "" if own == other else safe_text.cell(short(other, 4)) for own, other in pairs.values()
            ],
        }
    )


def changed_settings(view: StudyView, trial: TrialRow) -> pd.DataFrame | str:
    """Return the settings that differ from the reference (or the first trial), or a sentence if none do."""
    first, name = _reference(view)
    changed = {setting: pair for setting, pair in results.differences([first, trial]).items() if setting != "seed"}
    if not changed:
        return f"Trial {trial.number} is {name}." if trial.number == first.number else f"Its settings are {name}'s."
    return pd.DataFrame(
        {
            "Changed setting": [title_of(setting) for setting in changed],
            f"Trial {trial.number}": [safe_text.cell(short(new, 4)) for _, new in changed.values()],
            name.capitalize(): [safe_text.cell(short(old, 4)) for old, _ in changed.values()],
        }
    )
