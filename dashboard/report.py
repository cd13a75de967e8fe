"""One study as one HTML file that needs no network, for a colleague or a ticket: what to launch, how sure, and why.

`python -m dashboard.report STUDY FILE` writes it; the store is that of PPO_TUNER_STORAGE. `ppo-tuner report` checks
what it is given and starts this. Never imports torch.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import tomli_w

from dashboard import analysis, data, figures, style
from dashboard.data import Snapshot, StepCache
from dashboard.report_page import Html, Page, box, code, element, fold, paragraph, said, section, table, together
from ppo_core import __version__
from ppo_core.errors import PPOTunerError
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, NOTHING, counted, measured, plain, plus_minus, short
from ppo_core.run.command_line import EXIT_ERROR
from tuner import audit, forks, results
from tuner.confirmed import Confirmation, confirmations, launch_words, longest_read, runs_text
from tuner.environment import PROG
from tuner.guard import RULES
from tuner.results import StudyView
from tuner.status import Status
from tuner.store import Store, TrialRow
from tuner.store.schema import without_secrets

LINES = style.AT_A_GLANCE
"""Trials in colour, and lines in the curves."""
PROMPTS = 3
"""Prompts whose samples are shown."""
KL_CURVE, REWARD_CURVE = "objective/kl_exact", "objective/scores"
SHOWN_LIMITS = 1.5
"""How many times the guard's KL limit an axis of KL shows at most: one blow-up would flatten all the others."""
PACKAGES = ("torch", "transformers", "peft", "optuna")


def write(store: Store, name: str, path: Path) -> None:
    """Write the report of a study; a file that is there already is replaced, and never there half."""
    text = report(store, name)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8", errors="replace")
    new.replace(path)


def report(store: Store, name: str) -> str:
    """Return a study's report as the text of an HTML file."""
    view = results.read_study(store, name)
    found = confirmations(store, view)
    confirmation = longest_read(found)
    launch = None if confirmation is None else confirmation.best
    answer = view.best() if launch is None else launch.trial
    page = Page()
    body = together(
        _head(store, view),
        _recommendation(store, view, confirmation, answer),
        _confirmations(found),
        _charts(store, view, answer, page),
        _trials(view, answer),
        _why(view),
        _audited(store, view),
        _samples(store, view, answer),
        _reproduce(view, answer, confirmation),
    )
    return page.whole(f"{name}: report of PPO Tuner", body)


# What a reader needs first: which study this is, and what to launch.


def _head(store: Store, view: StudyView) -> Html:
    spec, row = view.spec, view.row
    spent, extent = results.spent(store, view), view.extent
    became = ", ".join(f"{count} {what}" for what, (count, _) in spent.by.items())
    total = f" of {extent.total}" if extent.total is not None and extent.total > len(view.trials) else ""
    budget = "" if extent.budget is None else f", {extent.spent:.1f} of the budget of {extent.budget:g} full trials"
    confirming = sum(run.seconds for run in view.confirming)
    more = f" and {confirming:.0f} to confirm configurations" if confirming else ""
    facts = (
        f"Task {spec.task}. Objective {spec.objective}, strategy {spec.strategy}, KL budget {spec.kl_budget:g} "
        f"{KL_UNIT}. Started {_clock(row.created_at)}"
        + ("" if row.finished_at is None else f", finished {_clock(row.finished_at)}")
        + f". {counted(len(view.trials), 'trial')}{total}{became and f': {became}'}. "
        f"Spent: {spent.seconds:.0f} device-seconds on the search{more}{budget}."
    )
    state = data.shown_state(view)
    note = {
        "running": "The study is running: this is how it stood when the report was written.",
        "stalled": "The study's controller has given no sign of life for over a minute.",
        "paused": "The study is paused: this is how it stood when the report was written.",
        "unfinished": "The study is not finished, and nothing is running it.",
    }.get(state, "")
    return together(
        element("h1", f"Study {row.name}: {state}"),
        paragraph(facts, "soft"),
        paragraph(f"Report of PPO Tuner {__version__}, written {_clock(time.time())}.", "soft"),
        paragraph(note),
    )


