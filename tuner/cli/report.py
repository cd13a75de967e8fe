"""Print a study's outcome: tables, the winner, and what to do next."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ppo_core import output
from tuner.cli import render
from tuner.confirm import gauntlet
from tuner.confirm.answer import Answer, answer_data, launch_of, study_answer
from tuner.confirm.headline import headlines
from tuner.confirm.intervals import places_of
from tuner.confirm.result import Confirmation, confirmations, longest_read, runs_text
from tuner.judge import forks
from tuner.judge.best import is_sound
from tuner.judge.results import StudyView, front, spent
from tuner.judge.scoring import with_running
from tuner.search.choose import why_early
from tuner.store import OnTest, Store, TrialRow, command
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
    answer = study_answer(store, view)
    out.print()
    if early := why_early(view.spec, view.trials):
        out.print(early, soft_wrap=True)
    if answer is not None:
        confirmation = longest_read(confirmations(store, view)) if is_confirmed else None
        if confirmation is not None:
            table = confirmation_table(confirmation)
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


def print_confirmation(out: Console, confirmation: Confirmation, *, with_verdict: bool) -> None:
    """Print the result of confirming a study at one length: each configuration, and which one is better."""
    out.print(confirmation_table(confirmation))
    sft = confirmation.sft
    if sft is not None and sft.reward is not None:
        reward = output.plus_minus(sft.reward, sft.reward_se)
        line = f"The SFT policy scores {reward} on the same prompts (± is one standard error over them)."
        out.print(line, soft_wrap=True)
    if with_verdict:
        out.print(confirmation.verdict, style="bold", soft_wrap=True)


def confirmation_table(confirmation: Confirmation) -> Table:
    """Return the table of the configurations that were confirmed, the highest mean first."""
    columns = ("configuration", "seeds", "reward", f"KL, {output.KL_UNIT}", "over the reference", "complete in budget")
    title = (
        f"On fresh seeds, {confirmation.total_episodes} episodes each, evaluated on "
        f"{output.pluralize(confirmation.prompts, 'test prompt')}"
    )
    caption = (
        "In brackets: 95% intervals over the seeds. Intervals of differences are adjusted for comparing several "
        "configurations and for repeated looks; the winner's own interval is not adjusted for having been selected. "
        "Reward and KL are those of each run's best checkpoint; the last column counts the runs that trained to "
        "their end and ended within the KL budget."
    )
    table = render.new_table(*columns, title=title, caption=caption, right=columns[1:])
    read = confirmation.configurations
    reward, kl, over = (places_of(getattr(one, name) for one in read) for name in ("reward", "kl", "over_reference"))
    for each in read:
        label = "\n".join(filter(None, (each.label, runs_text(each))))
        intervals = (
            output.NOTHING if each.reward is None else each.reward.with_places(reward),
            output.NOTHING if each.kl is None else each.kl.with_places(kl),
            output.NOTHING if each.over_reference is None else each.over_reference.with_places(over, signed=True),
        )
        count = 0 if each.reward is None else each.reward.n
        table.add_row(label, str(count), *intervals, f"{each.ends_within} of {count}")
    return table


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
            out.print(_test_line(answer.test))
        at, where = answer.checkpoint, answer.checkpoint.where
        text = render.shown_path(where) if isinstance(where, Path) else f"not kept here ({where})."
        out.print(f"Checkpoint of step {at.step}, episode {at.episode}: {text}", soft_wrap=isinstance(where, Path))
    gates = gauntlet.study_gauntlet(store, view, answer)
    reached = ", ".join(list(gauntlet.GATES)[: len(gates.left) - 1])
    out.print(f"Trials left, at the start and after each gate ({reached}): {gates.line}", soft_wrap=True)
    print_recommendation(out, store, answer)


def answer_json(store: Store, answer: Answer | None) -> dict[str, Any] | None:
    """Return a study's answer for JSON; None: it has none."""
    if answer is None:
        return None
    return answer_data(answer, command(answer.launch, store), command(answer.remedy, store) if answer.remedy else None)


def _test_line(test: OnTest | str) -> str:
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
    where = checkpoint.where
    return {
        "step": checkpoint.step,
        "episode": checkpoint.episode,
        "path": str(where.absolute()) if isinstance(where, Path) else None,
        "why_not": None if isinstance(where, Path) else where,
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
