"""Ten made-up studies, and the answer that every place prints of each: decision, evidence, doubt and command."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dashboard import report as html_report
from dashboard import safe_text
from ppo_core.report import SplitReading, StepReport
from tests.dashboard import shown
from tests.dashboard.shown import page
from tests.tuner.invoke import Invoke
from tuner.confirm.answer import Answer, Badge, answer_data, study_answer
from tuner.confirm.headline import ONE_SEED, UNTRAINED, headlines
from tuner.confirm.plan import Plan, missing
from tuner.environment import to_copy
from tuner.judge.diagnose import course_of, hacked, reward_hacked
from tuner.judge.results import read_study, under_budget
from tuner.judge.scoring import judged, judged_again
from tuner.store import Lease, NewTrial, Outcome, Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Status

NAME = "ten"
WORDS = 65
"""Most words that an answer takes in a terminal."""
CARD_WORDS = 30
"""The same of the dashboard's card."""
NOISE = (0.0, 0.02, -0.02, 0.01, -0.01)
SPEC = {
    "name": NAME, "task": "reviews", "seed": 3, "kl": {"budget": 6.0, "limit": 15.0},
    "fixed": {"total_episodes": 256, "batch_size": 64, "mini_batch_size": 16},
    "search": {"learning_rate": {"low": 1e-5, "high": 1e-2, "scale": "log"}},
}  # fmt: skip
BROKE = None
Run = tuple[float, float] | None
"""Reward and KL on the test prompts; BROKE: its run failed by itself."""


def around(reward: float, kl: float = 4.0, factor: float = 1.0) -> list[Run]:
    return [(reward + factor * noise, kl + noise) for noise in NOISE]


@dataclass(frozen=True)
class Made:
    """A study: the value of each trial of its search, and the runs on fresh seeds by trial."""

    values: Sequence[float]
    fresh: Mapping[int, Sequence[Run]] = field(default_factory=dict)
    kl: float = 4.0
    longer: int = 20
    """Length in tokens of trial 1's responses at its end; 20 before training."""
    longer_fresh: Sequence[int] = (20,) * len(NOISE)
    """The same of its runs on fresh seeds."""
    later: Sequence[float] = ()
    """Values of trials that were added after the confirmation."""
    is_running: bool = False
    has_baseline: bool = False
    """True: trial 1 is the user's present configuration."""
    budget: float = 6.0
    """The KL budget at the end; 6 before."""


