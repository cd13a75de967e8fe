"""A study from Python: run it, read its answer, confirm and launch it. The store is that of the command line."""

import argparse
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import escape

from ppo_core.cli.command_line import import_from_working_folder
from ppo_core.config import checks
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import ConfigError, StoreError, StudyError
from ppo_core.output import console
from ppo_core.tasks import skeleton
from ppo_tuner import given
from ppo_tuner.training import TrainedRun, flags, launched, train_keywords
from tuner.cli import manage, report, run
from tuner.cli.main import build_parser
from tuner.confirm.answer import study_answer
from tuner.confirm.plan import DEFAULT_SEEDS, Plan
from tuner.control.events import StudyStopped
from tuner.environment import RUNS_FOLDER
from tuner.exchange import TRAINERS
from tuner.exchange.trainers import launch_config, write
from tuner.files import folder as study_folder
from tuner.judge.results import StudyView, read_study
from tuner.store import Store, command, opened, storage_flags
from tuner.study.spec import StudySpec
from tuner.study.study_file import NAME, TOP_LEVEL, matching

if TYPE_CHECKING:  # they take seconds to import
    import pandas as pd
    import plotly.graph_objects as go

TASK_FOLDER = "task"
"""Folder of a study's own task, in the study's folder."""
_RUN_FLAGS = ("workers", "gpus", "trials_per_gpu", "engine", "timeout", "checkpoint_seconds", "report_to")
"""Flags of `ppo-tuner run` that are keywords here."""
_TASK_KEYS = ("doc", "eval", *given.SPLITS)
"""Keys of a task file that are keywords here, beside its policy, reward and prompts."""
_STUDY_KEYS = tuple(key for key in TOP_LEVEL if key != "workers")
LAUNCH = "study.train()"
"""The call that launches what a study's answer says."""


@dataclass(frozen=True)
class Answer:
    """What a study says to do now; in a notebook it is shown as a card."""

    decision: str
    """What to do, in a sentence; or why there is no answer."""
    evidence: str
    """Reward and KL that speak for it; empty: there is no answer."""
    gains: str
    """Its gains over the reference and the baseline; empty: the study has no baseline."""
    doubt: str
    """What could change the decision; empty: nothing known."""
    remedy: str
    """The call that settles the doubt, or a shell command that no call replaces; empty: there is none."""
    command: str
    """The shell command that does what `study.train()` does; empty: there is no answer, or nothing was learned."""
    trial: int | None = None
    """Number of the trial that it is about."""
    config: Mapping[str, HyperValue] | None = None
    """Its hyperparameters."""

    def __str__(self) -> str:
        doubt = " ".join(filter(None, (self.doubt, self.remedy)))
        launch = f"Launch: {LAUNCH}" if self.command else ""
        return "\n".join(filter(None, (self.decision, self.evidence, self.gains, doubt, launch)))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        doubt = f"{escape(self.doubt)} <code>{escape(self.remedy)}</code>" if self.remedy else escape(self.doubt)
        lines = [f"<b>{escape(self.decision)}</b>", *map(str, (escape(self.evidence), escape(self.gains), doubt))]
        if self.command:
            lines.append(f"<code>{LAUNCH}</code>")
        rows = "".join(f"<div style='margin: 2px 0'>{line}</div>" for line in lines if line)
        return f"<div style='border-left: 4px solid #888; padding: 4px 12px; max-width: 60em'>{rows}</div>"


