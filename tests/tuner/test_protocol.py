"""What crosses the pipe is plain data that either end can read without the other's libraries."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_core.distributed.rank_zero import NextMove
from ppo_core.report import Sample, StepReport
from tests.tuner.quick_study import ROOT, quick_spec
from tuner.engine.protocol import (
    Ended,
    Entered,
    Failed,
    Job,
    Left,
    Lost,
    Message,
    Phase,
    Prepared,
    PrepareTask,
    Progress,
    Stepped,
    TrialSpec,
)
from tuner.study.status import Reason

REPORT = StepReport(
    3, 48, {"eval/reward": 1.5, "objective/kl_exact": float("inf")}, (Sample(0, "a", "b", 1.0, 2.0, 3),)
)
MESSAGES: list[Message | Job | NextMove] = [
    PrepareTask("reviews", Path("x")),
    TrialSpec(1, {"seed": 3}, "reviews", "a:b", "cpu", 2, Path("x"), quick_spec().guard, 4.5, resume_from=Path("y")),
    *NextMove,
    Progress("words", 0.25),
    Prepared(),
    *map(Entered, Phase),
    Stepped(REPORT, 0.5, 0.25, Reason("kl_limit", "too far", "objective/kl_exact", 20.0, 15.0, 3, 3, ({"step": 3.0},))),
    Ended(),
    Left(),
    Failed("RuntimeError: no", "Traceback", out_of_memory=True),
    Lost("killed by SIGKILL"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_pipe(message: object) -> None:
    assert pickle.loads(pickle.dumps(message)) == message


def test_a_worker_begins_without_torch_and_without_the_store_and_the_sampler() -> None:
    heavy = "('torch', 'transformers', 'sqlalchemy', 'optuna')"
    code = f"import sys, tuner.engine.worker; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
