"""Handing a run's metrics to experiment trackers (TensorBoard, Weights & Biases, ...) through accelerate.

The trackers are accelerate's own classes, used without an Accelerator: that would share the state of the one which
finds the device. A resumed run continues the same run at trackers that can.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ppo_core.errors import ConfigError, nearest
from ppo_core.report import StepReport
from ppo_core.run.run_folder import TRACKERS, Run

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "ppo-tuner"
"""The project that runs stand in at trackers that have projects."""
KNOWN = ("tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio")
"""The trackers that accelerate hands metrics to; each is the name of its package, too."""
ALL = "all"


def resolve(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of trackers, each once; `all` stands for every one that is installed.

    Raises:
        ConfigError: one is unknown or not installed.
    """
    if not names:
        return ()
    from accelerate.tracking import get_available_trackers  # takes seconds to import

    installed = [str(name) for name in get_available_trackers()]
    there_are = f"(installed: {', '.join(installed) or 'none'})"
    for name in names:
        if name not in (*KNOWN, ALL):
            known = ", ".join(KNOWN)
            raise ConfigError(
                f'report_to: unknown tracker "{name}"; available: {known} {there_are}{nearest(name, KNOWN)}'
            )
        if name not in (*installed, ALL):
            raise ConfigError(
                f'report_to: tracker "{name}" is not installed; install it with: pip install {name} {there_are}'
            )
    return tuple(dict.fromkeys(installed if ALL in names else names))


class Trackers:
    """The trackers of a run, started; no names: nothing happens."""

    def __init__(self, run: Run) -> None:
        """Start the run's trackers, and tell them its configuration where it is new.

        Raises:
            ConfigError: one of them does not start.
        """
        self._started: list[GeneralTracker] = []
        for name in run.report_to:
            tracker = _made(name, run)
            try:
                tracker.start()
                if run.first_step == 0:
                    tracker.store_init_configuration(_configuration(run))
            except Exception as error:  # whatever the tracker's own library raises
                self.finish()
                raise ConfigError(f'report_to: tracker "{name}" does not start: {error}') from error
            self._started.append(tracker)

    def log(self, report: StepReport) -> None:
        """Hand over a step's metrics, with its episode among them."""
        values = {"episode": report.episode, **report.metrics}
        for tracker in self._started:
            tracker.log(values, step=report.step)

    def finish(self) -> None:
        """Let every tracker write what it still holds."""
        for tracker in self._started:
            tracker.finish()


def _made(name: str, run: Run) -> "GeneralTracker":
    """Return accelerate's tracker of that name, with what makes it continue a resumed run."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    made: type[GeneralTracker] = LOGGER_TYPE_TO_CLASS[name]
    going_on: Mapping[str, Mapping[str, Any]] = {
        # Steps that were logged before an interruption and are run again are hidden.
        "tensorboard": {"purge_step": run.first_step},
        "wandb": {"name": run.run_name, "id": run.tracker_id, "resume": "allow"},
        "comet_ml": {"experiment_key": run.tracker_id},
        "swanlab": {"experiment_name": run.run_name, "id": run.tracker_id[:21], "resume": "allow"},
        "trackio": {"name": run.run_name, "resume": "allow"},
    }
    if made.requires_logging_directory:
        return made(run.run_name, logging_dir=str(run.output / TRACKERS), **going_on.get(name, {}))
    return made(PROJECT, **going_on.get(name, {}))


def _configuration(run: Run) -> dict[str, Any]:
    values = {"task": run.task, "device": run.device, "threads": run.threads, **run.config.to_dict()}
    return {name: value for name, value in values.items() if value is not None}
