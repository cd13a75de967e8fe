"""Print a study's outcome: tables, the winner, and what to do next."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ppo_core import output
from tuner.cli import evidence, render
from tuner.confirm import gauntlet
from tuner.confirm.answer import Answer, answer_data, launch_of, of_study
from tuner.confirm.headline import headlines
from tuner.confirm.result import confirmations, longest_read
from tuner.judge import forks
from tuner.judge.best import is_sound
from tuner.judge.results import StudyView, front, spent
from tuner.judge.scoring import with_running
from tuner.search.choose import why_early
from tuner.store import Store, TrialRow
from tuner.store.commands import command
from tuner.study.status import Status


def print_trials(out: Console, store: Store, view: StudyView, answer: Answer | None) -> None:
    """Print the tables of trials, with the answer marked, and of searched values, and what they cost."""
    if not view.trials:
        out.print("No trial has started yet.")
        return
    listed = with_running(store, view.trials, view.spec)
    mark = "to launch" if view.state == "finished" else "leads"
    marks = {} if answer is None else {answer.number: mark if answer.confirmed is None else "to launch"}
    out.print(render.trials_table(list(headlines(store, view, listed).values()), marks))
    for table in render.params_tables(listed, view.spec, in_pipe=out.width >= output.PIPE_WIDTH):
        out.print(table)
    out.print(spent(store, view).text)
    if view.confirming:
        runs = output.pluralize(len(view.confirming), "confirming run")
        numbers = f"trials {view.confirming[0].number} to {view.confirming[-1].number}"
        again = command(["confirm", view.row.name, "--show"], store)
        out.print(f"Not in these tables: {runs} ({numbers}). Their results: {again}", soft_wrap=True)


def print_end(out: Console, store: Store, view: StudyView, *, is_confirmed: bool) -> None:
    """Print a finished study's answer and the next command; `is_confirmed`: also the table of its confirming runs."""
    answer = of_study(store, view)
    out.print()
    if early := why_early(view.spec, view.trials):
        out.print(early, soft_wrap=True)
    if answer is not None:
        confirmation = longest_read(confirmations(store, view)) if is_confirmed else None
        if confirmation is not None:
            table = evidence.confirmation_table(confirmation)
            table.caption = None
            out.print(table)
        print_recommendation(out, store, answer)
    else:
        out.print(no_winner(store, view), style="bold")
        if failed := all_failed(view):
            log = command(["logs", view.row.name, str(failed[0].number)], store)
            out.print(f"What the first of them printed: {log}", soft_wrap=True)
    out.print(f"All trials, settings and costs: {command(['show', view.row.name], store)}", soft_wrap=True)
    if answer is not None:
        out.print(f"Curves and samples in the browser: {command(['dashboard'], store)}", soft_wrap=True)


def print_recommendation(out: Console, store: Store, answer: Answer) -> None:
    """Print a study's answer: the decision, the evidence, gains and a doubt if there are, and the launch command."""
    out.print(answer.decision, style="bold", soft_wrap=True)
    for line in filter(None, (answer.evidence, answer.gained)):
        out.print(line, soft_wrap=True)
    if answer.doubt:
        remedy = f" {command(answer.remedy, store)}" if answer.remedy else ""
        out.print(f"{answer.doubt}{remedy}", soft_wrap=True)
    if answer.has_learned:
        out.print(f"Launch: {command(answer.launch, store)}", soft_wrap=True)


def print_answer(out: Console, store: Store, view: StudyView, answer: Answer) -> None:
    """Print a study's answer after its whole configuration and what its run in the search came to."""
    trial = answer.trial
    title = f"Within {output.nats(answer.kl_budget)}: {answer.name} ({answer.badge})"
    out.print(render.config_table(trial, view, title))
    out.print(f"In the search it ran for {trial.seconds:.0f} s, evaluations included.")
    if answer.checkpoint is not None:
        if answer.confirmed is None:
            out.print(_test_line(answer))
        out.print(render.checkpoint_line(answer.checkpoint), soft_wrap=answer.checkpoint.kept.path is not None)
    gates = gauntlet.of_study(store, view, answer)
    reached = ", ".join(list(gauntlet.GATES)[: len(gates.left) - 1])
    out.print(f"Trials left, at the start and after each gate ({reached}): {gates.line}", soft_wrap=True)
    print_recommendation(out, store, answer)


def answer_json(store: Store, answer: Answer | None) -> dict[str, Any] | None:
    """Return a study's answer for JSON; None: it has none."""
    if answer is None:
        return None
    return answer_data(answer, command(answer.launch, store), command(answer.remedy, store) if answer.remedy else None)


def _test_line(answer: Answer) -> str:
    test = answer.test
    if isinstance(test, str):
        return f"On the test prompts: not evaluated ({output.plain(test)})."
    reward, kl = output.plus_minus(test.reward, test.reward_se), output.plus_minus(test.kl, test.kl_se)
    prompts = output.pluralize(test.prompts, "test prompt")
    return f"On {prompts}: reward {reward} at KL {kl} {output.KL_UNIT} (evaluated once, after the search)."


def print_front(out: Console, store: Store, view: StudyView) -> None:
    """Print the checkpoints that are kept for other KL budgets, if there are several."""
    points = front(store, view)
    if len(points) > 1:
        out.print()
        out.print(render.front_table(points))
        out.print(f"For any budget X: {command(['best', view.row.name, '--kl-budget', 'X'], store)}", soft_wrap=True)


def checkpoint_data(store: Store, view: StudyView, trial: TrialRow) -> dict[str, Any] | None:
    """Return the checkpoint of a trial's value for JSON, or None; without a path `why_not` and `again` say more."""
    checkpoint = forks.value_checkpoint(store, view.row, trial)
    if checkpoint is None:
        return None
    path = checkpoint.kept.path
    return {
        "step": checkpoint.step,
        "episode": checkpoint.episode,
        "path": None if path is None else str(path.absolute()),
        "why_not": checkpoint.kept.why_not or None,
        "again": command(launch_of(store, view, trial), store),
    }


def no_winner(store: Store, view: StudyView) -> str:
    """Return why no trial is the best under the view's KL budget: what became of the trials, and where to look."""
    name = view.row.name
    if failed := all_failed(view):
        reason = failed[0].reason
        why = "for an unknown reason" if reason is None else output.plain(reason.message)
        how = "failed" if failed[0].status is Status.FAILED else "ended before the first update"
        which = "The only trial" if len(failed) == 1 else f"All {len(failed)} trials"
        return f'{which} of study "{name}" {how}: {why}'
    counts = Counter(trial.reason.rule if trial.reason else trial.shown_status for trial in view.trials)
    fates = ", ".join(f"{count} {fate}" for fate, count in counts.items())
    budget = output.nats(view.spec.kl_budget)
    within = f"is within the KL budget of {budget}: no trained checkpoint has so low a KL"
    if not any(map(is_sound, view.trials)):
        within = "ended soundly"
    elif any(trial.value_step and not is_sound(trial) for trial in view.trials):
        within = f"that is within the KL budget of {budget} ended soundly"
    return (
        f'No trial of study "{name}" {within} ({fates}). What to change: {command(["diagnose", name, "TRIAL"], store)}'
    )


def all_failed(view: StudyView) -> Sequence[TrialRow]:
    """Return the study's trials if every one failed, or was ended by a rule before its first update; else none."""
    return view.trials if all(trial.has_failed for trial in view.trials) else ()
