"""Tables and short texts on a study, for a terminal (readable at 100 columns) and for a pipe.

Text from a model, a study file or an error is shown with its control characters escaped, and never as markup.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, inert
from ppo_core.metrics import METRICS
from ppo_core.output import (
    KL_UNIT,
    NOTHING,
    PIPE_WIDTH,
    decimals,
    fixed,
    measured,
    nats,
    params_line,
    plain,
    pluralize,
    plus_minus,
    reward_texts,
    short,
)
from tuner.confirm.headline import Headline
from tuner.confirm.result import Interval
from tuner.environment import shortened
from tuner.judge.forks import ValueCheckpoint
from tuner.judge.paired import Difference
from tuner.judge.results import FrontPoint, Measured, Source, StudyView, value_sources
from tuner.judge.scoring import ends_within
from tuner.store import Order, TrialRow
from tuner.study.rules import RULES
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Role, Status

READABLE_WIDTH = 100
CURVE_ROWS = 12
STYLES = {
    Status.WAITING: "cyan",
    Status.RUNNING: "cyan",
    Status.PAUSED: "cyan",
    Status.COMPLETED: "green",
    Status.PRUNED: "yellow",
    Status.FAILED: "red",
    Status.STOPPED: "magenta",
}
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
    parts = (
        f"trial {trial.number:>3}",
        f"{trial.shown_status:<9}",
        _number(headline),
        f"{trial.seconds:>5.0f} s",
        _reason(trial),
        _marked_label(trial),
        lineage(trial) if trial.role is Role.CONFIRM else params_line(trial.params),
    )
    return "  ".join(filter(None, parts))


def _number(headline: Headline) -> str:
    """`best in budget, one seed 1.823 ± 0.051 at KL  5.02`."""
    if headline.reward is None:
        return headline.label
    return f"{headline.label} {headline.text():<13} at KL {headline.kl_text():>5}"


def _places_of(numbers: Sequence[Headline]) -> tuple[int, int]:
    """Return the decimals of these trials' rewards and of their KLs."""
    rewards = decimals([each.reward for each in numbers], [each.trial.value_se for each in numbers])
    return rewards, decimals(kl for each in numbers for kl in (each.kl, each.trial.end_kl))


def at_kl(kl: Measured | None) -> str:
    """Return ` at a KL of 1.94 ± 0.08 nats/response`; empty if it is unknown."""
    return "" if kl is None else f" at a KL of {plus_minus(kl.mean, kl.se)} {KL_UNIT}"


def study_line(view: StudyView) -> str:
    """Return one line on a study: its task, state, trials and KL budget."""
    return (
        f'Study "{plain(view.row.name)}": task {plain(view.spec.task)}, {view.state}, '
        f"{view.tally.text}, KL budget {short(view.spec.kl_budget)} and limit "
        f"{nats(view.spec.kl_limit)}"
    )


def outcome_line(headline: Headline) -> str:
    """Return one line on a trial's outcome so far."""
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


MOST_UNBROKEN = 24
"""Longest value that is kept on one line."""


class _UnbrokenTable(Table):
    """A table that avoids breaking values and words; into a pipe it breaks nothing."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= PIPE_WIDTH:
            return Table.__rich_console__(self._unbroken(), console, options)
        count = len(self.columns)
        for narrowest in (self._narrowest(str.splitlines), self._narrowest(str.split), [0] * count):
            if sum(narrowest) + 2 * count + 1 <= options.max_width:  # plus a gap of two per column
                break
        for column, width in zip(self.columns, narrowest, strict=True):
            column.min_width = width
        return super().__rich_console__(console, options)

    def _unbroken(self) -> Table:
        """Return the table with its title, its caption, each header and each cell on one line."""
        table = copy(self)
        table.title, table.caption = (
            text and Text(str(text), no_wrap=True, overflow="ignore") for text in (self.title, self.caption)
        )
        table.columns = [
            replace(
                column,
                header=str(column.header).replace("_\n", "_").replace("\n", " "),
                _cells=[cell.replace("\n", ", ") if isinstance(cell, str) else cell for cell in column.cells],
            )
            for column in self.columns
        ]
        return table

    def _narrowest(self, parts: Callable[[str], list[str]]) -> list[int]:
        """Return each column's narrowest width without breaking a word, or in columns of values one of these parts."""
        widths = []
        for column in self.columns:
            split = parts if column.justify == "right" else str.split
            unbroken = [*str(column.header).split(), *(part for cell in column.cells for part in split(str(cell)))]
            widths.append(min(max(map(cell_len, unbroken), default=0), MOST_UNBROKEN))
        return widths


