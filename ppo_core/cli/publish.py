"""Publish a trained model: its card, a README.md of one page as the hub reads it, and the push to the Hugging Face Hub.

The repository is created before training. Never imports torch.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ppo_core import __version__
from ppo_core.cli.ending import Ending
from ppo_core.cli.run_folder import HubRepo, Run, RunOrigin
from ppo_core.config.lookup import HUB_ID
from ppo_core.data.task import Task, TaskAssets
from ppo_core.errors import ConfigError, PPOTunerError, first_line
from ppo_core.output import KL_UNIT, decimals, fixed, measured, pluralize, plus_minus, short, without_secrets

CARD = "README.md"
ADAPTERS = "adapter_config.json"
"""File that identifies a folder of adapters, to be loaded with peft."""
PACKAGES = ("torch", "transformers", "peft")

FLAG = "--push_to_hub"


def write_card(
    model: Path, run: Run, task: Task, assets: TaskAssets, steps: Sequence[Mapping[str, Any]], ending: Ending
) -> None:
    """Write the card of a model of the run into its folder; `steps` are the lines of metrics up to the model's step."""
    is_adapters = (model / ADAPTERS).exists()
    command = shlex.join(without_secrets(word) for word in shlex.split(run.command))
    facts = [f"- Base model: {_code(assets.policy)}", f"- Task: {_code(task.name)}. {task.doc}"]
    for part in assets.rewards:
        where = _code(without_secrets(part.where))
        facts.append(f"- Reward {_code(part.name)}: {part.kind} {where}, weight {part.weight:g}")
    facts.append(f"- Prompts: {len(assets.prompts.train)} to train on, {len(assets.prompts.eval)} to evaluate on")
    settings = ["| setting | value |", "|---|---|"]
    for name, value in run.config.changed().items():
        cell = _code(short(value, 6)).replace("|", r"\|")
        settings.append(f"| `{name}` | {cell} |")
    lines = [
        f"---\n{_head(is_adapters, assets).to_yaml()}\n---",
        f"# {run.run_name}",
        f"{'LoRA adapters for a' if is_adapters else 'A'} language model, trained with PPO.",
        "\n".join(facts),
        "## Results",
        _results(task, steps),
        *_warnings(model, run, ending),
    ]
    if run.origin is not None:
        lines += ["## Where the configuration comes from", _origin(run.origin)]
    if run.stages_text is not None:
        lines.append(f"The trial is a fork: {run.stages_text}. The table below has the last values.")
    lines += [
        "## PPO settings other than the defaults",
        "\n".join(settings),
        "## Made with",
        f"PPO Tuner {__version__}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}:",
        f"```sh\n{command}\n```",
    ]
    (model / CARD).write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def _head(is_adapters: bool, assets: TaskAssets) -> ModelCardData:
    # The hub refuses a local path as base model.
    is_id = HUB_ID.fullmatch(assets.policy) is not None and not Path(assets.policy).exists()
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
        when = "before training" if step["step"] == 0 else f"after {pluralize(step['episode'], 'episode')}"
        rows.append(f"| {when} | {_reading(step, 'reward')} | {_reading(step, 'kl')} |")
    return (
        f"On the evaluation prompts, at temperature {task.eval_temperature:g} and at most "
        f"{pluralize(task.eval_response_length, 'token')}; ± is one standard error.\n\n"
        f"| | reward | KL from the base model ({KL_UNIT}) |\n|---|---|---|\n" + "\n".join(rows)
    )


def _reading(step: Mapping[str, Any], name: str) -> str:
    return plus_minus(step.get(f"eval/{name}"), step.get(f"eval/{name}_se"))


def _warnings(model: Path, run: Run, ending: Ending) -> list[str]:
    """Return the run's result for this model, in words."""
    warnings = []
    if model == run.best_model:
        about = "" if ending.note is None else f" About the run's last model: {ending.note}."
        warnings.append(f"This model is from the best checkpoint within the KL budget.{about}")
    elif ending.note is not None:
        warnings.append(f"Warning: {ending.note}.")
    if ending.kl_course is not None:
        warnings.append(f"Over the whole run, {ending.kl_course}.")
    return warnings


def _origin(origin: RunOrigin) -> str:
    """Return the configuration's trial and its confirmed results, in words."""
    text = f"The configuration is that of trial {origin.trial} of the study {_code(origin.study)}"
    if origin.changed:
        names = ", ".join(map(_code, origin.changed))
        return f"{text}, with other values of {names}: the trial's results do not apply to it."
    if not origin.confirmed:
        return f"{text}. One search run chose it; it is not confirmed on fresh seeds."
    lines = [f"{text}. Runs of it on fresh seeds, at the best checkpoint within the KL budget, on the test prompts:\n"]
    for reading in origin.confirmed:
        low, high = reading.reward_low, reading.reward_high
        places = decimals([reading.reward], [] if low is None or high is None else [high - low])
        interval = "" if low is None else f" [{fixed(low, places)}, {fixed(high, places)}] (95% t-interval)"
        kl = "" if reading.kl is None else f", KL {measured(reading.kl)} {KL_UNIT}"
        reward = f"{pluralize(reading.total_episodes, 'episode')}: reward {fixed(reading.reward, places)}{interval}"
        lines.append(f"- {reward}{kl}; mean of {pluralize(reading.seeds, 'seed')}")
    return "\n".join(lines)


def _code(text: str) -> str:
    """Return a text as inline code on one line; backticks inside become apostrophes."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def create_repo(asked: HubRepo, name: str) -> HubRepo:
    """Create the repository unless it exists, and return it; `name` is used if it has none.

    Raises ConfigError for a name that is not allowed or without a token, PPOTunerError where the hub does not do it.
    """
    from huggingface_hub import HfApi, get_token  # slow to import
    from huggingface_hub.errors import HFValidationError

    if get_token() is None:
        raise ConfigError(f"{FLAG} needs a token that may write: log in with `hf auth login`, or set HF_TOKEN")
    repo = asked.id or name
    try:
        with _one_line(f"{FLAG}: cannot create the repository {repo}"):
            return HubRepo(HfApi().create_repo(repo, private=asked.private, exist_ok=True).repo_id, asked.private)
    except HFValidationError as error:
        raise ConfigError(f"{FLAG} {repo} is not allowed: {first_line(error)}") from None


def upload(repo: HubRepo, folder: Path, message: str) -> str:
    """Upload a model's folder and return its repository's address.

    Raises:
        PPOTunerError: it did not arrive; the message says where the model is, and how to push it later.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # progress bars would mix with our lines
    try:
        with _one_line(f"pushing the model to {repo.id} failed"):
            api = HfApi()
            api.upload_folder(repo_id=repo.id, folder_path=folder, commit_message=message)
            return f"{api.endpoint}/{repo.id}"
    except PPOTunerError as error:
        private = ["--private"] if repo.private else []
        command = shlex.join(["hf", "upload", repo.id, str(folder), ".", *private])
        raise PPOTunerError(f"{error}; the model stays in {folder}; push it later with: {command}") from error


@contextmanager
def _one_line(failure: str) -> Iterator[None]:
    """Convert errors of the hub's library, or of the connection, to a one-line PPOTunerError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError:
        raise
    except HfHubHTTPError as error:
        answer = error.server_message or first_line(error)
        raise PPOTunerError(f"{failure}: the hub refuses ({error.response.status_code}): {answer}") from error
    except Exception as error:  # connections raise classes of libraries below the hub's own
        raise PPOTunerError(f"{failure}: {first_line(error)}") from error