class Study:
    """A stored study. Each reading is of the store as it is now, so a study that runs elsewhere is followed.

    Args:
        name: Its name, as `ppo-tuner list` prints it.
        storage: Where studies are kept: a database URL or an SQLite file. None: as on the command line.

    Raises:
        StudyError: there is no such study.
        StoreError: there is no such store.
    """

    def __init__(self, name: str, storage: str | os.PathLike[str] | None = None) -> None:
        self.name = name
        self._storage = None if storage is None else os.fspath(storage)
        with self._read():
            pass

    @property
    def state(self) -> str:
        """`running`, `paused`, `finished` or `unfinished`."""
        with self._read() as (_, view):
            return view.state

    @property
    def answer(self) -> Answer:
        """What to launch within the KL budget, why, and how sure that is."""
        with self._read() as (store, view):
            found = study_answer(store, view)
            if found is None:
                return Answer(report.no_winner(store, view), "", "", "", "", "")
            return Answer(
                decision=found.decision,
                evidence=found.evidence,
                gains=found.gained,
                doubt=found.doubt,
                remedy=_call(found.remedy, store) if found.remedy else "",
                command=command(found.launch, store) if found.has_learned else "",
                trial=found.number,
                config=dict(found.trial.config),
            )

    @property
    def trials(self) -> "pd.DataFrame":
        """The trials by number.

        `value` is the eval reward of the best checkpoint within the KL budget, `kl` its eval KL in nats per response;
        `params_*` are the searched values.
        """
        from dashboard.data import Snapshot

        with self._read() as (_, view):
            return Snapshot.of(view).trials.set_index("number")

    def plot_reward_kl(self) -> "go.Figure":
        """Return the dashboard's figure of eval reward against eval KL: every trial's way.

        Raises:
            StudyError: nothing was evaluated yet.
        """
        from dashboard.report import reward_against_kl

        with self._read() as (store, view):
            found = study_answer(store, view)
            drawn = reward_against_kl(store, view, None if found is None else found.trial)
        if drawn is None:
            raise StudyError(f'study "{self.name}" has no evaluation yet')
        return drawn

    def gauntlet(self) -> "go.Figure":
        """Return the dashboard's figure of the gates: which of them stopped each trial, and by how much."""
        from dashboard.gauntlet import figure
        from tuner.confirm.gauntlet import study_gauntlet

        with self._read() as (store, view):
            return figure(study_gauntlet(store, view, study_answer(store, view)))

    def confirm(
        self, seeds: int = DEFAULT_SEEDS, *, top: int | None = None, total_episodes: int | None = None, **settings: Any
    ) -> Answer:
        """Run the best configurations again on fresh seeds, or resume that, and return the answer.

        Args:
            seeds: Runs of each.
            top: How many configurations, beside the reference; None: what the command line takes.
            total_episodes: Length of the runs; None: the study's.
            settings: Flags of `ppo-tuner confirm`, such as `workers` or `timeout`.

        Raises:
            StudyError: the search has not ended.
            ConfigError: a setting is not allowed.
            KeyboardInterrupt: it was interrupted; what runs has saved a checkpoint.
        """
        given.require_known(settings, _RUN_FLAGS, Study.confirm)
        args = _parsed("confirm", self.name, storage=self._storage, seeds=seeds, top=top, **settings)
        with self._read() as (_, view):
            spec = view.spec
        _announce(run.run_rest(spec, args, plan=Plan(top, seeds, total_episodes)))
        return self.answer

    def train(self, total_episodes: int | None = None, **flags_of_train: Any) -> TrainedRun:
        """Train what the answer says to launch, in this process.

        Args:
            total_episodes: Length of the run; None: as the answer's command.
            flags_of_train: Hyperparameters and other flags of `ppo-tuner train`, such as `output`.

        Raises:
            StudyError: the study has no answer, or says to launch nothing.
            KeyboardInterrupt: it was interrupted; the run has saved a checkpoint.
        """
        with self._read() as (store, view):
            found = study_answer(store, view)
            if found is None:
                raise StudyError(report.no_winner(store, view))
            if not found.has_learned:
                raise StudyError(found.decision)
            words = [*found.launch[1:], *storage_flags(store.url.render_as_string(hide_password=False))]
        given.require_known(flags_of_train, train_keywords(), Study.train)
        output = flags_of_train.pop("output", None)
        words += flags(total_episodes=total_episodes, **flags_of_train)
        return launched(f"{self.name}-{found.number}" if output is None else Path(output), words)

    def export(self, to: str, output: str | os.PathLike[str] | None = None, *, force: bool = False) -> str:
        """Return the configuration to launch as the text of another trainer's file.

        Args:
            to: `trl`, `openrlhf`, `verl`, or `yaml`, which is ours.
            output: A file to write it to as well.
            force: True: an existing file is replaced.

        Raises:
            StudyError: the study has no answer.
            ConfigError: there is no such trainer, or the file cannot be written.
        """
        checks.one_of(to, TRAINERS, "to")
        with self._read() as (store, view):
            launch = launch_config(store, view, None)
        if launch is None:
            raise StudyError(report.no_winner(store, view))
        if output is not None:
            manage.export(_parsed("export", self.name, storage=self._storage, to=to, output=output, force=force))
        return write(launch, to, view.spec.task).text

    @contextmanager
    def _read(self) -> Iterator[tuple[Store, StudyView]]:
        with opened(self._storage) as store:
            yield store, read_study(store, self.name)

    def __repr__(self) -> str:
        return f'study "{self.name}", {self.state}\n{self.answer}'

    def _repr_html_(self) -> str:
        return f'<div>study "{escape(self.name)}", {self.state}</div>{self.answer._repr_html_()}'


