"""Write docs/reference.md from the declarations.

    .venv/bin/python docs/reference.py

It has every command, hyperparameter, study key, metric, guard rule, trial status and JSON shape. A test fails where the
file is not what this writes.
"""

import argparse
import inspect
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ppo_tuner as pt
from docs.shapes import EXPORTED, OBJECTS, PRINTED, all_fields, docs_below, first_line
from ppo_core.cli import trl
from ppo_core.config.declare import Hyperparameter
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.data.prompts import PromptSource
from ppo_core.data.task import RewardPart
from ppo_core.metrics import METRICS
from ppo_core.output import short
from tuner.cli import estimate
from tuner.cli.main import COMMANDS, GROUPS, build_parser
from tuner.environment import PROG
from tuner.exchange.export_folder import TABLES
from tuner.search import optuna_trials
from tuner.store.rows import INTERRUPTED
from tuner.study import study_file
from tuner.study.rules import RULES, SIGNS, GuardSettings
from tuner.study.status import Origin, Role, Status
from tuner.study.study_file import BETAS, KL_STEP_SPAN, KL_TARGETS, PRUNERS, SAMPLERS
from tuner.study.worker_settings import WORKER_SETTINGS

FILE = Path(__file__).with_name("reference.md")


def text() -> str:
    """Return the whole reference."""
    parts = [
        "# Reference",
        "Written from the declarations by `python docs/reference.py`: change those, not this file.",
        *_commands(),
        *_hyperparameters(),
        *_study_keys(),
        *_task_keys(),
        *_rules(),
        *_workers(),
        *_metrics(),
        *_states(),
        *_json(),
        *_tables(),
        *_trl(),
        *_python(),
    ]
    return "\n\n".join(parts) + "\n"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _commands() -> Iterator[str]:
    _, parsers = build_parser()
    parsers["estimate"] = estimate.build_parser()
    yield "## Commands"
    yield (
        f"`{PROG} COMMAND --help` prints the same. Exit statuses: 0 done; 1 failed, or what was asked for is not "
        "there; 2 a mistake in the command line, a study, a task or a value; 130 interrupted; 141 the output's "
        "reader went away."
    )
    for title, names in GROUPS.items():
        yield f"### {title}"
        for name in names:
            yield from _command(name, parsers[name])


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    does = COMMANDS[name].does
    yield f"**`{PROG} {name}`**: {does}. {parser.epilog or ''}".strip()
    if name == "train":
        yield "Its flags are the hyperparameters below, and those that `ppo-tuner train --help` lists before them."
        return
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    rows = [
        (_called(action), str(action.help or ""))
        for action in actions
        if name == "confirm" or action.dest not in HYPERPARAMETERS or f"--{action.dest}" not in action.option_strings
    ]
    if rows:
        yield _table(("argument", "meaning"), rows)


def _called(action: argparse.Action) -> str:
    metavar = action.metavar or action.dest.upper()
    placeholder = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.option_strings:
        return f"`{placeholder}`"
    flag = action.option_strings[-1]
    return f"`{flag}`" if action.nargs == 0 else f"`{flag} {placeholder}`"


def _hyperparameters() -> Iterator[str]:
    yield "## Hyperparameters"
    yield (
        "Names of a study file's `[fixed]` and `[search]`, of `--NAME` on the command line, and of `PPOConfig` in "
        "Python. The default is TRL's where TRL has the field. `advised` in `[search]` is the range in the last "
        "column, unless the task states one of its own."
    )
    for group, members in groupby(HYPERPARAMETERS.values(), key=lambda one: one.group):
        yield f"### {group}"
        rows = (
            (
                f"`{one.name}`",
                "unset" if one.default is None else f"`{short(one.default, 6)}`",
                one.allowed + (f"; {one.unit}" if one.unit else ""),
                f"{one.label}. {one.doc}",
                _advised(one),
            )
            for one in members
        )
        yield _table(("name", "default", "allowed; unit", "meaning", "advised range"), rows)


def _advised(one: Hyperparameter) -> str:
    """Return a hyperparameter's advised range, in words where it depends on the study."""
    if one.name == "kl_target":
        return "{:g} to {:g} of the KL budget, linear".format(*KL_TARGETS)
    if one.name == "kl_coef":
        return "{:g} to {:g} of σ / √(2 · KL budget), log; with normalize_kl_coef".format(*BETAS)
    if one.name == "kl_step":
        return f"its default divided and multiplied by {KL_STEP_SPAN:g}, log"
    return "" if one.search is None else f"{one.search.low:g} to {one.search.high:g}, {one.search.scale}"


def _metrics() -> Iterator[str]:
    yield "## Metrics"
    yield "Of every step; those that begin with `eval/` where the step was evaluated."
    rows = ((f"`{one.name}`", one.unit, f"{one.label}. {one.doc}") for one in METRICS.values())
    yield _table(("name", "unit", "meaning"), rows)


