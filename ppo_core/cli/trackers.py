"""Send a run's metrics to experiment trackers (TensorBoard, Weights & Biases, ...) through accelerate.

Its tracker classes are used without an Accelerator, which would share the global state that holds the device. A resumed
run continues the same run at trackers that support it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.errors import ConfigError, nearest
from ppo_core.report import StepReport

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "ppo-tuner"
KNOWN = ("tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio")
"""Trackers supported by accelerate; each is also the name of its package."""
ALL = "all"


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers know it."""

    name: str
    id: str
    """The same after resuming."""
    folder: Path
    """Folder of a tracker that writes on this machine."""
    configuration: Mapping[str, Any]
    is_new: bool
    first_step: int
    """The step that comes next."""
    group: str | None = None
    """Group that it shares with other runs."""


def resolve(names: Sequence[str], known: Sequence[str] = KNOWN) -> tuple[str, ...]:
    """Resolve tracker names, each once and installed, or raise ConfigError; `all` means every installed one."""
    if not names:
        return ()
    from accelerate.tracking import get_available_trackers  # slow to import

    installed = [str(name) for name in get_available_trackers() if str(name) in known]
    choice = f"available: {', '.join(known)} (installed: {', '.join(installed) or 'none'})"
    for name in names:
        if name not in (*known, ALL):
            raise ConfigError(f'report_to: unknown tracker "{name}"; {choice}{nearest(name, known)}')
        if name not in (*installed, ALL):
            raise ConfigError(
                f'report_to: tracker "{name}" is not installed; install it with: pip install {name}; {choice}'
            )
    return tuple(dict.fromkeys(installed if ALL in names else names))


class Tracker:
    """A run's tracker of one name."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        """Start the tracker, or raise ConfigError; a new run's configuration is logged."""
        self._tracker = _make_tracker(name, run)
        try:
            self._tracker.start()
            if run.is_new and name not in _TAKE_CONFIGURATION:
                self._tracker.store_init_configuration(_given_values(run))
        except Exception as error:  # trackers raise errors of any class
            raise ConfigError(f'report_to: tracker "{name}" does not start: {error}') from error

    def log(self, report: StepReport) -> None:
        """Log a step's metrics, including its episode."""
        self.log_values({"episode": report.episode, **report.metrics}, report.step)

    def log_values(self, values: Mapping[str, Any], step: int) -> None:
        """Log a step's numbers and texts."""
        self._tracker.log(dict(values), step=step)

    def finish(self) -> None:
        """Flush and close the tracker."""
        self._tracker.finish()


_TAKE_CONFIGURATION = ("trackio", "wandb")
"""Trackers that get the configuration at their start; later they would write it to this process's most recent run."""


def _make_tracker(name: str, run: TrackedRun) -> "GeneralTracker":
    """Return accelerate's tracker, set up to continue a resumed run."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker_class: type[GeneralTracker] = LOGGER_TYPE_TO_CLASS[name]
    shared = {"config": _given_values(run), **({} if run.group is None else {"group": run.group})}
    options: Mapping[str, Mapping[str, Any]] = {
        # Steps that were logged before an interruption and are run again are hidden.
        "tensorboard": {"purge_step": run.first_step},
        "wandb": {"name": run.name, "id": run.id, "resume": "allow", "reinit": "create_new", **shared},
        "comet_ml": {"experiment_key": run.id},
        "swanlab": {"experiment_name": run.name, "id": run.id[:21], "resume": "allow"},
        "trackio": {"name": run.name, "resume": "allow", **shared},
    }
    if tracker_class.requires_logging_directory:
        return tracker_class(run.folder.name, logging_dir=str(run.folder.parent), **options.get(name, {}))
    return tracker_class(PROJECT, **options.get(name, {}))


def _given_values(run: TrackedRun) -> dict[str, Any]:
    return {name: value for name, value in run.configuration.items() if value is not None}
