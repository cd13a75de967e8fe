"""Prompts from files, folders and datasets: read, checked, and put into disjoint splits.

`PromptSource` declares where they are; `read_prompts` reads them and says what it left out. Nothing here imports torch.
"""

from ppo_core.prompts.encoding import encode, prompt_lengths
from ppo_core.prompts.reading import read_prompts
from ppo_core.prompts.source import PromptSource

__all__ = ["PromptSource", "encode", "prompt_lengths", "read_prompts"]
