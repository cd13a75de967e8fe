"""The search of a study file, without what the rest of its budget confirms: our side of the battery."""

import sys
from pathlib import Path

from tuner.control.run import run_study
from tuner.study.spec import StudySpec

if __name__ == "__main__":
    run_study(
        StudySpec.load(sys.argv[1]),
        storage=f"sqlite:///{Path('store.db').absolute()}",
        runs_folder=Path("runs"),
        workers=1,
        on_event=lambda _: None,
    )
