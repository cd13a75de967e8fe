"""How good the search is: runs of whole search spaces, recorded once, and whole studies.

python benchmarks/search.py record reviews    # trains hundreds of configurations; resumes where it was
python benchmarks/search.py show reviews      # what is recorded
python benchmarks/search.py live --peer       # whole studies, run for real; takes hours, and resumes where it was
"""

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

from support import live, recorded, recorded_summary, recording
from support.common import run_command
from support.recording import DEFAULT_AMOUNTS, OTHER_AMOUNT, Amount

from ppo_core.data.task import BUILT_IN
from tuner.study.spec import StudySpec
from tuner.study.study_file import SAMPLERS, SamplerSpec


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    record = commands.add_parser("record", help="train what is not recorded yet; may be killed")
    record.add_argument("task", choices=BUILT_IN)
    record.add_argument("--random", type=_positive, metavar="N", help="random configurations (reviews: 300, else 120)")
    record.add_argument("--top", type=_positive, metavar="N", help="the best, to be repeated (reviews: 15, else 0)")
    record.add_argument("--seeds", type=_positive, metavar="N", help="seeds of each of these, the first included (3)")
    record.add_argument("--workers", type=_positive, metavar="N", default=2, help="processes (2)")
    record.add_argument("--until", type=float, metavar="SECONDS", help="begin no run after this time")
    record.set_defaults(run=_record)

    show = commands.add_parser("show", help="print what is recorded")
    show.add_argument("task", choices=BUILT_IN)
    show.set_defaults(run=_show)

    lived = commands.add_parser("live", help="run whole studies: random search, ours, and Optuna alone")
    lived.add_argument("--study", type=Path, metavar="FILE", default=Path("studies/reviews.toml"))
    lived.add_argument("--studies", type=_positive, metavar="N", default=5, help="of each, with seeds from 0 (5)")
    lived.add_argument("--budget", type=float, metavar="N", default=12.0, help="of each, in full trials (12)")
    lived.add_argument("--sampler", nargs="+", choices=tuple(SAMPLERS), default=[SamplerSpec.name], help="of ours")
    lived.add_argument("--peer", action="store_true", help="Optuna alone, too: see support/optuna_alone.py")
    lived.add_argument("--json", action="store_true", help="print one line of JSON as well")
    lived.set_defaults(run=_live)
    return parser


def _record(arguments: argparse.Namespace) -> int:
    usual = DEFAULT_AMOUNTS.get(arguments.task, OTHER_AMOUNT)
    given = {field.name: getattr(arguments, field.name) for field in fields(Amount)}
    amount = Amount(**{name: getattr(usual, name) if value is None else value for name, value in given.items()})
    return recording.record(arguments.task, amount, arguments.workers, arguments.until)


def _show(arguments: argparse.Namespace) -> int:
    print(recorded_summary.summary(recorded.read(recorded.file_of(arguments.task))))
    return 0


def _live(arguments: argparse.Namespace) -> int:
    sides = live.arms(arguments.sampler, arguments.peer)
    spec = StudySpec.load(arguments.study).with_keys({"budget": arguments.budget}, "--budget")
    found = live.run_all(sides, spec, arguments.study, arguments.studies, recording.ROOT / live.FOLDER, _tell)
    moment, summaries = live.summarise(found, spec.kl_budget)
    print(live.table(moment, summaries))
    if arguments.json:
        arms = [asdict(one) for one in summaries]
        print(json.dumps({"cpu_seconds": moment, "budget": spec.budget, "arms": arms}))
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(run_command(_parser()))
