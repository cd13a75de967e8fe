"""Orders: checked against the study before they are placed, and by the controller, which carries them out or refuses.

An order's change is written in the transaction that decides it. A running trial reads it there at its next report, so
nothing is lost if the controller dies.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sqlalchemy import Connection, update

from ppo_core import checkpoint
from ppo_core.config.declare import RUN_LENGTH, HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import ConfigError, PPOTunerError, StoreError, StudyError, nearest
from tuner.control import forks
from tuner.control.events import Limits
from tuner.control.session import OpenStudy, after_order, changed_spec
from tuner.files.trial_files import ForkPoint, TrialFiles
from tuner.judge.results import StudyView
from tuner.judge.scoring import judged, judged_again, so_far
from tuner.search.choose import as_stored
from tuner.store import NewTrial, Order, Store, StudyRow, TrialRow, schema
from tuner.store.connect import now
from tuner.store.trials import copy_steps, insert_trial, write_judgements, write_outcome, write_pause, write_resumption
from tuner.study import folder as study_folder
from tuner.study.spec import StudySpec
from tuner.study.status import ORDER_KINDS, STOPPED_BY_PERSON, Origin, Role, Status, Wanted


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
    """Return the params of an enqueued configuration; trial 0's fill in missing ones.

    Any hyperparameter may be given, searched or not, inside its range or not: it is this trial's own.

    Raises:
        ConfigError: a value is not allowed, does not go together with others, or a trial has these values already; the
            message says what is allowed.
    """
    given = {name: _declared(name, value) for name, value in values.items()}
    for name in given:
        if name in RUN_LENGTH:
            raise ConfigError(f"{name} is the same in all trials of a study, which are compared by what they come to")
    params = dict(given) if spec.listed else spec.params_with(given)
    config = spec.config(params).to_dict()
    same = next((row.number for row in rows if row.config == config), None)
    if same is not None:
        raise ConfigError(f"trial {same} has these values already")
    if "mini_batch_size" in given and config["mini_batch_size"] != given["mini_batch_size"]:
        raise ConfigError(
            f"mini_batch_size = {given['mini_batch_size']} is not allowed; expected at most batch_size = "
            f"{config['batch_size']}"
        )
    return as_stored(params, config)


def _declared(name: str, value: object) -> HyperValue:
    if name not in HYPERPARAMETERS:
        raise ConfigError(f'unknown hyperparameter "{name}"{nearest(name, HYPERPARAMETERS)}')
    return HYPERPARAMETERS[name].coerce(value)


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
    elif kind == "stop" and not view.row.is_held:
        raise StudyError(f'nothing runs study "{view.row.name}", so there is no run to stop')
    else:
        check_study_order(kind, view.row)


def _check_fork(view: StudyView, parent: TrialRow, values: Mapping[str, Any], episode: int | None) -> None:
    """Raise ConfigError for an impossible fork. Whoever can read its checkpoint checks that, too.

    A trial without checkpoints here may have some elsewhere, or soon: then the controller decides.
    """
    if not parent.attempts and parent.role is not Role.FORK:  # which begins with a copy of a checkpoint
        raise ConfigError(f"trial {parent.number} has not started yet; a fork starts from a checkpoint")
    folder = study_folder.own_folder(view.row)
    if folder is not None and checkpoint.complete(folder / str(parent.number)):
        _, _, episode = forks.choose(folder / str(parent.number), episode)
    forks.check(parent.config, values, episode or 0)


def why_waiting(is_held: bool, go_on: str) -> str:
    """Return why an order is still undecided; `go_on` is the command that runs its study."""
    return "the controller has not read it yet" if is_held else f"nothing runs the study; to carry it out: {go_on}"


class OrderDesk:
    """Decides the orders of one study."""

    def __init__(
        self,
        study: OpenStudy,
        files: TrialFiles,
        limits: Limits,
        is_running: Callable[[int], bool],
        on_decided: Callable[[Order], None],
    ) -> None:
        """Handle orders of `study`, whose run has `limits`.

        Args:
            study: The study.
            files: Its trials' files.
            limits: Of its run.
            is_running: Tells what a worker runs, or is about to.
            on_decided: Called with an order that was decided after `decide` had returned.
        """
        self._study = study
        self._files = files
        self._limits = limits
        self._is_running = is_running
        self._on_decided = on_decided
        self._forking: set[int] = set()
        self._changed: list[int] = []

    def is_under_way(self, order: Order) -> bool:
        """Return True for a fork whose checkpoint is being copied."""
        return order.id in self._forking

    def decide(self, order: Order) -> Order:
        """Carry out or refuse an order, and return its new state; see `is_under_way`."""
        return self._decided(order, lambda: self._carry_out(order))

    def _decided(self, order: Order, work: Callable[[], None]) -> Order:
        study = self._study
        try:
            work()
        except StoreError:
            raise  # says nothing about the order
        except PPOTunerError as error:
            study.store.refuse(study.lease, order, str(error))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # No command places what leads here; whoever did must not end this run, and the next one, and the next.
            study.store.refuse(study.lease, order, f"it cannot be carried out: {type(error).__name__}: {error}")
        return study.store.order(order.id)

    def take_changed(self) -> list[TrialRow]:
        """Return the trials that orders changed or added since the last call."""
        changed = [self._study.refresh(number) for number in self._changed]
        self._changed = []
        return changed

    def _carry_out(self, order: Order) -> None:
        if order.kind not in ORDER_KINDS:
            raise ConfigError(f'unknown order "{order.kind}"')
        if order.trial is None and ORDER_KINDS[order.kind].trial == "needed":
            raise ConfigError(f"{order.kind} names no trial")
        whole = {"enqueue": self._enqueue, "fork": self._fork, "set": self._set, "retry": self._retry}
        if order.kind in whole:
            whole[order.kind](order)
        elif order.trial is None:
            self._steer_study(order)
        else:
            self._steer_trial(order, self._study.store.trial(self._study.row, order.trial))

    # The whole study

    def _steer_study(self, order: Order) -> None:
        table = schema.studies

        def effect(connection: Connection) -> str:
            if order.kind == "stop":
                return "the run of the study is stopping cleanly"
            at = now(connection) if order.kind == "pause" else None
            connection.execute(update(table).where(table.c.id == self._study.row.id).values(paused_at=at))
            return "the study is paused" if order.kind == "pause" else "the study resumes"

        if order.kind == "stop" and order.id <= self._study.last_order:
            raise ConfigError("it was for an earlier run of the study, which has ended")
        check_study_order(order.kind, self._study.row)
        self._study.store.decide(self._study.lease, order, effect)
        self._reread_study()

    def _set(self, order: Order) -> None:
        changes = order.arguments.get("changes", {})
        spec = changed_spec(self._study.spec, changes)
        most = self._limits.most_workers
        if most is not None and changes.get("workers", 1) > most:
            raise ConfigError(f"workers = {changes['workers']} is not allowed; expected at most {most}, one per GPU")
        has_changed = spec.kl_budget != self._study.spec.kl_budget
        judged_anew = judged_again(self._study.store, self._study.rows, spec) if has_changed else []
        table = schema.studies

        def effect(connection: Connection) -> str:
            values = {"spec": spec.to_dict()} | ({"workers": changes["workers"]} if "workers" in changes else {})
            values["overrides"] = after_order(self._study.row.overrides or {}, changes)
            connection.execute(update(table).where(table.c.id == self._study.row.id).values(**values))
            write_judgements(connection, judged_anew)
            return ", ".join(f"{name} is now {value:g}" for name, value in changes.items())

        self._study.store.decide(self._study.lease, order, effect)
        self._study.spec = spec
        self._reread_study()
        if judged_anew:
            self._study.rows = self._study.store.trials(self._study.row)

    def _reread_study(self) -> None:
        self._study.row = self._study.store.study(self._study.spec.name)

    # One trial

    def _steer_trial(self, order: Order, row: TrialRow) -> None:
        check_trial_order(order.kind, row)
        study = self._study
        effect = self._while_it_runs(order, row) if self._is_running(row.number) else self._at_once(order, row)
        study.store.decide(study.lease, order, effect)
        self._changed.append(row.number)

    def _while_it_runs(self, order: Order, row: TrialRow) -> Callable[[Connection], str]:
        """Return the effect on a running trial, which learns of it at its next report."""
        wanted = None if order.kind == "resume" else Wanted(order.kind)
        text = f"trial {row.number} resumes" if wanted is None else f"trial {row.number} {wanted}s after this step"

        def effect(connection: Connection) -> str:
            connection.execute(update(schema.trials).where(schema.trials.c.id == row.id).values(wanted=wanted))
            return text

        return effect

    def _at_once(self, order: Order, row: TrialRow) -> Callable[[Connection], str]:
        """Return the effect on a trial that no worker runs."""
        study = self._study
        if order.kind == "resume":

            def resume(connection: Connection) -> str:
                write_resumption(connection, row)
                return f"trial {row.number} is {Status.WAITING}"

            return resume
        if order.kind == "pause":
            standing = so_far(study.store, row, study.spec)

            def pause(connection: Connection) -> str:
                write_pause(connection, row.id, standing)
                return f"trial {row.number} is {Status.PAUSED}"

            return pause
        outcome = judged(study.store, row, study.spec, Status.STOPPED, STOPPED_BY_PERSON)

        def end(connection: Connection) -> str:
            write_outcome(connection, row.id, outcome)
            return f"trial {row.number} is {Status.STOPPED}"

        return end

    def _retry(self, order: Order) -> None:
        study = self._study
        chosen = retried(study.rows, order.trial)
        blank = {"status": Status.WAITING, "reason": None, "ended_at": None, "violation": None, "retries": 0}

        def effect(connection: Connection) -> str:
            ids = [row.id for row in chosen]
            connection.execute(update(schema.trials).where(schema.trials.c.id.in_(ids)).values(**blank))
            numbers = ", ".join(str(row.number) for row in chosen)
            return f"trial {numbers} is tried again" if len(chosen) == 1 else f"trials {numbers} are tried again"

        study.store.decide(study.lease, order, effect)
        self._changed += [row.number for row in chosen]

    # New trials

    def _enqueue(self, order: Order) -> None:
        study = self._study
        params = enqueued_params(study.spec, study.rows, order.arguments.get("values", {}))
        config = study.spec.config(params).to_dict()
        number = len(study.rows)
        label = str(order.arguments.get("label") or "")
        trial = NewTrial(number, Origin.ENQUEUED, config, params, self._limits.threads, Status.WAITING, label)

        def effect(connection: Connection) -> str:
            insert_trial(connection, study.lease, trial)
            return f"added as trial {number}"

        study.store.decide(study.lease, order, effect)
        self._changed.append(number)

    def _fork(self, order: Order) -> None:
        """Start copying the parent's checkpoint; the fork is added when that is done."""
        parent = self._study.store.trial(self._study.row, order.trial or 0)

        def then(outcome: Future[ForkPoint]) -> None:
            self._forking.discard(order.id)
            self._on_decided(self._decided(order, lambda: self._add_fork(order, parent, outcome.result())))

        values, episode = order.arguments.get("values", {}), order.arguments.get("episode")
        self._files.fork(parent, f"fork-{order.id}", values, episode, then)
        self._forking.add(order.id)

    def _add_fork(self, order: Order, parent: TrialRow, point: ForkPoint) -> None:
        study, number = self._study, len(self._study.rows)
        values = order.arguments.get("values", {})
        self._files.place_fork(point, number)
        trial = NewTrial(
            number,
            Origin.FORKED,
            point.config,
            {**parent.params, **{name: point.config[name] for name in values}},
            parent.threads,
            Status.WAITING,
            str(order.arguments.get("label") or ""),
            parent.number,
            point.step,
            Role.FORK,
        )

        def effect(connection: Connection) -> str:
            made = insert_trial(connection, study.lease, trial)
            copy_steps(connection, parent.id, made, point.step)
            return f"added as trial {number}, forked from trial {parent.number} at episode {point.episode}"

        study.store.decide(study.lease, order, effect)
        self._changed.append(number)
