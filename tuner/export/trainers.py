"""Writes a configuration as a file of TRL's PPO, of OpenRLHF, of verl, or of ours. Never imports torch."""

import json
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.output import plain, short
from tuner.export.chosen import Chosen
from tuner.export.drafts import MISSING, Draft, to_openrlhf, to_trl, to_verl
from tuner.export.task_parts import Parts

# What a file looks like


def _comments(lines: Iterable[str]) -> str:
    return "".join(f"# {part}\n" for line in lines for part in _wrapped(plain(line)))


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, 116, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _not_mapped(draft: Draft) -> Iterator[str]:
    order = [name for name in HYPERPARAMETERS if name in draft.notes]
    if order:
        yield "Not mapped, or not the same there:"
        yield from (f"  {name} = {short(draft.values[name])}: {draft.notes[name]}" for name in order)


def _to_fill_in(draft: Draft) -> Iterator[str]:
    yield from (f"FILL IN {key}: {what}" for key, what in draft.missing.items())


def _flat_yaml(draft: Draft, facts: Iterable[str]) -> str:
    body = _yaml(draft.keys)
    return f"{_comments([*facts, *_to_fill_in(draft)])}\n{body}\n{_comments(_not_mapped(draft))}"


def _hydra(draft: Draft, facts: Iterable[str]) -> str:
    content: dict[str, Any] = {"hydra": {"searchpath": ["pkg://verl.trainer.config"]},
                               "defaults": ["ppo_trainer", "_self_"]}  # fmt: skip
    for key, value in draft.keys.items():
        *tables, last = key.split(".")
        table = content
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return f"{_comments([*facts, *_to_fill_in(draft)])}\n{_yaml(content)}\n{_comments(_not_mapped(draft))}"


def _yaml(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120)


def _script(draft: Draft, facts: Iterable[str]) -> str:
    variables = {key: key.removesuffix("_name_or_path").replace(".", "_").upper() for key in draft.missing}
    asked = "".join(f': "${{{variables[key]}:?{_bare(what)}}}"\n' for key, what in draft.missing.items())
    flags = [
        f'--{key} "${variables[key]}"' if value == MISSING else f"--{key}{_flag_value(value)}"
        for key, value in draft.keys.items()
        if value is not False
    ]
    command = " \\\n   ".join(["python3 -m openrlhf.cli.train_ppo_ray", *flags, '"$@"'])
    ask = f"# FILL IN, or set in the environment:\n{asked}" if asked else ""
    return f"#!/bin/bash\n{_comments(facts)}\n{ask}{command}\n\n{_comments(_not_mapped(draft))}"


def _bare(text: str) -> str:
    """Return a text as the message of a `${NAME:?...}`: without what the shell would read."""
    return "".join(c for c in plain(text) if c not in "\"'$`\\{}")


def _flag_value(value: object) -> str:
    if value is True:
        return ""
    return "".join(f" {shlex.quote(str(one))}" for one in (value if isinstance(value, list) else [value]))


@dataclass(frozen=True)
class Target:
    """A trainer that a configuration is written for."""

    title: str
    """What it is, and of which version the names are."""
    suffixes: tuple[str, ...]
    """How a file for it may be called; empty: as one likes."""
    launch: tuple[str, ...]
    """Lines on how a file of it is used."""
    draft: Callable[[Chosen, Parts], Draft] | None
    """None: it is our own."""
    render: Callable[[Draft, Iterable[str]], str] = _flat_yaml


_HARDWARE = "GPUs, parallelism and memory are yours to set."
TARGETS: Mapping[str, Target] = {
    "trl": Target(
        "TRL 1.12's PPO (transformers 5)",
        (".yaml", ".yml"),
        (
            "TRL's examples/scripts/ppo/ppo.py reads it where TrlParser and its parse_args_and_config take the place "
            "of HfArgumentParser and parse_args_into_dataclasses:",
            "  accelerate launch ppo.py --config FILE",
            "Sizes are for one process; with W of them divide per_device_train_batch_size by W. A pass has at most "
            "batch / num_mini_batches rows. With several mini-batches leave gradient_accumulation_steps at 1: where it "
            "accumulates gradients, TRL's PPO steps once an epoch.",
        ),
        to_trl,
    ),
    "openrlhf": Target(
        "OpenRLHF 0.11",
        (".sh",),
        (f"{_HARDWARE} Launch:", "  bash FILE [further flags]"),
        to_openrlhf,
        _script,
    ),
    "verl": Target(
        "verl 0.8",
        (".yaml", ".yml"),
        (
            "trainer.total_training_steps ends the run; total_epochs only has to be large enough.",
            f"{_HARDWARE} Launch:",
            '  python3 -m verl.trainer.main_ppo --config-path "$PWD" --config-name NAME '
            "actor_rollout_ref.rollout.name=vllm",
        ),
        to_verl,
        _hydra,
    ),
    "yaml": Target("PPO Tuner", (".yaml", ".yml"), ("Use: ppo-tuner train --config FILE",), None),
    "json": Target("PPO Tuner", (".json",), (), None),
}
"""Every target by name."""


@dataclass(frozen=True)
class Written:
    """A configuration in a trainer's format."""

    text: str
    notes: tuple[str, ...]
    """What a format without comments cannot hold."""
    draft: Draft | None
    """None: in our own names all is said."""


def write(chosen: Chosen, target: str, parts: Parts) -> Written:
    """Return the text of a configuration for one of `TARGETS`.

    Raises:
        ConfigError: the trainer cannot run it at all.
    """
    to = TARGETS[target]
    facts = [*chosen.facts, *([f"Names are those of {to.title}."] if to.draft else []), *to.launch]
    if to.draft is not None:
        draft = to.draft(chosen, parts)
        return Written(to.render(draft, facts), (), draft)
    content = {"task": parts.task, **chosen.config.to_dict()}
    if target == "json":
        return Written(json.dumps(content, indent=2, ensure_ascii=False) + "\n", tuple(facts), None)
    return Written(f"{_comments(facts)}\n{_yaml(content)}", (), None)
