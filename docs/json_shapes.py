"""The JSON that each command prints with `--json`, and the tables of `export`: keys or columns, and what each is.

docs/reference.py writes it into the reference; tests/tuner/test_json_shapes.py holds it against what commands print.
"""

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {
    "demo": "a study with its `answer`",
    "run": "a study with its `answer`",
    "confirm": "a confirmation with `study` and its `answer`, or null; with `--show` a list of them",
    "train": "a training",
    "estimate": "an estimate",
    "doctor": "a list of findings",
    "list": "a list of summaries; of a study that cannot be read `name`, `state` (`not readable`) and `error` alone",
    "show": "a study with its `answer`, lists `front` of front points and `orders`; of one trial a trial's detail",
    "compare": "a comparison",
    "best": "a best trial",
    "diagnose": "a list of diagnoses",
    "importance": "an importance",
    "stop": "an order",
    "pause": "an order",
    "resume": "an order",
    "retry": "an order",
    "enqueue": "an order",
    "fork": "an order",
    "set": "an order",
}
"""What each command with `--json` prints."""

SUMMARY = {
    "name": "the study",
    "task": "its task",
    "state": "`running`, `paused`, `finished` or `unfinished`",
    "trials": "how many trials it runs in all; of a study with a budget null or the most",
    "budget": "in trials of full length; null: it has none",
    "spent": "what it has spent of that",
    "finished": "how many trials have ended",
    "best": "the best trial's number; null: there is none",
    "best_value": "its value, in reward",
    "best_value_se": "its standard error",
    "best_kl": "its eval KL, in nats per response",
    "kl_budget": "in nats per response",
    "created_at": "a time",
    "finished_at": "a time; null: it has not finished",
}
TRIAL = {
    "number": "from 0, in the order of their making",
    "origin": "where its configuration comes from",
    "status": "its status, or `interrupted`: not ended, and nothing runs its study",
    "reason": "a reason; null: it did not end early, and waits for nothing",
    "config": "all hyperparameters by name",
    "params": "the searched or listed ones",
    "value": "in reward; null: it has none yet",
    "value_se": "its standard error over the eval prompts",
    "kl": "its eval KL, in nats per response",
    "violation": "log(eval KL / KL budget)",
    "episodes": "episodes collected",
    "seconds": "what it cost, all attempts together",
    "attempts": "how often it was started or resumed",
    "threads": "CPU threads of its trainer",
    "started_at": "a time",
    "ended_at": "a time; null: it has not ended",
    "label": "its name in the study file or an order, or empty",
    "parent": "of a fork or a confirming run: the trial that it comes from",
    "fork_step": "of a fork: the step of the parent's checkpoint",
    "wanted": "what an order still wants of it: `stop` or `pause`",
    "role": "`search`, `confirm` or `fork`",
    "seed": "of its trainer",
    "value_step": "the step that its value comes from",
    "end_reward": "eval reward of its last evaluation, whatever its KL",
    "end_kl": "eval KL of its last evaluation",
    "end_kl_se": "its standard error over the eval prompts",
    "baseline": "the SFT policy's eval reward",
    "retries": "how often it was resumed after a lost worker or an error without a new checkpoint in between",
}
REASON = {
    "rule": "a guard rule, `pruner`, `person`, `error`, `out_of_memory`, `worker_lost`; `outage`: waits",
    "message": "one line",
    "metric": "which metric the rule read",
    "value": "what it read",
    "limit": "the limit",
    "steps_over": "for how many steps in a row",
    "step": "at which step",
    "evidence": "a list of the last steps' readings",
    "log": "the end of the trial's log, where an error ended it",
    "cause": "of an error its type, file and line: the same where trials fail for one cause",
}
STUDY = {
    **SUMMARY,
    "trials": "a list of trials",
    "confirming": "a list of the trials that confirm some of them",
    "total": "how many trials it runs in all",
    "spec": "the study file, with all defaults",
    "seconds": "what all trials cost",
}
FRONT_POINT = {
    "trial": "its number",
    "step": "of the checkpoint",
    "episode": "of the checkpoint",
    "budget": "the smallest KL budget that it is within",
    "reward": "eval reward",
    "kl": "eval KL",
    "reward_se": "standard error",
    "kl_se": "standard error",
    "path": "of the checkpoint",
}
DETAIL = {
    **TRIAL,
    "steps": "a list of steps: `step`, `episode`, `at`, and every metric by name, null where it was not measured",
    "samples": "a list of samples",
    "checkpoints": "a list of `step`, `episode` and `path`: those on this machine",
}
SAMPLE = {
    "step": "of the evaluation",
    "prompt_index": "the same index is the same prompt in every trial",
    "prompt": "text",
    "response": "text",
    "reward": "of the response",
    "kl": "of the response, in nats",
    "length": "in tokens",
    "parts": "the reward's parts by name",
    "tokens": "null, or lists with an item a token",
}
ANSWER = {
    "trial": "the number of the trial to launch",
    "is_reference": "whether it is the reference",
    "kl_budget": "that it is the answer for",
    "badge": "`one seed`, `confirmed` or `a tie`",
    "reward": "eval reward of its best checkpoint within the KL budget",
    "reward_se": "its standard error over the eval prompts",
    "improvement": "reward less the SFT policy's in the search, paired on the eval prompts; null: not known",
    "improvement_se": "its standard error",
    "kl": "eval KL of that checkpoint, in nats per response",
    "kl_se": "its standard error",
    "step": "of that checkpoint; null: there is none",
    "episode": "of that checkpoint",
    "end_kl": "eval KL of the trial's last evaluation",
    "ends_within_budget": "whether the configuration itself ends within the KL budget; null: not known",
    "test_reward": "of that checkpoint on the test prompts; null: not evaluated",
    "test_kl": "the same of its KL",
    "confirmed": "null, or on fresh seeds `total_episodes`, `reward` and `kl` (`mean`, `low`, `high`, `n`), "
    "`ends_within` and `breaks_at_most`",
    "decision": "what to do, in a sentence",
    "certainty": "the evidence, in a sentence",
    "cautions": "a list of at most one sentence: a doubt that could change the decision",
    "remedy": "the command that settles the doubt; null: there is none",
    "has_learned": "false: nothing is confirmed, and the best trial's improvement is no more than noise",
    "launch": "the command that launches it",
}
BEST = {
    **TRIAL,
    "study": "its name",
    "kl_budget": "that it is the best under",
    "kl_se": "standard error of `kl`",
    "baseline": "the SFT policy's eval reward",
    "baseline_se": "its standard error",
    "improvement": "value less baseline, paired on the eval prompts",
    "improvement_se": "its standard error",
    "ends_within_budget": "whether the configuration itself ends within the KL budget; null: not known",
    "test": "null, or `step`, `prompts`, `reward`, `reward_se`, `kl`, `kl_se`, `why_not` and `at`",
    "test_why_not": "why there is no test reading; null: there is one",
    "answer": "the study's answer for that KL budget",
    "checkpoint": "null, or `step`, `episode`, `path`, `why_not`, and `again`, the command that makes it again",
}
COMPARISON = {
    "study": "its name",
    "trials": "a list of trials, in the order asked for",
    "differences": "hyperparameters that differ, each with a list of values",
    "over_first": "for each further trial null, or `mean`, `se` and `prompts` of its reward over the first's",
}
DIAGNOSIS = {
    "rule": "which rule found something",
    "finding": "the numbers it spoke on, in a sentence",
    "name": "the hyperparameter to change",
    "was": "its value",
    "value": "the value to try",
    "enqueue": "all values of the trial to enqueue",
    "command": "the command that tries it",
}
IMPORTANCE = {
    "study": "its name",
    "trials": "how many",
    "reward": "a list of `name`, `share`, `low`, `high`, `chance` and `is_sure`, the largest share first",
    "KL": "the same for KL",
}
ORDER = {
    "id": "of the order",
    "kind": "the command",
    "trial": "its number; null: the whole study",
    "arguments": "`values`, `label`, `episode` or settings",
    "placed_by": "process and host",
    "placed_at": "a time",
    "state": "`waiting`, `done` or `refused`",
    "outcome": "what became of it, in a sentence",
    "decided_at": "a time; null: it waits",
}
CONFIRMATION = {
    "total_episodes": "of each run",
    "prompts": "how many test prompts",
    "baseline": "the SFT policy's reward on them",
    "baseline_se": "its standard error",
    "configurations": "a list of configurations, those better than the reference first, then by their mean",
    "is_whole": "whether all runs have ended",
    "choice": "the number of the trial to launch; null: not whole, or too few seeds",
    "best": "the number of the trial with the highest mean; null: none was evaluated",
    "not_told_apart": "trials that the data do not distinguish from it",
    "verdict": "a sentence",
}
CONFIGURATION = {
    "trial": "its number",
    "is_reference": "whether it is the reference",
    "reward": "null, or `mean`, `low`, `high` and `n`: a 95% interval over the seeds",
    "kl": "the same, in nats per response",
    "over_reference": "the same, of the difference to the reference; intervals of differences hold for all at once",
    "under_best": "the same, of the difference to the best",
    "rewards": "by seed",
    "kls": "by seed",
    "ends_within": "how many of the runs that were read also end within the KL budget",
    "lost": "seeds whose runs broke, failed by themselves, or had nothing within the KL budget",
    "failed": "seeds whose runs an outage ended",
    "stopped": "seeds whose runs a person stopped",
    "open": "seeds not evaluated yet",
}
ESTIMATE = {
    "largest": "which of the configurations takes most, the one that was measured",
    "least": "bytes that it needs at the least, by part; null where the models' shape cannot be read",
    "measured": "`peak` in bytes, the `phase` that reached it, the settings that `lower` it, `evaluation_seconds`, "
    "`iteration_seconds`, `run_seconds`, and the bytes of a `checkpoint` and of a `model`",
    "room": "the device: `device`, `name`, `total`, `free` and `process`",
    "side_by_side": "how many such trials fit at the same time",
    "disk": "`checkpoint`, `most`, `free` and `line`",
    "fits": "whether the checkpoints do",
}
FINDING = {
    "state": "`ok`, `warn` or `fail`",
    "about": "what was looked at",
    "found": "what was found, and what to do about it",
}
TRAINING = {
    "task": "its name",
    "output": "the run's folder",
    "model": "the folder of the trained model",
    "best_model": "the folder of the best checkpoint's model; null: the end is the best",
    "ending": "`kl_budget`, `note`, `best` and `kl_course`",
    "config": "all hyperparameters by name",
    "steps": "a list of `step`, `episode` and the metrics by name",
    "hub": "null, or where it was pushed",
}
OBJECTS: Mapping[str, Mapping[str, str]] = {
    "summary": SUMMARY,
    "study": STUDY,
    "trial": TRIAL,
    "reason": REASON,
    "front point": FRONT_POINT,
    "trial's detail": DETAIL,
    "sample": SAMPLE,
    "answer": ANSWER,
    "best trial": BEST,
    "comparison": COMPARISON,
    "diagnosis": DIAGNOSIS,
    "importance": IMPORTANCE,
    "order": ORDER,
    "confirmation": CONFIRMATION,
    "configuration": CONFIGURATION,
    "estimate": ESTIMATE,
    "finding": FINDING,
    "training": TRAINING,
}
"""Every object by name. Where one has the keys of another, the reference lists only the further ones."""

TABLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "trials": (
        "One row per trial; the other tables name their trial by number in the column `trial`.",
        {
            "number": "from 0, in the order of creation",
            "origin, status, role": "[what a trial can be](#what-a-trial-can-be)",
            "reason": "JSON: why it ended early or failed, as the reason above",
            "config": "JSON: all hyperparameters",
            "params": "JSON: the searched or listed ones alone",
            "value, value_se": "the trial's value in reward, and its standard error over the eval prompts",
            "kl": "its eval KL",
            "violation": "log(eval KL / KL budget) of its value, -5 to 0; 0: none; 1: it broke; empty: not judged",
            "episodes": "episodes collected",
            "seconds": "what it cost, all attempts together",
            "attempts": "how often it was started or resumed",
            "threads": "CPU threads of its trainer",
            "started_at, ended_at": "times",
            "label": "what the study file or an order calls it",
            "parent": "of a fork or a confirming run: the trial that it comes from",
            "fork_step": "of a fork: the step of the parent whose checkpoint it started from",
            "wanted": "`stop` or `pause`: an order that is not carried out yet",
            "seed": "of its trainer",
            "value_step": "the step that its value comes from",
            "end_reward, end_kl, end_kl_se": "its last evaluation, whatever its KL",
            "baseline": "the SFT policy's eval reward",
            "retries": "how often it was resumed after a lost worker or an error without a new checkpoint in between",
        },
    ),
    "steps": (
        "One row per step of a trial; step 0 evaluates the SFT policy. Each [metric](#metrics) is one more column, "
        "with `_` in place of `/`; those of `eval_` have values only where the step evaluated.",
        {
            "trial, step": "the key",
            "episode": "episodes collected up to it",
            "at": "when it was reported",
            "extra": "JSON: the task's own metrics, and any reading that is not finite, as text",
        },
    ),
    "samples": (
        "One row per evaluation for each of a few fixed eval prompts.",
        {
            "trial, step, prompt_index": "the key; the same index is the same prompt in every trial",
            "prompt, response": "texts",
            "reward, kl": "of the response",
            "length": "response tokens, the end-of-sequence token included",
            "parts": "JSON: the reward's parts by name, unweighted",
            "tokens": "JSON: per token `texts`, `logprobs`, `log_ratios`, `kls`, of a critic `advantages`, `values`",
        },
    ),
    "readings": (
        "One row per evaluation, with all eval prompts in order, so that trials can be compared prompt by prompt.",
        {
            "trial, step": "the key",
            "rewards, kls, lengths": "JSON: lists with one item per prompt",
        },
    ),
    "test_readings": (
        "One row per checkpoint that was the study's answer when the search ended, read on the test prompts.",
        {
            "trial, step": "the key",
            "prompts": "how many test prompts there are; 0: none were read",
            "reward, reward_se, kl, kl_se": "means over them, with standard errors",
            "why_not": "why none were read",
            "at": "when",
        },
    ),
}
"""What each table of `export --format csv, parquet or json` has a row for, and its columns."""
