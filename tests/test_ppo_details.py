"""docs/ppo_details.md names real places, counts without a gap, and leaves no hyperparameter out."""

import ast
import re
from pathlib import Path

from ppo_core.config.hyperparameters import HYPERPARAMETERS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "ppo_details.md").read_text()
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def defined_in(file: Path) -> set[str]:
    """The file's functions, classes and constants, and a class's own as `Class.name`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        names |= _names_of(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for member in node.body for name in _names_of(member)}
    return names


def _names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_every_place_exists() -> None:
    places = PLACE.findall(TEXT)
    assert len(places) > 50
    for file, name in places:
        assert (ROOT / file).is_file(), file
        assert name in defined_in(ROOT / file), f"{file}:{name}"


def test_every_detail_is_numbered_and_most_name_their_place() -> None:
    details = re.split(r"^(?=\d+\. )", TEXT, flags=re.MULTILINE)[1:]
    assert [int(detail.split(".")[0]) for detail in details] == list(range(1, len(details) + 1))
    assert len(details) >= 40
    for detail in details:
        assert PLACE.search(detail), detail


def test_every_hyperparameter_is_mentioned() -> None:
    mentioned = set(re.findall(r"`(\w+)`", TEXT))
    assert not set(HYPERPARAMETERS) - mentioned
