"""Orders: checked against the study before they are placed, and by the controller, which carries them out or refuses.

An order's change is written in the transaction that decides it. A running trial reads it there at its next report, so
nothing is lost if the controller dies.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, update

from ppo_core import checkpoint
from ppo_core.config.declare import RUN_LENGTH, HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import ConfigError, PPOTunerError, StoreError, StudyError, nearest
from tuner.control.changes import after_order, changed_spec
from tuner.control.events import Limits
from tuner.control.session import OpenStudy
from tuner.control.trial_files import ForkPoint, TrialFiles
from tuner.files import folder as study_folder
from tuner.judge import forks
from tuner.judge.results import StudyView
from tuner.judge.scoring import judged, judged_again
from tuner.search.choose import as_stored
from tuner.store import NewTrial, Order, OrderState, Store, StudyRow, TrialRow, schema
from tuner.store.connect import now
from tuner.store.trials import copy_steps, insert_trial, write_judgements, write_outcome, write_pause, write_resumption
from tuner.study.spec import StudySpec, require_stated_mini_batch
from tuner.study.status import ORDER_KINDS, STOPPED_BY_PERSON, Origin, Role, Status, Wanted
from tuner.study.study_file import setting_text


def check_trial_order(kind: str, row: TrialRow) -> None:
    """Raise ConfigError if an order cannot be carried out on a trial in its current state."""
    status = row.shown_status
    if kind == "resume" and row.status is not Status.PAUSED and row.wanted is None:
        raise ConfigError(f"trial {row.number} is {status}; only a paused trial can be resumed")
    if kind == "pause" and row.status is Status.PAUSED:
        raise ConfigError(f"trial {row.number} is paused already")
    if kind in ("stop", "pause") and row.status.is_final:
        raise ConfigError(f"trial {row.number} is {status}; {kind} does not apply to it")


def check_study_order(kind: str, study: StudyRow) -> None:
    """Raise ConfigError if an order on the whole study cannot be carried out in its current state."""
    if kind == "resume" and study.paused_at is None:
        raise ConfigError("the study is not paused")
    if kind == "pause" and study.paused_at is not None:
        raise ConfigError("the study is paused already")


def retried(rows: Sequence[TrialRow], number: int | None) -> list[TrialRow]:
    """Return the failed trials that a retry order concerns; ConfigError if there are none."""
    failed = [row for row in rows if row.status is Status.FAILED and number in (None, row.number)]
    if not failed:
        other = next((row for row in rows if row.number == number), None)
        raise ConfigError(
            "no trial has failed" if other is None else f"trial {number} is {other.shown_status}, not failed"
        )
    return failed


def enqueued_params(spec: StudySpec, rows: Sequence[TrialRow], values: Mapping[str, object]) -> dict[str, HyperValue]:
    """Return the params of an enqueued configuration, with trial 0's for missing ones.

    In a study of listed trials missing ones are the study's own, since trial 0 is only the first of the list.
    Any hyperparameter may be given, searched or not, inside its range or not: it applies to this trial alone.

    Raises:
        ConfigError: a value is not allowed, alone or beside others, or a trial has these values already; the message
            says what is allowed.
    """
    given: dict[str, HyperValue] = {}
    for name, value in values.items():
        if name not in HYPERPARAMETERS:
            raise ConfigError(f'unknown hyperparameter "{name}"{nearest(name, HYPERPARAMETERS)}')
        given[name] = HYPERPARAMETERS[name].coerce(value)
        if name in RUN_LENGTH:
            raise ConfigError(f"{name} is the same in all trials of a study, so that their results can be compared")
    params = dict(given) if spec.listed else spec.params_with(given)
    config = spec.config(params)
    same = next((row.number for row in rows if row.config == config.to_dict()), None)
    if same is not None:
        raise ConfigError(f"trial {same} has these values already")
    require_stated_mini_batch(given, config)
    return as_stored(params, config.to_dict())


def check(store: Store, view: StudyView, kind: str, trial: int | None, arguments: Mapping[str, Any]) -> None:
    """Raise if the controller would refuse the order now; for use before placing it.

    Raises:
        ConfigError: it does not fit the study; the message says what is allowed.
        StudyError: there is no such trial, or no run that could be ended.
    """
    if kind not in ORDER_KINDS:
        raise ConfigError(f'unknown order "{kind}"; available: {", ".join(ORDER_KINDS)}')
    row = None if trial is None else store.trial(view.row, trial)
    if kind == "enqueue":
        enqueued_params(view.spec, view.trials, arguments["values"])
    elif kind == "set":
        changed_spec(view.spec, arguments["changes"])
    elif kind == "retry":
        retried((*view.trials, *view.confirming), trial)
    elif kind == "fork":
        if row is None:
            raise ConfigError("a fork needs the trial to start from")
        _check_fork(view, row, arguments["values"], arguments.get("episode"))
    elif row is not None:
        check_trial_order(kind, row)
    elif kind == "stop" and not view.row.has_controller:
        raise StudyError(f'nothing runs study "{view.row.name}", so there is no run to stop')
    else:
        check_study_order(kind, view.row)


def _check_fork(view: StudyView, parent: TrialRow, values: Mapping[str, Any], episode: int | None) -> None:
    """Raise ConfigError for an impossible fork; where no checkpoint is here, the controller decides."""
    if not parent.attempts and parent.role is not Role.FORK:  # a fork begins with a copy of a checkpoint
        raise ConfigError(f"trial {parent.number} has not started yet; a fork starts from a checkpoint")
    folder = study_folder.own_folder(view.row)
    if folder is not None and checkpoint.complete(folder / str(parent.number)):
        _, _, episode = forks.choose(folder / str(parent.number), episode)
    forks.check(parent.config, values, episode or 0)


def why_waiting(has_controller: bool, go_on: str) -> str:
    """Return why an order is still undecided; `go_on` is the command that runs its study."""
    why = "the controller has not read it yet"
    return why if has_controller else f"nothing runs the study; to carry it out: {go_on}"


class OrderDesk:
    """Decides the orders of a study that this process holds."""

    def __init__(
        self,
        study: OpenStudy,
        files: TrialFiles,
        limits: Limits,
        is_running: Callable[[int], bool],
        on_decided: Callable[[Order, Sequence[TrialRow]], None],
    ) -> None:
        """`is_running`: does a worker run a trial; `on_decided` takes each order with the trials that it changed."""
        self._study, self._files, self._limits = study, files, limits
        self._is_running, self._on_decided = is_running, on_decided
        self._forking: set[int] = set()  # ids of fork orders whose checkpoint is being copied

    def pending(self) -> list[Order]:
        """Return the orders to decide; another setting is decided once this run's own are stored."""
        waiting = self._study.store.orders(self._study.row, OrderState.WAITING)
        is_early = self._study.unstored is not None
        return [o for o in waiting if o.id not in self._forking and not (is_early and o.kind == "set")]

    def decide(self, order: Order, carry_out: Callable[[], Sequence[int]] | None = None) -> None:
        """Carry out or refuse an order; a fork is decided once its checkpoint has been copied."""
        study = self._study
        changed: Sequence[int] = ()
        try:
            changed = self._carry_out(order) if carry_out is None else carry_out()
        except StoreError:
            raise  # says nothing about the order
        except PPOTunerError as error:
            study.store.refuse(study.lease, order, str(error))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # No command places such an order; it must not end this run, and the next one, and the next.
            study.store.refuse(study.lease, order, f"it cannot be carried out: {type(error).__name__}: {error}")
        order = study.store.order(order.id)
        if order.state is not OrderState.WAITING:
            self._on_decided(order, [study.refresh(number) for number in changed])

    def _carry_out(self, order: Order) -> Sequence[int]:
        """Carry out an order, and return the numbers of the trials that it changed or added."""
        if order.trial is None and ORDER_KINDS[order.kind].trial == "needed":
            raise ConfigError(f"{order.kind} names no trial")
        match order.kind:
            case "enqueue":
                return self._enqueue(order)
            case "fork":
                return self._fork(order)
            case "set":
                return self._set(order)
            case "retry":
                return self._retry(order)
        return self._steer_study(order) if order.trial is None else self._steer_trial(order, order.trial)

    def _steer_study(self, order: Order) -> Sequence[int]:
        table = schema.studies

        def effect(connection: Connection) -> str:
            if order.kind == "stop":
                return "the run of the study is stopping cleanly"
            paused_at = now(connection) if order.kind == "pause" else None
            connection.execute(update(table).where(table.c.id == self._study.row.id).values(paused_at=paused_at))
            return "the study is paused" if order.kind == "pause" else "the study resumes"

        if order.kind == "stop" and order.id <= self._study.last_order:
            raise ConfigError("it was for an earlier run of the study, which has ended")
        check_study_order(order.kind, self._study.row)
        self._study.store.decide(self._study.lease, order, effect)
        self._reread_study()
        return ()

    def _set(self, order: Order) -> Sequence[int]:
        study, table = self._study, schema.studies
        changes = order.arguments.get("changes", {})
        spec = changed_spec(study.spec, changes)
        most = self._limits.most_workers
        if most is not None and changes.get("workers", 1) > most:
            raise ConfigError(f"workers = {changes['workers']} is not allowed; expected at most {most} on these GPUs")
        judged_anew = judged_again(study.store, study.rows, spec) if spec.kl_budget != study.spec.kl_budget else []
        values = {"spec": spec.to_dict(), "overrides": after_order(study.row.overrides or {}, changes)}
        if "workers" in changes:
            values["workers"] = changes["workers"]

        def effect(connection: Connection) -> str:
            connection.execute(update(table).where(table.c.id == study.row.id).values(**values))
            write_judgements(connection, judged_anew)
            said = ", ".join(f"{name} is now {setting_text(value)}" for name, value in changes.items())
            return f"{said}. {spec.budget_changed}" if "kl_budget" in changes and spec.budget_changed else said

        study.store.decide(study.lease, order, effect)
        study.spec = spec
        self._reread_study()
        if judged_anew:  # else a running trial's row stays as it began, since its progress is counted from there
            rows = zip(study.store.trials(study.row), study.rows, strict=True)
            study.rows = [old if new.status is Status.RUNNING else new for new, old in rows]
        return ()

    def _reread_study(self) -> None:
        self._study.row = self._study.store.study(self._study.spec.name)

    def _steer_trial(self, order: Order, number: int) -> Sequence[int]:
        row = self._study.store.trial(self._study.row, number)
        check_trial_order(order.kind, row)
        effect = self._while_it_runs(order, row) if self._is_running(row.number) else self._at_once(order, row)
        self._study.store.decide(self._study.lease, order, effect)
        return [row.number]

    def _while_it_runs(self, order: Order, row: TrialRow) -> Callable[[Connection], str]:
        """Return the effect on a running trial, which learns of it at its next report."""
        wanted = None if order.kind == "resume" else Wanted(order.kind)

        def effect(connection: Connection) -> str:
            connection.execute(update(schema.trials).where(schema.trials.c.id == row.id).values(wanted=wanted))
            return f"trial {row.number} " + ("resumes" if wanted is None else f"{wanted}s after this step")

        return effect

    def _at_once(self, order: Order, row: TrialRow) -> Callable[[Connection], str]:
        status = {"resume": Status.WAITING, "pause": Status.PAUSED, "stop": Status.STOPPED}[order.kind]
        reason = STOPPED_BY_PERSON if status is Status.STOPPED else None
        outcome = judged(self._study.store, row, self._study.spec, status, reason)

        def effect(connection: Connection) -> str:
            if status is Status.WAITING:
                write_resumption(connection, row.id)
            elif status is Status.PAUSED:
                write_pause(connection, row.id, outcome)
            else:
                write_outcome(connection, row.id, outcome)
            return f"trial {row.number} is {status}"

        return effect

    def _retry(self, order: Order) -> Sequence[int]:
        study = self._study
        chosen = retried(study.rows, order.trial)
        blank = {"status": Status.WAITING, "reason": None, "ended_at": None, "violation": None, "retries": 0}

        def effect(connection: Connection) -> str:
            ids = [row.id for row in chosen]
            connection.execute(update(schema.trials).where(schema.trials.c.id.in_(ids)).values(**blank))
            numbers = ", ".join(str(row.number) for row in chosen)
            return f"trial {numbers} is tried again" if len(chosen) == 1 else f"trials {numbers} are tried again"

        study.store.decide(study.lease, order, effect)
        return [row.number for row in chosen]

    # New trials

    def _enqueue(self, order: Order) -> Sequence[int]:
        study = self._study
        params = enqueued_params(study.spec, study.rows, order.arguments.get("values", {}))
        config = study.spec.config(params).to_dict()
        trial = NewTrial(len(study.rows), Origin.ENQUEUED, config, params, self._limits.threads)
        return self._add(order, trial, "", lambda connection, row: None)

    def _add(
        self, order: Order, trial: NewTrial, said: str, also: Callable[[Connection, TrialRow], None]
    ) -> Sequence[int]:
        """Add a trial, called as the order says, and do what else belongs into that transaction."""
        study, label = self._study, str(order.arguments.get("label") or "")

        def effect(connection: Connection) -> str:
            also(connection, insert_trial(connection, study.lease, replace(trial, status=Status.WAITING, label=label)))
            return f"added as trial {trial.number}{said}"

        study.store.decide(study.lease, order, effect)
        return [trial.number]

    def _fork(self, order: Order) -> Sequence[int]:
        """Start copying the parent's checkpoint; the fork is added when that is done."""
        assert order.trial is not None
        parent = self._study.store.trial(self._study.row, order.trial)

        def then(fork_point: Future[ForkPoint]) -> None:
            self._forking.discard(order.id)
            self.decide(order, lambda: self._add_fork(order, parent, fork_point.result()))

        values, episode = order.arguments.get("values", {}), order.arguments.get("episode")
        self._files.fork(parent, f"fork-{order.id}", values, episode, then)
        self._forking.add(order.id)
        return ()

    def _add_fork(self, order: Order, parent: TrialRow, point: ForkPoint) -> Sequence[int]:
        number = len(self._study.rows)
        params = {**parent.params, **{name: point.config[name] for name in order.arguments.get("values", {})}}
        new = NewTrial(number, Origin.FORKED, point.config, params, parent.threads, role=Role.FORK)
        self._files.place_fork(point, number)
        said = f", forked from trial {parent.number} at episode {point.episode}"
        fork = replace(new, parent=parent.number, fork_step=point.step)
        return self._add(order, fork, said, lambda at, row: copy_steps(at, parent.id, row, point.step))
