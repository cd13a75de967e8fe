"""The model card of a run: a README.md of one page in the model's folder, as the hub reads it. Never imports torch."""

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ppo_core import __version__
from ppo_core.cli.run_folder import Ending, Run, RunOrigin
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.data.task import Task, TaskAssets
from ppo_core.output import KL_UNIT, counted, plus_minus, short, without_secrets

CARD = "README.md"
ADAPTERS = "adapter_config.json"
"""File that identifies a folder of adapters, to be loaded with peft."""
PACKAGES = ("torch", "transformers", "peft")

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def write(
    model: Path, run: Run, task: Task, assets: TaskAssets, steps: Sequence[Mapping[str, Any]], ending: Ending
) -> None:
    """Write the card of a model of the run into its folder `model`.

    `steps` are the run's lines of metrics, from step 0 on to the model's.
    """
    is_adapters = (model / ADAPTERS).exists()
    changed = {n: v for n, v in run.config.to_dict().items() if v != HYPERPARAMETERS[n].default}
    command = shlex.join(without_secrets(word) for word in shlex.split(run.command))
    lines = [
        f"---\n{_head(is_adapters, assets).to_yaml()}\n---",
        f"# {run.run_name}",
        f"{'LoRA adapters for a' if is_adapters else 'A'} language model, trained with PPO.",
        "\n".join(
            [
                f"- Base model: {_code(assets.policy)}",
                f"- Task: {_code(task.name)}. {task.doc}",
                *(
                    f"- Reward {_code(p.name)}: {p.kind} {_code(without_secrets(p.where))}, weight {p.weight:g}"
                    for p in assets.rewards
                ),
                f"- Prompts: {len(assets.prompts.train)} to train on, {len(assets.prompts.eval)} to evaluate on",
            ]
        ),
        "## Results",
        _results(task, steps),
        *_warnings(model, run, ending),
        *([] if run.origin is None else ["## Where the configuration comes from", _origin(run.origin)]),
        *(
            []
            if run.stages_text is None
            else [f"The trial is a fork: {run.stages_text}. The table below has the last values."]
        ),
        "## PPO settings other than the defaults",
        "\n".join(
            ["| setting | value |", "|---|---|", *(f"| `{n}` | {_code(short(v, 6))} |" for n, v in changed.items())]
        ),
        "## Made with",
        f"PPO Tuner {__version__}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}:",
        f"```sh\n{command}\n```",
    ]
    (model / CARD).write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def _head(is_adapters: bool, assets: TaskAssets) -> ModelCardData:
    # The hub refuses a local path as base model.
    is_id = _HUB_ID.fullmatch(assets.policy) is not None and not Path(assets.policy).exists()
    return ModelCardData(
        base_model=assets.policy if is_id else None,
        library_name="peft" if is_adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["ppo", "rlhf", "ppo-tuner"],
    )


def _results(task: Task, steps: Sequence[Mapping[str, Any]]) -> str:
    evaluated = [step for step in steps if step.get("eval/reward") is not None]
    if not evaluated:
        return "No evaluation."
    rows = []
    for step in evaluated[:1] + evaluated[1:][-1:]:
        when = "before training" if step["step"] == 0 else f"after {step['episode']} episodes"
        rows.append(f"| {when} | {_reading(step, 'reward')} | {_reading(step, 'kl')} |")
    return (
        f"On the evaluation prompts, at temperature {task.eval_temperature:g} and at most "
        f"{task.eval_response_length} tokens; ± is one standard error.\n\n"
        f"| | reward | KL from the base model ({KL_UNIT}) |\n|---|---|---|\n" + "\n".join(rows)
    )


def _reading(step: Mapping[str, Any], name: str) -> str:
    return plus_minus(step.get(f"eval/{name}"), step.get(f"eval/{name}_se"))


def _warnings(model: Path, run: Run, ending: Ending) -> list[str]:
    """Return the run's result for this model, in words."""
    found = []
    if ending.note is not None and model == run.best_model:
        found.append("This model is from the best checkpoint within the KL budget. "
                     f"About the run's last model: {ending.note}.")  # fmt: skip
    elif ending.note is not None:
        found.append(f"Warning: {ending.note}.")
    if ending.kl_course is not None:
        found.append(f"Over the whole run, {ending.kl_course}.")
    return found


def _origin(origin: RunOrigin) -> str:
    """Return the configuration's trial and its confirmed results, in words."""
    text = f"The configuration is that of trial {origin.trial} of the study {_code(origin.study)}"
    if origin.changed:
        names = ", ".join(map(_code, origin.changed))
        return f"{text}, with other values of {names}: the trial's results do not apply to it."
    if not origin.confirmed:
        return f"{text}. One search run chose it; it is not confirmed on fresh seeds."
    lines = [f"{text}. Runs of it on fresh seeds, at the best checkpoint within the KL budget, on the test prompts:\n"]
    for one in origin.confirmed:
        low, high = one.reward_low, one.reward_high
        interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}] (95% t-interval)"
        kl = "" if one.kl is None else f", KL {one.kl:.2f} {KL_UNIT}"
        seeds = counted(one.seeds, "seed")
        lines.append(f"- {one.total_episodes} episodes: reward {one.reward:.2f}{interval}{kl}; mean of {seeds}")
    return "\n".join(lines)


def _code(text: str) -> str:
    """Return a text as Markdown code on one line, without backticks."""
    return "`" + " ".join(text.replace("`", "'").replace("|", "\\|").split()) + "`"