STUDIES = {
    "tie": Made((1.00, 1.05), {0: around(1.0, factor=4), 1: around(1.01, factor=-4)}),
    "win": Made((1.00, 2.00), {0: around(1.0), 1: around(2.0)}),
    "small win": Made((1.00, 1.20), {0: around(1.0), 1: around(1.2)}),
    "breaks": Made((1.00, 2.00), {0: around(1.0), 1: [*around(2.0)[:4], BROKE]}),
    "over": Made((1.00, 2.00), {0: around(1.0)[:3], 1: [(2.0, 5.0), (2.01, 5.1), (1.99, 6.5)]}),
    "hacked": Made((1.00, 2.00), {0: around(1.0), 1: around(2.0)}, longer=35, longer_fresh=(36, 34, 35, 20, 20)),
    "suspect": Made((1.00, 2.00), longer=35),
    "hacked once": Made((1.00, 2.00), {0: around(1.0), 1: around(2.0)}, longer=35, longer_fresh=(35, 20, 20, 20, 20)),
    "newer": Made((1.00, 2.000), {0: around(1.0), 1: around(2.0)}, later=(2.001,)),
    "none": Made((1.00, 2.00), kl=9.0),
    "one trial": Made((1.00,)),
    "running": Made((1.00, 2.00), is_running=True),
    "baseline": Made(
        (1.00, 1.50, 2.00), {0: around(1.0), 1: around(1.5, factor=-1), 2: around(2.0)}, has_baseline=True
    ),
    "baseline wins": Made((1.00, 2.00, 1.50), {0: around(1.0), 1: around(2.0), 2: around(1.5)}, has_baseline=True),
    "baseline on one seed": Made((1.00, 1.50, 2.00), has_baseline=True),
    "changed": Made((1.00, 2.00), {0: around(1.0), 1: around(2.0)}, budget=4.5),
    "changed to less": Made((1.00, 2.00), {0: around(1.0), 1: around(2.0)}, budget=3.0),
    "nothing learned": Made((0.26, 0.33)),
}  # fmt: skip
ON_FRESH = "On 5 fresh seeds: reward "
WIN = "Launch trial 1: +1.000 [0.972, 1.028] over the reference."
TOLD: Mapping[str, tuple[Badge, str, str, str, int]] = {
    "tie": (Badge.TIE, "Keep the reference: nothing beat it (trial 1: +0.01 [-0.10, 0.12]).",
        f"{ON_FRESH}1.00 [0.93, 1.07] at KL 4.000 [3.984, 4.016] of 6 nats/response; 0 of 5 broke (95% bound 45%).",
        "5 seeds are too few to detect 0.076 (10% of training's gain); 20 should do. confirm ten --seeds 20", 0),
    "win": (Badge.CONFIRMED, WIN,
        f"{ON_FRESH}2.000 [1.984, 2.016] at KL 4.000 [3.984, 4.016] of 6 nats/response; 0 of 5 broke (95% bound 45%).",
        "", 1),
    "small win": (Badge.CONFIRMED, "Launch trial 1: +0.200 [0.172, 0.228] over the reference.",
        ON_FRESH,
        "If more than 21% of its runs broke, it would lose its lead.", 1),
    "breaks": (Badge.TIE, "Keep the reference: nothing beat it (trial 1: +0.7 [-0.2, 1.5]; 1 of 5 broke (95% bound 66%)).",
        f"{ON_FRESH}1.000 [0.983, 1.017]",
        "40 seeds are too few to detect 0.075 (10% of training's gain).", 0),
    "over": (Badge.CONFIRMED, "Launch trial 1: ",
        "On 3 fresh seeds",
        "KL is over the budget in 1 of 3 runs (95% bound 86%).", 1),
    "hacked": (Badge.CONFIRMED, WIN,
        ON_FRESH,
        "Reward hacking, also on fresh seeds: length grows from 20 to 36 tokens. Read its samples. show ten 1", 1),
    "suspect": (Badge.ONE_SEED, "Launch trial 1, which is not confirmed.",
        "Best in budget, one seed: ",
        "A sign of reward hacking: length grows from 20 to 35 tokens. Read its samples. show ten 1", 1),
    "hacked once": (Badge.CONFIRMED, WIN,
        ON_FRESH,
        "", 1),
    "newer": (Badge.CONFIRMED, WIN,
        ON_FRESH,
        "Trial 12 is newer and scored higher in the search (2.001 against 2.000), but is not confirmed. confirm ten --top 1", 1),
    "one trial": (Badge.ONE_SEED, "Launch trial 0, the reference, which is not confirmed.",
        "Best in budget, one seed: eval reward 1.000 ± 0.030 at KL 4.00 ± 0.10 of 6 nats/response; +0.750 ± 0.042 over the SFT policy.",
        "The highest of many values on one seed is partly luck: confirm it. confirm ten", 0),
    "changed": (Badge.CONFIRMED, WIN,
        f"{ON_FRESH}2.000 [1.984, 2.016] at KL 4.000 [3.984, 4.016] of 4.5 nats/response (trials were trained for the first budget, 6); 0 of 5 broke (95% bound 45%).",
        "", 1),
    "running": (Badge.ONE_SEED, "Nothing yet: trial 1 leads.",
        "Best in budget, one seed: eval reward 2.000 ± 0.030 at KL 4.00 ± 0.10 of 6 nats/response; +1.750 ± 0.042 over the SFT policy.",
        "The search is not finished. run ten", 1),
    "baseline": (Badge.CONFIRMED, "Launch trial 2: +1.000 [0.971, 1.029] over the reference, and better than every other.",
        ON_FRESH,
        "", 2),
    "baseline wins": (Badge.CONFIRMED, "Launch the baseline: +1.000 [0.971, 1.029] over the reference, and better than every other.",
        ON_FRESH,
        "", 1),
    "baseline on one seed": (Badge.ONE_SEED, "Launch trial 2, which is not confirmed.",
        "Best in budget, one seed: ",
        "The highest of many values on one seed is partly luck: confirm it. confirm ten", 2),
    "nothing learned": (Badge.ONE_SEED, "Launch nothing: ",
        "Best in budget, one seed: eval reward 0.330 ± 0.030 at KL 4.00 ± 0.10 of 6 nats/response; +0.080 ± 0.042 over ",
        "Its gain is within the noise. To see what to change: diagnose ten 1", 1),
}  # fmt: skip
GAINED: Mapping[str, str] = {
    "baseline": "Over the reference (trial 0): +1.000 [0.971, 1.029]; over the baseline (trial 1): "
    "+0.500 [0.471, 0.529].",
    "baseline wins": "Over the reference (trial 0): +1.000 [0.971, 1.029].",
    "baseline on one seed": "Over the reference (trial 0): +1.000 ± 0.042; over the baseline (trial 1): "
    "+0.500 ± 0.042.",
}
"""Gains over the reference and the baseline, in studies that have one."""