def _recommendation(store: Store, view: StudyView, confirmation: Confirmation | None, answer: TrialRow | None) -> Html:
    if answer is None:
        return box(paragraph(_nothing(view)), code(data.command(["show", view.row.name])))
    if confirmation is None:
        said_first = _unconfirmed(store, view, answer)
        end = _end(store, view, answer)
    else:
        said_first = paragraph(confirmation.verdict)
        end = _confirmed_end(confirmation)
    first = "To confirm it first" if view.state == "finished" else "To confirm it, once the study is finished"
    return section(
        "Recommendation",
        box(
            said_first,
            paragraph(end),
            element("h3", "To launch it"),
            code(data.command(launch_words(store, view, answer, confirmation))),
            *([] if confirmation else [element("h3", first), code(_confirm(view))]),
        ),
        _differences(view, answer),
    )


def _nothing(view: StudyView) -> str:
    if not view.trials:
        return "No trial has begun yet, so there is nothing to recommend."
    ended = [trial for trial in view.trials if trial.status.is_final]
    if ended and len(ended) == len(view.trials) and all(trial.status is Status.FAILED for trial in ended):
        return "Every trial failed, so there is nothing to recommend; the errors are below."
    return f"No trial is within the KL budget of {view.spec.kl_budget:g} {KL_UNIT}, so there is nothing to recommend."


def _unconfirmed(store: Store, view: StudyView, answer: TrialRow) -> Html:
    kl = results.value_kl(store, answer, view.spec.objective)
    at = "" if kl is None else f" at a KL of {plus_minus(kl.mean, kl.se)} {KL_UNIT}"
    run = "one run of each trial" if view.spec.listed else "one search run"
    sure = "One seed cannot separate luck from merit, and the highest of many evaluations is high partly by luck."
    return together(
        paragraph(
            f"Trial {answer.number} has the highest eval reward within the KL budget: "
            f"{plus_minus(answer.value, answer.value_se)}{at}. {run[0].upper()}{run[1:]} chose it; not confirmed."
        ),
        paragraph(f"{sure} ± is one standard error over the eval prompts.", "soft"),
    )


def _end(store: Store, view: StudyView, answer: TrialRow) -> str:
    """Return whether the configuration itself ends within the KL budget, or only a checkpoint is within it."""
    end = results.end_of(store, answer, view.spec)
    kl = "an unknown KL" if end.kl is None else f"{plus_minus(end.kl.mean, end.kl.se)} {KL_UNIT}"
    if end.is_within is None:
        return f"It was not trained to its end, so where it ends is not known; its KL was last {kl}."
    if end.is_within:
        return f"The configuration itself ends within the KL budget, at {kl}."
    return f"Only a checkpoint is within the KL budget: trained to its end the configuration is at {kl}."


def _confirmed_end(confirmation: Confirmation) -> str:
    launch = confirmation.best
    if launch is None or launch.reward is None or launch.kl is None:
        return ""
    within = f"{launch.ends_within} of {counted(launch.reward.n, 'run')} ended within the KL budget themselves"
    rest = "" if launch.ends_within >= launch.reward.n else "; of the others only a checkpoint is within it"
    whole = "" if confirmation.is_whole else " Some confirming runs have not been evaluated yet."
    return (
        f"On {confirmation.prompts} test prompts and {counted(launch.reward.n, 'fresh seed')} it reaches "
        f"{launch.reward.text} at a KL of {launch.kl.text} {KL_UNIT} (in brackets: 95% intervals over the seeds). "
        f"{within}{rest}. That is confirmed at {confirmation.total_episodes} episodes only.{whole}"
    )


def _confirm(view: StudyView) -> str:
    return data.command(["confirm", view.row.name])


def _differences(view: StudyView, answer: TrialRow) -> Html:
    first = next((trial for trial in view.trials if trial.origin == "reference"), None)
    other = "the reference"
    if first is None and view.trials:
        first, other = view.trials[0], f"trial {view.trials[0].number}"
    if first is None or first.number == answer.number:
        return paragraph(f"Trial {answer.number} is {other}: there is no setting to change.")
    changed = {name: pair for name, pair in results.differences([first, answer]).items() if name != "seed"}
    if not changed:
        return paragraph(f"Trial {answer.number} has the settings of {other}.")
    rows = [
        (HYPERPARAMETERS[name].label, name, short(new, 6), short(old, 6), HYPERPARAMETERS[name].unit)
        for name, (old, new) in changed.items()
    ]
    return table(
        ("setting", "name", f"trial {answer.number}", other, "unit"),
        rows,
        numbers=(f"trial {answer.number}", other),
        title=f"How trial {answer.number} differs from {other}",
    )