def _rules() -> Iterator[str]:
    yield "## Guard rules"
    settings = GuardSettings
    yield (
        "Keys of a study file's `[guard]`: a number, `true` where a rule needs none, or `false` to switch it off. "
        f"`patience` ({settings.patience}): a patient rule waits until it is broken for so many steps in a row. "
        f"`grace` ({settings.grace:g}): the share of the episodes in which some rules are silent."
    )
    rows = (
        (
            f"`{rule.name}`",
            "`true`" if rule.valid is None else f"`{rule.limit:g}`",
            f"{rule.label}. {rule.doc}",
            ", ".join(filter(None, ("patient" * rule.is_patient, "silent during `grace`" * rule.has_grace))),
            rule.change,
        )
        for rule in RULES.values()
    )
    yield _table(("name", "default", "ends a trial when", "", "what to change"), rows)
    yield "## Signs"
    yield (
        "What `diagnose` and the dashboard's pages say of a trial. Those of the rollouts are medians of the last "
        "third of the run's iterations, two at least, except where the meaning says otherwise."
    )
    rows = ((sign.label, f"`{sign.metric}`", sign.range, sign.doc, sign.change) for sign in SIGNS.values())
    yield _table(("sign", "metric", "in range", "meaning", "what to change"), rows)


def _study_keys() -> Iterator[str]:
    yield "## Study file"
    yield "The keys of a study's TOML file. [The study file](studies.md) explains them with an example."
    yield _table(("key", "meaning"), _rows(study_file.TOP_LEVEL))
    for title, values in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
        yield f"`{title}` is one of:"
        yield _table((title, "meaning"), _rows(values))
    for title, keys in (("kl", study_file.KL), ("sampler", study_file.SAMPLER)):
        yield f"Keys of `[{title}]`:"
        yield _table(("key", "meaning"), _rows(keys))


TASK_KEYS = {
    "policy": "a model's folder or hub id: the SFT policy and KL reference; `task:NAME` is a built-in task's",
    "reward": "a model, function or URL; a table of the keys below; or a list of them, which are summed",
    "prompts": "a file, folder or dataset's hub id; or a table of the keys below",
    "eval_prompts, test_prompts": "data files of these prompts; unless given, `prompts` says",
    "doc": "what the task is, in a sentence",
    "kl_budget": "how far a recommended policy may be from the reference, in nats per response; 10 unless given",
    "kl_limit": "where the guard ends a trial; 2.5 times the budget unless given",
    "eval": "a table: `temperature` and `response_length` of evaluations (the reference's unless given), their `seed`, "
    "and `prompts`, how many of the eval prompts are used each time",
    "reference": "a table of hyperparameters that replace the declared defaults: trial 0 of a study",
    "search": 'a table of ranges that a study takes as `"advised"`; `why` says where one comes from',
}


def _task_keys() -> Iterator[str]:
    yield "## Task file"
    yield "The keys of a task file, or of a study's `[task]`. [Your own task](tasks.md) explains them with an example."
    yield _table(("key", "meaning"), _rows(TASK_KEYS))
    yield "Keys of a reward:"
    yield _table(("key", "meaning"), _rows(all_fields(RewardPart)))
    yield "Keys of prompts:"
    yield _table(("key", "meaning"), _rows(all_fields(PromptSource)))
    yield (
        "A split is given by its name, as a share between 0 and 1, as a number of rows, or as `train[:90%]`; `eval` "
        "and `test` also as a data file. A prompt that stands in two splits is kept in test before eval, and in eval "
        "before train."
    )


def _rows(values: Mapping[str, str]) -> Iterable[Sequence[str]]:
    """Return rows of names, several with commas between them, and what each does."""
    return ((f"`{name.replace(', ', '`, `')}`", does) for name, does in values.items())


def _members(kind: type[StrEnum]) -> Iterable[Sequence[str]]:
    does = docs_below(kind)
    return _rows({member.value: does.get(member.name, "") for member in kind})


def _json() -> Iterator[str]:
    yield "## JSON"
    yield (
        "What a command prints on stdout with `--json`. Times are seconds since the epoch, KL is in nats per response, "
        "and a number that is not finite is null. Progress and errors go to stderr."
    )
    yield _table(("command", "prints"), _rows(PRINTED))
    for name, (kind, without, more) in OBJECTS.items():
        about = without if kind is None else first_line(kind)
        yield f"**{name[0].upper()}{name[1:]}**" + (f": {about}" if about else "")
        own = {} if kind is None else all_fields(kind)
        rows = {key: does for key, does in own.items() if key not in without.split(", ")}
        plain = ", ".join(key for key, does in rows.items() if not does)
        told = {key: does for key, does in rows.items() if does} | dict(more)
        yield _table(("key", "meaning"), _rows(({plain: "as named"} if plain else {}) | told))


