"""Print a study's outcome: tables, the winner, and what to do next."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from ppo_core import output
from ppo_core.cli.command_line import EXIT_ERROR, EXIT_OK
from tuner.cli import evidence, render, storage
from tuner.confirm.result import confirmations, longest_read
from tuner.control import forks
from tuner.environment import to_copy
from tuner.judge.answer import Answer, answer_data, of_study
from tuner.judge.best import best_rank
from tuner.judge.paired import improvement
from tuner.judge.results import (
    StudyView,
    baseline,
    front,
    kl_prunings,
    spent,
)
from tuner.judge.rules import RULES
from tuner.judge.scoring import with_running
from tuner.store import Store, TrialRow
from tuner.study.status import Status

MOST_LISTED, LISTED_EACH = 200, 50
"""With more trials than the first number, tables list only the best and the latest (the second number of each), and
unended ones.
"""


def print_trials(out: Console, store: Store, view: StudyView, *, is_all: bool = False) -> None:
    """Print the tables of trials and searched values, the legend of trial 0 and how many were pruned for KL.

    Of a large study they list some trials (see `MOST_LISTED`), unless `is_all`.
    """
    if not view.trials:
        out.print("No trial has started yet.")
        return
    listed = with_running(store, view.trials if is_all else _listed(view), view.spec)
    out.print(render.trials_table(listed, view.best()))
    width = out.width if out.width >= output.PIPE_WIDTH else render.READABLE_WIDTH
    for table in render.params_tables(listed, view.spec, width):
        out.print(table)
    if len(listed) < len(view.trials):
        which = f"the {LISTED_EACH} best, the {LISTED_EACH} latest, and those that have not ended"
        again = to_copy(["show", view.row.name, "--all"])
        out.print(f"{len(listed)} of {len(view.trials)} trials: {which}. All of them: {again}", soft_wrap=True)
    legend = render.reference_legend(view)
    if legend is not None:
        out.print(legend)
    pruned = kl_prunings(view.trials)
    if pruned:
        out.print(render.prunings_line(pruned, len(view.trials)))
        out.print("Value and eval KL of a pruned trial are those of its best checkpoint within the KL budget.")
    out.print(spent(store, view).text)
    if view.confirming:
        runs = output.counted(len(view.confirming), "confirming run")
        numbers = f"trials {view.confirming[0].number} to {view.confirming[-1].number}"
        again = to_copy(["confirm", view.row.name, "--show"])
        out.print(f"Not in these tables: {runs} ({numbers}). Their results: {again}", soft_wrap=True)


def _listed(view: StudyView) -> Sequence[TrialRow]:
    if len(view.trials) <= MOST_LISTED:
        return view.trials
    ranks = (best_rank(row, view.spec.kl_budget) for row in view.trials)
    best = sorted(rank for rank in ranks if rank is not None)[:LISTED_EACH]
    chosen = {number for _, _, number in best} | {row.number for row in view.trials[-LISTED_EACH:]}
    return [row for row in view.trials if row.number in chosen or not row.is_done]


def print_end(out: Console, store: Store, view: StudyView, where: str, *, is_confirmed: bool) -> None:
    """Print a finished study's answer, how sure it is, and the one command to run next; `show` has the rest.

    `where` is the storage, which the commands name unless they find it by themselves. `is_confirmed`: confirming runs
    have just ended, and their table is shown.
    """
    found, name, failed = of_study(store, view), view.row.name, _all_failed(view)
    out.print()
    again: Sequence[str] = ()
    if found is not None:
        read = longest_read(confirmations(store, view)) if is_confirmed else None
        if read is not None:
            table = evidence.confirmation_table(read)
            table.caption = None
            out.print(table)
        out.print(f"To launch: {found.name} ({found.badge}). {found.reading}", style="bold")
        for line in (found.certainty, *found.cautions):
            out.print(line)
        again, purpose = found.confirm, "on fresh seeds, beside the reference: does it hold?"
        if not again:
            again, purpose = found.launch, "launch it"
    else:
        out.print(no_winner(view, view.spec.kl_budget), style="bold")
        if failed:
            again, purpose = ("logs", name, str(failed[0].number)), "what the first of them printed"
    if again:
        out.print(f"Next: {_command(again, where)}\n      {purpose}", soft_wrap=True)
    out.print(f"All trials, settings and costs: {_command(['show', name], where)}", soft_wrap=True)
    if found is not None:
        out.print(f"Curves and samples in the browser: {_command(['dashboard'], where)}", soft_wrap=True)


def print_answer(out: Console, store: Store, view: StudyView, found: Answer, where: str) -> None:
    """Print a study's answer: its whole configuration, what it reaches, how sure that is, and how to launch it.

    `where` is the storage, which the suggested commands name unless they find it by themselves.
    """
    trial, one = found.trial, found.checkpoint
    title = f"To launch within {output.short(found.kl_budget)} {output.KL_UNIT}: {found.name} ({found.badge})"
    out.print(render.config_table(trial, view, title))
    took = f"in {trial.seconds:.0f} s"
    out.print(f"{found.name.capitalize()}: {found.reading}", style="bold", soft_wrap=True)
    if found.confirmed is not None:
        at = "" if found.kl is None else f" at a KL of {output.plus_minus(found.kl.mean, found.kl.se)} {output.KL_UNIT}"
        out.print(f"Its run in the search: eval reward {output.plus_minus(trial.value, trial.value_se)}{at}, {took}.")
    else:
        out.print(f"It ran {took}, evaluations included.")
    start, better = baseline(store, trial), improvement(store, trial)
    if found.confirmed is None and start is not None and better is not None:
        before = output.plus_minus(start.mean, start.se)
        out.print(
            f"Improvement on the SFT baseline: {output.plus_minus(better.mean, better.se)} reward "
            f"(baseline {before}; ± is one standard error, {better.basis}).",
            style="bold",
        )
    if one is not None:
        if found.confirmed is None:
            out.print(_test_line(found))
        out.print(render.answer_line(one), soft_wrap=one.kept.path is not None)
    print_launch(out, found, where)


def print_launch(out: Console, found: Answer, where: str) -> None:
    """Print an answer's certainty, its cautions, and the commands that confirm and launch it."""
    for line in (found.certainty, *found.cautions):
        out.print(line, soft_wrap=True)
    if found.confirm:
        out.print(f"To confirm it: {_command(found.confirm, where)}", soft_wrap=True)
    out.print(f"To launch it: {_command(found.launch, where)}", style="bold", soft_wrap=True)


