"""docs/reference.md is what the declarations say, and leaves no command out; links in docs lead somewhere."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from docs import reference, shapes
from ppo_core.cli import trl
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.data.prompts import DATE, PROMPT_COLUMNS, PromptSource
from ppo_core.data.task import TIMEOUTS, RewardKind, RewardPart
from ppo_core.loading import task_file
from ppo_core.metrics import METRICS
from tuner.cli.main import COMMANDS
from tuner.study import study_file
from tuner.study.rules import RULES, SIGNS, GuardSettings
from tuner.study.status import Origin, Role, Status
from tuner.study.worker_settings import WORKER_SETTINGS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks/README.md",
]


def test_the_reference_is_what_the_declarations_say() -> None:
    assert reference.FILE.read_text() == reference.text(), "write it again with: python docs/reference.py"


@pytest.mark.parametrize(
    "names", [COMMANDS, HYPERPARAMETERS, METRICS, RULES, trl.FIELDS, study_file.TOP_LEVEL, WORKER_SETTINGS]
)
def test_nothing_that_is_declared_is_missing(names: Iterable[str]) -> None:
    page = reference.text()
    assert not [name for name in names if f"`{name}`" not in page and f"`ppo-tuner {name}`" not in page]


def test_the_reference_says_what_every_status_origin_and_role_means() -> None:
    page = reference.text()
    for kind in (Status, Origin, Role):
        for member in kind:
            assert re.search(rf"^\| `{member.value}` \| \w", page, flags=re.MULTILINE), f"{member} lacks a meaning"


def test_the_reference_has_the_keys_of_a_task_file_alone() -> None:
    assert sorted(key for names in reference.TASK_KEYS for key in names.split(", ")) == sorted(task_file.KEYS)
    for kind in (RewardPart, PromptSource):
        assert all(shapes.all_fields(kind).values()), "each key has a meaning"
    assert all(f"`{key}`" in reference.TASK_KEYS["eval"] for key in task_file.EVAL_KEYS)


def test_meanings_that_repeat_a_declared_value_repeat_it_as_it_is() -> None:
    prompts, rewards = (shapes.all_fields(kind) for kind in (PromptSource, RewardPart))
    *columns, last = PROMPT_COLUMNS
    assert f"the first of {', '.join(columns)} and {last} " in prompts["column"]
    assert f" {DATE} unless given" in prompts["chat_template_kwargs"]
    assert f" {PromptSource.max_prompt_tokens} unless given" in prompts["max_prompt_tokens"]
    assert f" {RewardPart.retries} unless given" in rewards["retries"]
    whats: dict[RewardKind, str] = {"http": "a request", "function": "a function call"}
    for kind, what in whats.items():
        assert f" {TIMEOUTS[kind]:g} for {what}" in rewards["timeout"]


def test_the_reference_has_every_limit_and_no_other_page_a_table_of_them() -> None:
    page = reference.text()
    for sign in SIGNS.values():
        assert f"| {sign.label} | `{sign.metric}` | {sign.range} |" in page
    for rule in RULES.values():
        assert f"| `{rule.name}` | `{'true' if rule.valid is None else f'{rule.limit:g}'}` |" in page
    guard = (ROOT / "docs" / "glossary.md").read_text()
    for name, default in (("patience", GuardSettings.patience), ("grace", GuardSettings.grace)):
        assert f"`{name} = {default:g}`" in guard


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path)
        assert there.exists(), f"{page.name} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{page.name} links to {target}"
