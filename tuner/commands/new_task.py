"""The command that writes the beginnings of a task: `ppo-tuner new-task`."""

import argparse
from pathlib import Path

from ppo_core.tasks import skeleton
from tuner.commands.arguments import to_copy


def new_task(args: argparse.Namespace) -> int:
    """Write a task's folder, and say what to run next."""
    folder = Path(args.name)
    names = skeleton.write(folder, args.policy or skeleton.DEFAULT_POLICY)
    print(f"wrote {folder}: {', '.join(names)}")
    print(f"train once: {to_copy(['train', '--task', str(folder)])}")
    print(f"tune:       {to_copy(['run', str(folder / 'study.toml')])}")
    return 0