# The evidence: confirming runs, charts, every trial.


def _confirmations(found: Sequence[Confirmation]) -> Html:
    parts: list[Html] = []
    for one in found:
        numbers = ("seeds", "reward", f"KL, {KL_UNIT}", "over the reference", "end within budget")
        rows, marked = [], None
        for place, each in enumerate(one.configurations):
            notes = runs_text(each)
            name = f"reference (trial {each.trial.number})" if each.is_reference else each.name
            count = 0 if each.reward is None else each.reward.n
            intervals = (each.reward, each.kl, each.over_reference)
            texts = [NOTHING if interval is None else interval.text for interval in intervals]
            rows.append((f"{name}: {notes}" if notes else name, str(count), *texts, f"{each.ends_within} of {count}"))
            marked = place if one.best is each else marked
        title = f"{one.total_episodes} episodes each, evaluated on {one.prompts} test prompts"
        parts.append(table(("configuration", *numbers), rows, numbers=numbers, marked=marked, title=title))
        parts.append(paragraph(one.verdict))
        if one.baseline is not None and one.baseline.reward is not None:
            reads = plus_minus(one.baseline.reward, one.baseline.reward_se)
            parts.append(paragraph(f"The SFT policy scores {reads} on the same prompts.", "soft"))
    if parts:
        note = "In brackets: 95% intervals over the seeds; those of differences hold for all at once."
        parts.append(paragraph(note, "soft"))
    return section("Confirmed on fresh seeds", *parts)


def _charts(store: Store, view: StudyView, answer: TrialRow | None, page: Page) -> Html:
    evaluated = analysis.evaluations(StepCache(analysis.EVALUATED, evaluations_only=True).read(store, view.trials))
    if evaluated.empty:
        return section("Reward and KL", paragraph("Nothing was evaluated yet."))
    shown = _in_colour(view, answer)
    parts = [
        page.chart(
            _reward_and_kl(view, evaluated, shown, answer),
            "Eval reward against eval KL of every evaluated checkpoint, with the KL budget and the answer",
        ),
        paragraph(
            "Each line is a trial's way from one evaluation to the next; what lies over the KL budget is shaded."
            + _over_the_axis(evaluated, view),
            "soft",
        ),
    ]
    chosen = [row for row in view.trials if row.number in shown]
    steps = StepCache((KL_CURVE, REWARD_CURVE)).read(store, chosen)
    limits = {"KL budget": view.spec.kl_budget, "guard's limit": view.spec.kl_limit}
    for metric, lines in ((KL_CURVE, limits), (REWARD_CURVE, {})):
        if steps[metric].notna().any():
            drawn = _over_episodes(steps, metric, shown, lines, _top(view))
            parts += [element("h3", METRICS[metric].label), page.chart(drawn, f"{METRICS[metric].label} over episodes")]
    if len(chosen) < len(view.trials):
        numbers = ", ".join(map(str, sorted(shown)))
        parts.append(
            paragraph(f"In colour, and as curves: {len(chosen)} of {len(view.trials)} trials ({numbers}).", "soft")
        )
    return section("Reward and KL", *parts)


def _in_colour(view: StudyView, answer: TrialRow | None) -> tuple[int, ...]:
    """Return the trials worth a line: all of a few, else the answer, the default ones and then the best."""
    if len(view.trials) <= LINES:
        return tuple(row.number for row in view.trials)
    ranked = sorted((row for row in view.trials if row.value is not None), key=lambda row: -(row.value or 0.0))
    best = [row.number for row in ranked if row.kl is not None and row.kl <= view.spec.kl_budget]
    first = [] if answer is None else [answer.number]
    return tuple(dict.fromkeys([*first, *Snapshot.of(view).default_trials, *best]))[:LINES]


def _reward_and_kl(
    view: StudyView, evaluated: pd.DataFrame, shown: tuple[int, ...], answer: TrialRow | None
) -> go.Figure:
    best = None
    if answer is not None and answer.value_step is not None:
        best = analysis.checkpoint_of(evaluated, answer.number, answer.value_step)
    elif answer is not None:
        last = evaluated[evaluated["trial"] == answer.number]["step"].max()
        best = None if pd.isna(last) else analysis.checkpoint_of(evaluated, answer.number, int(last))
    before = evaluated.loc[evaluated["step"] == 0, "reward"]
    figure = figures.trajectories(
        evaluated,
        Snapshot.of(view).trials,
        analysis.front(evaluated),
        kl_budget=view.spec.kl_budget,
        kl_limit=view.spec.kl_limit,
        chosen=shown,
        best=best,
        star="recommended checkpoint",  # after a confirmation it need not be the search's best
        baseline=None if before.empty else float(before.mean()),
    )
    right = figure.layout.xaxis.range[1]
    return figure.update_xaxes(range=[-0.02 * min(right, _top(view)), min(right, _top(view))])


