"""PPO Tuner from Python: `import ppo_tuner as pt`, then `pt.tune(...)`."""

from ppo_core import __version__
from ppo_core.errors import ConfigError, PPOTunerError, StudyError, TaskError
from ppo_tuner.study import Answer, Study, tune
from ppo_tuner.training import TrainedRun, train

__all__ = [
    "Answer", "ConfigError", "PPOTunerError", "Study", "StudyError", "TaskError", "TrainedRun", "__version__",
    "train", "tune",
]  # fmt: skip
