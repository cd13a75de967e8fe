"""Tables and short texts on a study, for a terminal (readable at 100 columns) and for a pipe.

Whatever comes from a model, a study file or an error is shown with its control characters escaped,
and never as markup.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, NOTHING, PIPE_WIDTH, counted, measured, parts_text, plain, plus_minus, short
from tuner.control.forks import ValueCheckpoint
from tuner.judge.paired import Difference
from tuner.judge.results import FrontPoint, Measured, Source, StudyView, value_sources
from tuner.judge.rules import RULES
from tuner.judge.scoring import ends_within
from tuner.store import Order, TrialRow
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
SOURCES: Mapping[Source, str] = {
    "searched": "* searched",
    "enqueued": "* enqueued",
    "listed": "* listed",
    "study": "the study",
    "task": "the task's reference",
    "TRL": "TRL's default",
    "default": "default",
}


def params_line(params: Mapping[str, HyperValue]) -> str:
    """Return values on one line."""
    return " ".join(f"{plain(name)}={short(value)}" for name, value in params.items())


def trial_line(trial: TrialRow) -> str:
    """Return one line on a trial: number, status, its best reward within the KL budget, its last reward and KL,
    seconds, reason, label, and its values.
    """
    of = lineage(trial) if trial.role is Role.CONFIRM else params_line(trial.params)
    parts = [
        f"trial {trial.number:>3}",
        f"{trial.status_word:<9}",
        f"best in budget {plus_minus(trial.value, trial.value_se):<13} at KL {measured(trial.kl):>5}",
        f"{trial.seconds:>5.0f} s",
    ]
    if trial.end_reward is not None and trial.end_reward != trial.value:
        parts.append(f"last {_last(trial)}")
    if trial.is_at_rung:
        parts.append(f"screening score {measured(trial.rung_score)}")
    elif trial.reason is not None:
        parts.append(plain(trial.reason.message))
    if trial.label:
        parts.append(plain(trial.label))
    return "  ".join([*parts, of])


def _last(trial: TrialRow) -> str:
    """Return the reward and KL of a trial's last evaluation, whatever the KL budget."""
    return NOTHING if trial.end_kl is None else f"{measured(trial.end_reward)} at KL {measured(trial.end_kl)}"


def study_line(view: StudyView) -> str:
    """Return one line on a study: its task, state, trials and KL budget."""
    return (
        f'Study "{plain(view.row.name)}": task {plain(view.spec.task)}, {view.state}, '
        f"{view.extent.text}, KL budget {short(view.spec.kl_budget)} and limit "
        f"{short(view.spec.kl_limit)} {KL_UNIT}"
    )


def outcome_line(trial: TrialRow, kl: Measured | None) -> str:
    """Return one line on a trial's outcome so far."""
    at = "" if kl is None else f" at a KL of {plus_minus(kl.mean, kl.se)} {KL_UNIT}"
    texts = [trial.status_word, f"best within the KL budget {plus_minus(trial.value, trial.value_se)}{at}"]
    if trial.end_kl is not None:
        texts.append(f"last evaluation {_last(trial)}")
    total = short(trial.config.get("total_episodes"))
    texts += [f"{trial.episodes} of {total} episodes", f"{trial.seconds:.0f} s"]
    if trial.attempts > 1:
        texts.append(f"{trial.attempts} attempts")
    return "Outcome: " + ", ".join(texts)


MOST_WHOLE = 24
"""Longest value that is kept on one line."""


class _Whole(Table):
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
        found = []
        for column in self.columns:
            split = parts if column.justify == "right" else str.split
            whole = [*str(column.header).split(), *(part for cell in column.cells for part in split(str(cell)))]
            found.append(min(max(map(cell_len, whole), default=0), MOST_WHOLE))
        return found