def _top(view: StudyView) -> float:
    return SHOWN_LIMITS * view.spec.kl_limit


def _over_the_axis(evaluated: pd.DataFrame, view: StudyView) -> str:
    """Return how many trials go beyond the end of the KL axis; empty: none does."""
    count = evaluated[evaluated["kl"] > _top(view)]["trial"].nunique()
    return f" {counted(count, 'trial')} went beyond the end of the axis at {_top(view):g} nats." if count else ""


def _over_episodes(
    steps: pd.DataFrame, metric: str, shown: tuple[int, ...], limits: dict[str, float], top: float
) -> go.Figure:
    figure = figures.aligned(steps, metric, sorted(shown), limits)
    if limits and float(steps[metric].max()) > top:
        figure.update_yaxes(range=[0, top])
    return figure


def _trials(view: StudyView, answer: TrialRow | None) -> Html:
    numbers = ("trial", "value ± SE", f"KL, {KL_UNIT}", "episodes", "seconds")
    marked = next((p for p, row in enumerate(view.trials) if answer is not None and row.number == answer.number), None)
    rows = [
        (
            str(row.number),
            style.status_cell(row) + (" (audited)" if row.is_audited else ""),
            plus_minus(row.value, row.value_se),
            measured(row.kl),
            str(row.episodes),
            f"{row.seconds:.0f}",
            row.label,
            "" if row.reason is None else row.reason.message,
        )
        for row in view.trials
    ]
    if not rows:
        return Html("")
    return section(
        "Trials",
        table(("trial", "status", *numbers[1:], "label", "reason"), rows, numbers=numbers, marked=marked),
        paragraph("Values are eval rewards; the answer's row is marked." if marked is not None else "", "soft"),
    )


def _why(view: StudyView) -> Html:
    ended = [row for row in view.trials if row.status in (Status.PRUNED, Status.FAILED) and row.reason is not None]
    rules = Counter(row.reason.rule for row in ended if row.reason is not None)
    parts = []
    for rule, count in rules.most_common():
        own = [row for row in ended if row.reason is not None and row.reason.rule == rule]
        label = RULES[rule].label if rule in RULES else rule
        numbers = ", ".join(str(row.number) for row in own[:20]) + (", ..." if count > 20 else "")
        parts += [element("h3", f"{label}: {counted(count, 'trial')} ({numbers})"), _example(own[0])]
    return section("Why the others failed", *parts)


def _example(row: TrialRow) -> Html:
    reason = row.reason
    assert reason is not None
    facts = [
        f"rule {reason.rule}",
        "" if reason.metric is None else f"metric {reason.metric}",
        "" if reason.value is None else f"value {measured(reason.value)}",
        "" if reason.limit is None else f"limit {measured(reason.limit)}",
        "" if reason.step is None else f"step {reason.step}",
    ]
    names = list(dict.fromkeys(name for reading in reason.evidence for name in reading))
    evidence = Html("")
    if names:
        heads = [METRICS[name].label if name in METRICS else name for name in names]
        cells = [[_reading(name, reading.get(name)) for name in names] for reading in reason.evidence]
        evidence = table(heads, cells, numbers=heads, title=f"What the rule measured on trial {row.number}")
    log = fold("The end of its log", code(reason.log)) if reason.log else Html("")
    return together(
        paragraph(f"Trial {row.number}: {reason.message}"),
        paragraph(", ".join(fact for fact in facts if fact), "soft"),
        evidence,
        log,
    )


def _reading(name: str, value: float | None) -> str:
    return f"{value:.0f}" if name in ("step", "episode") and value is not None else measured(value)


