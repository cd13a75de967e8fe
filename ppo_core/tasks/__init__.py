"""Built-in tasks, one package each. Their models and prompts are data that ships; `tools/make_models.py` makes them."""

import json
from pathlib import Path

from ppo_core.data.task import Prompt, Prompts


def shipped_prompts(folder: Path) -> Prompts:
    """Return the prompts of `{train,eval,test}.jsonl`: each row's `prompt`, and its other columns for the reward."""

    def split(name: str) -> tuple[Prompt, ...]:
        rows = map(json.loads, (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
        return tuple(Prompt(row.pop("prompt"), row) for row in rows)

    return Prompts(train=split("train"), eval=split("eval"), test=split("test"))
