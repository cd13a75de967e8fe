"""The model card of what a run trained: a README.md as the hub reads it, in the model's folder. Never imports torch."""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ppo_core import __version__
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.output import KL_UNIT, counted, plus_minus, short
from ppo_core.run.run_folder import ConfirmedReading, Ending, Run
from ppo_core.task import Task, TaskAssets

CARD = "README.md"
ADAPTERS = "adapter_config.json"
"""A folder that holds it is adapters, which peft loads."""

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

_SLUG = re.compile(r"[^A-Za-z0-9._-]+")


def write(
    model: Path, run: Run, task: Task, assets: TaskAssets, steps: Sequence[Mapping[str, Any]], ending: Ending
) -> None:
    """Write the card of a model of the run into its folder `model`.

    `steps` are the run's lines of metrics, from step 0 on to the model's.
    """
    adapters = (model / ADAPTERS).exists()
    results = _results(task, steps) + ("" if ending.note is None else f"\n\n{_ended(model, run, ending.note)}")
    results += "" if ending.kl_course is None else f"\n\nOver the whole run, {ending.kl_course}."
    head = _head(adapters, assets, run, task)
    sections = [head, _about(adapters, run, task, assets), results, *_origin(run), _settings(run)]
    (model / CARD).write_text("\n\n".join([*sections, _made_with(adapters, run)]) + "\n", encoding="utf-8")


def _ended(model: Path, run: Run, note: str) -> str:
    """Return what the note of the run's ending says of this one of its models."""
    if model == run.best_model:
        return f"This model is from the best checkpoint within the KL budget. About the run's last model: {note}."
    return f"Warning: {note}."


def _head(adapters: bool, assets: TaskAssets, run: Run, task: Task) -> str:
    # The hub refuses a card whose base model is a folder of somebody's machine.
    is_id = _HUB_ID.fullmatch(assets.policy) is not None and not Path(assets.policy).exists()
    evaluated = _eval_results(run, task)
    data = ModelCardData(
        eval_results=evaluated or None,
        model_name=run.run_name if evaluated else None,
        base_model=assets.policy if is_id else None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["ppo", "rlhf", "ppo-tuner"],
    )
    return f"---\n{data.to_yaml()}\n---"


def _eval_results(run: Run, task: Task) -> list[EvalResult]:
    """Return what confirms the run's configuration at the run's length, for the hub's model index."""
    found = _confirmed_here(run)
    if found is None:
        return []
    over = f"mean of {counted(found.seeds, 'seed')}"
    readings = [
        ("reward", "Reward", found.reward, found.reward_low, found.reward_high),
        ("kl", f"KL from the base model, {KL_UNIT}", found.kl, found.kl_low, found.kl_high),
    ]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=_SLUG.sub("-", task.name).strip("-") or "task",
            dataset_name=f"test prompts of {task.name}",
            dataset_split="test",
            metric_type=kind,
            metric_name=f"{label} ({over}{_between(low, high)})",
            metric_value=round(value, 4),
        )
        for kind, label, value, low, high in readings
        if value is not None
    ]


def _confirmed_here(run: Run) -> ConfirmedReading | None:
    """Return what is confirmed of the run's own configuration, at its own length; None: nothing is."""
    if run.origin is None or run.origin.changed:
        return None
    length = run.config.total_episodes
    return next((one for one in run.origin.confirmed if one.total_episodes == length), None)


def _origin(run: Run) -> list[str]:
    """Return the section on the study that the configuration comes from, and how sure it is; else nothing."""
    if run.origin is None:
        return []
    from_trial = f"The configuration is that of trial {run.origin.trial} of the study {_code(run.origin.study)}"
    if run.origin.changed:
        names = ", ".join(_code(name) for name in run.origin.changed)
        lines = [f"{from_trial}, with other values of {names}: the trial's results do not apply to it."]
    elif not run.origin.confirmed:
        lines = [f"{from_trial}. One search run chose it; it is not confirmed on fresh seeds."]
    else:
        lines = [
            f"{from_trial}. Runs of it on fresh seeds, each evaluated at its best checkpoint within the KL budget:",
            "",
        ]
        lines += [_confirmed_line(one) for one in run.origin.confirmed]
        own = run.config.total_episodes
        lengths = " and ".join(str(one.total_episodes) for one in run.origin.confirmed)
        here = "" if _confirmed_here(run) else f" This model's run has {own} episodes, so it is not."
        lines += ["", f"It is confirmed at {lengths} episodes only.{here}"]
    return ["\n".join(["## Where the configuration comes from", "", *lines])]


def _confirmed_line(one: ConfirmedReading) -> str:
    interval = "; in brackets: 95% t-interval over the seeds" if one.reward_low is not None else ""
    kl = "" if one.kl is None else f", KL {one.kl:.2f}{_bracket(one.kl_low, one.kl_high)} {KL_UNIT}"
    return (
        f"- {one.total_episodes} episodes: reward {one.reward:.2f}{_bracket(one.reward_low, one.reward_high)}{kl} "
        f"(mean of {counted(one.seeds, 'seed')} on {one.prompts} test prompts{interval})"
    )


def _bracket(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f", 95% t-interval {low:.2f} to {high:.2f}"


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
