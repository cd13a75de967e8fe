"""Write docs/reference.md from the declarations.

    .venv/bin/python docs/reference.py

It has every command, hyperparameter, study key, metric, guard rule, trial status and JSON shape. A test fails where the
file is not what this writes.
"""

import argparse
import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ppo_tuner as pt
from ppo_core.cli import trl
from ppo_core.config.declare import Hyperparameter
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from ppo_core.output import short
from ppo_core.report import EvalReadings, Sample
from tuner.cli import estimate
from tuner.cli.main import COMMANDS, GROUPS, build_parser
from tuner.confirm.intervals import Interval
from tuner.confirm.result import Confirmed
from tuner.environment import PROG
from tuner.exchange.export_folder import TABLES
from tuner.judge.diagnose import Diagnosis
from tuner.judge.results import FrontPoint
from tuner.search import optuna_trials
from tuner.search.importance import Importance
from tuner.store import Order
from tuner.store.rows import INTERRUPTED, OnTest, TrialRow
from tuner.study import study_file
from tuner.study.rules import RULES, SIGNS, GuardSettings
from tuner.study.status import ORDER_KINDS, Origin, Reason, Role, Status
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
    shown = [action for action in actions if name == "confirm" or not _is_hyperparameter(action)]
    rows = [(_called(action), str(action.help or "")) for action in shown]
    if rows:
        yield _table(("argument", "meaning"), rows)


