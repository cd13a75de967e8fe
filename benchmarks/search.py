"""How good the search is: runs of whole search spaces, recorded once, on which strategies are judged.

python benchmarks/search.py record reviews    # trains hundreds of configurations; resumes where it was
python benchmarks/search.py show reviews      # what is recorded
python benchmarks/search.py replay reviews    # strategies over the recorded runs
python benchmarks/search.py live --peer       # whole studies, run for real; takes hours, and resumes where it was
python benchmarks/search.py restarts reviews  # what a trial costs beside training: the replay's constants
"""

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from support import comparing, live, recorded, recorded_summary, recording, replay_report
from support.common import plain, run_command
from support.recording import DEFAULT_AMOUNTS, OTHER_AMOUNT, Amount
from support.replaying import MEASURED
from support.traces import traces_of

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

    replay = commands.add_parser("replay", help="compare strategies over the recorded runs")
    replay.add_argument("task", choices=BUILT_IN)
    replay.add_argument("--repeats", type=_positive, metavar="N", default=200, help="orders of the runs (200)")
    replay.add_argument("--workers", type=_positive, metavar="N", default=1, help="trials at a time (1)")
    replay.add_argument("--json", action="store_true", help="print one line of JSON as well")
    replay.set_defaults(run=_replay)

    lived = commands.add_parser("live", help="run whole studies: random search, ours, and Optuna alone")
    lived.add_argument("--study", type=Path, metavar="FILE", default=Path("studies/reviews.toml"))
    lived.add_argument("--studies", type=_positive, metavar="N", default=5, help="of each, with seeds from 0 (5)")
    lived.add_argument("--budget", type=float, metavar="N", default=12.0, help="of each, in full trials (12)")
    lived.add_argument("--sampler", nargs="+", choices=tuple(SAMPLERS), default=[SamplerSpec.name], help="of ours")
    lived.add_argument("--peer", action="store_true", help="Optuna alone, too: see support/optuna_alone.py")
    lived.add_argument("--json", action="store_true", help="print one line of JSON as well")
    lived.set_defaults(run=_live)

    restarts = commands.add_parser("restarts", help="measure what it costs to start, pause and resume a trial")
    restarts.add_argument("task", choices=BUILT_IN)
    restarts.add_argument("--rounds", type=_positive, metavar="N", default=5, help="medians are taken over them (5)")
    restarts.set_defaults(run=_restarts)
    return parser


def _record(arguments: argparse.Namespace) -> int:
    usual = DEFAULT_AMOUNTS.get(arguments.task, OTHER_AMOUNT)
    given = {field.name: getattr(arguments, field.name) for field in fields(Amount)}
    amount = Amount(**{name: getattr(usual, name) if value is None else value for name, value in given.items()})
    return recording.record(arguments.task, amount, arguments.workers, arguments.until)


def _show(arguments: argparse.Namespace) -> int:
    print(recorded_summary.summary(recorded.read(recorded.file_of(arguments.task))))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    runs = recorded.read(recorded.file_of(arguments.task))
    amount = {"repeats": arguments.repeats, "workers": arguments.workers}
    found = comparing.compare(arguments.task, traces_of(runs), runs.spec, MEASURED, **amount, progress=_tell)
    print(replay_report.text(found))
    if arguments.json:
        print(json.dumps(plain(asdict(found))))
    return 0


def _live(arguments: argparse.Namespace) -> int:
    sides = live.arms(arguments.sampler, arguments.peer)
    spec = StudySpec.load(arguments.study).with_keys({"budget": arguments.budget}, "--budget")
    found = live.run_all(sides, spec, arguments.study, arguments.studies, recording.ROOT / live.FOLDER, _tell)
    moment, summaries = live.summarise(found, spec.kl_budget)
    print(live.table(moment, summaries))
    data: dict[str, Any] = {"cpu_seconds": moment, "budget": spec.budget, "arms": [asdict(one) for one in summaries]}
    if recorded.file_of(spec.task).exists():
        runs = recorded.read(recorded.file_of(spec.task))
        random = comparing.RandomSearch.of(traces_of(runs), runs.spec, MEASURED)
        pace = live.pace(found[live.RANDOM], random)
        ratios = [live.Ratios.of(arm, results, spec.kl_budget, random, pace) for arm, results in found.items()]
        print(live.ratio_lines(ratios, random, pace))
        data |= {"random_search": asdict(random), "ratios": [asdict(one) for one in ratios], "pace": pace}
    if arguments.json:
        print(json.dumps(data))
    return 0


def _restarts(arguments: argparse.Namespace) -> int:
    from support import restarting

    costs = restarting.measure(recording.built_in_study(arguments.task), arguments.rounds)
    for name, seconds in costs.items():
        print(f"{name:8}{seconds:8.3f} CPU-seconds")
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(run_command(_parser()))
