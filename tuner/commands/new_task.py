"""The command that writes the beginnings of a task: `ppo-tuner new-task`."""

import argparse
from pathlib import Path

from ppo_core.errors import PPOTunerError, TaskError
from ppo_core.tasks import skeleton
from tuner.commands.arguments import to_copy


def new_task(args: argparse.Namespace) -> int:
    """Write a task's folder, and say what to run next."""
    folder = Path(args.name)
    try:
        names = skeleton.write(folder, args.policy or skeleton.DEFAULT_POLICY)
    except PPOTunerError:
        raise
    except OSError as error:  # it names a file of the folder's making
        raise TaskError(f"the task's folder {folder} cannot be written: {error.strerror or error}") from error
    print(f"wrote {folder}: {', '.join(names)}")
    print(f"train once: {to_copy(['train', '--task', str(folder)])}")
    print(f"tune:       {to_copy(['run', str(folder / 'study.toml')])}")
    return 0
