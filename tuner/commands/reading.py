"""The commands that read a store: list, show, compare, best."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from ppo_core import output
from ppo_core.errors import ConfigError, StudyError
from tuner import kept_checkpoints, render, results
from tuner.commands import report, storage
from tuner.results import StudyView, read_study
from tuner.store import Store, TrialRow


@contextmanager
def opened(given: str | None) -> Iterator[Store]:
    """Open the store of `--storage` for reading, and close it in the end."""
    store = Store.open(storage.location(given))
    try:
        yield store
    finally:
        store.close()


def studies(args: argparse.Namespace) -> int:
    """List the studies of a store."""
    with opened(args.storage) as store:
        studies = store.studies()
        listed = [row for row in studies if args.all or row.archived_at is None]
        rows = [results.study_summary(read_study(store, row.name)) for row in listed]
    if args.json:
        print(output.dumps(rows))
    elif rows:
        output.console().print(render.studies_table(rows))
    elif studies:
        print("All studies are archived; list them with: ppo-tuner list --all")
    else:
        print("No studies yet; begin with: ppo-tuner demo")
    return 0


def show(args: argparse.Namespace) -> int:
    """Show a study, or one of its trials."""
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        if args.trial is None:
            _show_study(store, view, args)
        else:
            _show_trial(store, view, store.trial(view.row, args.trial), args.json)
    return 0


def _show_study(store: Store, view: StudyView, args: argparse.Namespace) -> None:
    if args.json:
        print(output.dumps(results.study_data(view)))
        return
    out = output.console()
    out.print(render.study_line(view), style="bold")
    report.print_trials(out, view)
    best = view.best()
    if best is not None:
        report.print_winner(out, store, view, best, view.spec.kl_budget, storage.location(args.storage))
    elif view.ended:
        out.print(report.no_winner(view, view.spec.kl_budget, storage.location(args.storage)))


def _show_trial(store: Store, view: StudyView, trial: TrialRow, as_json: bool) -> None:
    if as_json:
        print(output.dumps(results.trial_detail(store, view.row, trial)))
        return
    out = output.console()
    title = f'Trial {trial.number} of study "{output.plain(view.row.name)}" ({render.lineage(trial)})'
    out.print(render.config_table(trial, view, title))
    out.print(render.outcome_line(trial, results.final_kl(store, trial)), style="bold")
    if trial.reason is not None:
        out.print(f"Reason: {output.plain(trial.reason.message)} (rule {output.plain(trial.reason.rule)})")
        evidence = render.evidence_table(trial.reason)
        if evidence is not None:
            out.print(evidence)
    rows = store.steps([trial.id], render.CURVE_METRICS)
    if rows:
        out.print(render.curve_table(rows))
    for text in render.checkpoint_lines(kept_checkpoints.by_episode(view.row, trial.number)):
        out.print(text, soft_wrap=True)
    for line in render.sample_lines(store.samples([trial.id])):
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
        print(output.dumps(results.comparison_data(view, trials)))
        return 0
    out = output.console()
    differing = results.differences(trials)
    for table in render.comparison_tables(view, trials, differing):
        out.print(table)
    if not differing:
        out.print("Their configurations are equal.")
    return 0


def best(args: argparse.Namespace) -> int:
    """Show the best trial within the study's KL budget or another; an error where there is none."""
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        kl_budget = view.spec.kl_budget if args.kl_budget is None else args.kl_budget
        trial, where = view.best(kl_budget), storage.location(args.storage)
        if trial is None:
            raise StudyError(report.no_winner(view, kl_budget, where))
        if args.json:
            kept = {"checkpoint": report.checkpoint_data(store, view, trial, where)}
            print(output.dumps(results.best_data(store, view, trial, kl_budget) | kept))
        else:
            report.print_winner(output.console(), store, view, trial, kl_budget, where)
    return 0
