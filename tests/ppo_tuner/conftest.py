"""The small policy of the trainer's tests."""

from tests.ppo_core.conftest import tiny_folder

__all__ = ["tiny_folder"]