def tune(
    policy: Any = None,
    reward: Any = None,
    prompts: Any = None,
    *,
    kl_budget: float | None = None,
    budget: float | str | None = None,
    name: str | None = None,
    task: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    search: Mapping[str, Any] | None = None,
    workers: int | None = None,
    timeout: float | str | None = None,
    storage: str | os.PathLike[str] | None = None,
    **more: Any,
) -> Study:
    """Run a study, or resume the one of that name, and return it.

    It shows its progress, and is seen by the command line and the dashboard. Ctrl-C stops it cleanly.

    Args:
        policy: The SFT policy: a hub id, a path or a loaded model, which is saved into the study's folder.
        reward: A function (also a notebook's), a reward model's hub id or path, a URL; a table of a task file, with
            `where` and `weight`; or a list of them.
        prompts: A list of texts, chats or rows; a file, a folder, a hub id or a dataset; or a table of a task file.
        kl_budget: Highest eval KL of the answer, in nats per response. None: the task's, 10 unless it states one.
        budget: What the search may spend, in trials of full length, or in time such as `"3m"` or `"2h"`, after which no
            trial begins; this, `trials` or both.
        name: The study's name. None: it is made of the policy's and the reward's.
        task: In the place of policy, reward and prompts: a built-in task's name, or a task file.
        tokenizer: A loaded policy's. None: that of the place it was loaded from.
        search: What is searched, as in a study file. None: what `ppo-tuner new-task` writes.
        workers: Trials at a time.
        timeout: Time after which it stops, to be resumed: seconds, `"10m"` or `"2h"`.
        storage: Where studies are kept. None: as on the command line.
        more: Any hyperparameter, the same in all trials unless it is searched; other keys of a study file, `kl_limit`,
            and its table of workers as `worker_settings`; `eval_prompts`, `test_prompts`, `eval` and `doc` of a task
            file; other flags of `ppo-tuner run`.

    Raises:
        ConfigError: something is not allowed, or would change a study that has trials.
        TaskError: a part of the task does not exist, or cannot be used.
        StudyError: another process runs the study, or all its trials fail.
        StoreError: the store or the folder cannot be used.
        KeyboardInterrupt: it was interrupted; running trials have saved checkpoints.
    """
    import_from_working_folder()
    allowed = (*_STUDY_KEYS, *_RUN_FLAGS, *_TASK_KEYS, *HYPERPARAMETERS, "kl_limit", "worker_settings")
    given.require_known(more, allowed, tune)
    hyperparameters = {key: more[key] for key in HYPERPARAMETERS if key in more and key != "seed"}
    of_task = {key: more[key] for key in _TASK_KEYS if key in more}
    parts = {"policy": policy, "reward": reward, "prompts": prompts}
    given.require_task(parts, task)
    if task is not None and of_task:
        raise ConfigError(f"{', '.join(of_task)} is given beside a task, which has its own")
    named = [policy, *(reward if isinstance(reward, list | tuple) else [reward])]
    usual = "-".join(map(_called, named))[:100] if task is None else Path(task).stem
    name = matching(name or usual, NAME, "name")
    where = None if storage is None else os.fspath(storage)
    content = {
        "name": name,
        "task": "" if task is None else os.fspath(task),
        "budget": budget,
        "search": search,
        "workers": more.get("worker_settings"),
        **{key: more[key] for key in _STUDY_KEYS if key in more},
        "kl": {**more.get("kl", {}), **_given(budget=kl_budget, limit=more.get("kl_limit"))},
    }
    content = _given(**content)
    if "trial" not in content:
        content.setdefault("search", skeleton.search())
    if task is not None:
        content["fixed"] = {**hyperparameters, **content.get("fixed", {})}
    else:
        asked = {"tokenizer": tokenizer, "hyperparameters": hyperparameters, "more": of_task}
        content["task"] = str(_own_task(name, where, parts | asked))
    args = _parsed(
        "run", name, storage=where, workers=workers, timeout=timeout,
        **{key: more[key] for key in _RUN_FLAGS if key in more},
    )  # fmt: skip
    with given.in_words_of_keywords():
        stopped, _ = run.run_whole(StudySpec.from_dict(content, "tune"), args, from_file=True)
    _announce(stopped)
    return Study(name, where)


