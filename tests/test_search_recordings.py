"""The benchmark of the search: what a recording holds, and that making one may be interrupted at any moment."""

import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ppo_core.declare import Range
from ppo_core.errors import ConfigError
from ppo_core.hyperparameters import PPOConfig
from ppo_core.metrics import METRICS
from ppo_core.report import EvalReadings, StepReport
from tests import waiting
from tuner.engine.trial import run_trial
from tuner.guard import READ, RULES, GuardSettings
from tuner.protocol import Answer, NoRoom, Stepped, TrialSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # as for the scripts there

from support import pool, recorded, recorded_summary, recording
from support.recorded import RecordedEvaluation, RecordedRun, RecordedStep, Recording
from support.recording import Amount, Planned, Workshop, record_run, work

KL = "objective/kl_exact"
SPEC = recording.built_in_study("reviews")


@dataclass
class MadeUp:
    """A trainer whose KL rises by 1 nat per 320 episodes, and whose reward is best at a rate of 3e-4."""

    config: PPOConfig
    raises_at: int | None = None
    changes: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of some steps, over what they would be."""
    kl_per_episode: float = 1 / 320

    def __iter__(self) -> Iterator[StepReport]:
        yield self.evaluated(StepReport(0, 0, {}))
        batch = self.config.batch_sizes(1).batch_size
        for step in range(1, self.config.num_iterations() + 1):
            if step == self.raises_at:
                raise RuntimeError("probabilities hold a NaN")
            metrics = {KL: (step - 1) * batch * self.kl_per_episode, "lr": 0.5, "policy/grad_norm": 1.0}
            report = StepReport(step, step * batch, {**metrics, **self.changes.get(step, {})})
            interval = self.config.eval_interval
            is_due = report.episode // interval > (report.episode - batch) // interval
            yield self.evaluated(report) if is_due or step == self.config.num_iterations() else report

    def evaluated(self, report: StepReport) -> StepReport:
        reward = 2 - abs(math.log(self.config.learning_rate / 3e-4)) + report.episode / 65536
        kl = report.episode * self.kl_per_episode
        metrics = {"eval/reward": reward, "eval/reward_se": 0.25, "eval/kl": kl, "eval/kl_se": 0.25}
        readings = EvalReadings((reward, reward + 1), (kl, kl), (24, 24))
        return replace(report, metrics={**report.metrics, **metrics}, readings=readings)

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        raise NotImplementedError

    def save_model(self, folder: Path) -> None:
        raise NotImplementedError


def make_up(config: PPOConfig, task: str) -> MadeUp:
    return MadeUp(config)


def planned(**params: Any) -> Planned:
    return Planned(
        "random-0000", "random", 0, {**pool.random_params(SPEC, 1)[0], "batch_size": 32, **params}, SPEC.seed
    )


def workshop(folder: Path) -> Workshop:
    shop = Workshop(SPEC, folder / "data" / "reviews.parquet", folder / "work", {"commit": "abc"})
    shop.open()
    return shop


# One run.


def causes(run: RecordedRun) -> dict[int, tuple[str, ...]]:
    return {step.step: step.evaluation.causes for step in run.steps if step.evaluation is not None}


def test_a_run_is_evaluated_regularly_early_and_where_the_watch_says_so() -> None:
    run = record_run(SPEC, planned(), make_up)
    found = causes(run)
    assert list(found)[:4] == [0, 3, 6, 12]
    assert (found[0], found[3], found[6]) == (("regular",), ("early",), ("regular",))
    assert [step for step, why in found.items() if why == ("regular",)] == list(range(0, 61, 6))
    # The KL rises by 0.1 per step: from step 57 on, at 5.6, it would be over 6 five steps later.
    assert [step for step, why in found.items() if why == ("watch",)] == [57, 58, 59]
    assert (run.stopped, len(run.steps), run.steps[-1].episode) == ("", 61, 1920)
    assert run.config["eval_every_episodes"] == 192


def test_large_batches_have_their_early_evaluation_at_the_first_step() -> None:
    assert causes(record_run(SPEC, planned(batch_size=128), make_up))[1] == ("early",)


def test_one_evaluation_may_have_several_causes() -> None:
    steep = {1: {KL: 0.0}, 2: {KL: 1.0}, 3: {KL: 4.0}}
    run = record_run(SPEC, planned(), lambda config, task: MadeUp(config, changes=steep))
    assert causes(run)[3] == ("early", "watch")


def test_training_and_evaluations_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: clock[0])

    class Slow(MadeUp):
        def __iter__(self) -> Iterator[StepReport]:
            for report in super().__iter__():
                clock[0] += 10.0 * (report.step > 0)
                yield report

        def evaluated(self, report: StepReport) -> StepReport:
            clock[0] += 1.0
            return super().evaluated(report)

    run = record_run(SPEC, planned(batch_size=128), lambda config, task: Slow(config))
    assert [step.cpu_seconds for step in run.steps] == [0.0, *[10.0] * 15]
    assert {step.evaluation.cpu_seconds for step in run.steps if step.evaluation is not None} == {1.0}
    assert run.cpu_seconds == 150.0 + len(run.rows(recorded.CAUSES))


def test_a_run_that_raises_is_recorded_up_to_there() -> None:
    run = record_run(SPEC, planned(), lambda config, task: MadeUp(config, raises_at=5))
    assert [step.step for step in run.steps] == [0, 1, 2, 3, 4]
    assert run.stopped == "step 5: RuntimeError: probabilities hold a NaN"


def test_what_raises_before_anything_is_trained_is_no_data() -> None:
    class Broken(MadeUp):
        def __iter__(self) -> Iterator[StepReport]:
            raise RuntimeError("no such model")
            yield

    with pytest.raises(RuntimeError, match="no such model"):
        record_run(SPEC, planned(), lambda config, task: Broken(config))


def test_a_run_ends_where_a_metric_that_must_be_finite_is_not() -> None:
    nan = {4: {"policy/grad_norm": math.nan, "val/var_explained": math.nan}, 2: {"val/var_explained": math.nan}}
    run = record_run(SPEC, planned(), lambda config, task: MadeUp(config, changes=nan))
    assert [step.step for step in run.steps] == [0, 1, 2, 3, 4]
    assert run.stopped == "step 4: policy/grad_norm is nan"
    assert math.isnan(run.steps[-1].metrics["policy/grad_norm"])


def test_an_evaluation_that_raises_ends_the_run_and_keeps_its_step() -> None:
    class Unevaluable(MadeUp):
        def evaluated(self, report: StepReport) -> StepReport:
            if report.step == 3:
                raise ValueError("logits are NaN")
            return super().evaluated(report)

    run = record_run(SPEC, planned(), lambda config, task: Unevaluable(config))
    assert run.stopped == "evaluation of step 3: ValueError: logits are NaN"
    assert run.steps[-1].step == 3
    assert run.steps[-1].evaluation is None


@pytest.mark.slow
def test_what_is_recorded_is_what_a_worker_trains_without_a_guard(tmp_path: Path) -> None:
    short = replace(SPEC, fixed={**SPEC.fixed, "total_episodes": 640})
    wanted = planned(mini_batch_size=32, num_ppo_epochs=1, learning_rate=1e-3)
    torch.set_num_threads(1)
    run = record_run(short, wanted, recording.make_ppo)
    assert causes(run)[1] == ("early",)  # which the worker does not make
    off = GuardSettings.from_dict(dict.fromkeys(RULES, False), SPEC.kl_limit, "guard")
    config = recording.run_config(short, wanted).to_dict()
    trial = TrialSpec("study", 0, config, SPEC.task, SPEC.trainer, "cpu", 1, tmp_path, off, SPEC.kl_budget)
    reports: list[StepReport] = []

    def note(message: Stepped | NoRoom) -> Answer:
        assert isinstance(message, Stepped)
        reports.append(message.report)
        return Answer.GO_ON

    run_trial(trial, note)
    assert len(reports) == len(run.steps) == 21
    for step, report in zip(run.steps, reports, strict=True):
        assert step.metrics == {name: value for name, value in report.metrics.items() if name in step.metrics}
        if report.is_evaluation:
            assert report.readings is not None
            assert step.evaluation is not None
            assert step.evaluation.rewards == report.readings.rewards
    assert run.steps[-1].metrics.keys() == {name for name in READ if name in METRICS and not name.startswith("eval/")}


# The file.


def evaluation(reward: float, kl: float, *causes: recorded.Cause) -> RecordedEvaluation:
    metrics = {"eval/reward": reward, "eval/reward_se": 0.25, "eval/kl": kl, "eval/kl_se": 0.5}
    return RecordedEvaluation(causes or ("regular",), metrics, (reward, -1.5), (kl, 0.25), 0.75)


def run_of(name: str, *evaluations: RecordedEvaluation | None, **values: Any) -> RecordedRun:
    """Return a run of 640 episodes a step that was evaluated so, from step 0."""
    steps = tuple(
        RecordedStep(number, 640 * number, {KL: float(number)} if number else {}, 2.5 * number, found)
        for number, found in enumerate(evaluations)
    )
    number = int(name.split("-")[1]) if name[0] == "r" else 0
    drawn = pool.random_params(SPEC, number + 1)[-1]
    about = {"kind": "random", "number": number, "seed": 0, "params": drawn, "config": SPEC.config(drawn).to_dict()}
    return RecordedRun(**{"name": name, **about, "steps": steps, **values})


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    plain = run_of("random-0000", evaluation(0.5, 0.0), None, evaluation(1.5, 2.0, "early", "watch"))
    broken = run_of("random-0001", evaluation(0.5, 0.0), None, stopped="step 2: it broke", weight=0.25)
    nan = replace(broken.steps[1], metrics={KL: math.nan, "loss/value_avg": math.inf})
    repeat = run_of("random-0000-seed-1", evaluation(0.5, 0.0), kind="seed", repeats="random-0000", seed=1, weight=0.0)
    runs = (plain, replace(broken, steps=(broken.steps[0], nan)), repeat)
    file = tmp_path / "new" / "reviews.parquet"
    region = {"fitted_on": 2, "scales": [0.5], "noise": 0.1, "threshold": 1.0, "probability": 0.15}
    recorded.write(file, Recording(SPEC.to_dict(), runs, region, ({"commit": "abc", "threads": 1},)))
    found = recorded.read(file)
    assert (found.spec, found.region, found.provenance) == (SPEC, region, ({"commit": "abc", "threads": 1},))
    assert found.runs[0] == plain
    assert repr(found.runs) == repr(runs)  # in which NaN equals NaN
    assert list(file.parent.iterdir()) == [file]
    assert pq.read_table(file).num_rows == 6


def test_what_each_prompt_came_to_is_kept_in_half_precision(tmp_path: Path) -> None:
    found = replace(evaluation(0.5, 0.0), rewards=(0.1, -2.0), kls=(12.3, 0.0))
    recorded.write(tmp_path / "reviews.parquet", Recording(SPEC.to_dict(), (run_of("random-0000", found),)))
    read = recorded.read(tmp_path / "reviews.parquet").runs[0].steps[0].evaluation
    assert read is not None and (read.rewards, read.kls) == ((0.0999755859375, -2.0), (12.296875, 0.0))


def test_a_file_that_is_no_recording_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^reviews\.parquet: no such recording; make it with: python benchmarks/search"
    ):
        recorded.read(tmp_path / "reviews.parquet")
    (tmp_path / "reviews.parquet").write_text("nothing")
    with pytest.raises(ConfigError, match=r"^reviews\.parquet cannot be read as Parquet: .*$"):
        recorded.read(tmp_path / "reviews.parquet")


def test_a_step_is_reported_with_the_evaluations_that_are_asked_for() -> None:
    run = run_of(
        "random-0000", evaluation(0.5, 0.0), None, evaluation(1.5, 2.0, "early"), evaluation(1.0, 3.0, "watch")
    )
    assert [report.is_evaluation for report in run.reports()] == [True, False, True, True]
    assert [report.is_evaluation for report in run.reports(("regular", "watch"))] == [True, False, False, True]
    report = run.steps[3].report()
    assert (report.step, report.episode, report.metrics[KL], report.metrics["eval/kl"]) == (3, 1920, 3.0, 3.0)
    assert report.readings == EvalReadings((1.0, -1.5), (3.0, 0.25), ())


def test_the_best_within_the_budget_leaves_room_for_a_standard_error() -> None:
    run = run_of(
        "random-0000", evaluation(0.5, 0.0), evaluation(1.0, 5.5), evaluation(3.0, 5.6), evaluation(2.0, 4.0, "early")
    )
    assert run.best_within(6.0) == 1.0
    assert run.best_within(6.0, recorded.CAUSES) == 2.0
    assert run.best_within(6.1) == 3.0
    assert run_of("random-0000", evaluation(0.5, 1.0)).best_within(1.0) is None


def test_the_value_at_the_end_is_of_the_last_two_regular_evaluations() -> None:
    run = run_of("random-0000", *(evaluation(reward, 0.0) for reward in (9, 1, 2, 4)), evaluation(7, 0.0, "watch"))
    assert run.value_at_end() == 3.0
    assert run_of("random-0000", evaluation(9, 0.0)).value_at_end() == 9, "the baseline, where there is no other"


# Which configurations.


def test_random_runs_are_what_a_random_search_proposes_first() -> None:
    drawn = pool.random_params(SPEC, 3)
    assert [params["kl_control"] for params in drawn] == ["fixed", "adaptive", "fixed"]
    assert drawn[:2] == pool.random_params(SPEC, 2)
    assert all(span.low <= drawn[0][name] <= span.high for name, span in SPEC.search.items() if name in drawn[0])


def test_the_unit_cube_has_each_dimension_along_its_scale() -> None:
    spans = {"learning_rate": Range(1e-5, 1e-3, "log"), "batch_size": Range(32, 128, "log2"), "lam": Range(0.8, 1.0)}
    point = pool.unit(spans, {"learning_rate": 1e-4, "batch_size": 32, "lam": 0.95})
    assert point == pytest.approx([0.5, 0.0, 0.75])
    spans |= {"kl_target": Range(2, 8, "log"), "kl_coef": Range(0.01, 0.1, "log")}
    values = {"learning_rate": 1e-5, "batch_size": 128, "lam": 0.8}
    assert pool.unit(spans, {**values, "kl_control": "fixed", "kl_coef": 0.1}) == pytest.approx([0, 1, 0, 0.5, 1, 0])
    assert pool.unit(spans, {**values, "kl_control": "adaptive", "kl_target": 4}) == pytest.approx(
        [0, 1, 0, 0.5, 0.5, 1]
    )


def test_the_error_left_out_is_that_of_leaving_each_one_out() -> None:
    random = np.random.default_rng(0)
    points, values = random.random((7, 2)), random.random(7)
    kernel = pool.Kernel((0.5, 2.0), 0.2)
    errors = []
    for left_out in range(7):
        kept = [number for number in range(7) if number != left_out]
        matrix = kernel.between(points[kept], points[kept]) + 0.2 * np.eye(6)
        predicted = kernel.between(points[left_out : left_out + 1], points[kept]) @ np.linalg.solve(
            matrix, values[kept]
        )
        errors.append((values[left_out] - predicted[0]) ** 2)
    assert kernel.error_left_out(points, values) == pytest.approx(np.mean(errors))
    assert kernel.between(points[:1], points[1:2])[0, 0] == pytest.approx(
        math.exp(-0.5 * (((points[0] - points[1]) / [0.5, 2.0]) ** 2).sum())
    )


def random_runs(count: int) -> list[RecordedRun]:
    """Return runs whose value falls with the distance of the rate from 3e-4, and depends on nothing else."""
    drawn = pool.random_params(SPEC, count)
    return [
        RecordedRun(f"random-{number:04d}", "random", number, 0, params, {}, (RecordedStep(0, 0, {}, 0.0, found),))
        for number, params in enumerate(drawn)
        for found in [evaluation(2 - abs(math.log(float(params["learning_rate"]) / 3e-4)), 1.0)]
    ]


@pytest.fixture(scope="module")
def region() -> pool.Region:
    """The region of 60 random runs."""
    return pool.find_region(SPEC, random_runs(60))


def test_runs_near_the_top_are_where_the_best_random_ones_were(region: pool.Region) -> None:
    randoms = random_runs(60)
    assert region.probability == pytest.approx(0.15, abs=0.001)
    near = pool.near_params(SPEC, region, randoms, 50)
    # 15% of the log range from 1e-5 to 3e-3 is a factor of 2.35: from 2e-4 to 4.6e-4 around 3e-4.
    rates = [float(params["learning_rate"]) for params in near]
    assert sum(1.7e-4 < rate < 5.3e-4 for rate in rates) >= 45
    assert {params["kl_control"] for params in near} == {"fixed", "adaptive"}
    assert near[:20] == pool.near_params(SPEC, region, randoms, 20)
    assert pool.Region.from_dict(json.loads(json.dumps(region.to_dict()))) == region


def test_weights_keep_the_pool_representative(region: pool.Region) -> None:
    randoms = random_runs(60)
    assert set(pool.weights(SPEC, region, randoms).values()) == {1.0}
    near = [
        replace(randoms[0], name=f"near-top-{number:04d}", kind="near-top", params=params)
        for number, params in enumerate(pool.near_params(SPEC, region, randoms, 12))
    ]
    repeat = replace(randoms[0], name="random-0000-seed-1", kind="seed", repeats="random-0000")
    weights = pool.weights(SPEC, region, [*randoms, *near, repeat])
    inside = [run.name for run in randoms if weights[run.name] != 1.0]
    assert 5 <= len(inside) <= 13
    share = len(inside) / (len(inside) + 12)
    assert {weights[name] for name in [*inside, *(run.name for run in near)]} == {share}
    assert weights["random-0000-seed-1"] == 0.0
    assert sum(weights.values()) == pytest.approx(60)


def test_the_best_are_repeated() -> None:
    rewards = (1.0, 3.0, 2.0, 5.0)
    runs = [run_of(f"random-{number:04d}", evaluation(reward, 1.0)) for number, reward in enumerate(rewards)]
    runs[3] = run_of("random-0003", evaluation(5.0, 7.0))  # over the budget
    repeat = replace(
        runs[0], name="random-0001-seed-1", kind="seed", steps=run_of("random-0000", evaluation(9.0, 1.0)).steps
    )
    assert [run.name for run in pool.repeated([*runs, repeat], 6.0, 2)] == ["random-0001", "random-0002"]


# Interrupting it.


def _until_killed(folder: Path, begun: Path) -> None:
    def hang_at_second(config: PPOConfig, task: str) -> MadeUp:
        if not shop.finished():
            return MadeUp(config)
        begun.touch()
        time.sleep(waiting.SECONDS)
        raise AssertionError("nobody killed it")

    shop = workshop(folder)
    work(shop, Amount(random=3), hang_at_second)


def test_a_recording_that_was_killed_goes_on_with_the_run_it_was_in(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    process = multiprocessing.get_context("spawn").Process(target=_until_killed, args=(tmp_path, begun), daemon=True)
    process.start()
    waiting.until(begun.exists, lambda: f"the first run did not finish; exit code {process.exitcode}")
    shop = workshop(tmp_path)
    with shop.claimed(["random-0001"]) as name:
        assert name is None  # its process lives
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    trained: list[float] = []

    def note(config: PPOConfig, task: str) -> MadeUp:
        trained.append(config.learning_rate)
        return MadeUp(config)

    work(shop, Amount(random=3), note)
    assert trained == [params["learning_rate"] for params in pool.random_params(SPEC, 3)[1:]]
    shop.assemble()
    assert [run.name for run in recorded.read(shop.file).runs] == ["random-0000", "random-0001", "random-0002"]


def test_claims_exclude_each_other(tmp_path: Path) -> None:
    ours, theirs = workshop(tmp_path), workshop(tmp_path)
    names = ["random-0000", "random-0001"]
    with ours.claimed(names) as first, theirs.claimed(names) as second, ours.claimed(names) as third:
        assert (first, second, third) == ("random-0000", "random-0001", None)
    ours.finish(run_of("random-0000", evaluation(0.5, 0.0)))
    with theirs.claimed(names) as again:
        assert again == "random-0001"


def test_three_rounds_and_then_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "WRITE_EVERY", 4)
    shop = workshop(tmp_path)
    amount = Amount(random=12, near_top=3, top=2, seeds=3)
    work(shop, amount, make_up)
    found = recorded.read(shop.file)  # written every fourth run
    assert len(found.runs) == 16
    shop.assemble()
    found = recorded.read(shop.file)
    names = [run.name for run in found.runs]
    assert names[:15] == [*(f"random-{number:04d}" for number in range(12)), *(f"near-top-{n:04d}" for n in range(3))]
    best = [run.name for run in pool.repeated(found.runs, 6.0, 2)]
    assert set(names[15:]) == {f"{name}-seed-{seed}" for name in best for seed in (1, 2)}
    repeats = found.runs[15:]
    assert [(run.repeats, run.config["seed"]) for run in repeats] == [(run.name[:-7], run.seed) for run in repeats]
    assert found.named(best[0]).params == found.named(f"{best[0]}-seed-1").params
    assert sum(run.weight for run in found.runs) == pytest.approx(12)
    assert found.region is not None
    assert found.region["fitted_on"] == 12
    assert recording.Plan(shop, amount).left() == []


def test_without_its_working_folder_a_recording_goes_on_from_its_file(tmp_path: Path) -> None:
    shop = workshop(tmp_path)
    work(shop, Amount(random=12, near_top=1), make_up)
    shop.assemble()
    before = recorded.read(shop.file)
    elsewhere = Workshop(SPEC, shop.file, tmp_path / "elsewhere", {"commit": "def"})
    elsewhere.open()
    assert elsewhere.finished() == {run.name for run in before.runs}
    work(elsewhere, Amount(random=13, near_top=2), make_up)
    elsewhere.assemble()
    after = recorded.read(shop.file)
    assert after.region == before.region
    assert [after.named(run.name).steps for run in before.runs] == [run.steps for run in before.runs]
    assert {run.name for run in after.runs} - {run.name for run in before.runs} == {"random-0012", "near-top-0001"}
    assert [entry["commit"] for entry in after.provenance] == ["abc", "def"]


def test_a_recording_of_another_space_is_refused(tmp_path: Path) -> None:
    work(workshop(tmp_path), Amount(random=1), make_up)
    other = replace(SPEC, kl_budget=5.0)
    with pytest.raises(ConfigError, match="is of another search space, seed, KL budget or number of threads"):
        Workshop(other, tmp_path / "data" / "reviews.parquet", tmp_path / "work").open()
    same = replace(SPEC, trials=99)
    Workshop(same, tmp_path / "data" / "reviews.parquet", tmp_path / "work").open()


def test_no_run_begins_after_the_time_that_was_given(tmp_path: Path) -> None:
    shop = workshop(tmp_path)
    work(shop, Amount(random=1), make_up, until=time.time() - 1)
    assert shop.finished() == set()


def test_what_it_was_made_with_names_no_machine_or_folder() -> None:
    text = json.dumps(recording._provenance(SPEC))
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert str(recording.ROOT) not in text
    assert {"commit", "torch", "transformers", "cpu", "threads", "date", "command"} <= json.loads(text).keys()


# What it says.


def test_the_summary_counts_what_crosses_returns_and_would_be_stopped() -> None:
    start = evaluation(0.0, 0.0)
    runs = [
        run_of("random-0000", start, evaluation(1.0, 2.0), evaluation(1.0, 3.0)),
        run_of("random-0001", start, evaluation(1.5, 7.0), evaluation(2.0, 5.0)),
        run_of("random-0002", start, evaluation(3.0, 7.0), evaluation(3.0, 8.0)),
    ]
    over = replace(runs[2].steps[2], metrics={KL: 61.0})
    runs[2] = replace(runs[2], steps=(*runs[2].steps[:2], over))
    for seed, reward in ((1, 2.5), (2, 3.0)):
        again = run_of("random-0001", start, evaluation(reward, 5.0)).steps
        runs.append(
            replace(
                runs[1], name=f"random-0001-seed-{seed}", kind="seed", repeats="random-0001", seed=seed, steps=again
            )
        )
    text = recorded_summary.describe(Recording(SPEC.to_dict(), tuple(runs)))
    assert "reviews: 3 random, 2 seed; KL budget 6 nats, limit 15" in text
    assert "2 cross the budget, 1 of them return" in text
    assert "the guard would stop 1 (kl_hard 1)" in text
    assert "standard deviation over random configurations: 1.000; over seeds, median of 1 of the best: 0.500" in text
    assert "ratio: 2.0" in text
