"""What a run without a guard says of a sampler that is not the trainer's."""

from ppo_core.report import StepReport
from ppo_core.sampling.sampler_check import AgreementWatch

MISMATCH, GAP, NOISE = "sampler/mismatch", "sampler/kl_gap", "sampler/kl_gap_noise"


def said(*history: dict[str, float]) -> list[list[str]]:
    """What is said after each step."""
    watch = AgreementWatch()
    return [watch.warnings(StepReport(step, 16 * step, metrics)) for step, metrics in enumerate(history)]


def test_a_run_whose_sampler_agrees_is_not_warned() -> None:
    healthy = {MISMATCH: 0.4, GAP: 0.9, NOISE: 0.25}
    by_chance = {**healthy, GAP: -1.5}
    assert said({}, *[healthy, by_chance, by_chance] * 9) == [[]] * 28
    assert said({}, {"eval/reward": 1.0}, {GAP: 99.0}) == [[], [], []]


def test_a_mismatch_is_said_at_once_and_only_once() -> None:
    before, line, after = said({MISMATCH: 1.0}, {MISMATCH: 1.01}, {MISMATCH: 7.0})
    assert before == after == []
    assert len(line) == 1 and "sampler/mismatch" in line[0] and "1.01 nats at step 1" in line[0]
    assert "\n" not in line[0]


def test_a_sampled_kl_that_stays_apart_is_said_after_three_steps_and_only_once() -> None:
    apart = {GAP: -2.0, NOISE: 0.25}
    *before, line, after = said(apart, apart, {GAP: 0.0, NOISE: 0.25}, apart, apart, apart, apart)
    assert before == [[]] * 5 and after == []
    assert len(line) == 1 and "sampler/kl_gap" in line[0] and "2 nats per response apart at step 5" in line[0]
    assert "\n" not in line[0]