def new_table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """Return an empty table; columns in `right` hold values, kept on one line if they fit."""
    table = _Whole(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def trials_table(trials: Sequence[TrialRow], best: TrialRow | None = None) -> Table:
    """Return the table of trials: value, KL, status and reason. The best one is marked."""
    kl = f"eval KL\n{KL_UNIT}"
    numbers = ("trial", "value ± SE\nreward", kl, "last reward\nand KL", "episodes", "seconds")
    table = new_table("trial", "status", *numbers[1:], "reason", title="Trials", right=numbers)
    for trial in trials:
        mark = "* " if best is not None and trial.number == best.number else ""
        table.add_row(
            f"{mark}{trial.number}",
            _status(trial),
            plus_minus(trial.value, trial.value_se),
            measured(trial.kl),
            NOTHING if trial.end_kl is None else f"{measured(trial.end_reward)}, {measured(trial.end_kl)}",
            str(trial.episodes),
            f"{trial.seconds:.0f}",
            "best" if mark else _why(trial),
        )
    return table


def _why(trial: TrialRow) -> str:
    """Return why a trial ended; of one that the strategy paused its screening score."""
    if trial.is_at_rung:
        return f"screening score {measured(trial.rung_score)}"
    return plain(trial.reason.message) if trial.reason else ""


def _status(trial: TrialRow) -> Text:
    return Text(trial.status_word, style=STYLES[trial.status])


def lineage(trial: TrialRow) -> str:
    """Return where a trial comes from, and what it is called."""
    text = str(trial.origin)
    if trial.role is Role.FORK:
        text = f"forked from trial {trial.parent} at step {trial.fork_step}"
    elif trial.role is Role.CONFIRM:
        text = f"confirms trial {trial.parent} on seed {trial.seed}"
    return f'{text} as "{plain(trial.label)}"' if trial.label else text


def _called(trial: TrialRow) -> str:
    """Return a trial's label; trials that a person added are marked."""
    added = f"fork of {trial.parent}" if trial.role is Role.FORK else _ADDED.get(trial.origin, "")
    return ": ".join(text for text in (added, plain(trial.label)) if text)


_ADDED = {Origin.ENQUEUED: "enqueued"}


def params_tables(trials: Sequence[TrialRow], spec: StudySpec, width: int = READABLE_WIDTH) -> list[Table]:
    """Return the searched or listed values, one row per trial, split into tables that fit the width."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    columns = {_broken(name): [_cell(trial, name) for trial in trials] for name in names}
    called = [_called(trial) for trial in trials]
    labels = {"label": called} if any(called) else {}
    title = "Listed values" if spec.listed else "Searched values"
    tables = []
    for number, chosen in enumerate(_in_widths(columns, width - 8 - _width(labels))):
        head = ("trial", *labels, *chosen)
        table = new_table(*head, title=title if number == 0 else None, right=("trial", *chosen))
        for row, trial in enumerate(trials):
            table.add_row(str(trial.number), *(cells[row] for cells in {**labels, **chosen}.values()))
        tables.append(table)
    return tables


def _cell(trial: TrialRow, name: str) -> str:
    return short(trial.params[name]) if name in trial.params else NOTHING


def _in_widths(columns: Mapping[str, list[str]], width: int) -> list[dict[str, list[str]]]:
    """Return the columns in groups, each at most `width` characters wide where its columns allow it."""
    groups: list[dict[str, list[str]]] = [{}]
    for header, cells in columns.items():
        if groups[-1] and _width(groups[-1]) + _width({header: cells}) > width:
            groups.append({})
        groups[-1][header] = cells
    return groups


def _width(columns: Mapping[str, list[str]]) -> int:
    """Return how many characters the columns take, with their gaps."""
    return sum(2 + max(map(len, [*header.split("\n"), *cells])) for header, cells in columns.items())


def _broken(name: str, width: int = 7) -> str:
    """Break a hyperparameter's name after underscores, for a narrow column."""
    lines = [""]
    for piece in plain(name).replace("_", "_\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def config_table(trial: TrialRow, view: StudyView, title: str) -> Table:
    """Return a trial's configuration but for the declared defaults, with where each value comes from."""
    table = new_table("hyperparameter", "value", "unit", "from", title=title, right=("value",))
    sources = value_sources(trial, view.spec)
    chosen = {name: source for name, source in sources.items() if source != "default"}
    for name, source in chosen.items():
        style = "bold" if source in ("searched", "listed", "enqueued") else "dim" if source == "TRL" else ""
        cells = (name, short(trial.config[name], 6), HYPERPARAMETERS[name].unit, SOURCES[source])
        table.add_row(*cells, style=style)
    table.caption = f"{len(sources) - len(chosen)} others have their defaults; --json prints all."
    table.caption_justify = "left"
    return table


def reference_legend(view: StudyView) -> str | None:
    """Return one paragraph on trial 0: which of its values are TRL's, the task's own, and the study's."""
    trial = next((t for t in view.trials if t.origin == "reference"), None)
    if trial is None:
        return None
    sources = value_sources(trial, view.spec)
    shown = {name: source for name, source in sources.items() if trial.config[name] is not None and name != "seed"}
    groups = {source: [name for name, s in shown.items() if s == source] for source in ("TRL", "task", "study")}
    owners = {
        "TRL": "TRL's values",
        "task": f'the reference of task "{plain(view.spec.task)}"',
        "study": "this study's",
    }
    texts = [
        f"{owners[source]}: " + params_line({name: trial.config[name] for name in names})
        for source, names in groups.items()
        if names
    ]
    return f"Trial {trial.number} is the reference. " + "; ".join(texts) + "; all else: defaults."


def comparison_tables(
    view: StudyView, trials: Sequence[TrialRow], differing: Mapping[str, Sequence[HyperValue]]
) -> list[Table]:
    """Return the trials' outcomes and their differing values, one column per trial."""
    numbers = [f"trial {trial.number}" for trial in trials]
    outcomes = new_table("outcome", *numbers, title="Outcomes", right=numbers)
    if any(_called(trial) for trial in trials):
        outcomes.add_row("label", *(_called(trial) for trial in trials))
    outcomes.add_row("status", *(_status(trial) for trial in trials))
    outcomes.add_row("best within the KL budget ± SE (reward)", *(plus_minus(t.value, t.value_se) for t in trials))
    outcomes.add_row(f"KL there ({KL_UNIT})", *(measured(t.kl) for t in trials))
    outcomes.add_row("last eval reward", *(measured(t.end_reward) for t in trials))
    outcomes.add_row(f"its KL ({KL_UNIT})", *(measured(t.end_kl) for t in trials))
    outcomes.add_row(
        f"ends within {short(view.spec.kl_budget)} {KL_UNIT}",
        *({None: NOTHING, True: "yes", False: "no"}[ends_within(t, view.spec)] for t in trials),
    )
    outcomes.add_row("episodes", *(str(t.episodes) for t in trials))
    outcomes.add_row("seconds", *(f"{t.seconds:.0f}" for t in trials))
    outcomes.add_row("reason", *(plain(t.reason.message) if t.reason else "" for t in trials))
    values = new_table("hyperparameter", *numbers, title="Differing values", right=numbers)
    for name, row in differing.items():
        values.add_row(name, *(short(value, 6) for value in row))
    return [outcomes, values]


def difference_line(base: TrialRow, other: TrialRow, found: Difference | None) -> str:
    """Return one line on the value of `other` less that of `base`."""
    names = f"Trial {other.number} minus trial {base.number}"
    if found is None:
        return f"{names}: one of them has no value."
    return f"{names}: {plus_minus(found.mean, found.se)} reward, {found.verdict}."


def studies_table(views: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of `list` from its JSON objects."""
    headers = ("trials\nended", "best\ntrial", "best value\nreward", f"its KL\n{KL_UNIT}")
    table = new_table("study", "task", "state", *headers, right=headers)
    for view in views:
        best = NOTHING if view["best"] is None else str(view["best"])
        numbers = (
            _ended(view),
            best,
            measured(view["best_value"]),
            measured(view["best_kl"]),
        )
        table.add_row(
            plain(view["name"]),
            plain(view["task"]),
            view["state"],
            *numbers,
        )
    return table


def _ended(view: Mapping[str, Any]) -> str:
    ended, total = view["finished"], view["trials"]
    if total is None:
        return f"{ended}"
    return f"{ended}/{total}" if ended <= total else f"{ended} ({total} asked)"


def orders_table(orders: Sequence[Order], placed: int) -> Table:
    """Return the table of a study's orders: of those placed all, or the latest."""
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


def answer_line(answer: ValueCheckpoint) -> str:
    """Return one line on the checkpoint that stands for a trial's value: where it is, or why it is not kept."""
    at = f"of step {answer.step}, episode {answer.episode}"
    if answer.kept.path is not None:
        return f"Checkpoint {at}: {_place(answer.kept.path)}"
    return f"Checkpoint {at}: not kept here ({answer.kept.why_not})."


def front_table(points: Sequence[FrontPoint]) -> Table:
    """Return the table of checkpoints kept because they are best under some KL budget."""
    columns = (f"budgets from\n{KL_UNIT}", "eval reward", f"eval KL\n{KL_UNIT}", "trial", "step")
    table = new_table(*columns, "checkpoint", title="Kept for other KL budgets", right=columns)
    for point in points:
        reward, kl = (plus_minus(estimate.mean, estimate.se) for estimate in (point.reward, point.kl))
        table.add_row(measured(point.budget), reward, kl, str(point.trial), str(point.step), _place(point.path))
    return table


def checkpoint_lines(kept: Mapping[int, Path]) -> list[str]:
    """Return a heading and one line per checkpoint, by episode; nothing where none is kept."""
    lines = [f"  episode {episode}: {_place(path)}" for episode, path in kept.items()]
    return ["Checkpoints kept:", *lines] if lines else []


def _place(path: Path) -> str:
    """Return a path as short as possible for copying."""
    here = Path.cwd()
    return plain(str(path.relative_to(here) if path.is_relative_to(here) else path))


# One trial in detail

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
    for row in _thinned(rows):
        evaluated = (
            plus_minus(row["eval/reward"], row["eval/reward_se"]),
            plus_minus(row["eval/kl"], row["eval/kl_se"]),
        )
        cells = (measured(row[name]) for name, _ in _CURVE)
        table.add_row(str(row["step"]), str(row["episode"]), *evaluated, *cells)
    return table


def _thinned(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the evaluated rows, the last one, and evenly spaced others while there are fewer than CURVE_ROWS."""
    kept = {i for i, row in enumerate(rows) if row["eval/reward"] is not None} | {len(rows) - 1}
    spare = max(0, CURVE_ROWS - len(kept))
    kept |= {round(k * (len(rows) - 1) / (spare + 1)) for k in range(1, spare + 1)}
    return [row for i, row in enumerate(rows) if i in kept]


def evidence_table(reason: Reason) -> Table | None:
    """Return the last steps' readings that made a rule stop the trial, or None where none were kept."""
    read_first = [name for name in ("step", "episode", reason.metric) if name is not None]
    names = list(dict.fromkeys([*read_first, *(name for reading in reason.evidence for name in reading)]))
    if not reason.evidence:
        return None
    headers = [METRICS[name].label if name in METRICS else plain(name) for name in names]
    table = new_table(*headers, title="Evidence", right=headers)
    for reading in reason.evidence:
        table.add_row(*(_reading(name, reading.get(name)) for name in names))
    return table


def _reading(name: str, value: float | None) -> str:
    is_count = name in ("step", "episode") and value is not None
    return f"{value:.0f}" if is_count else measured(value)


def sample_lines(rows: Sequence[Mapping[str, Any]], most: int = 3) -> list[Text]:
    """Return the last evaluation's first samples: prompt, response, reward with its parts, and KL."""
    last = max((row["step"] for row in rows), default=None)
    chosen = [row for row in rows if row["step"] == last][:most]
    lines = [Text(f"Samples at step {last}", style="bold")] if chosen else []
    for row in chosen:
        reward = f"reward {plus_minus(row['reward'])}{parts_text(row['parts'])}"
        numbers = ", ".join((reward, f"KL {plus_minus(row['kl'])} {KL_UNIT}", f"{counted(row['length'], 'token')}"))
        lines.append(Text(f"[{row['prompt_index']}] {numbers}", style="dim"))
        lines.append(Text(f"    {plain(row['prompt'])} |") + Text(f" {plain(row['response']).strip()}", style="cyan"))
    return lines


def prunings_line(by_rule: Mapping[str, Sequence[int]], trials: int) -> str:
    """Return how many of the trials were pruned for their KL, and by which rule."""
    count = sum(len(numbers) for numbers in by_rule.values())
    rules = "; ".join(f"{RULES[rule].label} ({rule}): {_ranges(numbers)}" for rule, numbers in by_rule.items())
    were = "was" if count == 1 else "were"
    return f"{count} of {counted(trials, 'trial')} {were} pruned by the guard for KL blow-up. {rules}."


def _ranges(numbers: Sequence[int]) -> str:
    """Return `trial 3` or `trials 2-4, 7`."""
    runs = [list(run) for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    texts = [str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs]
    return f"trial{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
