"""What trials reported, step by step, and their samples."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, select

from ppo_core.metrics import METRICS
from ppo_core.report import StepReport, TokenReadings
from tuner.store import schema
from tuner.store.database import Database
from tuner.store.sample_rows import token_readings

STEP_KEYS = ("trial_id", "step", "episode", "at")
"""What tells a row of steps from the others, and where and when it was."""


class Curves(Database):
    """The store's steps and samples, to be read."""

    def steps(
        self, trial_ids: Iterable[int], metrics: Sequence[str], *, after_step: int = -1, evaluations_only: bool = False
    ) -> list[dict[str, Any]]:
        """Return rows of `trial_id`, `step`, `episode`, `at` and the named metrics, in order of trial and step.

        A metric is None where it was not measured or was no finite number.
        """
        found = self.step_values(trial_ids, metrics, after_step=after_step, evaluations_only=evaluations_only)
        names = (*STEP_KEYS, *metrics)
        return [dict(zip(names, row, strict=True)) for row in found]

    def step_values(
        self, trial_ids: Iterable[int], metrics: Sequence[str], *, after_step: int = -1, evaluations_only: bool = False
    ) -> list[tuple[Any, ...]]:
        """Return `steps` as bare values in the order `STEP_KEYS`, then `metrics`: a third of the time for many rows."""
        table = schema.steps
        columns: list[ColumnElement[Any]] = [table.c[name] for name in STEP_KEYS]
        columns += [table.c[METRICS[name].column].label(name) for name in metrics]
        query = select(*columns).where(and_(table.c.trial_id.in_(list(trial_ids)), table.c.step > after_step))
        if evaluations_only:
            query = query.where(table.c.eval_reward.is_not(None))
        query = query.order_by(table.c.trial_id, table.c.step)
        return self._read(lambda connection: [tuple(row) for row in connection.execute(query)])

    def own_metrics(self, trial_id: int) -> dict[int, dict[str, float]]:
        """Return what a task reported beyond the declared metrics, by step and name."""
        table = schema.steps
        query = select(table.c.step, table.c.extra).where(table.c.trial_id == trial_id).order_by(table.c.step)
        found = [(row["step"], row["extra"] or {}) for row in self._rows(query)]
        return {step: {name: value for name, value in extra.items() if name not in METRICS} for step, extra in found}

    def last_step(self, trial_id: int) -> int | None:
        """Return the newest recorded step of a trial, or None where it has none."""
        query = select(func.max(schema.steps.c.step)).where(schema.steps.c.trial_id == trial_id)
        last: int | None = self._read(lambda connection: connection.scalar(query))
        return last

    def samples(
        self, trial_ids: Iterable[int], step: int | None = None, *, with_tokens: bool = False
    ) -> list[dict[str, Any]]:
        """Return sample rows by prompt, trial and step (`step`: of that step alone).

        `tokens` are by far the largest part of a row, and there only where asked for.
        """
        table = schema.samples
        query = select(*(column for column in table.c if with_tokens or column is not table.c.tokens))
        query = query.where(table.c.trial_id.in_(list(trial_ids)))
        if step is not None:
            query = query.where(table.c.step == step)
        order = (table.c.prompt_index, table.c.trial_id, table.c.step)
        return self._rows(query.order_by(*order))

    def sample_tokens(self, trial_id: int, step: int, prompt_index: int) -> TokenReadings | None:
        """Return one sample's readings token by token; None: there is no such sample, or it has none."""
        table = schema.samples
        one = and_(table.c.trial_id == trial_id, table.c.step == step, table.c.prompt_index == prompt_index)
        stored = self._read(lambda connection: connection.scalar(select(table.c.tokens).where(one)))
        return None if stored is None else token_readings(stored)

    def _rows(self, query: Select[Any]) -> list[dict[str, Any]]:
        return self._read(lambda connection: [dict(row._mapping) for row in connection.execute(query)])


def step_values(report: StepReport) -> dict[str, Any]:
    """Return a row of the steps table, but for its trial. What a float column cannot hold goes into `extra`."""
    extra: dict[str, float | str] = {}
    columns: dict[str, Any] = {"step": report.step, "episode": report.episode, "at": time.time()}
    for name, value in report.metrics.items():
        if not math.isfinite(value):
            extra[name] = str(value)
        elif name in METRICS:
            columns[METRICS[name].column] = value
        else:
            extra[name] = value
    return columns | {"extra": extra or None}
