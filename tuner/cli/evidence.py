"""The commands that say whether to trust a study: what confirmed it, what went wrong, what mattered."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ppo_core import output
from ppo_core.errors import StudyError
from ppo_core.output import KL_UNIT, NOTHING, plus_minus
from tuner.cli import render, storage
from tuner.confirm.result import Confirmation, runs_text
from tuner.environment import to_copy
from tuner.judge import diagnose as diagnoses
from tuner.judge.results import read_study

if TYPE_CHECKING:  # its libraries take a second to load
    from tuner.search.importance import Importance

# Confirming


def print_confirmation(out: Console, found: Confirmation, *, with_verdict: bool) -> None:
    """Print the result of confirming a study at one length: each configuration, and which one is better."""
    out.print(confirmation_table(found))
    if found.baseline is not None and found.baseline.reward is not None:
        before = plus_minus(found.baseline.reward, found.baseline.reward_se)
        line = f"The SFT policy scores {before} on the same prompts (± is one standard error over them)."
        out.print(line, soft_wrap=True)
    if with_verdict:
        out.print(found.verdict, style="bold", soft_wrap=True)


def confirmation_table(found: Confirmation) -> Table:
    """Return the table of the configurations that were confirmed, the highest mean first."""
    columns = (
        "configuration",
        "seeds",
        "reward",
        f"KL, {KL_UNIT}",
        "over the reference",
        "end within budget",
    )
    title = f"On fresh seeds, {found.total_episodes} episodes each, evaluated on {found.prompts} test prompts"
    table = render.new_table(*columns, title=title, right=columns[1:])
    table.caption = (
        "In brackets: 95% intervals over the seeds; those of differences hold for all at once. Reward and KL are of "
        "each run's best checkpoint; the last column counts the runs that also end within the KL budget."
    )
    table.caption_justify = "left"
    for one in found.configurations:
        intervals = (one.reward, one.kl, one.over_reference)
        texts = [NOTHING if interval is None else interval.text for interval in intervals]
        notes = runs_text(one)
        count = 0 if one.reward is None else one.reward.n
        table.add_row(one.label + (f"\n{notes}" if notes else ""), str(count), *texts, f"{one.ends_within} of {count}")
    return table


# What is wrong with a trial


def diagnose(args: argparse.Namespace) -> int:
    """Show what is wrong with a trial, by its curves, and the change to try next."""
    with storage.opened(args.storage) as store:
        view = read_study(store, args.study)
        trial = store.trial(view.row, args.trial)
        if not trial.episodes:
            raise StudyError(f"trial {trial.number} has made no step yet, so there is nothing to diagnose")
        found = diagnoses.diagnose(diagnoses.course_of(store, trial, view.spec))
    flags = storage.flags(storage.location(args.storage))
    commands = [to_copy([*diagnoses.try_it(view.spec, trial, one), *flags]) for one in found]
    if args.json:
        pairs = zip(found, commands, strict=True)
        print(output.dumps([diagnoses.diagnosis_data(trial, one, command) for one, command in pairs]))
        return 0
    out = output.console()
    out.print(render.trial_line(trial), soft_wrap=True)
    for (one, is_repeat), command in zip(diagnoses.with_repeats(found), commands, strict=True):
        out.print(f"{one.rule}. {one.finding}", style="bold", soft_wrap=True)
        there = diagnoses.tried(view.trials, trial, one, view.spec)
        if is_repeat:
            out.print(f"  The same change: {one.advice}.")
        elif there is not None:
            value = output.short(there.config[one.name])
            out.print(f"  Tried already, with {one.name} = {value}: {render.trial_line(there)}", soft_wrap=True)
        else:
            out.print(f"  Try {one.advice}:\n  {command}", soft_wrap=True)
    if not found:
        out.print(diagnoses.why_nothing(trial))
    elif diagnoses.is_choice(found):
        out.print(
            "Try one change at a time, the first one first: with several at once you cannot see which one helped."
        )
    return 0


# What mattered


def importance(args: argparse.Namespace) -> int:
    """Show which hyperparameters mattered, at the first place where trials can be read.

    Raises:
        StudyError: there are too few trials to tell.
    """
    from tuner.search import fidelity
    from tuner.search import importance as importances

    with storage.opened(args.storage) as store:
        view = read_study(store, args.study)
        number_of = {trial.id: trial.number for trial in view.trials}
        rows = store.steps(number_of, ("eval/reward", "eval/kl"), evaluations_only=True)
    at = fidelity.offered(view.spec)[0]
    evaluated = {(number_of[row["trial_id"]], row["episode"]): (row["eval/reward"], row["eval/kl"]) for row in rows}
    trials = fidelity.read(view.trials, at, evaluated)
    refused = importances.refusal(trials, view.spec, at_rung=at.at_rung)
    if refused:
        raise StudyError(f"{refused} The dashboard's page Search plots the trials against each hyperparameter.")
    usable = importances.usable(trials, view.spec, at_rung=at.at_rung)
    found = importances.importances(usable, view.spec)
    if args.json:
        lists: dict[str, Any] = {
            outcome: [asdict(one) | {"is_sure": one.is_sure} for one in each] for outcome, each in found.items()
        }
        print(output.dumps({"study": view.row.name, "read": at.name, "trials": len(usable), **lists}))
        return 0
    out = output.console()
    if where := fidelity.read_where(view.trials, at, view.spec):
        out.print(where, soft_wrap=True)
        out.print()
    for outcome, each in found.items():
        out.print(importance_table(each, f"What mattered for {outcome}, {at.name}"))
        out.print(importances.certainty(each, len(usable)), soft_wrap=True)
        out.print()
    for line in (importances.MEANING, *importances.COLUMNS):
        out.print(line, soft_wrap=True)
    return 0


BAR = 20
"""Characters of a share of 100%."""


def importance_table(found: Sequence[Importance], title: str) -> Table:
    """Return the table of what mattered for an outcome, the largest share first."""
    right = ("share", "likely", "chance")
    table = render.new_table("hyperparameter", "", *right, "verdict", title=title, right=right)
    for one in found:
        table.add_row(
            Text(one.name, style="bold" if one.is_sure else ""),
            "█" * round(BAR * one.share),
            f"{one.share:.0%}",
            f"{one.low:.0%} to {one.high:.0%}",
            f"{one.chance:.0%}",
            Text("matters", style="bold") if one.is_sure else "may be chance",
        )
    return table
