"""List the constants of the judge and the search that are in nats, reward, tokens or iterations, not shares of a task.

    python -m tests.tuner.absolute_constants

A task's rewards, lengths, iterations and KL budget come in any unit, so whatever decides about trials is a share of
them. What is left is declared with its unit and the reason.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ppo_core.metrics import METRICS
from tuner.study.rules import RULES, SIGNS

FILES = ("tuner/judge/*.py", "tuner/search/*.py", "tuner/study/rules.py")
UNIT = re.compile(r"\b(nats|reward|tokens|iterations)\b", re.IGNORECASE)
SHARE = re.compile(r"^(A |The )?(share|factor|multiple|evaluation interval)", re.IGNORECASE)
"""Start of the description of a number that has no unit."""


class Constant(NamedTuple):
    """A number in the code."""

    where: str
    value: str
    doc: str | None

    @property
    def is_absolute(self) -> bool:
        """True if it has the unit of something that a task brings along."""
        return self.doc is not None and bool(UNIT.search(self.doc)) and not SHARE.search(self.doc)


def constants() -> Iterator[Constant]:
    """Yield the numbers that are constants of modules, or defaults of classes, and the limits of the rules."""
    root = Path(__file__).parent.parent.parent
    for path in sorted(path for pattern in FILES for path in root.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        for body in [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]:
            yield from _declared(body, text.splitlines(), module, is_module=body is tree.body)
    for rule in (*RULES.values(), *SIGNS.values()):
        if rule.metric is not None:
            unit = "" if rule.relative_to else METRICS[rule.metric].unit
            yield Constant(
                f"tuner.study.rules {rule.name}", f"{rule.limit:g}", f"{unit}: {rule.doc}" if unit else "Share"
            )


def _declared(body: list[ast.stmt], lines: list[str], module: str, *, is_module: bool) -> Iterator[Constant]:
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is None or not targets or not _is_numeric(value):
            continue
        name, text = ast.unparse(targets[0]), ast.unparse(value)
        if not is_module and text in ("0", "0.0"):  # where a count begins
            continue
        doc = lines[node.end_lineno - 1 if node.end_lineno else 0].partition("  # ")[2] or None
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            doc = " ".join(str(after.value.value).split())
        yield Constant(f"{module} {name}", text, doc)


def _is_numeric(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return bool(value.elts) and all(map(_is_numeric, value.elts))
    if isinstance(value, ast.BinOp):
        return _is_numeric(value.left) and _is_numeric(value.right)
    if isinstance(value, ast.UnaryOp):
        return _is_numeric(value.operand)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


if __name__ == "__main__":
    for one in constants():
        if one.is_absolute:
            print(f"{one.where} = {one.value}\n    {one.doc}")
