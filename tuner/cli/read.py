"""The commands that read a store: list, show, compare, best, diagnose, importance, logs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ppo_core import output
from ppo_core.cli.command_line import EXIT_OK
from ppo_core.errors import ConfigError, StudyError
from tuner.cli import render, report
from tuner.confirm.answer import decided, headline_of, study_answer
from tuner.confirm.headline import headline_data, headlines
from tuner.confirm.result import confirmations
from tuner.files import folder as study_folder
from tuner.files import trial_log
from tuner.judge import diagnose as diagnoses
from tuner.judge import forks, results
from tuner.judge.paired import reward_difference
from tuner.judge.results import StudyView, read_study
from tuner.judge.scoring import with_running
from tuner.store import Store, TrialRow, command, opened

if TYPE_CHECKING:  # its libraries take a second to load
    from tuner.search.importance import Importance

BAR_WIDTH = 20


def studies(args: argparse.Namespace) -> int:
    """List the studies of a store; one that cannot be read is a line."""
    rows: list[dict[str, Any]] = []
    with opened(args.storage) as store:
        for row in store.studies():
            try:
                view = read_study(store, row.name)
                rows.append(results.study_summary(view) | headline_data(headline_of(store, view)))
            except ConfigError as error:
                rows.append({"name": row.name, "state": results.UNREADABLE, "error": str(error)})
    if args.json:
        print(output.dumps(rows))
    elif rows:
        out = output.console()
        if readable := [each for each in rows if "error" not in each]:
            out.print(render.studies_table(readable))
        for line in (f"{results.UNREADABLE}: {each['error']}" for each in rows if "error" in each):
            out.print(output.plain(line), soft_wrap=True)
    else:
        print("No studies yet; start with: ppo-tuner demo")
    return EXIT_OK


def show(args: argparse.Namespace) -> int:
    """Show a study, or one of its trials."""
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        if args.trial is None:
            _show_study(store, view, args)
        else:
            _show_trial(store, view, store.trial(view.row, args.trial), args.json)
    return EXIT_OK


def _show_study(store: Store, view: StudyView, args: argparse.Namespace) -> None:
    placed = store.orders(view.row)
    answer = study_answer(store, view)
    if args.json:
        more = {
            "front": results.front_data(store, view),
            "orders": [results.order_data(order) for order in placed],
            "answer": report.answer_json(store, answer),
        }
        print(output.dumps(results.study_data(view) | more))
        return
    out = output.console()
    out.print(render.study_line(view), style="bold")
    out.print()
    report.print_trials(out, store, view, answer)
    if answer is not None:
        out.print()
        report.print_answer(out, store, view, answer)
        report.print_front(out, store, view)
    elif view.ended:
        out.print()
        out.print(report.no_winner(store, view))
    if placed:
        out.print()
        out.print(render.orders_table(placed))


def _show_trial(store: Store, view: StudyView, trial: TrialRow, as_json: bool) -> None:
    if as_json:
        print(output.dumps(results.trial_detail(store, view.row, trial)))
        return
    out = output.console()
    (trial,) = with_running(store, [trial], view.spec)
    title = f'Trial {trial.number} of study "{output.plain(view.row.name)}" ({render.lineage(trial)})'
    out.print(render.config_table(trial, view, title))
    out.print(render.outcome_line(headlines(store, view, [trial])[trial.number]), style="bold")
    folder = study_folder.own_folder(view.row)
    process = None if folder is None else trial_log.ran_as(folder / str(trial.number))
    if process is not None:
        out.print(f"Ran in process {output.plain(process)}")
    if trial.reason is not None:
        out.print(f"Reason: {output.plain(trial.reason.message)} (rule {output.plain(trial.reason.rule)})")
        evidence = render.evidence_table(trial.reason)
        if evidence is not None:
            out.print(evidence)
    rows = store.steps([trial.id], render.CURVE_METRICS)
    if rows:
        out.print(render.curve_table(rows))
    kept = forks.kept_by_episode(view.row, trial.number)
    if kept:
        out.print("Checkpoints kept:")
    for episode, path in kept.items():
        out.print(f"  episode {episode}: {render.shown_path(path)}", soft_wrap=True)
    for line in render.sample_lines(store.samples([trial.id]), trial.value_step or None):  # 0: none trained has it
        out.print(line)


def compare(args: argparse.Namespace) -> int:
    """Show the differing values and the outcomes of at least two trials side by side."""
    numbers = list(dict.fromkeys(args.trials))
    if len(numbers) < 2:
        raise ConfigError("compare needs at least two different trials: ppo-tuner compare STUDY TRIAL TRIAL")
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        trials = [store.trial(view.row, number) for number in numbers]
        if args.json:
            print(output.dumps(results.comparison_data(store, view, trials)))
            return EXIT_OK
        differences = [reward_difference(store, trials[0], trial) for trial in trials[1:]]
        numbers_of, done = headlines(store, view, trials), decided(confirmations(store, view))
    out = output.console()
    differing = results.differences(trials)
    for table in render.comparison_tables(view, numbers_of, differing):
        out.print(table)
    if not differing:
        out.print("Their configurations are equal.")
    first = trials[0].number
    out.print(
        f"Differences in reward from trial {first}, the first one listed (+: better than trial {first}; -: worse):"
    )
    for trial, difference in zip(trials[1:], differences, strict=True):
        lead = None if done is None else done.lead_of(trial.number, first)
        out.print(render.difference_line(trials[0], trial, difference, lead), soft_wrap=True)
    return EXIT_OK


def best(args: argparse.Namespace) -> int:
    """Show what to launch within the study's KL budget or another; an error if there is nothing."""
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        if args.kl_budget is not None:
            view = results.under_budget(store, view, args.kl_budget)
        answer = study_answer(store, view)
        if answer is None:
            raise StudyError(report.no_winner(store, view))
        if args.json:
            more = {
                "checkpoint": report.checkpoint_data(store, view, answer.trial),
                "answer": report.answer_json(store, answer),
            }
            print(output.dumps(results.best_data(store, view, answer.trial) | more))
        else:
            report.print_answer(output.console(), store, view, answer)
    return EXIT_OK


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
        more = [asdict(one) | {"enqueue": diagnoses.enqueued(trial, one), "command": try_it} for one, try_it in pairs]
        print(output.dumps(more))
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
        by: dict[str, Any] = {
            key: [asdict(one) | {"is_sure": one.is_sure} for one in ranking] for key, ranking in rankings.items()
        }
        print(output.dumps({"study": view.row.name, "trials": len(usable), **by}))
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


def logs(args: argparse.Namespace) -> int:
    """Print a trial's log.

    Raises:
        StudyError: there is no such trial, or its log is not here.
    """
    with opened(args.storage) as store:
        study = store.study(args.study)
        trial = store.trial(study, args.trial)
    if study.folder is None:
        raise StudyError(f'study "{study.name}" has no logs: no controller has run it yet')
    if not Path(study.folder).is_dir():
        raise StudyError(f'the folder of study "{study.name}", {study.folder}, is not here; {study.lease_host} ran it')
    path = trial_log.path_of(Path(study.folder) / str(trial.number))
    if not path.is_file():
        why = f"has no log at {path}: it was removed, or could not be written"
        if not trial.attempts:
            why = "has not started yet"
        raise StudyError(f'trial {trial.number} of study "{study.name}" {why}')
    print(trial_log.escaped(path.read_text(encoding="utf-8", errors="replace")), end="")
    return EXIT_OK
