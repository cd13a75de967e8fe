"""Tables and short texts on a study, for a terminal (readable at 100 columns) and for a pipe.

Text from a model, a study file or an error is shown with its control characters escaped, and never as markup.
"""

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ppo_core import output
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, inert
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, NOTHING, decimals, fixed, measured, nats, plain, pluralize, plus_minus, short
from tuner.confirm.headline import Headline
from tuner.confirm.intervals import Interval
from tuner.environment import shortened
from tuner.judge.paired import Difference
from tuner.judge.results import FrontPoint, Source, StudyView, value_sources
from tuner.judge.scoring import ends_within
from tuner.store import Order, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Role, Status

VALUES_A_TABLE = 8  # hyperparameters in a table for a terminal: about a hundred columns wide
CURVE_ROWS = 12
STYLES = {status: "cyan" for status in Status if not status.is_final} | {
    Status.COMPLETED: "green", Status.PRUNED: "yellow", Status.FAILED: "red", Status.STOPPED: "magenta"
}  # fmt: skip
SOURCES: Mapping[Source, tuple[str, str]] = {
    "searched": ("* searched", "bold"),
    "enqueued": ("* enqueued", "bold"),
    "listed": ("* listed", "bold"),
    "forked": ("* the fork", "bold"),
    "study": ("the study", ""),
    "task": ("the task's reference", ""),
    "TRL": ("TRL's default", "dim"),
    "default": ("default", ""),
}
"""Text and style of each source of a value."""


def trial_line(headline: Headline) -> str:
    """Return one line on a trial: number, status, reward and KL, seconds, reason, label, and its values."""
    trial = headline.trial
    numbers = (f"trial {trial.number:>3}", f"{trial.shown_status:<9}", _number(headline), f"{trial.seconds:>5.0f} s")
    values = lineage(trial) if trial.role is Role.CONFIRM else output.params_line(trial.params)
    return "  ".join(filter(None, (*numbers, _reason(trial), _marked_label(trial), values)))


def _number(headline: Headline) -> str:
    """`best in budget, one seed 1.823 ± 0.051 at KL  5.02`."""
    if headline.reward is None:
        return headline.label
    return f"{headline.label} {headline.text():<13} at KL {headline.kl_text():>5}"


def _places_of(numbers: Sequence[Headline]) -> tuple[int, int]:
    rewards = decimals([each.reward for each in numbers], [each.trial.value_se for each in numbers])
    return rewards, decimals(kl for each in numbers for kl in (each.kl, each.trial.end_kl))


def study_line(view: StudyView) -> str:
    """Return one line on a study: its task, state, trials and KL budget."""
    kl = f"KL budget {short(view.spec.kl_budget)} and limit {nats(view.spec.kl_limit)}"
    return f'Study "{plain(view.row.name)}": task {plain(view.spec.task)}, {view.state}, {view.tally.text}, {kl}'


def outcome_line(headline: Headline) -> str:
    trial = headline.trial
    total = short(trial.config.get("total_episodes"))
    parts = (
        trial.shown_status,
        _number(headline),
        "" if trial.end_kl is None else f"KL at its end {measured(trial.end_kl)}",
        f"{trial.episodes} of {total} episodes",
        f"{trial.seconds:.0f} s",
        f"{trial.attempts} attempts" if trial.attempts > 1 else "",
    )
    return "Outcome: " + ", ".join(filter(None, parts))


