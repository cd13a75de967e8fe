"""A study with all that is hard to export or copy, and reading what came of it."""

from pathlib import Path
from typing import Any

from sqlalchemy import insert, select, update

from tests.tuner import made_study
from tuner.exchange import SUFFIXES
from tuner.store import OrderState, Store, schema
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Role, Wanted

FORMATS = tuple(SUFFIXES)
LONE = "\ud800"
HOSTILE = ("", "a\nb\r\nc\rd", 'q"u""o,te', "\x01\x1b[31m\x7f", "\u202ertl\u200f", "null", "nan", " ", "\u2028é🙂")
SPEC = StudySpec.from_dict(made_study.SPEC, "made").to_dict()
CONFIG = StudySpec.from_dict(made_study.SPEC, "made").config({}).to_dict()


def enrich(store: Store) -> None:
    study, trials = store.study(made_study.NAME), schema.trials
    for kind, state in (("pause", OrderState.DONE), ("stop", OrderState.REFUSED)):
        order = store.place_order(study, kind, 1, {"values": {"kl_coef": 0.1}})
        with store._engine.begin() as connection:
            values = {"state": state, "outcome": f"so {LONE!a}\nit is", "decided_at": 12.5}
            connection.execute(update(schema.orders).where(schema.orders.c.id == order.id).values(**values))
    with store._engine.begin() as connection:
        overrides = {"trials": {"file": 8, "set": 9}, "kl_budget": {"file": 10.0}}
        connection.execute(update(schema.studies).values(overrides=overrides))
        ids = list(connection.scalars(select(trials.c.id).order_by(trials.c.number)))
        fork = {
            "origin": Origin.FORKED, "role": Role.FORK, "parent": 1, "fork_step": 2, "wanted": Wanted.PAUSE,
            "label": "",
        }  # fmt: skip
        connection.execute(update(trials).where(trials.c.id == ids[-1]).values(**fork))
        reason = {"rule": "error", "message": f"half {LONE}", "evidence": [{"step": 1.0}], "log": "\x1b[31m"}
        connection.execute(update(trials).where(trials.c.id == ids[2]).values(reason=reason, label=HOSTILE[1]))
        for prompt_index, text in enumerate(HOSTILE):
            values = {"trial_id": ids[0], "step": 9, "prompt_index": prompt_index, "prompt": text, "response": text}
            values |= {"length": 1, "parts": {LONE: None, text: 0.1}, "kl": float("inf")}
            connection.execute(insert(schema.samples).values(**values))


def everything(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Return all that is to survive, times too."""
    found = {}
    with store._engine.connect() as connection:
        for table in (schema.studies, schema.trials, *schema.OF_TRIALS.values(), schema.orders):
            rows = connection.execute(select(table).order_by(*table.primary_key.columns)).mappings()
            dropped = (
                "lease_token",
                "lease_host",
                "lease_renewed_at",
                "folder",
                "key",
            )  # of who holds it where, and made anew
            found[table.name] = [{name: value for name, value in row.items() if name not in dropped} for row in rows]
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()}


def clear(*stores: Store) -> None:
    for store in stores:
        with store._engine.begin() as connection:
            connection.execute(schema.studies.delete())
