"""Run a study: take its lease, resume interrupted trials, and release the lease however the run ends."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from ppo_core.cli.command_line import INTERRUPTED, StopRequest, stop_requests
from ppo_core.errors import ConfigError, StudyError, first_line
from ppo_core.loading.digest import digests
from ppo_core.loading.task_file import get_task
from ppo_core.output import pluralize
from tuner.confirm.plan import Plan, cost_line, missing
from tuner.control.changes import changed_spec
from tuner.control.controller import TrialLoop
from tuner.control.events import Emit, Limits, Stop, StudyStarted, StudyStopped, StudyWarned
from tuner.control.held_out_readings import due_readings
from tuner.control.retry import StoreRetry
from tuner.control.session import OpenStudy, accept, changed_task, open_study, reconcile
from tuner.control.trial_files import TrialFiles
from tuner.engine.base import Engine, EngineNeeds, MakeEngine
from tuner.engine.gpu import mps_line
from tuner.engine.local import LocalEngine, threads_per_worker
from tuner.judge.best import best_trial
from tuner.judge.scoring import tally
from tuner.search import propose, prune
from tuner.search.choose import is_finished
from tuner.store import Store, command
from tuner.study.spec import StudySpec
from tuner.study.status import Role


def run_study(
    spec: StudySpec,
    *,
    storage: str,
    runs_folder: Path,
    workers: int | None = None,
    gpus: Sequence[str] = (),
    trials_per_gpu: int = 1,
    from_file: bool = True,
    trials: int | None = None,
    budget: float | str | None = None,
    timeout: float | None = None,
    checkpoint_seconds: float | None = None,
    plan: Plan | None = None,
    make_engine: MakeEngine = LocalEngine,
    threads_per_trial: Callable[[int], int] = threads_per_worker,
    on_event: Emit,
) -> bool:
    """Run or resume a study; return True if it is finished.

    Ctrl-C, SIGTERM, SIGHUP and the timeout stop it cleanly: running trials finish their step and save, and the next run
    resumes them. A second Ctrl-C ends at once; trials then resume from their last checkpoints.

    Args:
        spec: The study; an existing study of its name is resumed, and the `StudyStarted` event lists the changes.
        storage: URL or path of the store, created if missing.
        runs_folder: Folder of the checkpoints, `<study>/<trial>/step-000012`.
        workers: Trials at a time. None: as many as fit the GPUs; without GPUs as in the study's last run, at first 1.
            With 1 the same seed proposes the same trials; with more that depends on which trial ends first.
        gpus: As in CUDA_VISIBLE_DEVICES; each trial gets its own. Empty: all see the GPUs that this process sees.
        trials_per_gpu: Trials that share a GPU.
        from_file: True if the spec is a study file's. A value of an order `set` holds until the file's own changes.
        trials, budget, checkpoint_seconds: Replace the values of the spec and of orders, unless None.
        timeout: Seconds after which to stop.
        plan: The confirmation to run once the search has ended; None: none beyond what was asked for before.
        make_engine, threads_per_trial: The engine and a trial's share of its cores; by default this machine's.
        on_event: Called with each event, in this thread.

    Raises:
        ConfigError: a number is not allowed, the spec would mix two experiments in one study, or the plan asks for
            what the study's trials do not allow.
        StudyError: another controller holds the study, or trial after trial failed for the same cause.
        TaskError: the task could not be prepared.
        StoreError: the store or the folder cannot be used.
    """
    given = {"workers": workers, "trials_per_gpu": trials_per_gpu, "trials": trials, "timeout": timeout}
    for name, value in given.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{name} = {value:g} is not allowed; expected a number over 0")
    most_workers = _most_workers(spec, gpus, trials_per_gpu, workers)
    if checkpoint_seconds is not None:
        spec = spec.with_keys({"workers": {"checkpoint_seconds": checkpoint_seconds}}, f'study "{spec.name}"')
    asked = {"trials": trials, "budget": budget}
    flags: dict[str, float | str] = {name: value for name, value in asked.items() if value is not None}
    if flags:
        changed_spec(spec, flags)  # bad values are refused before anything is created
    propose.require_usable(spec)
    prune.require_usable(spec)
    with closing(Store.open(storage, create=True)) as store, stop_requests() as stop:

        def warn(line: str) -> None:
            on_event(StudyWarned(line))

        patience = StoreRetry(warn, lambda: stop.why is not None)
        store.on_trouble, store.on_answer = patience.wait, patience.end
        with open_study(store, spec, runs_folder / spec.name) as study:
            if plan is not None:  # a bad plan is refused before anything is changed
                searched = [row for row in study.rows if row.role is not Role.CONFIRM]
                if not is_finished(study.spec, searched):  # its best configurations may still change
                    first = f"({tally(searched, study.spec).text}); first: {command(['run', spec.name], store)}"
                    raise StudyError(f'study "{spec.name}" is not finished {first}')
                wanted = missing(study.rows, spec, plan)
                plan = plan if wanted else None
            count = workers or most_workers or study.row.workers or 1
            ranks = spec.gpus_per_trial
            needs = EngineNeeds(count, tuple(gpus), spec.workers, trials_per_gpu, ranks, warn)
            limits = Limits(
                threads_of=lambda trials: spec.threads or threads_per_trial(trials * ranks),
                workers=count,
                most_workers=most_workers,
                deadline=time.monotonic() + (math.inf if timeout is None else timeout),
                timeout=timeout,
            )
            changes = list(reconcile(study, flags, from_file=from_file))
            notes = list(study.spec.notes)
            if ranks > 1:
                notes.append(f"each trial has {ranks} processes")
            if gpus and trials_per_gpu > 1:
                notes.append(mps_line())
            notes += changes
            others = sorted({row.threads for row in study.rows} - {limits.threads})
            if others:
                kept = ", ".join(map(str, others))
                threads = pluralize(limits.threads, "CPU thread")
                notes.append(f"new trials have {threads} each; those of {kept} keep them")
            progress = tally(study.rows, study.spec)
            if plan is not None:
                notes.append(cost_line(wanted, study.rows, count))
                progress = replace(progress, confirming=progress.confirming + len(wanted))
            best = best_trial(study.rows, study.spec.kl_budget)
            on_event(StudyStarted(study.spec, progress, tuple(notes), best))
            return _run_held(study, partial(make_engine, needs), stop, limits, on_event, plan)


def _run_held(
    study: OpenStudy,
    make_engine: Callable[[], Engine],
    stop: StopRequest,
    limits: Limits,
    emit: Emit,
    plan: Plan | None,
) -> bool:
    stopped: Stop | None = None
    is_due = plan is not None or not is_finished(study.spec, study.rows) or bool(due_readings(study))
    finished = not is_due and _end_again(study, emit)
    while not finished and stopped is None:  # twice if an order came at the last moment
        files = TrialFiles(study)
        try:
            with files.work, make_engine() as engine:
                stop.on_request = files.work.on_done = engine.wake
                stopped = TrialLoop(study, files, engine, stop, limits, emit, plan).run()
        except KeyboardInterrupt:
            stopped = Stop(INTERRUPTED)
        finished = is_finished(study.spec, study.rows) and study.store.set_finished(study.lease)
    is_unread = stopped is not None and (due_readings(study) or (plan and missing(study.rows, study.spec, plan)))
    if stopped is not None and (not finished or is_unread):
        emit(StudyStopped(tally(study.rows, study.spec), stopped))
    return finished


def _end_again(study: OpenStudy, emit: Emit) -> bool:
    """Store the settings of a study with nothing left to run, say whether its task has changed; see `set_finished`."""
    accept(study)
    name = study.spec.name
    try:
        task = get_task(study.spec.task)
        changed = changed_task(study, digests(task, task.prepare(None)))
    except Exception as error:  # a task is anybody's code, and nothing of it is needed any more
        emit(StudyWarned(f'whether the task of study "{name}" is still the same is not known: {first_line(error)}'))
    else:
        if changed:
            what = f'the task of study "{name}" has changed since its trials ran: {"; ".join(changed)}'
            emit(StudyWarned(f"{what}; to tune it as it is now, give the study another name"))
    return study.store.set_finished(study.lease)


def _most_workers(spec: StudySpec, gpus: Sequence[str], trials_per_gpu: int, workers: int | None) -> int | None:
    ranks = spec.gpus_per_trial
    if trials_per_gpu > 1 and ranks > 1:
        raise ConfigError(f"trials_per_gpu is not allowed beside gpus_per_trial = {ranks}: a trial has its GPUs alone")
    if not gpus:
        return None
    most = len(gpus) // ranks * trials_per_gpu
    if most == 0:
        there = f"{pluralize(len(gpus), 'GPU')} ({', '.join(gpus)})"
        raise ConfigError(f"gpus_per_trial = {ranks} is not allowed with {there}")
    if workers is not None and workers > most:
        per_gpu = "one per GPU" if trials_per_gpu == 1 else f"{trials_per_gpu} per GPU"
        share = f"{ranks} GPUs per trial" if ranks > 1 else per_gpu
        raise ConfigError(f"workers = {workers} is not allowed; expected at most {most}, {share}")
    return most
