"""Which trial of a study starts next: what was interrupted, what waits, and then what the sampler proposes."""

from collections.abc import Container

from ppo_core.declare import HyperValue
from tuner.held_study import OpenStudy
from tuner.search.sampler import Projection
from tuner.status import Origin
from tuner.store import NewTrial, TrialRow


class TrialQueue:
    """The trials of one study that are still to be run. New ones are recorded as they are chosen."""

    def __init__(self, study: OpenStudy, threads: int) -> None:
        """Begin with the study as it stands; a new trial gets `threads` CPU threads."""
        self._study = study
        self._threads = threads
        self._projection = Projection(study.spec, study.board.rows)

    def next(self, running: Container[int]) -> TrialRow | None:
        """Return the trial to start now, none of the `running` numbers; None: nothing is left to start."""
        board, total = self._study.board, self._study.spec.trials
        for row in board.open(total):
            if row.number not in running:
                return row
        return self._add() if len(board.counted()) < total else None

    def learn(self, row: TrialRow) -> None:
        """Have the sampler know how a trial stands."""
        self._projection.tell(row)

    def restart(self) -> None:
        """Have the sampler see all trials under the study's spec of now."""
        self._projection.respec(self._study.spec, self._study.board.rows)

    def _add(self) -> TrialRow:
        study, number = self._study, len(self._study.board)
        params, origin, label = self._choose(number)
        config = study.spec.config(params).to_dict()
        row = study.store.add_trial(study.lease, NewTrial(number, origin, config, params, self._threads, label=label))
        study.board.put(row)
        self._projection.note_running(number, params)
        return row

    def _choose(self, number: int) -> tuple[dict[str, HyperValue], Origin, str]:
        """Return the params of the next trial, where they come from, and what it is called."""
        spec, counted = self._study.spec, len(self._study.board.counted())
        if spec.listed:
            return dict(spec.listed[counted].params), Origin.LISTED, spec.listed[counted].label
        if counted == 0:
            return spec.reference_params(), Origin.REFERENCE, ""
        return self._projection.propose(number), Origin.SAMPLED, ""