def _tables() -> Iterator[str]:
    yield "## Exported tables"
    yield "[`export`](export.md#data) writes them as CSV or Parquet; columns of JSON hold it as text."
    metrics = {metric.column for metric in METRICS.values()}
    for table, kinds in TABLES.items():
        rows, kind = EXPORTED[table]
        own = {} if kind is None else all_fields(kind)
        yield f"**{table}**: {rows}"
        columns = {name: type_ for name, type_ in kinds.items() if name not in metrics}
        yield _table(
            ("column", "type", "meaning"), ((f"`{name}`", type_, own.get(name, "")) for name, type_ in columns.items())
        )


def _trl() -> Iterator[str]:
    yield "## Fields of TRL's PPO"
    yield (
        "What `--config` does with a file of TRL's PPOConfig, ModelConfig and ScriptArguments. A field with the name "
        "of a hyperparameter above is read as it is. [Coming from TRL](export.md#coming-from-trl) says more."
    )
    yield "Translated:"
    yield _table(("field", "becomes"), ((f"`{field}`", f"`{ours}`") for field, (ours, _) in trl.TRANSLATED.items()))
    yield "Not followed, with a warning unless it has a harmless value:"
    rows = (
        (f"`{field}`", ", ".join(f"`{json.dumps(value)}`" for value in harmless), why)
        for field, (harmless, why) in trl.WARNED.items()
    )
    yield _table(("field", "harmless", "instead"), rows)
    yield "Ignored, without effect here or in TRL's PPO: " + ", ".join(f"`{field}`" for field in trl.IGNORED) + "."


def _python() -> Iterator[str]:
    yield "## Python"
    yield "What `import ppo_tuner as pt` has. [From Python](python.md) shows it at work."
    errors = [
        name for name in pt.__all__ if isinstance(getattr(pt, name), type) and issubclass(getattr(pt, name), Exception)
    ]
    for name in (name for name in pt.__all__ if name not in errors and not name.startswith("_")):
        yield from _public(name, getattr(pt, name))
    yield "Errors, whose message is one line:"
    yield _table(("name", "raised when"), ((f"`{name}`", first_line(getattr(pt, name))) for name in errors))


def _public(name: str, value: object) -> Iterator[str]:
    """Yield a public name with its first line, and a table of its arguments or members."""
    yield f"**`pt.{name}`**: {first_line(value)}"
    if isinstance(value, type):
        members = {key: one for key, one in vars(value).items() if not key.startswith("_") and inspect.getdoc(one)}
        fields = _rows(docs_below(value)) if is_dataclass(value) else ()
        rows = [(f"`{key}`", first_line(one)) for key, one in members.items() if isinstance(one, property)]
        calls = [(f"`{key}()`", first_line(one)) for key, one in members.items() if inspect.isfunction(one)]
        yield _table(("member", "meaning"), [*fields, *rows, *calls])
        return
    section = (inspect.getdoc(value) or "").partition("Args:\n")[2].partition("\n\n")[0]
    lines = textwrap.dedent(section).replace("\n    ", " ").splitlines()
    yield _table(
        ("argument", "meaning"), ((f"`{key}`", does) for key, _, does in (line.partition(": ") for line in lines))
    )


def _states() -> Iterator[str]:
    _, table, *rest = (optuna_trials.__doc__ or "").strip().split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0][0] == "status" and set("".join(rows[1])) == {"-"}, "the table of states has moved"
    known = {status.value for status in Status}
    assert known == {word for row in rows[2:] for word in row[0].replace(",", " ").replace(":", " ").split()} & known
    yield "## What a trial can be"
    yield "### Statuses"
    yield _table(("status", "meaning"), ((f"`{status}`", status.meaning) for status in Status))
    yield (
        f"A trial that has not ended and that nobody runs is shown as `{INTERRUPTED}`: the next run of its study "
        "resumes it."
    )
    yield "### Origins"
    yield "Where a trial's configuration comes from."
    yield _table(("origin", "meaning"), _members(Origin))
    yield "### Roles"
    yield (
        "What a trial is for. Only trials of the search teach the sampler. They count towards the study's total, "
        "except those that a person enqueued."
    )
    yield _table(("role", "meaning"), _members(Role))
    yield "### What Optuna sees"
    yield "The state, value and constraint of each trial in an exported study."
    yield _table(rows[0], rows[2:])
    yield from rest


def _workers() -> Iterator[str]:
    yield "## Workers"
    yield "Keys of a study file's `[workers]`."
    yield _table(("name", "meaning"), ((f"`{name}`", str(one["doc"])) for name, one in WORKER_SETTINGS.items()))


if __name__ == "__main__":
    FILE.write_text(text())
