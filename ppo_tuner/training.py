"""One training run from Python, and what it left."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.cli.command_line import EXIT_INTERRUPTED, import_from_working_folder
from ppo_core.cli.new_run import RUNS_FOLDER
from ppo_core.cli.run_folder import BEST_MODEL, MODEL, RUN_FILE, STEPS_FILE
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.output import console
from ppo_tuner import given
from tuner.cli import train as command

if TYPE_CHECKING:  # it takes a second to import
    import pandas as pd


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended."""

    output: Path
    """Its folder."""

    @property
    def model(self) -> Path:
        """The folder of the model to use: the best checkpoint's, where the end is not as good."""
        best = self.output / BEST_MODEL
        return best if best.exists() else self.output / MODEL

    @property
    def ending(self) -> dict[str, Any]:
        """How it ended: `kl_budget`, `note` on a problem, `best` checkpoint, as in `run.json`."""
        return dict(json.loads((self.output / RUN_FILE).read_text(encoding="utf-8"))["ending"])

    @property
    def steps(self) -> "pd.DataFrame":
        """Each step's metrics; those of an evaluation begin with `eval/`."""
        import pandas as pd

        return pd.read_json(self.output / STEPS_FILE, lines=True, precise_float=True)


def flags(**keywords: Any) -> list[str]:
    """Return keywords as the flags of a command; None: not given."""
    words = []
    for key, value in keywords.items():
        if value is None or (value is False and key not in HYPERPARAMETERS):
            continue
        words.append(f"--{key}")
        if isinstance(value, list | tuple):
            words.append(json.dumps(list(value)) if key in HYPERPARAMETERS else ",".join(map(str, value)))
        elif isinstance(value, bool):
            words += ["false"] if not value else []
        else:
            words.append(str(value))
    return words


def train(
    policy: Any = None,
    reward: Any = None,
    prompts: Any = None,
    *,
    kl_budget: float | None = None,
    task: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    output: str | os.PathLike[str] | None = None,
    **more: Any,
) -> TrainedRun:
    """Train once with PPO, in this process, and return the run.

    With a KL budget and no learning rate the run keeps its own pace, so no other number is needed.

    Args:
        policy: As of `tune`; a loaded model is saved beside the run's folder.
        reward: As of `tune`.
        prompts: As of `tune`.
        kl_budget: Highest eval KL of the model to use, in nats per response. None: the task's.
        task: In the place of policy, reward and prompts: a built-in task's name, or a task file.
        tokenizer: A loaded policy's. None: that of the place it was loaded from.
        output: An empty or new folder. None: one in runs/train.
        more: Hyperparameters and other flags of `ppo-tuner train`; `eval_prompts` and `test_prompts`, as `prompts`.

    Raises:
        PPOTunerError: something is not allowed, or the run failed.
        KeyboardInterrupt: it was interrupted; the run has saved a checkpoint.
    """
    import_from_working_folder()
    given.require_known(more, (*train_keywords(), *given.SPLITS), train)
    parts = {"policy": policy, "reward": reward, "prompts": prompts}
    given.require_task(parts, task)
    of_task = {key: more.pop(key) for key in given.SPLITS if key in more}
    folder = _new_folder("run" if task is None else Path(task).stem) if output is None else Path(output)
    if task is None:
        file = folder.with_name(f"{folder.name}-task") / given.TASK_FILE
        hyperparameters = {key: value for key, value in more.items() if key in HYPERPARAMETERS and key != "seed"}
        text = given.task_text(file.parent, **parts, tokenizer=tokenizer, hyperparameters=hyperparameters, more=of_task)
        file.write_text(text, encoding="utf-8")
        task = file
    done = launched(folder, flags(task=task, kl_budget=kl_budget, **more))
    budget = "X" if kl_budget is None else f"{kl_budget:g}"
    console().print(f"a study that looks for more: pt.tune(..., kl_budget={budget}, budget=8)")
    return done


def train_keywords() -> list[str]:
    options = (option for action in command.build_parser()._actions for option in action.option_strings)
    return [option.removeprefix("--") for option in options if option.startswith("--")]


def _new_folder(name: str) -> Path:
    return RUNS_FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def launched(folder: str | Path, words: Sequence[str]) -> TrainedRun:
    """Train in this process by the flags of `ppo-tuner train`.

    Args:
        folder: The run's folder; a text is the beginning of a new one's name.
        words: All other flags.

    Raises:
        PPOTunerError: something is not allowed, or the run failed.
        KeyboardInterrupt: it was interrupted; the run has saved a checkpoint.
    """
    output = _new_folder(folder) if isinstance(folder, str) else folder
    with given.in_words_of_keywords():
        status = command.train([*words, "--output", str(output)])
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"the run in {output} was interrupted")
    return TrainedRun(output)
