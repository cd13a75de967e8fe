"""How good the search is: runs of whole search spaces, recorded once, on which strategies are judged.

python benchmarks/search.py record reviews    # trains hundreds of configurations; goes on where it was
python benchmarks/search.py show reviews      # what is recorded
"""

import argparse
import sys
from dataclasses import fields

from support import recorded_summary, recording
from support.recording import DEFAULT_AMOUNTS, OTHER_AMOUNT, Amount

from ppo_core.errors import PPOTunerError
from ppo_core.task import BUILT_IN


def main() -> int:
    arguments = _parser().parse_args()
    try:
        status: int = arguments.run(arguments)
    except PPOTunerError as error:
        print(f"search.py: {error}", file=sys.stderr)
        status = 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    record = commands.add_parser("record", help="train what is not recorded yet; may be killed, and run several times")
    record.add_argument("task", choices=BUILT_IN)
    record.add_argument("--random", type=_whole, metavar="N", help="random configurations (reviews: 300, else 120)")
    record.add_argument("--near-top", type=_whole, metavar="N", help="more of those near the top (reviews: 60, else 0)")
    record.add_argument("--top", type=_whole, metavar="N", help="the best, to be repeated (reviews: 15, else 0)")
    record.add_argument("--seeds", type=_whole, metavar="N", help="seeds of each of these, the first included (3)")
    record.add_argument("--workers", type=_positive, metavar="N", default=2, help="processes (2)")
    record.add_argument("--until", type=float, metavar="SECONDS", help="begin no run after this time")
    record.set_defaults(run=_record)

    show = commands.add_parser("show", help="print what is recorded")
    show.add_argument("task", choices=BUILT_IN)
    show.set_defaults(run=_show)
    return parser


def _record(arguments: argparse.Namespace) -> int:
    usual = DEFAULT_AMOUNTS.get(arguments.task, OTHER_AMOUNT)
    given = {field.name: getattr(arguments, field.name) for field in fields(Amount)}
    amount = Amount(**{name: getattr(usual, name) if value is None else value for name, value in given.items()})
    return recording.record(arguments.task, amount, arguments.workers, arguments.until)


def _show(arguments: argparse.Namespace) -> int:
    print(recorded_summary.summary(arguments.task))
    return 0


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a whole number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if _whole(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