def new_table(*columns: str, title: str | None = None, caption: str | None = None, right: Sequence[str] = ()) -> Table:
    """Return an empty table; columns in `right` hold values."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = caption, "left"
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def trials_table(numbers: Sequence[Headline], marks: Mapping[int, str]) -> Table:
    """Return the table of trials: reward, KL, status and reason; `marks` by number replaces the reason."""
    columns = ("reward", f"KL\n{KL_UNIT}", "KL at\nits end", "episodes", "seconds")
    table = new_table("trial", "status", *columns, "reason", title="Trials", right=("trial", *columns))
    reward, kl = _places_of(numbers)
    for each in numbers:
        trial = each.trial
        table.add_row(
            f"* {trial.number}" if trial.number in marks else str(trial.number),
            _status(trial),
            each.text(reward),
            each.kl_text(kl),
            fixed(trial.end_kl, kl),
            str(trial.episodes),
            f"{trial.seconds:.0f}",
            marks.get(trial.number) or _reason(trial),
        )
    table.caption = f"Reward and KL: {' or '.join(dict.fromkeys(each.label for each in numbers))}."
    return table


def _reason(trial: TrialRow) -> str:
    return plain(trial.reason.message) if trial.reason else ""


def _status(trial: TrialRow) -> Text:
    return Text(trial.shown_status, style=STYLES[trial.status])


def lineage(trial: TrialRow) -> str:
    """Return a trial's origin and its label."""
    text = str(trial.origin)
    if trial.role is Role.FORK:
        text = f"forked from trial {trial.parent} at step {trial.fork_step}"
    elif trial.role is Role.CONFIRM:
        text = f"confirms trial {trial.parent} on seed {trial.seed}"
    return f'{text} as "{plain(trial.label)}"' if trial.label else text


def _marked_label(trial: TrialRow) -> str:
    """Return a trial's label; the baseline and trials that a person added are marked."""
    added = f"fork of {trial.parent}" if trial.role is Role.FORK else ""
    if trial.origin in (Origin.ENQUEUED, Origin.BASELINE):
        added = str(trial.origin)
    return ": ".join(filter(None, (added, plain(trial.label))))


def params_tables(trials: Sequence[TrialRow], spec: StudySpec, *, in_pipe: bool = False) -> list[Table]:
    """Return the searched or listed values, one row per trial; for a terminal several tables, of narrow columns."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    labels = [_marked_label(trial) for trial in trials]
    called = ["label"] if any(labels) else []
    most = len(names) if in_pipe else VALUES_A_TABLE
    tables = []
    for first in range(0, len(names), most or 1):
        group = names[first : first + most]
        title = None if first else "Listed values" if spec.listed else "Searched values"
        broken = (textwrap.wrap(name.replace("_", "_ "), 8, break_long_words=False) for name in group)
        headers = group if in_pipe else ["\n".join(lines).replace("_ ", "_") for lines in broken]
        table = new_table("trial", *called, *headers, title=title, right=("trial", *headers))
        for trial, label in zip(trials, labels, strict=True):
            cells = (short(trial.params[name]) if name in trial.params else NOTHING for name in group)
            table.add_row(str(trial.number), *([label] if called else []), *cells)
        tables.append(table)
    return tables


def config_table(trial: TrialRow, view: StudyView, title: str) -> Table:
    """Return the table of a trial's configuration, without declared defaults, and the source of each value."""
    table = new_table("hyperparameter", "value", "unit", "from", title=title, right=("value",))
    sources = value_sources(trial, view.spec, view.trials)
    for name, source in sources.items():
        if source != "default":
            text, style = SOURCES[source]
            no_effect = inert(name, trial.config) if name == "learning_rate" or name.startswith("kl_") else None
            text = text if no_effect is None else f"no effect: {no_effect}"
            table.add_row(name, short(trial.config[name], 6), HYPERPARAMETERS[name].unit, text, style=style)
    table.caption = f"{len(sources) - table.row_count} others have their defaults; --json prints all."
    return table


