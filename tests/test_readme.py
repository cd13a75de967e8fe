"""The README's annotated tree is the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("ppo_core", "tuner", "dashboard", "benchmarks", "docs", "studies")


def files_in_the_readme() -> set[str]:
    """The paths that the tree names, from the indentation and the folders above."""
    text = (ROOT / "README.md").read_text()
    tree = text.split("## Where things are")[1].split("```text\n")[1].split("```")[0]
    folders: list[tuple[int, str]] = []
    paths = set()
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        names = re.split(r" {2,}", line.strip())[0].split(", ")
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        parent = folders[-1][1] if folders else ""
        for name in names:
            if name.endswith("/"):
                folders.append((indent, parent + name))
            paths.add(parent + name)
    return paths


def test_every_source_file_stands_in_the_tree_and_nothing_else_does() -> None:
    named = files_in_the_readme()
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".toml") and path.name != "__init__.py"
    }
    assert {name for name in named if name.endswith((".py", ".toml")) and "/" in name} == files
    for name in named:
        assert (ROOT / name).exists(), name


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"\]\((docs/[^)]+)\)", (ROOT / "README.md").read_text())
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).is_file(), picture
