"""The commands that write a study to a folder of plain files, and take one in: export, import."""

import argparse
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from tuner import study_file
from tuner.commands import storage
from tuner.commands.arguments import to_copy
from tuner.commands.reading import opened
from tuner.exchange import study_json
from tuner.exchange.exporting import export_study
from tuner.exchange.importing import import_study
from tuner.store import Store


def export(args: argparse.Namespace) -> int:
    """Write a study to a folder, and say how to take it in again."""
    folder = Path(args.output or f"{args.study}-export")
    with opened(args.storage) as store:
        written = export_study(store, args.study, folder, args.format, replace=args.force)
    print(f"wrote {folder}: {_told(written.rows)}")
    if written.waiting_orders:
        print(f"{_orders(written.waiting_orders)}; an import leaves out what is not decided")
    print(f"take it in elsewhere: {to_copy(['import', str(folder)])}")
    return 0


def take_in(args: argparse.Namespace) -> int:
    """Add the study of a folder to a store."""
    folder = Path(args.folder)
    study_json.read(folder)  # before a store is made for what is no export, or for no name
    if args.name is not None:
        study_file.matching(args.name, study_file.NAME, "--as")
    with closing(Store.open(storage.location(args.storage), create=True)) as store:
        taken = import_study(store, folder, args.name)
    print(f'imported study "{taken.name}": {_told(taken.rows)}')
    if taken.waiting_orders:
        print(f"left out: {_orders(taken.waiting_orders)}")
    return 0


def _told(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {table if count != 1 else table.removesuffix('s')}" for table, count in rows.items())


def _orders(count: int) -> str:
    return "1 order that waits" if count == 1 else f"{count} orders that wait"
