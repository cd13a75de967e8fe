"""Does the search win on tasks it was not chosen on, wherever it starts? Small tasks of two makers, made from seeds.

python benchmarks/battery.py run open            # tasks that searches are tuned on; hours, and resumes where it was
python benchmarks/battery.py run open --screen --name idea    # ours alone, two starts, three seeds: about 20 minutes
python benchmarks/battery.py run open --make pairs --arm "random search" --seeds 1    # the scale of a maker's tasks
python benchmarks/battery.py run sealed          # the judge; adds a line to the ledger
python benchmarks/battery.py show open --name idea
python benchmarks/battery.py check               # are the tasks of any use, by random search
"""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

sys.path.insert(1, str(Path(__file__).parents[1]))  # for tools/

from support.battery import report, runs
from support.battery.recipes import GROUPS, MAKES, Recipe
from support.battery.tasks import recipes
from support.common import commit, run_command

from docs.kl_by_beta import draw
from ppo_core.errors import PPOTunerError

LEDGER = runs.DATA / "ledger.jsonl"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser("run", help="run what is missing, then show")
    show = commands.add_parser("show", help="print a table of what has run, and draw its picture")
    show.add_argument("--picture", type=Path, metavar="FILE", help="draw value against cost into a PNG file")
    for command in (run, show):
        command.add_argument("group", choices=GROUPS)
        command.add_argument("--name", default=runs.OURS, help="ours under another name, to be compared (ours)")
        command.add_argument("--json", action="store_true", help="print one line of JSON as well")
    check = commands.add_parser("check", help="say of each task whether it is taken")
    for command in (run, show, check):
        command.add_argument(
            "--make", nargs="+", choices=MAKES, default=list(MAKES), help="tasks of these makers (both)"
        )
    run.add_argument("--arm", nargs="+", choices=runs.ARMS, default=list(runs.ARMS), help="all four")
    run.add_argument("--start", nargs="+", choices=runs.ALL_STARTS, default=list(runs.ALL_STARTS), help="all five")
    run.add_argument("--seeds", type=int, metavar="N", default=5, help="studies of each kind, with seeds from 0 (5)")
    run.add_argument("--screen", action="store_true", help="ours alone, two starts, three seeds")
    run.add_argument("--workers", type=int, metavar="N", default=2, help="studies at a time (2)")
    run.set_defaults(run=_run, picture=None)
    show.set_defaults(run=_show)
    check.set_defaults(run=_check)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    tasks = recipes(arguments.group, arguments.make)
    arms = [runs.OURS] if arguments.screen else arguments.arm
    starts = runs.STARTS_SCREENED if arguments.screen else arguments.start
    seeds = min(arguments.seeds, 3) if arguments.screen else arguments.seeds
    for arm in arms:
        name = arguments.name if arm == runs.OURS else arm
        runs.run(name, arm, runs.jobs(arm, tasks, starts, seeds), tasks, arguments.workers, _tell)
    found = _lines(arguments)
    if arguments.group == "sealed" and runs.OURS in arms:
        with LEDGER.open("a") as ledger:
            entry = {
                "date": f"{datetime.date.today()}", "commit": commit(), "name": arguments.name,
                "makes": arguments.make, "lines": found,
            }  # fmt: skip
            ledger.write(json.dumps(entry) + "\n")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    _lines(arguments)
    return 0


def _lines(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Print the table, and return its lines as plain values."""
    names = dict.fromkeys((*runs.ARMS, arguments.name))
    results = {name: runs.read_results(name) for name in names}
    tasks = _measured(recipes(arguments.group, arguments.make), results[runs.RANDOM])
    known = {name: found for name, found in results.items() if found.task.isin([task.name for task in tasks]).any()}
    if runs.RANDOM not in known:
        raise PPOTunerError(f"no random search of the {arguments.group} tasks has run, and values are measured by it")
    battery = report.Battery(tasks, known)
    lines = battery.lines()
    print(report.table(lines))
    if arguments.picture:
        draw(report.figure(battery), arguments.picture)
    found = report.as_json(lines)
    if arguments.json:
        print(json.dumps(found))
    return found


def _measured(tasks: Sequence[Recipe], random: pd.DataFrame) -> list[Recipe]:
    """Return the tasks on which random search has run, and tell of the others."""
    found = [task for task in tasks if (random.task == task.name).any()]
    if left_out := [task.name for task in tasks if task not in found]:
        _tell(f"left out until random search has run on them: {', '.join(left_out)}")
    return found


def _check(arguments: argparse.Namespace) -> int:
    random = runs.read_results(runs.RANDOM)
    refusals = {task.name: runs.refusal(task, random) for group in GROUPS for task in recipes(group, arguments.make)}
    for name, why in refusals.items():
        print(f"{name}: {why or 'taken'}")
    return 1 if any(refusals.values()) else 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_command(_parser()))
