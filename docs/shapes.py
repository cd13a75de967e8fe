"""The shapes of what commands print with `--json` and of what is exported, and the docstrings that describe them.

`docs/reference.py` writes them; tests hold them against what is printed.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise

from ppo_core.report import EvalReadings, Sample
from tuner.confirm.intervals import Interval
from tuner.confirm.result import Confirmed
from tuner.judge.diagnose import Diagnosis
from tuner.judge.results import FrontPoint
from tuner.search.importance import Importance
from tuner.store import Order
from tuner.store.rows import INTERRUPTED, OnTest, TrialRow
from tuner.study.status import ORDER_KINDS, Reason

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
        "decision, evidence": "what to do, and the evidence, a sentence each",
        "gains": "where the study has a baseline, a list of `over` (`reference` or `baseline`), its `trial`, and the "
        "difference's `mean` with `se` over the prompts, or with `low` and `high` over fresh seeds",
        "doubt": "null, or a sentence: a doubt that could change the decision",
        "remedy, launch": "the commands that settle the doubt, and that launch it; null: there is none",
        "has_learned": "false: nothing is confirmed, and the best trial's improvement is no more than noise",
    }),
    "best trial": (None, "the keys of a trial, and", {
        "study, kl_budget, answer": "its study, and that one's answer for the KL budget",
        "kl_se, sft_reward, sft_reward_se": "the SFT policy's eval reward; standard errors",
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
        "sft_reward, sft_reward_se": "the SFT policy's reward on them",
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


def first_line(value: object) -> str:
    """Return the first paragraph of a docstring."""
    return (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")


def all_fields(kind: type) -> dict[str, str]:
    """Return a dataclass's fields by name, with their docstrings on one line; empty where the name says it."""
    does = docs_below(kind)
    return {one.name: " ".join(does.get(one.name, "").split()) for one in fields(kind)}


def docs_below(kind: type) -> dict[str, str]:
    """Return the docstrings below a class's fields or members, by name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for one, below in pairwise(definition.body):
        if isinstance(one, ast.AnnAssign | ast.Assign) and isinstance(below, ast.Expr):
            target = one.target if isinstance(one, ast.AnnAssign) else one.targets[0]
            found[ast.unparse(target)] = str(ast.literal_eval(below.value))
    return found
