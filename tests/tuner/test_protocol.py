"""What crosses the pipe is plain data that either end can read without the other's libraries."""

import subprocess
import sys

from tests.tuner.quick_study import ROOT


def test_a_worker_begins_without_torch_the_store_and_the_sampler() -> None:
    heavy = "('torch', 'transformers', 'sqlalchemy', 'optuna')"
    code = f"import sys, tuner.engine.worker; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
