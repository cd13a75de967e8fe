"""Settle a study's starts: those that have run, unchanged, then those that its file asks for. Never imports torch.

Settled starts are stored in place of the names in `warm_start`, so that neither new ranges nor a new best trial of an
earlier study changes one that has run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import StudyError
from tuner.judge.results import read_study
from tuner.search.warm_start import STUDY, ListedTrial, moved
from tuner.store import Store
from tuner.study.spec import StudySpec

Resolve = Callable[[StudySpec, str], ListedTrial]
"""Returns the start that a warm start `study:NAME` stands for."""


def settle(
    spec: StudySpec, stored: StudySpec | None, ran: int, resolve: Resolve
) -> tuple[StudySpec, list[str], list[str]]:
    """Return the study with all starts settled, changes in those still to run, and forbidden changes, one line each.

    Args:
        spec: The study as its file describes it now.
        stored: The study as stored; None: it has no trial yet.
        ran: Number of its stored starts that have run, or are running.
        resolve: Returns the best trial of an earlier study as a start of this one.
    """
    before = () if stored is None else stored.starts
    done, known = before[:ran], {start.source: start for start in before}
    asked = [*spec.starts, *(start for start, _ in spec.dropped)]
    names = spec.warm_start
    for name in names:
        if name.startswith(STUDY):
            old = known.get(name)
            asked.append(moved(old.original, spec.search, old.label, source=name) if old else resolve(spec, name))
    asked.sort(key=lambda start: names.index(start.source) if start.source in names else -1)
    gone = [start for start in done if not any(_is_same(start, other, spec) for other in asked)]
    new = [start for start in asked if not any(_is_same(start, other, spec) for other in done)]
    settled = replace(spec.with_starts(done, new), warm_start=())
    refused = [
        f"{start.name} has run, and the file no longer has it unchanged; give the study another name" for start in gone
    ]
    return settled, [] if stored is None else list(_changes(before[ran:], settled.starts[ran:])), refused


def _is_same(one: ListedTrial, other: ListedTrial, spec: StudySpec) -> bool:
    """Return True for the same warm start, or the same label and searched values."""
    if one.source or other.source:
        return one.source == other.source
    values, others = (
        {name: value for name, value in start.original.items() if name in spec.search} for start in (one, other)
    )
    return one.label == other.label and values == others


def _changes(before: Sequence[ListedTrial], after: Sequence[ListedTrial]) -> Iterator[str]:
    yield from (f"{start.name} will not run any more" for start in before if start not in after)
    yield from (f"{start.name} will run: {start.text}" for start in after if start not in before)


def best_of(store: Store, spec: StudySpec, name: str) -> ListedTrial:
    """Return the best trial of the study in `study:NAME`, moved into the ranges of `spec`.

    Raises:
        StudyError: the store holds no such study, or it has no best trial.
    """
    study = name.removeprefix(STUDY)
    try:
        view = read_study(store, study)
    except StudyError as error:
        raise StudyError(f'warm_start "{name}": {error}') from None
    best = view.best()
    if best is None:
        budget = f"its KL budget of {view.spec.kl_budget:g} nats per response"
        raise StudyError(f'warm_start "{name}": study "{study}" has no best trial: none is within {budget}')
    config = PPOConfig.from_dict(best.config)
    sizes = config.batch_sizes(world_size=1)
    values = config.to_dict() | {
        name: getattr(sizes, name) for name in ("batch_size", "mini_batch_size", "num_mini_batches")
    }
    return moved(values, spec.search, f"{name} trial {best.number}", source=name)