def comparison_tables(
    view: StudyView, numbers: Mapping[int, Headline], differing: Mapping[str, Sequence[HyperValue]]
) -> list[Table]:
    """Return the trials' outcomes and their differing values, one column per trial."""
    names = [f"trial {number}" for number in numbers]
    outcomes = new_table("outcome", *names, title="Outcomes", right=names)
    within = {None: NOTHING, True: "yes", False: "no"}
    reward, kl = _places_of(list(numbers.values()))
    rows: Mapping[str, Callable[[TrialRow], str | Text]] = {
        "label": _marked_label,
        "status": _status,
        "reward": lambda trial: numbers[trial.number].text(reward),
        "measured as": lambda trial: numbers[trial.number].label,
        f"KL ({KL_UNIT})": lambda trial: numbers[trial.number].kl_text(kl),
        f"KL at its end ({KL_UNIT})": lambda trial: fixed(trial.end_kl, kl),
        f"ends within {nats(view.spec.kl_budget)}": lambda trial: within[ends_within(trial, view.spec)],
        "episodes": lambda trial: str(trial.episodes),
        "seconds": lambda trial: f"{trial.seconds:.0f}",
        "reason": _reason,
    }
    for name, text in rows.items():
        cells = [text(each.trial) for each in numbers.values()]
        if any(cells):
            outcomes.add_row(name, *cells)
    values = new_table("hyperparameter", *names, title="Differing values", right=names)
    for name, row in differing.items():
        values.add_row(name, *(short(value, 6) for value in row))
    return [outcomes, values]


def difference_line(base: TrialRow, other: TrialRow, difference: Difference | None, lead: Interval | None) -> str:
    """Return one line on the reward of `other` less that of `base`: on fresh seeds if known, which is `lead`."""
    names = f"Trial {other.number} minus trial {base.number}"
    if lead is not None:
        return f"{names}: {lead.signed} reward on {pluralize(lead.n, 'fresh seed')}."
    if difference is None:
        return f"{names}: one of them has no trained checkpoint within the KL budget."
    reward = plus_minus(difference.mean, difference.se, signed=True)
    return f"{names}: {reward} reward, {difference.verdict} ({difference.evidence})."


