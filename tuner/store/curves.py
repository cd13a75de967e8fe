"""Reads of the store's steps, samples and readings per prompt."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Select, Table, func, select

from ppo_core.metrics import METRICS
from ppo_core.report import TokenReadings
from tuner.store import schema
from tuner.store.connect import Database
from tuner.store.rows import OnTest, token_readings

STEP_KEYS = ("trial_id", "step", "episode", "at")
"""Columns that identify and date a row of steps."""


class Curves(Database):
    """Reads the store's steps and samples."""

    def steps(
        self, trial_ids: Iterable[int], metrics: Sequence[str], *, after_step: int = -1, evaluations_only: bool = False
    ) -> list[dict[str, Any]]:
        """Return rows of `trial_id`, `step`, `episode`, `at` and the named metrics, ordered by trial and step.

        A metric is None where not measured or not finite.
        """
        rows = self.step_values(trial_ids, metrics, after_step=after_step, evaluations_only=evaluations_only)
        return [dict(zip((*STEP_KEYS, *metrics), row, strict=True)) for row in rows]

    def step_values(
        self, trial_ids: Iterable[int], metrics: Sequence[str], *, after_step: int = -1, evaluations_only: bool = False
    ) -> list[tuple[Any, ...]]:
        """Return `steps` as bare values in the order `STEP_KEYS`, then `metrics`; three times as fast for many rows."""
        table = schema.steps
        columns = [table.c[name] for name in (*STEP_KEYS, *(METRICS[metric].column for metric in metrics))]
        query = select(*columns).where(table.c.trial_id.in_(list(trial_ids)), table.c.step > after_step)
        if evaluations_only:
            query = query.where(table.c.eval_reward.is_not(None))
        query = query.order_by(table.c.trial_id, table.c.step)
        return self._read(lambda connection: [tuple(row) for row in connection.execute(query)])

    def own_metrics(self, trial_id: int) -> dict[int, dict[str, float]]:
        """Return the metrics that a task reported beyond the declared ones, by step and name."""
        table = schema.steps
        query = select(table.c.step, table.c.extra).where(table.c.trial_id == trial_id).order_by(table.c.step)
        return {
            row["step"]: {name: value for name, value in (row["extra"] or {}).items() if name not in METRICS}
            for row in self._rows(query)
        }

    def last_step(self, trial_id: int) -> int | None:
        """Return a trial's newest recorded step, or None."""
        last: int | None = self._scalar(
            select(func.max(schema.steps.c.step)).where(schema.steps.c.trial_id == trial_id)
        )
        return last

    def samples(
        self, trial_ids: Iterable[int], step: int | None = None, *, with_tokens: bool = False
    ) -> list[dict[str, Any]]:
        """Return sample rows by prompt, trial and step, optionally of one step.

        `tokens`, by far the largest part of a row, are included only on request.
        """
        table = schema.samples
        query = select(*(column for column in table.c if with_tokens or column is not table.c.tokens))
        query = query.order_by(table.c.prompt_index, table.c.trial_id, table.c.step)
        return self._rows(_of_trials(query, table, trial_ids, step))

    def sample_tokens(self, trial_id: int, step: int, prompt_index: int) -> TokenReadings | None:
        """Return one sample's readings per token, or None."""
        table = schema.samples
        query = _of_trials(select(table.c.tokens), table, [trial_id], step).where(table.c.prompt_index == prompt_index)
        stored = self._scalar(query)
        return None if stored is None else token_readings(stored)

    def readings(self, trial_ids: Iterable[int], step: int | None = None) -> list[dict[str, Any]]:
        """Return rows of `trial_id`, `step` and the evaluation's readings, in order, optionally of one step.

        `rewards`, `kls` (nats) and `lengths` (tokens) have one number per eval prompt, in the prompts' order; None for
        one that was not finite.
        """
        table = schema.readings
        query = select(table).order_by(table.c.trial_id, table.c.step)
        return self._rows(_of_trials(query, table, trial_ids, step))

    def on_test(self, trial_id: int, step: int) -> OnTest | None:
        """Return a checkpoint's result on the test prompts, or None if not read."""
        return self.test_readings([trial_id]).get((trial_id, step))

    def test_readings(self, trial_ids: Iterable[int]) -> dict[tuple[int, int], OnTest]:
        """Return the results of trials' checkpoints on the test prompts, by trial id and step."""
        table = schema.test_readings
        rows = self._rows(_of_trials(select(table), table, trial_ids))
        return {(row.pop("trial_id"), row["step"]): OnTest(**row) for row in rows}


def _of_trials(query: Select[Any], table: Table, trial_ids: Iterable[int], step: int | None = None) -> Select[Any]:
    """Limit a query to the rows of these trials, optionally of one step."""
    query = query.where(table.c.trial_id.in_(list(trial_ids)))
    return query if step is None else query.where(table.c.step == step)