def _audited(store: Store, view: StudyView) -> Html:
    found = audit.audit(store, [view])
    if not found.trials:
        return Html("")
    numbers = ("verdicts", "wrong", "share", "at most, 95%")
    rows = [
        (one.by, str(one.verdicts), str(one.wrong), f"{one.wrong / one.verdicts:.0%}", f"{one.at_most:.0%}")
        for one in audit.counts(found.verdicts)
    ]
    what = f"{counted(found.trials, 'audited trial')} kept running whatever a rule said."
    if not rows:
        return section("How often a verdict was wrong", paragraph(f"{what} No rule fired on them."))
    wrong = "Wrong: the trial later reached more than the study's answer would have been without it."
    parts = (table(("by", *numbers), rows, numbers=numbers), paragraph(f"{what} {wrong}", "soft"))
    return section("How often a verdict was wrong", *parts)


# What the answer writes, and how to make all of it again.


def _samples(store: Store, view: StudyView, answer: TrialRow | None) -> Html:
    if answer is None:
        return Html("")
    kept = forks.answer(store, view.row, answer)
    rows = store.samples([answer.id])
    steps = sorted({int(row["step"]) for row in rows})
    if kept is None or not steps:
        return Html("")
    step = max((one for one in steps if one <= kept.step), default=steps[0])
    before = {row["prompt_index"]: row for row in _sft_samples(store, view, rows)}
    parts = []
    for row in [row for row in rows if row["step"] == step][:PROMPTS]:
        first = before.get(row["prompt_index"])
        columns = [_sample("SFT policy", first)] if first is not None and step > 0 else []
        columns.append(_sample(f"Trial {answer.number} at step {step}", row))
        parts += [element("h3", "Prompt"), said(row["prompt"]), element("div", together(*columns), "samples")]
    return section("Samples", *parts)


def _sft_samples(store: Store, view: StudyView, own: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples before training: the trial's own, or of one that has them (a fork may not)."""
    return [row for row in own if row["step"] == 0] or store.samples([row.id for row in view.trials[:1]], 0)


def _sample(title: str, row: dict[str, Any]) -> Html:
    numbers = f"reward {measured(row['reward'])}, KL {measured(row['kl'])} {KL_UNIT}, {counted(row['length'], 'token')}"
    return element("div", together(element("h3", title), said(row["response"]), paragraph(numbers, "soft")))


def _reproduce(view: StudyView, answer: TrialRow | None, confirmation: Confirmation | None) -> Html:
    spec, name = view.spec, view.row.name
    threads = sorted({row.threads for row in view.trials})
    versions = ", ".join(f"{package} {found}" for package in PACKAGES if (found := _version(package)))
    commands = [data.command(["run", f"{name}.toml"]), data.command(["confirm", name])]
    if answer is not None:
        commands.append(data.command(["train", "--from", name, str(answer.number)]))
    many = (
        ""
        if confirmation is None or confirmation.total_episodes == spec.total_episodes
        else (
            f"The confirmed length is {confirmation.total_episodes} episodes: add --total_episodes "
            f"{confirmation.total_episodes} to confirm and train."
        )
    )
    return section(
        "How to reproduce it",
        paragraph(
            f"Seed {spec.seed}, device {spec.device}, "
            + (f"threads of a trial: {', '.join(map(str, threads))}." if threads else "threads: no trial has begun.")
        ),
        paragraph(
            f"This report was written with PPO Tuner {__version__}, Python {sys.version.split()[0]}, {versions}: "
            "the environment that wrote the report. A store does not keep the versions that its trials ran with."
        ),
        code("\n".join(commands)),
        paragraph(many),
        fold(f"The whole study file, {name}.toml", code(study_file(view.row.spec))),
    )


def study_file(spec: dict[str, Any]) -> str:
    """Return a stored study as the TOML that makes it; passwords in URLs are left out, since the report is mailed."""
    return tomli_w.dumps(_stated(spec))


def _stated(value: Any) -> Any:
    """Return a value without passwords, and without what is None: TOML leaves such keys out."""
    if isinstance(value, dict):
        return {key: _stated(item) for key, item in value.items() if item is not None}
    if isinstance(value, str):
        return without_secrets(value)
    return [_stated(item) for item in value] if isinstance(value, list | tuple) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def main(arguments: Sequence[str]) -> int:
    """Write one report, and return the exit status."""
    name, path = arguments
    try:
        with closing(Store.open(data.storage())) as store:
            write(store, name, Path(path))
    except PPOTunerError as error:
        print(f"{PROG}: error: {plain(' '.join(str(error).split()))}", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:
        print(f"{PROG}: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
