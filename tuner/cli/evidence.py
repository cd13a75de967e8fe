"""The evidence on a study: its confirmation, the diagnosis of a trial, the hyperparameters that mattered."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ppo_core import output
from ppo_core.cli.command_line import EXIT_OK
from ppo_core.errors import StudyError
from ppo_core.output import KL_UNIT, NOTHING, pluralize, plus_minus
from tuner.cli import render
from tuner.confirm.headline import headlines
from tuner.confirm.intervals import places_of
from tuner.confirm.result import Confirmation, runs_text
from tuner.judge import diagnose as diagnoses
from tuner.judge.results import read_study
from tuner.store.commands import command, opened

if TYPE_CHECKING:  # its libraries take a second to load
    from tuner.search.importance import Importance

BAR_WIDTH = 20


def print_confirmation(out: Console, confirmation: Confirmation, *, with_verdict: bool) -> None:
    """Print the result of confirming a study at one length: each configuration, and which one is better."""
    out.print(confirmation_table(confirmation))
    baseline = confirmation.baseline
    if baseline is not None and baseline.reward is not None:
        reward = plus_minus(baseline.reward, baseline.reward_se)
        line = f"The SFT policy scores {reward} on the same prompts (± is one standard error over them)."
        out.print(line, soft_wrap=True)
    if with_verdict:
        out.print(confirmation.verdict, style="bold", soft_wrap=True)


def confirmation_table(confirmation: Confirmation) -> Table:
    """Return the table of the configurations that were confirmed, the highest mean first."""
    columns = ("configuration", "seeds", "reward", f"KL, {KL_UNIT}", "over the reference", "end within budget")
    title = (
        f"On fresh seeds, {confirmation.total_episodes} episodes each, evaluated on "
        f"{pluralize(confirmation.prompts, 'test prompt')}"
    )
    caption = (
        "In brackets: 95% intervals over the seeds; those of differences hold for all at once, however often you look, "
        "and that of the winner is not adjusted for its being chosen. Reward and KL are of each run's best checkpoint; "
        "the last column counts the runs that also end within the KL budget."
    )
    table = render.new_table(*columns, title=title, caption=caption, right=columns[1:])
    read = confirmation.configurations
    reward, kl, over = (places_of(getattr(one, name) for one in read) for name in ("reward", "kl", "over_reference"))
    for each in read:
        label = "\n".join(filter(None, (each.label, runs_text(each))))
        intervals = (
            NOTHING if each.reward is None else each.reward.with_places(reward),
            NOTHING if each.kl is None else each.kl.with_places(kl),
            NOTHING if each.over_reference is None else each.over_reference.with_places(over, signed=True),
        )
        count = 0 if each.reward is None else each.reward.n
        table.add_row(label, str(count), *intervals, f"{each.ends_within} of {count}")
    return table


def diagnose(args: argparse.Namespace) -> int:
    """Show what is wrong with a trial, by its curves, and the change to try next."""
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        trial = store.trial(view.row, args.trial)
        if not trial.episodes and not trial.has_failed:
            raise StudyError(f"trial {trial.number} has made no step yet, so there is nothing to diagnose")
        findings = diagnoses.diagnose(diagnoses.course_of(store, trial, view))
        numbers = headlines(store, view, (*view.trials, trial))
    tries = [command(diagnoses.try_it(view.spec, trial, finding), store) for finding in findings]
    if args.json:
        pairs = zip(findings, tries, strict=True)
        more = ({"enqueue": diagnoses.enqueued(trial, finding), "command": try_it} for finding, try_it in pairs)
        print(output.dumps([asdict(finding) | each for finding, each in zip(findings, more, strict=True)]))
        return EXIT_OK
    out = output.console()
    out.print(render.trial_line(numbers[trial.number]), soft_wrap=True)
    for (finding, is_repeat), try_it in zip(diagnoses.with_repeats(findings), tries, strict=True):
        out.print(f"{finding.rule}. {finding.finding}", style="bold", soft_wrap=True)
        earlier = diagnoses.tried(view.trials, trial, finding, view.spec)
        if is_repeat:
            out.print(f"  The same change: {finding.advice}.")
        elif earlier is not None:
            change = f"{finding.name} = {output.short(earlier.config[finding.name])}"
            out.print(f"  Tried already, with {change}: {render.trial_line(numbers[earlier.number])}", soft_wrap=True)
        else:
            out.print(f"  Try {finding.advice}:\n  {try_it}", soft_wrap=True)
    if not findings:
        out.print(diagnoses.why_nothing(trial))
    elif len({finding.advice for finding in findings}) > 1:
        out.print(
            "Try one change at a time, the first one first: with several at once you cannot see which one helped."
        )
    return EXIT_OK


def importance(args: argparse.Namespace) -> int:
    """Show which hyperparameters mattered.

    Raises:
        StudyError: there are too few trials to tell.
    """
    from tuner.search import importance as importances

    with opened(args.storage) as store:
        view = read_study(store, args.study)
    if refused := importances.refusal(view.trials, view.spec):
        raise StudyError(f"{refused} The dashboard's page Why plots the trials against each hyperparameter.")
    usable = importances.usable(view.trials, view.spec)
    rankings = importances.importances(usable, view.spec)
    if args.json:
        data: dict[str, Any] = {"study": view.row.name, "trials": len(usable)}
        for outcome, ranking in rankings.items():
            data[outcome] = [asdict(each) | {"is_sure": each.is_sure} for each in ranking]
        print(output.dumps(data))
        return EXIT_OK
    out = output.console()
    for outcome, ranking in rankings.items():
        out.print(importance_table(ranking, f"What mattered for {outcome}"))
        out.print(importances.certainty(ranking, len(usable)), soft_wrap=True)
        out.print()
    for line in (importances.MEANING, *importances.COLUMNS):
        out.print(line, soft_wrap=True)
    return EXIT_OK


def importance_table(ranking: Sequence[Importance], title: str) -> Table:
    """Return the table of the hyperparameters that mattered for an outcome, the largest share first."""
    right = ("share", "likely", "chance")
    table = render.new_table("hyperparameter", "", *right, "verdict", title=title, right=right)
    for each in ranking:
        table.add_row(
            Text(each.name, style="bold" if each.is_sure else ""),
            "█" * round(BAR_WIDTH * each.share),
            f"{each.share:.0%}",
            f"{each.low:.0%} to {each.high:.0%}",
            f"{each.chance:.0%}",
            Text("matters", style="bold") if each.is_sure else "may be chance",
        )
    return table