def new_table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """Return an empty table; columns in `right` hold values, kept on one line if they fit."""
    table = _UnbrokenTable(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
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
    table.caption_justify = "left"
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


def params_tables(trials: Sequence[TrialRow], spec: StudySpec, width: int = READABLE_WIDTH) -> list[Table]:
    """Return the searched or listed values, one row per trial, split into tables that fit the width."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    columns = {
        _broken(name): [short(trial.params[name]) if name in trial.params else NOTHING for trial in trials]
        for name in names
    }
    called = [_marked_label(trial) for trial in trials]
    labels = {"label": called} if any(called) else {}
    title: str | None = "Listed values" if spec.listed else "Searched values"
    tables = []
    for group in _in_widths(columns, width - 8 - _width(labels)):
        table = new_table("trial", *labels, *group, title=title, right=("trial", *group))
        for trial, *cells in zip(trials, *labels.values(), *group.values(), strict=True):
            table.add_row(str(trial.number), *cells)
        tables.append(table)
        title = None
    return tables


def _in_widths(columns: Mapping[str, list[str]], width: int) -> list[dict[str, list[str]]]:
    """Return the columns in groups, each at most `width` characters wide if its columns allow it."""
    groups: list[dict[str, list[str]]] = [{}]
    for header, cells in columns.items():
        if groups[-1] and _width(groups[-1]) + _width({header: cells}) > width:
            groups.append({})
        groups[-1][header] = cells
    return groups


def _width(columns: Mapping[str, list[str]]) -> int:
    """Return the number of characters that the columns take, with their gaps."""
    return sum(2 + max(map(len, [*header.split("\n"), *cells])) for header, cells in columns.items())


def _broken(name: str) -> str:
    """Break a hyperparameter's name after underscores, for a narrow column."""
    lines = [""]
    for piece in plain(name).replace("_", "_\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(piece) > 7:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


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
    table.caption_justify = "left"
    return table


def reference_legend(view: StudyView) -> str | None:
    """Return one paragraph on trial 0: which of its values are TRL's, the task's own, and the study's."""
    trial = next((t for t in view.trials if t.origin is Origin.REFERENCE), None)
    if trial is None:
        return None
    sources = value_sources(trial, view.spec)
    owners = {
        "TRL": "TRL's values",
        "task": f'the reference of task "{plain(view.spec.task)}"',
        "study": "this study's",
    }
    texts = []
    for source, owner in owners.items():
        names = [name for name, value in trial.config.items() if value is not None and name != "seed"]
        values = {name: trial.config[name] for name in names if sources.get(name) == source}
        if values:
            texts.append(f"{owner}: {params_line(values)}")
    return f"Trial {trial.number} is the reference. " + "; ".join(texts) + "; all else: defaults."


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
        "which is": lambda trial: numbers[trial.number].label,
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
    table = new_table("study", "task", "state", *headers, "which is", right=headers)
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


def orders_table(orders: Sequence[Order], placed: int) -> Table:
    """Return the table of a study's orders: all that were placed, or the latest."""
    title = "Orders" if len(orders) == placed else f"Latest {len(orders)} of {placed} orders (--all lists them all)"
    table = new_table("order", "placed", "asks", "state", "outcome", title=title, right=("order",))
    for order in orders:
        about = order.kind if order.trial is None else f"{order.kind} trial {order.trial}"
        asked = ", ".join(f"{name}={short(value)}" for name, value in _asked(order).items())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(order.placed_at))
        table.add_row(str(order.id), when, f"{about} {plain(asked)}".strip(), order.state, plain(order.outcome or ""))
    return table


def _asked(order: Order) -> dict[str, Any]:
    """Return an order's arguments without their grouping."""
    flat: dict[str, Any] = {}
    for name, value in order.arguments.items():
        flat |= value if isinstance(value, Mapping) else {name: value}
    return flat


def checkpoint_line(checkpoint: ValueCheckpoint) -> str:
    """Return one line on the checkpoint of a trial's value: its place, or why it is not kept."""
    kept = checkpoint.kept
    where = f"not kept here ({kept.why_not})." if kept.path is None else place(kept.path)
    return f"Checkpoint of step {checkpoint.step}, episode {checkpoint.episode}: {where}"


def front_table(points: Sequence[FrontPoint]) -> Table:
    """Return the table of checkpoints kept because they are best under some KL budget."""
    columns = (f"budgets from\n{KL_UNIT}", "eval reward", f"eval KL\n{KL_UNIT}", "trial", "step")
    table = new_table(*columns, "checkpoint", title="Kept for other KL budgets", right=columns)
    both = [[point.reward for point in points], [point.kl for point in points]]
    places = [decimals([one.mean for one in each], [one.se for one in each]) for each in both]
    for point, *estimates in zip(points, *both, strict=True):
        reward, kl = (plus_minus(one.mean, one.se, each) for one, each in zip(estimates, places, strict=True))
        budget = fixed(point.budget, places[1])
        table.add_row(budget, reward, kl, str(point.trial), str(point.step), place(point.path))
    return table


def place(path: Path) -> str:
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
    table = new_table(*headers, title="Curve", right=headers)
    table.caption, table.caption_justify = "Step 0 is the SFT policy.", "left"
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
    why = "the last" if value_step is None else "that of its value"
    if value_step not in (None, step):
        why = f"the nearest stored to that of its value, {value_step}"
    lines = [Text(f"Samples at step {step}, {why}", style="bold")]
    shown = [row for row in rows if row["step"] == step][:most]
    rewards = reward_texts([row["reward"] for row in shown], [row["parts"] for row in shown])
    for row, reward in zip(shown, rewards, strict=True):
        numbers = f"reward {reward}, KL {measured(row['kl'])} {KL_UNIT}, {pluralize(row['length'], 'token')}"
        lines.append(Text(f"[{row['prompt_index']}] {numbers}", style="dim"))
        lines.append(Text(f"    {plain(row['prompt'])} |") + Text(f" {plain(row['response']).strip()}", style="cyan"))
    return lines


def prunings_line(by_rule: Mapping[str, Sequence[int]], trials: int) -> str:
    """Return the number of trials that were pruned for their KL, by rule."""
    count = sum(len(numbers) for numbers in by_rule.values())
    rules = "; ".join(
        f"{RULES[rule].label} ({rule}): trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        for rule, numbers in by_rule.items()
    )
    were = "was" if count == 1 else "were"
    return f"{count} of {pluralize(trials, 'trial')} {were} pruned by the guard for KL blow-up. {rules}."
