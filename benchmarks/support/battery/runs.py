"""Runs the battery's studies, each in processes of its own with one worker and one thread, and keeps what they logged.

The results of an arm are one Parquet file, a row per evaluation, to which each finished study is added; a battery that
was stopped goes on with the studies that are missing.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

from ppo_core.config.kl_budget import is_within
from ppo_core.errors import ConfigError

from .recipes import Recipe
from .tasks import STARTS, Start, make_task
from .trainer import LOG

ROOT = Path(__file__).parents[3]
WORK = ROOT / "runs" / "benchmarks" / "battery"
"""Where tasks are made, and where results of other names are kept."""
DATA = ROOT / "benchmarks" / "data" / "battery"
"""Where the results of the three arms are kept."""
RANDOM, OPTUNA, PACED, OURS = "random search", "Optuna alone", "random, paced", "ours"
"""The third draws at random what ours searches, in runs that keep their own pace."""
ARMS = (RANDOM, OPTUNA, PACED, OURS)
BUDGET = 12
"""Trials of full length."""
READ = ["trial", "step", "reward", "reward_se", "kl", "kl_se", "fresh_reward", "fresh_kl", "fresh_kl_se"]
AGAIN = ["again_reward", "again_kl", "again_kl_se"]
"""Of the readings after the search, by which our answer is chosen."""
KEYS = ["task", "start", "budget", "seed"]


@dataclass(frozen=True)
class Job:
    """One study."""

    task: str
    start: Start
    budget: int
    seed: int


def jobs(arm: str, tasks: Iterable[Recipe], starts: Sequence[Start], seeds: int) -> list[Job]:
    """Return an arm's studies, the first seed of all tasks first."""
    tasks = list(tasks)
    return [
        Job(task.name, start, task.random_budget if arm == RANDOM and seed == 0 else BUDGET, seed)
        for seed in range(seeds)
        for start in starts
        if as_run(arm, start) == start
        for task in tasks
    ]


def as_run(arm: str, start: Start) -> Start:
    """Return the start whose studies are an arm's at this one: the fair one's where nothing differs.

    Starts of random draws differ in trial 0 alone. Ours does not read the reference's β.
    """
    return "fair" if arm in (RANDOM, PACED) or (arm != OPTUNA and STARTS[start][0] == "kl_coef") else start


def results_file(name: str) -> Path:
    """Return where the results of that name are kept: in the repository those of the arms, and others put there."""
    file = f"{name.replace(',', '').replace(' ', '_')}.parquet"
    return DATA / file if name in ARMS or (DATA / file).exists() else WORK / file


def read_results(name: str) -> pd.DataFrame:
    """Return what was kept under a name; without rows where there is nothing."""
    path = results_file(name)
    known = pd.read_parquet(path) if path.exists() else pd.DataFrame()
    return known.reindex(columns=[*KEYS, "cpu", "pace", *READ, *AGAIN])


def run(
    name: str,
    arm: str,
    wanted: Sequence[Job],
    tasks: Sequence[Recipe],
    workers: int,
    tell: Callable[[str], None],
) -> None:
    """Run the studies that are missing under `name`, so many at a time."""
    known = read_results(name)
    have = set(known[KEYS].itertuples(index=False, name=None))
    missing = [job for job in wanted if (job.task, job.start, job.budget, job.seed) not in have]
    studies = {task.name: make_task(task, WORK / task.name) for task in tasks}
    with ThreadPoolExecutor(workers) as pool:
        running: dict[Future[pd.DataFrame], Job] = {}
        for job in missing:
            if len(running) == workers:
                known = _kept(name, known, running, tell)
            running[pool.submit(_run_study, arm, job, studies[job.task][job.start])] = job
        while running:
            known = _kept(name, known, running, tell)