def studies_table(views: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of `list` from its JSON objects."""
    headers = ("trials\nended", "its\ntrial", "reward", f"KL\n{KL_UNIT}")
    table = new_table("study", "task", "state", *headers, "measured as", right=headers)
    for view in views:
        ended, total = view["finished"], view["trials"]
        count = str(ended)
        if total is not None:
            count = f"{ended}/{total}" if ended <= total else f"{ended} ({total} asked)"
        answer = NOTHING if view["answer"] is None else str(view["answer"])
        reward = fixed(view["reward"], decimals([view["reward"]], [view["best_value_se"]]))  # in its own task's unit
        cells = (count, answer, reward, measured(view["kl"]), view["reward_is"] or NOTHING)
        table.add_row(plain(view["name"]), plain(view["task"]), view["state"], *cells)
    return table


def orders_table(orders: Sequence[Order]) -> Table:
    table = new_table("order", "placed", "asks", "state", "outcome", title="Orders", right=("order",))
    for order in orders:
        about = order.kind if order.trial is None else f"{order.kind} trial {order.trial}"
        pairs = (
            value.items() if isinstance(value, Mapping) else [(name, value)] for name, value in order.arguments.items()
        )
        asked = ", ".join(f"{name}={short(value)}" for name, value in chain.from_iterable(pairs))
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(order.placed_at))
        table.add_row(str(order.id), when, f"{about} {plain(asked)}".strip(), order.state, plain(order.outcome or ""))
    return table


def front_table(points: Sequence[FrontPoint]) -> Table:
    """Return the table of checkpoints kept because they are best under some KL budget."""
    columns = (f"budgets from\n{KL_UNIT}", "eval reward", f"eval KL\n{KL_UNIT}", "trial", "step")
    table = new_table(*columns, "checkpoint", title="Kept for other KL budgets", right=columns)
    both = [[point.reward for point in points], [point.kl for point in points]]
    places = [decimals([one.mean for one in each], [one.se for one in each]) for each in both]
    for point, *estimates in zip(points, *both, strict=True):
        reward, kl = (plus_minus(one.mean, one.se, each) for one, each in zip(estimates, places, strict=True))
        budget = fixed(point.budget, places[1])
        table.add_row(budget, reward, kl, str(point.trial), str(point.step), shown_path(point.path))
    return table


def shown_path(path: Path) -> str:
    """Return a path as short as possible for copying."""
    return plain(str(shortened(path)))


_CURVE = (
    ("objective/scores", "score\nreward"),
    ("objective/kl_exact", "KL\nnats/resp."),
    ("objective/kl_coef", "β"),
    ("policy/clipfrac_avg", "clip\nfraction"),
    ("response/length_mean", "length\ntokens"),
)
CURVE_METRICS = ("eval/reward", "eval/reward_se", "eval/kl", "eval/kl_se", *(name for name, _ in _CURVE))
"""Columns that `curve_table` needs."""


def curve_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the trial's curve: its evaluated steps, and others in between up to about a dozen rows."""
    headers = ("step", "episode", "eval reward\n± SE", f"eval KL ± SE\n{KL_UNIT}", *(header for _, header in _CURVE))
    table = new_table(*headers, title="Curve", caption="Step 0 is the SFT policy.", right=headers)
    shown = _thinned(rows)
    errors = {name: [row[f"{name}_se"] for row in shown] for name in ("eval/reward", "eval/kl")}
    errors_of = errors | {"objective/scores": errors["eval/reward"]}  # of the same unit, and of a mean as well
    places = {
        name: decimals([row[name] for row in shown], errors_of.get(name, ())) for name in (*errors, *dict(_CURVE))
    }
    for row in shown:
        evaluated = (plus_minus(row[name], row[f"{name}_se"], places[name]) for name in errors)
        cells = (fixed(row[name], places[name]) for name, _ in _CURVE)
        table.add_row(str(row["step"]), str(row["episode"]), *evaluated, *cells)
    return table


def _thinned(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the evaluated rows, the last one, and evenly spaced others while there are fewer than CURVE_ROWS."""
    kept = {i for i, row in enumerate(rows) if row["eval/reward"] is not None} | {len(rows) - 1}
    spare = max(0, CURVE_ROWS - len(kept))
    kept |= {round(k * (len(rows) - 1) / (spare + 1)) for k in range(1, spare + 1)}
    return [row for i, row in enumerate(rows) if i in kept]


def evidence_table(reason: Reason) -> Table | None:
    """Return the last steps' readings that made a rule stop the trial, or None if none were kept."""
    if not reason.evidence:
        return None
    watched = [] if reason.metric is None else [reason.metric]
    names = list(dict.fromkeys(["step", "episode", *watched, *chain(*reason.evidence)]))
    headers = [METRICS[name].label if name in METRICS else plain(name) for name in names]
    table = new_table(*headers, title="Evidence", right=headers)
    for reading in reason.evidence:
        counts = (f"{reading['step']:.0f}", f"{reading['episode']:.0f}")
        table.add_row(*counts, *(measured(reading.get(name)) for name in names[2:]))
    return table


def sample_lines(rows: Sequence[Mapping[str, Any]], value_step: int | None, most: int = 3) -> list[Text]:
    """Return the first samples of the evaluation that the trial's value comes from: prompt, response, reward with its
    parts, and KL. They are of the nearest one that has any, or of the last where there is no value.
    """
    if not rows:
        return []
    steps = sorted({row["step"] for row in rows})
    step = steps[-1] if value_step is None else min(steps, key=lambda each: abs(each - value_step))
    why = "the last one" if value_step is None else "that of the trial's best checkpoint"
    if value_step not in (None, step):
        why = f"the stored step nearest to the trial's best checkpoint, {value_step}"
    lines = [Text(f"Samples at step {step}, {why}", style="bold")]
    shown = [row for row in rows if row["step"] == step][:most]
    rewards = output.reward_texts([row["reward"] for row in shown], [row["parts"] for row in shown])
    for row, reward in zip(shown, rewards, strict=True):
        numbers = f"reward {reward}, KL {measured(row['kl'])} {KL_UNIT}, {pluralize(row['length'], 'token')}"
        lines.append(Text(f"[{row['prompt_index']}] {numbers}", style="dim"))
        lines.append(Text(f"    {plain(row['prompt'])} |") + Text(f" {plain(row['response']).strip()}", style="cyan"))
    return lines
