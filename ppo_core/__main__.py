"""`python -m ppo_core`: train once with PPO, by flags or a config file. `--help` loads no torch."""

import shlex
import sys
from collections.abc import Sequence

from ppo_core.cli import command_line
from ppo_core.cli.arguments import core_parser
from ppo_core.cli.command_line import refuse_unknown
from ppo_core.cli.training import Program, train
from ppo_core.distributed import launch as launched
from ppo_core.distributed import rank_zero

PROGRAM = Program("ppo_core", lambda words: shlex.join([*launched.command_prefix(), "-m", "ppo_core", *words]))


def main(argv: Sequence[str] | None = None) -> int:
    """Train once and return the exit status (see `command_line.run`); 130: interrupted, to be resumed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return command_line.run(PROGRAM.name, lambda: rank_zero.drive(lambda: _train(arguments)))


def _train(arguments: list[str]) -> int:
    parser = core_parser()
    args, rest = parser.parse_known_args(arguments)
    refuse_unknown(parser, rest)
    return train(args, arguments, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