def _kept(
    name: str, known: pd.DataFrame, running: dict[Future[pd.DataFrame], Job], tell: Callable[[str], None]
) -> pd.DataFrame:
    """Wait for a study to end, and return the results with its own, which are written."""
    for done in wait(running, return_when=FIRST_COMPLETED).done:
        job, rows = running.pop(done), done.result()
        known = pd.concat([known, rows], ignore_index=True) if len(known) else rows
        path = results_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        known.to_parquet(path.with_suffix(".part"), compression="zstd")
        path.with_suffix(".part").replace(path)
        tell(f"{name}, {job.task}, {job.start}, budget {job.budget}, seed {job.seed}: {rows.cpu.max():.0f} CPU-seconds")
    return known


def _run_study(arm: str, job: Job, study: Path) -> pd.DataFrame:
    """Run one study and return a row per evaluation of it."""
    folder = Path(tempfile.mkdtemp(prefix="battery-"))
    try:
        table = tomllib.loads(study.read_text()) | {"seed": job.seed, "budget": job.budget}
        if arm not in (RANDOM, OPTUNA):  # whose trials find their own rate and β
            for name in ("learning_rate", "kl_coef"):
                del table["search"][name]
            table["search"] |= {"kl_step": "advised", "kl_target": "advised"}
        (folder / "study.toml").write_bytes(tomli_w.dumps(table).encode())
        if arm in (RANDOM, OPTUNA, PACED):
            script = str(Path(__file__).parents[1] / "optuna_alone.py")
            command = [script, "study.toml", "--budget", str(job.budget), "--seed", str(job.seed)]
            command += [] if arm == OPTUNA else ["--random"]
        else:
            command = [str(Path(__file__).parents[1] / "search_alone.py"), "study.toml"]
        log = folder / "log.jsonl"
        own = {LOG: str(log), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT}"}
        ended = subprocess.run(
            [sys.executable, *command], cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            last = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
            raise ConfigError(f"{arm}, {job}: exit status {ended.returncode}: {' '.join(last)}")
        return _rows(job, [json.loads(line) for line in log.read_text().splitlines()])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rows(job: Job, lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the evaluations of a log, each with the CPU-seconds up to it; the last row is the log's end."""
    frame = pd.DataFrame(lines).reindex(columns=["cpu", *READ, *AGAIN])
    is_again = frame.again_reward.notna()
    first = frame[(frame.trial == frame.trial.iloc[0]) & frame.step.between(1, 2) & ~is_again]
    frame = frame.assign(
        **asdict(job), cpu=frame.cpu.cumsum(), pace=first.cpu.sum(), trial=pd.factorize(frame.trial)[0]
    )
    frame = frame[frame.reward.notna() | is_again | (frame.index == frame.index[-1])]
    floats = ["cpu", "pace", *READ[2:], *AGAIN]
    return frame[[*KEYS, "cpu", "pace", *READ, *AGAIN]].astype(dict.fromkeys(floats, "float32"))


def refusal(task: Recipe, random: pd.DataFrame) -> str | None:
    """Return why a task is no use, by its first trials of random search; None: it is taken.

    Their best checkpoints within the KL budget must spread over five standard errors of an evaluation, and the best of
    them must lie below what no response can be worth more than.
    """
    rows = random[(random.task == task.name) & (random.start == "fair")]
    baseline = rows[rows.step == 0].reward.mean()
    values = []
    for (_, trial), of_trial in rows.groupby(["seed", "trial"]):
        within = [is_within(kl, se, task.kl_budget) for kl, se in zip(of_trial.kl, of_trial.kl_se, strict=True)]
        if trial:  # the first is the reference
            values.append(of_trial.reward[within].max())
    values = [baseline if math.isnan(value) else value for value in values[: task.checked]]
    if len(values) < task.checked:
        return f"only {len(values)} trials are recorded"
    spread, error = pd.Series(values).std(), rows.reward_se.median()
    if spread < 5 * error:
        return f"{task.checked} trials spread over {spread / error:.1f} standard errors"
    if max(values) > task.ceiling - 2 * error:
        return f"the best of {task.checked} trials is at the ceiling of {task.ceiling:g}"
    return None


STARTS_SCREENED: tuple[Start, ...] = ("fair", "rate ÷ 10")
"""Where ideas are tried first."""
ALL_STARTS: tuple[Start, ...] = tuple(STARTS)
