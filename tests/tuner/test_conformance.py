"""Our engine does what the controller relies on."""

from pathlib import Path

from tests.tuner.conformance import check_engine
from tuner.engine.local import LocalEngine


def test_the_local_engine_conforms(tmp_path: Path) -> None:
    check_engine(LocalEngine.of, tmp_path)