def _call(words: Sequence[str], store: Store) -> str:
    """Return the call that does what the words of a command do, or the command where no call does it."""
    verb, name, *flagged = words
    if verb == "run":
        return f'pt.tune(..., name="{name}")'
    if verb != "confirm":
        return command(words, store)
    pairs = zip(flagged[::2], flagged[1::2], strict=True)
    keywords = (f"{flag.removeprefix('--').replace('-', '_')}={value}" for flag, value in pairs)
    return f"study.confirm({', '.join(keywords)})"


def _own_task(name: str, where: str | None, asked: Mapping[str, Any]) -> Path:
    """Write the task of a study into the study's folder, and return its file.

    Raises:
        ConfigError: the study has trials of another task; the message says what has changed.
    """
    folder, has_trials = RUNS_FOLDER / name, False
    try:
        with opened(where) as store:
            known = next((row for row in store.studies() if row.name == name), None)
            if known is not None:
                folder, has_trials = study_folder.own_folder(known) or folder, bool(store.trials(known))
    except StoreError:  # there is none yet, or the run will say what is wrong with it
        pass
    file = (folder / TASK_FOLDER / given.TASK_FILE).absolute()
    text = given.task_text(file.parent, **asked)
    if file.exists() and (has_trials or any(folder.glob("*/step-*"))):
        texts = (file.read_text(encoding="utf-8"), text)
        before, now = (_flat(tomllib.loads(each.replace(f"{file.parent}/", ""))) for each in texts)
        if changed := "; ".join(_changes(before, now)):
            raise ConfigError(
                f'study "{name}" has trials already, and its task has changed: {changed}; give the study another name, '
                "or what it had before"
            )
    elif not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")
    return file


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each part of a task that differs; what was written to a file is called as in the program."""
    for key in dict.fromkeys((*before, *now)):
        values = [each.get(key, "none") for each in (now, before)]
        new, old = (given.WRITTEN.sub(r"\1", value) for value in values)
        if new != old:
            yield f"{key}: {new}, was {old}"
        elif len(set(values)) > 1:
            yield f"{re.split(r'[.[]', key)[0]}: not the same {new} as before"


def _flat(value: Any, at: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        pairs = [_flat(inner, f"{at}.{key}" if at else key) for key, inner in value.items()]
    elif isinstance(value, list):
        pairs = [_flat(inner, f"{at}[{i}]") for i, inner in enumerate(value)]
    else:
        return {at: str(value)}
    return {key: text for each in pairs for key, text in each.items()}


def _called(part: Any) -> str:
    """Return what a policy or reward is called, in the letters of a study's name."""
    if isinstance(part, Mapping):
        return _called(part.get("name") or part.get("where"))
    name = getattr(part, "name_or_path", None) or getattr(part, "__name__", None) or part
    text = str(name) if isinstance(name, str | os.PathLike) else type(part).__name__
    return re.sub(r"[^A-Za-z0-9._-]+", "-", re.split(r"[:/]", text.rstrip("/"))[-1]).strip("-._") or "unnamed"


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _parsed(command: str, name: str, **keywords: Any) -> argparse.Namespace:
    """Return a command's flags, checked as on the command line."""
    parser, _ = build_parser()
    with given.in_words_of_keywords():
        args: argparse.Namespace = parser.parse_args([command, name, *flags(**keywords)])
    return args


def _announce(stopped: StudyStopped | None) -> None:
    """Say how a study stopped; KeyboardInterrupt unless that was asked for in advance or by an order."""
    if stopped is None:
        return
    line = f"{stopped.stop.why}: {stopped.tally.text}; run this again to resume"
    if not stopped.stop.is_deliberate:
        raise KeyboardInterrupt(line)
    console().print(line)
