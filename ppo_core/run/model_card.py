"""The model card of what a run trained: a README.md as the hub reads it, in the model's folder. Never imports torch."""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ppo_core import __version__
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.output import KL_UNIT, plus_minus, short
from ppo_core.run.run_folder import Ending, Run
from ppo_core.task import Task, TaskAssets

CARD = "README.md"
ADAPTERS = "adapter_config.json"
"""A folder that holds it is adapters, which peft loads."""

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def write(
    model: Path, run: Run, task: Task, assets: TaskAssets, steps: Sequence[Mapping[str, Any]], ending: Ending
) -> None:
    """Write the card of a model of the run into its folder `model`.

    `steps` are the run's lines of metrics, from step 0 on to the model's.
    """
    adapters = (model / ADAPTERS).exists()
    results = _results(task, steps) + ("" if ending.note is None else f"\n\n{_ended(model, run, ending.note)}")
    results += "" if ending.kl_course is None else f"\n\nOver the whole run, {ending.kl_course}."
    sections = [_head(adapters, assets), _about(adapters, run, task, assets), results, _settings(run)]
    (model / CARD).write_text("\n\n".join([*sections, _made_with(adapters, run)]) + "\n", encoding="utf-8")


def _ended(model: Path, run: Run, note: str) -> str:
    """Return what the note of the run's ending says of this one of its models."""
    if model == run.best_model:
        return f"This model is the best checkpoint's within the KL budget. Of the run's last model: {note}."
    return f"Warning: {note}."


def _head(adapters: bool, assets: TaskAssets) -> str:
    # The hub refuses a card whose base model is a folder of somebody's machine.
    is_id = _HUB_ID.fullmatch(assets.policy) is not None and not Path(assets.policy).exists()
    data = ModelCardData(
        base_model=assets.policy if is_id else None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["ppo", "rlhf", "ppo-tuner"],
    )
    return f"---\n{data.to_yaml()}\n---"


def _about(adapters: bool, run: Run, task: Task, assets: TaskAssets) -> str:
    rewards = [f"- Reward {_code(part.name)}: {part.kind} {_code(part.where)}, weight {part.weight:g}"
               for part in assets.rewards]  # fmt: skip
    prompts = assets.prompts
    return "\n".join(
        [
            f"# {run.run_name}",
            "",
            f"{'LoRA adapters for a' if adapters else 'A'} language model, trained with PPO.",
            "",
            f"- Base model: {_code(assets.policy)}",
            f"- Task: {_code(task.name)}. {task.doc}",
            *rewards,
            f"- Prompts: {len(prompts.train)} to train on, {len(prompts.eval)} to evaluate on",
        ]
    )


def _results(task: Task, steps: Sequence[Mapping[str, Any]]) -> str:
    evaluated = [step for step in steps if step.get("eval/reward") is not None]
    if not evaluated:
        return "## Results\n\nNo evaluation."
    shown = evaluated if len(evaluated) < 2 else [evaluated[0], evaluated[-1]]
    rows = [f"| {_called(step)} | {_reading(step, 'reward')} | {_reading(step, 'kl')} |" for step in shown]
    return "\n".join(
        [
            "## Results",
            "",
            f"On the evaluation prompts, at temperature {task.eval_temperature:g} and at most "
            f"{task.eval_response_length} tokens; ± is one standard error.",
            "",
            f"| | reward | KL from the base model ({KL_UNIT}) |",
            "|---|---|---|",
            *rows,
        ]
    )


def _called(step: Mapping[str, Any]) -> str:
    return "before training" if step["step"] == 0 else f"after {step['episode']} episodes"


def _reading(step: Mapping[str, Any], name: str) -> str:
    return plus_minus(step.get(f"eval/{name}"), step.get(f"eval/{name}_se"))


def _settings(run: Run) -> str:
    changed = {n: v for n, v in run.config.to_dict().items() if v != HYPERPARAMETERS[n].default}
    rows = [f"| `{name}` | {_code(short(value, 6))} |" for name, value in changed.items()]
    return "\n".join(["## PPO settings other than the defaults", "", "| setting | value |", "|---|---|", *rows])


def _made_with(adapters: bool, run: Run) -> str:
    packages = ("torch", "transformers", *(("peft",) if adapters else ()))
    versions = ", ".join(f"{name} {found}" for name in packages if (found := _version(name)))
    return f"## Made with\n\nPPO Tuner {__version__}, {versions}:\n\n```sh\n{run.command}\n```"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _code(text: str) -> str:
    """Return a text as Markdown code, on one line and without what would end it."""
    return "`" + " ".join(text.replace("`", "'").replace("|", "\\|").split()) + "`"