def add(store: Store, lease: Lease, trial: TrialRow, spec: StudySpec, value: float, kl: float, length: int) -> None:
    """Train a trial: four steps, evaluated at 0, 2 and 4."""
    row = store.begin_attempt(lease, trial, None)
    for step, reward, at in ((0, 0.25, 0.0), (2, value - 0.001, kl), (4, value, kl)):
        metrics = {"eval/reward": reward, "eval/reward_se": 0.03, "eval/kl": at, "eval/kl_se": 0.1}
        metrics["eval/length"] = 20.0 if step == 0 else float(length)
        store.add_step(lease, row.id, StepReport(step, 64 * step, metrics), 1.0)
    store.finish_trial(lease, row.id, judged(store, row, spec, Status.COMPLETED, None))


def make(path: Path, made: Made) -> None:
    """Write the study to a new store at `path`."""
    values = (*made.values, *made.later)
    baseline = {"baseline": {"learning_rate": 3e-4}} if made.has_baseline else {}
    spec = StudySpec.from_dict({**SPEC, **baseline, "trials": len(values) + made.is_running}, "made")
    with closing(Store.open(f"sqlite:///{path}", create=True)) as store:
        store.create_study(NAME, spec.to_dict())
        lease = store.acquire(NAME)

        def search(number: int) -> None:
            params = {"learning_rate": 1e-4 * (number + 1)} if number else spec.reference_params()
            origin = Origin.SAMPLED if number else Origin.REFERENCE
            origin = Origin.BASELINE if made.has_baseline and number == 1 else origin
            new = NewTrial(number, origin, spec.config(params).to_dict(), params, 1)
            length = made.longer if number == 1 else 20
            add(store, lease, store.add_trial(lease, new), spec, values[number], made.kl, length)

        for number in range(len(made.values)):
            search(number)
        view = read_study(store, NAME)
        store.add_test_reading(lease, view.trials[0].id, 0, SplitReading(64, 0.25, 0.03, 0.0, 0.0), None)
        seeds = len(next(iter(made.fresh.values()), ()))
        for new in missing(view.trials, spec, Plan(seeds=seeds)) if seeds else ():
            row, place = store.add_trial(lease, new), int(new.config["seed"] or 0) - spec.seed - 1
            run = made.fresh[new.parent or 0][place]
            if run is BROKE:
                store.finish_trial(lease, row.id, Outcome(Status.FAILED, Reason("error", "made up")))
                continue
            length = made.longer_fresh[place] if new.parent == 1 else 20
            add(store, lease, row, spec, run[0], min(run[1], 5.0), length)
            store.add_test_reading(lease, row.id, 4, SplitReading(64, run[0], 0.03, run[1], 0.1), None)
        for number in range(len(made.values), len(values)):
            new_number = len(store.trials(store.study(NAME)))
            params = {"learning_rate": 1e-4 * (number + 1)}
            new = NewTrial(new_number, Origin.SAMPLED, spec.config(params).to_dict(), params, 1)
            add(store, lease, store.add_trial(lease, new), spec, values[number], made.kl, 20)
        now = spec.with_keys({"kl": {"budget": made.budget}}, "made")
        if now != spec:
            store.update_study(lease, judged_again(store, store.trials(store.study(NAME)), now), spec=now.to_dict())
            for run in read_study(store, NAME).confirming:  # as the next run of the study would read them
                if run.value_step == 0:
                    store.add_test_reading(lease, run.id, 0, SplitReading(64, 0.25, 0.03, 0.0, 0.0), None)
        if not made.is_running:
            store.set_finished(lease)
        store.release(lease)


def of(path: Path, kl_budget: float | None = None) -> Answer | None:
    with closing(Store.open(f"sqlite:///{path}")) as store:
        view = read_study(store, NAME)
        return study_answer(store, view if kl_budget is None else under_budget(store, view, kl_budget))


