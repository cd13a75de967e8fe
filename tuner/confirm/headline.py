"""A trial's one number: its reward with its KL, the same wherever trials are listed, ranked or compared.

It is the mean on fresh seeds of a whole confirmation (see `tuner.confirm.result`), which is also what the study's
answer states; of a trial that none confirmed it is its best checkpoint's within the KL budget on one seed, of both
readings where it was read twice (see `tuner.judge.best`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ppo_core.output import NOTHING, fixed, measured, pluralize, plus_minus
from tuner.confirm.result import Confirmation, Confirmed, confirmations
from tuner.judge.best import Standing, standing, twice_text
from tuner.judge.results import StudyView
from tuner.store import Store, TrialRow

ONE_SEED = "best in budget, one seed"
UNTRAINED = "none trained in budget"
NO_VALUE = "no value"


@dataclass(frozen=True)
class Headline:
    """A trial's one number."""

    trial: TrialRow
    """Valued under the view's KL budget."""
    confirmed: Confirmed | None
    """Its runs on fresh seeds; None: no whole confirmation has it."""

    @property
    def reward(self) -> float | None:
        """None: no trained checkpoint is within the KL budget."""
        if self.confirmed is not None and self.confirmed.reward is not None:
            return self.confirmed.reward.mean
        return None if self._stands is None else self._stands.reward

    @property
    def kl(self) -> float | None:
        """KL at that reward, in nats per response."""
        if self.confirmed is not None and self.confirmed.kl is not None:
            return self.confirmed.kl.mean
        return None if self._stands is None else self._stands.kl

    @property
    def _stands(self) -> Standing | None:
        return standing(self.trial) if self.trial.value_step else None

    @property
    def label(self) -> str:
        """Name of the number: `mean of 5 fresh seeds`, or ONE_SEED with `, read twice`, UNTRAINED or NO_VALUE."""
        if self.confirmed is not None:
            return f"mean of {pluralize(len(self.confirmed.rewards), 'fresh seed')}"
        if self.reward is None:
            return NO_VALUE if self.trial.has_failed else UNTRAINED
        return f"{ONE_SEED}{twice_text(self.trial)}"

    def text(self, places: int | None = None) -> str:
        """Return the reward with its 95% interval over seeds, or its standard error: `2.01 [1.96, 2.07]`."""
        if self.confirmed is not None and self.confirmed.reward is not None:
            reward = self.confirmed.reward
            return reward.text if places is None else reward.with_places(places)
        return NOTHING if self.reward is None else plus_minus(self.reward, self.trial.value_se, places)

    def kl_text(self, places: int | None = None) -> str:
        return measured(self.kl) if places is None else fixed(self.kl, places)


def headline_data(headline: Headline | None) -> dict[str, Any]:
    """Return a study's answer with its number for JSON; None: it has none."""
    if headline is None:
        return dict.fromkeys(("answer", "reward", "kl", "reward_is"))
    return {"answer": headline.trial.number, "reward": headline.reward, "kl": headline.kl, "reward_is": headline.label}


def headlines(store: Store, view: StudyView, rows: Iterable[TrialRow] | None = None) -> dict[int, Headline]:
    """Return the trials' numbers under the view's KL budget, by the trial's number."""
    fresh = on_fresh_seeds(confirmations(store, view) if view.is_own_budget else ())
    return {row.number: Headline(row, fresh.get(row.number)) for row in (view.trials if rows is None else rows)}


def on_fresh_seeds(runs: Iterable[Confirmation]) -> dict[int, Confirmed]:
    """Return by number what whole confirmations, from the shortest runs to the longest, read last of each trial."""
    return {one.trial.number: one for run in runs if run.choice is not None for one in run.read}
