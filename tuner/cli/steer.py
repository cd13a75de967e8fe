"""The commands that steer a study: each places an order, and prints its outcome if a controller is running."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from ppo_core import output
from ppo_core.cli.command_line import EXIT_OK
from ppo_core.errors import ConfigError, StudyError
from tuner.control import orders
from tuner.judge.results import StudyView, order_data, read_study
from tuner.store import Order, OrderState, Store, command, opened
from tuner.study.status import CHANGEABLE_SETTINGS

WAIT_SECONDS = 30.0
"""Time that a command waits for the controller to decide its order."""
POLL_SECONDS = 0.2


def place(args: argparse.Namespace) -> int:
    """Check an order against the study as it stands, place it, and print its outcome."""
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        if args.command == "enqueue" and not args.set:
            raise ConfigError("enqueue needs values, such as: --set learning_rate=1e-4 kl_coef=0.1")
        arguments = _arguments(args)
        trial = getattr(args, "trial", None)
        orders.check(store, view, args.command, trial, arguments)
        order = store.place_order(view.row, args.command, trial, arguments)
        order = _decided(store, view, order)
        has_controller = store.study(view.row.name).has_controller
    if args.json:
        print(output.dumps(order_data(order)))
    if order.state is OrderState.REFUSED:
        raise StudyError(f"order {order.id} was refused: {order.outcome}")
    if args.json:
        return EXIT_OK
    if order.state is OrderState.DONE:
        print(f"Order {order.id}: {output.plain(order.outcome or '')}.")
    else:
        run = command(["run", view.row.name], store)
        print(f"Order {order.id} waits: {orders.why_waiting(has_controller, run)}")
    return EXIT_OK


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """Return the values of `name=value` arguments; ConfigError if one is malformed, or a name is repeated."""
    values: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise ConfigError(f'"{text}" is not allowed; expected NAME=VALUE, such as kl_coef=0.1')
        if name in values:
            raise ConfigError(f"{name} is set twice")
        values[name] = value
    return values


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    if args.command == "set":
        given = {name: getattr(args, name) for name in CHANGEABLE_SETTINGS}
        return {"changes": {name: value for name, value in given.items() if value is not None}}
    if args.command not in ("enqueue", "fork"):
        return {}
    optional = {"label": args.label or None, "episode": getattr(args, "at", None)}
    given = {name: value for name, value in optional.items() if value is not None}
    return {"values": assignments(args.set or ()), **given}


def _decided(store: Store, view: StudyView, order: Order) -> Order:
    deadline = time.monotonic() + WAIT_SECONDS
    while order.state is OrderState.WAITING and time.monotonic() < deadline:
        if not store.study(view.row.name).has_controller:
            return store.order(order.id)  # it may just have been decided
        time.sleep(POLL_SECONDS)
        order = store.order(order.id)
    return order