def _is_hyperparameter(action: argparse.Action) -> bool:
    return action.dest in HYPERPARAMETERS and f"--{action.dest}" in action.option_strings


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
    flags: Sequence[tuple[str, Callable[..., bool]]] = (
        ("patient", lambda rule: rule.is_patient),
        ("silent during `grace`", lambda rule: rule.has_grace),
    )
    rows = (
        (
            f"`{rule.name}`",
            "`true`" if rule.valid is None else f"`{rule.limit:g}`",
            f"{rule.label}. {rule.doc}",
            ", ".join(name for name, holds in flags if holds(rule)),
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
    yield _table(("key", "meaning"), _named(study_file.TOP_LEVEL))
    for title, values in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
        yield f"`{title}` is one of:"
        yield _table((title, "meaning"), _named(values))
    for title, keys in (("kl", study_file.KL), ("sampler", study_file.SAMPLER)):
        yield f"Keys of `[{title}]`:"
        yield _table(("key", "meaning"), _named(keys))


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
REWARD_KEYS = {
    "where": "a reward model's path or hub id, `package.module:function`, `file.py:function`, or a URL",
    "name": "what metrics and errors call it",
    "kind": "`model`, `function` or `http`; unless given, what `where` looks like",
    "weight": "its weight in the sum",
    "chat_template_kwargs": "of a model's chat template, over those of the prompts",
    "append_eos": "whether a model reads its EOS after a response that ended by itself",
    "timeout": "seconds: 30 for a request to a URL, 300 for a function call. A function that exceeds it gets "
    "the same time again to find the slow sample or, if there is none, to score the batch once more. A hanging "
    "function is interrupted by a signal. On Linux this leaves the function's own alarms alone; on macOS it "
    "uses the alarm itself, so a function that sets an alarm has no other limit",
    "retries": "further attempts of a request to a URL, 2 unless given; then a study "
    "[waits](running.md#when-something-fails). Keep all attempts under what a step may take (`[workers]`)",
    "batch_size": "responses in a request to a URL",
    "concurrency": "requests to a URL at a time",
}
PROMPT_KEYS = {
    "path": "JSONL, JSON, CSV, TSV or Parquet, a folder of them, a saved dataset, or a hub id",
    "config": "of a hub dataset",
    "column": "unless given the first of prompt, query, question, instruction, text and messages that is there",
    "system": "a message for chats without one",
    "chat_template_kwargs": "a table that chat templates are given, such as `enable_thinking`; its `strftime_now` is "
    "the date that they print, 2024-07-26 unless given",
    "max_prompt_tokens": "512; longer rows are left out, and counted",
    "seed": "of the random splits",
    "eval": "what trials are judged on, all of it at each evaluation: the split called validation, else 256 rows, at "
    "most an eighth",
    "test": "used once, for the answer and by `confirm`: the split called test, else 256 rows, at most an eighth",
    "train": "what is trained on: all others",
}


def _task_keys() -> Iterator[str]:
    yield "## Task file"
    yield "The keys of a task file, or of a study's `[task]`. [Your own task](tasks.md) explains them with an example."
    yield _table(("key", "meaning"), _named(TASK_KEYS))
    yield "Keys of a reward:"
    yield _table(("key", "meaning"), _named(REWARD_KEYS))
    yield "Keys of prompts:"
    yield _table(("key", "meaning"), _named(PROMPT_KEYS))
    yield (
        "A split is given by its name, as a share between 0 and 1, as a number of rows, or as `train[:90%]`; `eval` "
        "and `test` also as a data file. A prompt that stands in two splits is kept in test before eval, and in eval "
        "before train."
    )


def _named(values: Mapping[str, str]) -> Iterable[Sequence[str]]:
    return ((f"`{name.replace(', ', '`, `')}`", does) for name, does in values.items())


PRINTED = {
    "demo, run": "a study with its `answer`",
    "confirm": "a confirmation with `study` and its `answer`, or null; with `--show` a list of them",
    "train": "a training",
    "estimate": "an estimate",
    "doctor": "a list of findings: `state` (`ok`, `warn` or `fail`), `about`, `found`",
    "list": "a list of summaries; of a study that cannot be read `name`, `state` (`not readable`) and `error` alone",
    "show": "a study with its `answer`, lists `front` and `orders`; of one trial its columns in the "
    "[exported tables](#exported-tables), and lists `steps`, `samples` and `checkpoints` (`step`, `episode`, `path`)",
    "compare": "a comparison",
    "best": "a best trial",
    "diagnose": "a list of diagnoses",
    "importance": "`study`, `trials` (how many), and for `reward` and `KL` a list of importances, the largest first",
    ", ".join(ORDER_KINDS): "an order",
}
"""What each command with `--json` prints."""

OBJECTS: Mapping[str, tuple[type | None, str, Mapping[str, str]]] = {
    "summary": (None, "", {
        "name, task, created_at, finished_at": "times in seconds since the epoch; `finished_at` null until then",
        "state": "`running`, `paused`, `finished` or `unfinished`",
        "trials": "how many trials it runs in all; of a study with a budget null or the most",
        "budget, spent": "in trials of full length, or in the unit of a budget in time; null: it has none",
        "finished": "how many trials have ended",
        "best, best_value, best_value_se, best_kl": "the best trial's number, value and eval KL; null: there is none",
        "kl_budget": "in nats per response",
        "answer, reward, kl": "the number of the answer's trial, its reward and KL: on fresh seeds if confirmed",
        "reward_is": "what these are, such as `mean of 5 fresh seeds` or `best in budget, one seed`",
    }),
    "study": (None, "the keys of a summary up to `kl_budget`, and", {
        "trials, confirming": "lists of trials, with the columns of the [exported table](#exported-tables) as keys; "
        f"their `status` is `{INTERRUPTED}` where nothing runs the study of one that has not ended",
        "total": "how many trials it runs in all",
        "spec": "the study file, with all defaults",
        "seconds": "what all trials cost",
    }),
    "reason of a trial's early end": (Reason, "", {}),
    "front's checkpoint": (FrontPoint, "", {"reward_se, kl_se": "standard errors"}),
    "order": (Order, "study_id, key", {}),
    "answer": (None, "", {
        "trial": "the number of the trial to launch",
        "is_reference": "whether it is the reference",
        "kl_budget": "that it is the answer for",
        "badge": "`one seed`, `confirmed` or `a tie`",
        "step, episode, reward, reward_se, kl, kl_se": "of its best checkpoint within the KL budget on the eval "
        "prompts; of one that was read twice, the mean",
        "improvement, improvement_se": "reward less the SFT policy's in the search, paired on the eval prompts",
        "end_kl": "eval KL of the trial's last evaluation",
        "ends_within_budget": "whether the configuration itself ends within the KL budget; null: not known",
        "test_reward, test_kl": "of that checkpoint on the test prompts; null: not evaluated",
        "confirmed": "null, or on fresh seeds `total_episodes`, the intervals `reward` and `kl`, `ends_within` and "
        "`breaks_at_most`",
        "decision, evidence": "what to do, and what speaks for it, a sentence each",
        "gains": "where the study has a baseline, a list of `over` (`reference` or `baseline`), its `trial`, and the "
        "difference's `mean` with `se` over the prompts, or with `low` and `high` over fresh seeds",
        "doubt": "what could change the decision, in a sentence; null: nothing known",
        "remedy, launch": "the commands that settle the doubt (null: there is none), and that launch it",
        "has_learned": "false: nothing is confirmed, and the best trial's improvement is no more than noise",
    }),
    "best trial": (None, "the keys of a trial, and", {
        "study, kl_budget, answer": "its study, and that one's answer for the KL budget",
        "kl_se, baseline, baseline_se": "the SFT policy's eval reward; standard errors",
        "improvement, improvement_se, ends_within_budget": "as of an answer",
        "test, test_why_not": "the columns of the table test_readings; null: why not",
        "checkpoint": "null, or `step`, `episode`, `path`, `why_not`, and `again`, the command that makes it again",
    }),
    "comparison": (None, "", {
        "study, trials": "its name, and a list of trials in the order asked for",
        "differences": "hyperparameters that differ, each with a list of values",
        "over_first": "for each further trial null, or `mean`, `se` and `prompts` of its reward over the first's",
    }),
    "diagnosis": (Diagnosis, "", {"enqueue, command": "all values of the trial to enqueue, and the command for it"}),
    "importance": (Importance, "", {"is_sure": "whether it is more than chance"}),
    "confirmation": (None, "", {
        "total_episodes, prompts": "of each run, and how many test prompts",
        "baseline, baseline_se": "the SFT policy's reward on them",
        "configurations": "a list, those better than the reference first, then by their mean",
        "is_whole": "whether all runs have ended",
        "choice": "the number of the trial to launch; null: not whole, or too few seeds",
        "best, not_told_apart": "that with the highest mean, and those that the data do not distinguish from it",
        "verdict": "a sentence",
    }),
    "configuration": (Confirmed, "length, episodes", {"is_reference": "whether it is the reference"}),
    "interval": (Interval, "", {}),
    "estimate": (None, "", {
        "largest": "which of the configurations takes most, the one that was measured",
        "least": "bytes that it needs at the least, by part; null where the models' shape cannot be read",
        "measured": "`peak` in bytes, the `phase` that reached it, the settings that `lower` it, `evaluation_seconds`, "
        "`iteration_seconds`, `run_seconds`, and the bytes of a `checkpoint` and of a `model`",
        "room": "the device: `device`, `name`, `total`, `free` and `process`",
        "side_by_side": "how many such trials fit at the same time",
        "disk, fits": "`checkpoint`, `most`, `free` and `line`; whether the checkpoints fit",
    }),
    "training": (None, "", {
        "task, output": "its name, and the run's folder",
        "model, best_model": "the folders of the trained model and of the best checkpoint's; null: the end is the best",
        "ending": "`kl_budget`, `note`, `best`, `kl_course` and `test`, its reading on the test prompts",
        "config, steps": "all hyperparameters by name, and a list of `step`, `episode` and the metrics by name",
        "hub": "null, or where it was pushed",
    }),
}  # fmt: skip
"""What `--json` prints: a dataclass, its fields that are left out (or what else there is), and further keys."""


def _json() -> Iterator[str]:
    yield "## JSON"
    yield (
        "What a command prints on stdout with `--json`. Times are seconds since the epoch, KL is in nats per response, "
        "and a number that is not finite is null. Progress and errors go to stderr."
    )
    yield _table(("command", "prints"), _named(PRINTED))
    for name, (kind, without, more) in OBJECTS.items():
        about = without if kind is None else _first_line(kind)
        yield f"**{name[0].upper()}{name[1:]}**" + (f": {about}" if about else "")
        own = {} if kind is None else _all_fields(kind)
        rows = {key: does for key, does in own.items() if key not in without.split(", ")}
        plain = ", ".join(key for key, does in rows.items() if not does)
        told = {key: does for key, does in rows.items() if does} | dict(more)
        yield _table(("key", "meaning"), _named(({plain: "as named"} if plain else {}) | told))


EXPORTED: Mapping[str, tuple[str, type | None]] = {
    "trials": ("One row per trial; the other tables name their trial by number in the column `trial`.", TrialRow),
    "steps": (
        "One row per step of a trial; step 0 evaluates the SFT policy. Each [metric](#metrics) is one more column, "
        "with `_` in place of `/`; those of `eval_` have values only where the step evaluated. `extra` has the task's "
        "own metrics, and any reading that is not finite, as text.",
        None,
    ),
    "samples": ("One row per evaluation for each of a few fixed eval prompts.", Sample),
    "readings": ("One row per evaluation, with all eval prompts in order, to compare trials by prompt.", EvalReadings),
    "test_readings": (
        "One row per checkpoint that was the study's answer when the search ended, read on the test prompts.",
        OnTest,
    ),
}
"""What each exported table has a row for, and the dataclass whose fields are its columns."""


def _tables() -> Iterator[str]:
    yield "## Exported tables"
    yield "[`export`](export.md#data) writes them as CSV or Parquet; columns of JSON hold it as text."
    metrics = {metric.column for metric in METRICS.values()}
    for table, kinds in TABLES.items():
        rows, kind = EXPORTED[table]
        own = {} if kind is None else _all_fields(kind)
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
    yield _table(("name", "raised when"), ((f"`{name}`", _first_line(getattr(pt, name))) for name in errors))


def _public(name: str, value: object) -> Iterator[str]:
    """Yield a public name with its first line, and a table of its arguments or members."""
    yield f"**`pt.{name}`**: {_first_line(value)}"
    if isinstance(value, type):
        members = {key: one for key, one in vars(value).items() if not key.startswith("_") and inspect.getdoc(one)}
        fields = [] if not is_dataclass(value) else _field_docs(value)
        rows = [(f"`{key}`", _first_line(one)) for key, one in members.items() if isinstance(one, property)]
        calls = [(f"`{key}()`", _first_line(one)) for key, one in members.items() if inspect.isfunction(one)]
        yield _table(("member", "meaning"), [*fields, *rows, *calls])
        return
    section = (inspect.getdoc(value) or "").partition("Args:\n")[2].partition("\n\n")[0]
    lines = textwrap.dedent(section).replace("\n    ", " ").splitlines()
    yield _table(
        ("argument", "meaning"), ((f"`{key}`", does) for key, _, does in (line.partition(": ") for line in lines))
    )


def _first_line(value: object) -> str:
    return (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")


def _all_fields(kind: type) -> dict[str, str]:
    """Return a dataclass's fields by name, with their docstrings on one line; empty where the name says it."""
    documented = dict(_field_docs(kind))
    return {one.name: " ".join(documented.get(f"`{one.name}`", "").split()) for one in fields(kind)}


def _field_docs(kind: type) -> list[tuple[str, str]]:
    """Return a dataclass's fields with the docstrings below them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    pairs = zip(definition.body, definition.body[1:], strict=False)
    return [
        (f"`{ast.unparse(one.target)}`", str(following.value.value))
        for one, following in pairs
        if isinstance(one, ast.AnnAssign)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    ]


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


def _members(kind: type[StrEnum]) -> Iterable[Sequence[str]]:
    """Return each member's value with the docstring below it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    documented: dict[str, str] = {}
    for one, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            documented[one.targets[0].id] = str(following.value.value) if is_text else ""  # type: ignore[union-attr]
    return [(f"`{member.value}`", documented[member.name]) for member in kind]


def _workers() -> Iterator[str]:
    yield "## Workers"
    yield "Keys of a study file's `[workers]`."
    yield _table(("name", "meaning"), ((f"`{name}`", str(one["doc"])) for name, one in WORKER_SETTINGS.items()))


if __name__ == "__main__":
    FILE.write_text(text())