@pytest.fixture
def path(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{own_folder / 'ten.db'}")
    return own_folder / "ten.db"


@pytest.mark.parametrize("name", TOLD)
def test_every_place_prints_the_same_answer(path: Path, name: str, ppo_tuner: Invoke) -> None:
    made = STUDIES[name]
    make(path, made)
    found, (badge, decision, evidence, doubt, trial) = of(path), TOLD[name]
    assert found is not None and found.badge is badge
    assert found.decision.startswith(decision) and found.evidence.startswith(evidence)
    assert " ".join(filter(None, [found.doubt, *found.remedy])) == doubt
    assert found.launch == ("train", "--from", NAME, str(trial)) and found.gained == GAINED.get(name, "")

    remedy = [to_copy(found.remedy)] if found.remedy else []
    assert found.has_learned == (name != "nothing learned")
    assert answer_data(found, "train", None)["launch"] == ("train" if found.has_learned else None)
    commands = (found.remedy, found.launch) if found.has_learned else (found.remedy,)
    lines = list(filter(None, [found.decision, found.evidence, found.gained, " ".join([found.doubt, *remedy]).strip()]))
    assert len(" ".join([*lines, "Launch:", to_copy(found.launch)]).split()) <= WORDS
    places = {"best": ["best", NAME], "show": ["show", NAME]}
    if not made.is_running:
        places["run"] = ["run", NAME]
    if made.fresh:
        places["confirm"] = ["confirm", NAME, "--show"]
    for place, words in places.items():
        printed = ppo_tuner(*words)[1].splitlines()
        at = printed.index(found.decision)
        assert printed[at : at + len(lines)] == lines, place
        launches = [line for line in printed[at:] if line.startswith("Launch: ")]
        assert launches == [f"Launch: {to_copy(words)}" for words in commands[1:]], place
    sentences = list(filter(None, [found.decision, found.evidence, found.gained, found.doubt]))
    exported = " ".join(ppo_tuner("export", NAME, "--to", "yaml")[1].replace("\n#", " ").split())
    assert all(sentence in exported for sentence in sentences)
    with closing(Store.open(f"sqlite:///{path}")) as store:
        html = html_report.report(store, NAME)
    assert all(f"<p>{sentence}</p>" in html.replace("&#39;", "'") for sentence in sentences)
    where = f" --storage sqlite:///{path}"
    app = page("answer", path)
    assert app.subheader[0].value == safe_text.in_markdown(found.decision) and found.evidence in app.subheader[0].help
    assert not found.doubt or found.doubt in shown.texts(app)
    assert len(f"{found.decision} {found.doubt}".split()) <= CARD_WORDS
    words = found.remedy if found.badge is Badge.ONE_SEED else found.launch
    assert shown.codes(app) == [to_copy(words) + where], "one command"
    studies = page("studies", path).dataframe[0].value
    assert studies["decision"].tolist() == [found.decision]


@pytest.mark.parametrize("name", ["none", "changed to less"])
def test_a_study_with_nothing_in_its_budget_has_no_command(path: Path, name: str, ppo_tuner: Invoke) -> None:
    make(path, STUDIES[name])
    assert of(path) is None
    status, out, err = ppo_tuner("best", NAME)
    assert status == 1 and out == "" and "train --from" not in err
    assert "train --from" not in ppo_tuner("show", NAME)[1]


def test_under_another_budget_nothing_is_confirmed(path: Path) -> None:
    make(path, STUDIES["win"])
    found = of(path, 5.0)
    assert found is not None and (found.number, found.badge, found.remedy) == (1, Badge.ONE_SEED, ())
    assert found.doubt == "Nothing is confirmed for this KL budget."
    assert found.launch == ("train", "--from", NAME, "1", "--kl_budget", "5")
    assert of(path, 1.0) is None


def test_a_trials_one_number_is_that_of_the_answer(path: Path) -> None:
    make(path, STUDIES["newer"])
    found = of(path)
    assert found is not None
    with closing(Store.open(f"sqlite:///{path}")) as store:
        view = read_study(store, NAME)
        numbers, under = (headlines(store, each) for each in (view, under_budget(store, view, 5.0)))
        low = headlines(store, under_budget(store, view, 1.0))
    assert numbers[1].label == "mean of 5 fresh seeds" and numbers[1].text() == "2.000 [1.984, 2.016]"
    assert f"reward {numbers[1].text()} at KL" in found.evidence
    assert (numbers[0].reward, numbers[0].kl) == (pytest.approx(1.0), pytest.approx(4.0))
    assert (numbers[12].label, numbers[12].text()) == (ONE_SEED, "2.001 ± 0.030")
    assert (under[1].label, under[1].reward) == (ONE_SEED, 2.0), "what is confirmed holds for the study's budget"
    assert (low[1].label, low[1].reward, low[1].text()) == (UNTRAINED, None, "-")


@pytest.mark.parametrize(
    ("name", "state", "is_advised"),
    [("hacked", "repeated", True), ("hacked once", "borderline", False), ("win", "clean", False)],
)
def test_hacking_that_fresh_seeds_do_not_repeat_advises_no_change(
    path: Path, ppo_tuner: Invoke, name: str, state: str, is_advised: bool
) -> None:
    make(path, STUDIES[name])
    with closing(Store.open(f"sqlite:///{path}")) as store:
        view = read_study(store, NAME)
        course = course_of(store, view.trials[1], view)
    assert hacked(course).verdict == state
    assert (
        ("hacking" in ppo_tuner("diagnose", NAME, "1")[1].lower()) == (reward_hacked(course) is not None) == is_advised
    )
    if name == "hacked once":
        assert reward_hacked(replace(course, fresh=())) is not None, "what one seed alone would say"
