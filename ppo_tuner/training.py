"""One training run from Python, and what it left."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.cli.command_line import EXIT_INTERRUPTED
from ppo_core.cli.new_run import RUNS_FOLDER
from ppo_core.cli.run_folder import BEST_MODEL, MODEL, RUN_FILE, STEPS_FILE
from ppo_core.config.hyperparameters import HYPERPARAMETERS
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

        return pd.read_json(self.output / STEPS_FILE, lines=True)


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


def launched(name: str, words: Sequence[str], keywords: Mapping[str, Any]) -> TrainedRun:
    """Train in this process by the flags of `ppo-tuner train`, in a new folder called `name` unless one is given.

    Raises:
        PPOTunerError: something is not allowed, or the run failed.
        KeyboardInterrupt: it was interrupted; the run has saved a checkpoint.
    """
    given_output = keywords.get("output")
    output = RUNS_FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" if given_output is None else Path(given_output)
    status = command.train([*words, *([] if given_output else ["--output", str(output)])])
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"the run in {output} was interrupted")
    return TrainedRun(output)
