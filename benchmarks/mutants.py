"""How many small faults the tests notice: each mutant changes one expression in a copy of the code that decides.

    .venv/bin/python benchmarks/mutants.py --count 200 --out mutants.jsonl

A mutant swaps a comparison, a sign, a number or a condition, or returns None. They are drawn with one seed, the same
number from each part of the code, and run against that part's fast tests, each in a fork of a process that has loaded
the libraries. A mutant that no test notices is printed; some of them change nothing that can be seen. A second call
with the same `--out` runs what is missing.
"""

import argparse
import ast
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

TUNER, CORE = "tests/tuner/test_", "tests/ppo_core/test_"
PARTS: dict[str, dict[str, list[str]]] = {
    "choose": {
        "tuner/search/choose.py": [TUNER + name for name in ("worth", "choose", "baseline", "listed_trials")],
        "tuner/search/prune.py": [TUNER + name for name in ("prune", "choose")],
    },
    "judge": {
        "tuner/judge/scoring.py": [TUNER + name for name in ("scoring", "results", "choose", "listings")],
        "tuner/judge/best.py": [TUNER + name for name in ("results", "scoring", "answer")],
        "tuner/judge/guard.py": [TUNER + name for name in ("guard", "invariance")],
        "tuner/judge/diagnose.py": [TUNER + name for name in ("diagnose", "invariance")],
        "tuner/judge/hacking.py": [TUNER + name for name in ("diagnose", "gauntlet")],
        "tuner/judge/paired.py": [TUNER + name for name in ("paired", "answer")],
    },
    "controller": {
        "tuner/control/controller.py": [TUNER + name for name in ("controller", "retry", "order_settings")],
        "tuner/control/trial_ends.py": [TUNER + name for name in ("choose", "controller", "worker")],
    },
    "loss": {"ppo_core/algorithm/ppo_loss.py": [CORE + name for name in ("ppo_loss", "mathematics", "not_finite")]},
    "advantages": {
        "ppo_core/algorithm/advantages.py": [CORE + name for name in ("advantages", "mathematics", "not_finite")]
    },
    "checkpoint": {
        "ppo_core/checkpoint.py": [CORE + "checkpoint", CORE + "checkpoints_kept", TUNER + "retention", CORE + "fork"]
    },
    "store": {
        "tuner/store/trials.py": [TUNER + name for name in ("store", "listings", "copy", "readings")],
        "tuner/store/studies.py": [TUNER + name for name in ("store", "resilience", "copy")],
        "tuner/store/rows.py": [TUNER + name for name in ("store", "listings", "propose")],
        "tuner/store/orders.py": [TUNER + name for name in ("store", "orders")],
        "tuner/store/bulk.py": [TUNER + "copy"],
    },
}
SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
LIMIT_S = 180.0


class Mutant(NamedTuple):
    """One expression of a file, and the text in its place."""

    part: str
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str

    def applied(self, source: str) -> str:
        """Return the file with the mutant in it."""
        lines = source.split("\n")
        before = lines[self.line - 1].encode()[: self.column].decode()
        after = lines[self.end_line - 1].encode()[self.end_column :].decode()
        return "\n".join([*lines[: self.line - 1], before + self.text + after, *lines[self.end_line :]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=53)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="results, a line each")
    args = parser.parse_args()
    args.out = args.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        tree = subprocess.run(["git", "archive", "HEAD"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=tree, check=True)
        os.chdir(folder)
        run(drawn(args.count, args.seed), args.out)


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return mutants, as many from each part of the code, in a random order."""
    chance, parts = random.Random(seed), []
    for part, files in PARTS.items():
        pool = [mutant for path in files for mutant in mutants(part, path)]
        parts.append(chance.sample(pool, min(len(pool), count // len(PARTS) + 1)))
    mixed = [mutant for part in parts for mutant in part]
    return chance.sample(mixed, count)


def mutants(part: str, path: str) -> list[Mutant]:
    """Return all mutants of a file. Texts, annotations and errors are left alone."""
    tree, skipped = ast.parse(Path(path).read_text()), set[ast.AST]()
    for node in ast.walk(tree):
        annotations = [getattr(node, "returns", None), getattr(node, "annotation", None)]
        alone = [node] if isinstance(node, ast.JoinedStr | ast.Raise) else [one for one in annotations if one]
        skipped |= {inner for one in alone for inner in ast.walk(one)}
    return [
        Mutant(part, path, old.lineno, old.col_offset, old.end_lineno or 0, old.end_col_offset or 0, new)
        for node in ast.walk(tree)
        if node not in skipped
        for old, new in changed(node)
    ]


def changed(node: ast.AST) -> list[tuple[ast.expr, str]]:
    """Return the expressions of a node that are changed, each with its new text."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            return [(node, f"({ast.unparse(ast.Compare(node.left, [SWAPS[type(operator)]()], node.comparators))})")]
        case ast.BinOp(op=ast.Add() | ast.Sub()) if "'" not in ast.unparse(node):
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            return [(node, f"({ast.unparse(ast.BinOp(node.left, other, node.right))})")]
        case ast.Constant(value=bool(value)):
            return [(node, repr(not value))]
        case ast.Constant(value=int(value)):
            return [(node, repr(value + 1))]
        case ast.Constant(value=float(value)):
            return [(node, repr(value * 1.5 or 1.0))]
        case ast.If(test=test) | ast.IfExp(test=test):
            return [(test, f"(not ({ast.unparse(test)}))")]
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            return [(value, "None")]
    return []


def run(chosen: list[Mutant], out: Path) -> None:
    """Run what `out` lacks, in the copy of the code that is the current folder, and print what survives."""
    sys.path.insert(0, str(Path.cwd()))
    for library in ("optuna", "pandas", "sqlalchemy", "transformers"):
        importlib.import_module(library)
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=str(Path.cwd()), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    done = {} if not out.exists() else dict(json.loads(line) for line in out.read_text().splitlines())

    for part, path in sorted({(mutant.part, mutant.path) for mutant in chosen}) if not done else []:
        if fails(PARTS[part][path]):
            raise SystemExit(f"the tests of {path} fail without a mutant")
    for mutant in chosen:
        key = f"{mutant.path}:{mutant.line}:{mutant.column} {mutant.text}"
        if key in done:
            continue
        file, source = Path(mutant.path), Path(mutant.path).read_text()
        file.write_text(mutant.applied(source))
        done[key] = fails(PARTS[mutant.part][mutant.path])
        file.write_text(source)
        with out.open("a") as lines:
            lines.write(json.dumps([key, done[key]]) + "\n")
        if not done[key]:
            print(key, "|", source.split("\n")[mutant.line - 1].strip(), flush=True)
    print(f"{sum(done.values())} of {len(done)} killed")


def fails(tests: list[str]) -> bool:
    """Run tests in a fork, and return True if one fails or they take too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            marks = "not (slow or postgres or ray or browser or chaos)"
            os._exit(
                int(pytest.main(["-qx", "-p", "no:cacheprovider", "-m", marks, *(f"{name}.py" for name in tests)]))
            )
    began = time.monotonic()
    while time.monotonic() - began < LIMIT_S:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


if __name__ == "__main__":
    main()
