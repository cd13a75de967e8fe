"""PPO for transformers language models: the trainer, its mathematics and the built-in tasks.

Importing this package imports neither torch nor transformers; the modules that train do.
"""

from ppo_core.config.hyperparameters import PPOConfig

__version__ = "0.1.0"

__all__ = ["PPOConfig", "__version__"]