def launch_command(found: Answer, where: str) -> str:
    """Return the command that launches a study's answer."""
    return _command(found.launch, where)


def data_of_answer(store: Store, view: StudyView, where: str) -> dict[str, Any] | None:
    """Return the study's answer for JSON; None: it has none."""
    found = of_study(store, view)
    return None if found is None else answer_data(found, launch_command(found, where))


def _test_line(found: Answer) -> str:
    test = found.test
    if isinstance(test, str):
        return f"On the test prompts: not evaluated ({output.plain(test)})."
    reward, kl = output.plus_minus(test.reward, test.reward_se), output.plus_minus(test.kl, test.kl_se)
    return f"On {test.prompts} test prompts: {reward} at {kl} {output.KL_UNIT} (once, after the search)."


def print_front(out: Console, store: Store, view: StudyView, where: str) -> None:
    """Print the checkpoints that are kept for other KL budgets, where there are several."""
    points = front(store, view)
    if len(points) > 1:
        out.print()
        out.print(render.front_table(points))
        out.print(f"For any budget X: {_command(['best', view.row.name, '--kl-budget', 'X'], where)}", soft_wrap=True)


def checkpoint_data(store: Store, view: StudyView, trial: TrialRow, where: str) -> dict[str, Any] | None:
    """Return the checkpoint that stands for a trial's value, for JSON; None: it was never evaluated.

    `path` is null where it is not kept on this machine: `why_not` says so, and the command `again` makes it again.
    """
    answer = forks.value_checkpoint(store, view.row, trial)
    if answer is None:
        return None
    path = answer.kept.path
    return {
        "step": answer.step,
        "episode": answer.episode,
        "path": None if path is None else str(path.absolute()),
        "why_not": answer.kept.why_not or None,
        "again": _command(answer.again, where),
    }


def no_winner(view: StudyView, kl_budget: float) -> str:
    """Return why no trial is the best: what ended them, and what to change."""
    failed = _all_failed(view)
    if failed:
        return f'All {len(failed)} trials of study "{view.row.name}" failed: {_first_error(failed)}'
    budget = f"{output.short(kl_budget)} {output.KL_UNIT}"
    return (
        f'No trial of study "{view.row.name}" is within the KL budget of {budget}: no trained checkpoint has so low a '
        f"KL. {_advice_on_causes(view)}"
    )


def exit_status(view: StudyView) -> int:
    """Return the exit status that a study's outcome stands for: 1 where every trial failed, else 0."""
    return EXIT_ERROR if _all_failed(view) else EXIT_OK


def _all_failed(view: StudyView) -> list[TrialRow]:
    """Return the study's trials where they ended and every one failed, else none."""
    trials = list(view.trials)
    return trials if all(trial.status is Status.FAILED for trial in trials) else []


def _first_error(failed: Sequence[TrialRow]) -> str:
    reason = failed[0].reason
    return "for an unknown reason" if reason is None else output.plain(reason.message)


_NEARER = ("To stay nearer to the reference", {
    "learning_rate": "lower the low end of", "kl_coef": "raise the high end of", "kl_target": "lower"})  # fmt: skip
_FURTHER = ("So that a policy moves at all", {
    "learning_rate": "raise the high end of", "kl_coef": "lower the low end of"})  # fmt: skip
_STEADIER = ("So that a run does not break", {"learning_rate": "lower the high end of"})
_ADVICE = {"kl": ("pruned for KL", _NEARER), "idle": ("pruned for learning nothing", _FURTHER),
           "broken": ("pruned as broken", _STEADIER)}  # fmt: skip


def _advice_on_causes(view: StudyView) -> str:
    """Return what ended the study's trials, by cause, and what to change for each."""
    pruned = [trial for trial in view.trials if trial.status is Status.PRUNED and trial.reason is not None]
    parts = []
    for blame, (what, moves) in _ADVICE.items():
        rules = {name for name, rule in RULES.items() if rule.blame == blame}
        count = sum(trial.reason is not None and trial.reason.rule in rules for trial in pruned)
        if count:
            parts.append(f"{count} {'was' if count == 1 else 'were'} {what}. {_moves(view, moves)}")
    failed = [trial for trial in view.trials if trial.status is Status.FAILED]
    if failed:
        parts.append(f"{len(failed)} failed, trial {failed[0].number}: {_first_error(failed)}.")
    return " ".join(parts) or "Run more trials."


def _moves(view: StudyView, advice: tuple[str, Mapping[str, str]]) -> str:
    """Return the advice on the study's search for one cause."""
    end, moves = advice
    searched = [f"{move} {name}" for name, move in moves.items() if name in view.spec.search]
    if searched:
        return f"{end}: {', '.join(searched)} in [search]."
    fixed = [f"{move.split()[0]} {name}" for name, move in moves.items() if name != "kl_target"]
    return f"{end}: {', or '.join(fixed)}."


def _command(words: Sequence[str], where: str) -> str:
    return to_copy([*words, *storage.flags(where)])
