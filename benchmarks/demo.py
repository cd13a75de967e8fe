"""Does the demo end with a gain that its own confirmation shows, whatever its seed?

    python benchmarks/demo.py run --seeds 10    # the demo's study and its confirmation, a seed after another; resumes
    python benchmarks/demo.py show              # a line a seed: the answer, and its gain over the baseline

Each takes about five minutes on two cores. Studies and their store are in runs/benchmarks/demo.
"""

import argparse
import sys
import tomllib
from pathlib import Path

import tomli_w
from support.common import add_line, read_lines, run_command

from ppo_core.errors import PPOTunerError
from tuner.cli.main import main as ppo_tuner
from tuner.cli.run import DEMO_PLAN, DEMO_WORKERS
from tuner.confirm.answer import study_answer
from tuner.confirm.result import confirmations
from tuner.judge.results import read_study
from tuner.store import Store

SHIPPED = Path(__file__).parents[1] / "studies" / "reviews.toml"
WORK = Path("runs", "benchmarks", "demo")
STORE, RESULTS = WORK / "store.db", WORK / "results.jsonl"


def _run(arguments: argparse.Namespace) -> int:
    for seed in range(arguments.seeds):
        if not any(row["seed"] == seed for row in read_lines(RESULTS)):
            add_line(RESULTS, _one(seed))
    return _show(arguments)


def _one(seed: int) -> dict[str, object]:
    """Run or resume the study of that seed, and return what it came to."""
    WORK.mkdir(parents=True, exist_ok=True)
    name, file = f"demo-{seed}", WORK / f"{seed}.toml"
    file.write_text(tomli_w.dumps(tomllib.loads(SHIPPED.read_text()) | {"name": name, "seed": seed}))
    top, seeds = f"{DEMO_PLAN.top}", f"{DEMO_PLAN.seeds}"
    for command in (["run", str(file)], ["confirm", name, "--top", top, "--seeds", seeds]):
        if ppo_tuner([*command, "--workers", f"{DEMO_WORKERS}", "--storage", str(STORE)]):
            raise PPOTunerError(f"the study of seed {seed} did not end")
    store = Store.open(str(STORE))
    view = read_study(store, name)
    answer, [run] = study_answer(store, view), confirmations(store, view)
    if answer is None or run.choice is None:
        raise PPOTunerError(f"the study of seed {seed} has no answer")
    baseline = next(one for one in run.configurations if one.trial.number == 1)
    gain = run.lead(run.choice, baseline)
    best = run.configurations[0]
    over = None if best.is_reference else run.lead_of(best.trial.number, 0)
    return {
        "seed": seed, "trials": len(view.trials), "answer": answer.number,
        "is_gain": gain is not None and gain.is_above_0,
        "reward": run.choice.reward and run.choice.reward.text, "kl": run.choice.kl and run.choice.kl.text,
        "over_baseline": gain and gain.signed, "best": best.trial.number, "over_reference": over and over.signed,
    }  # fmt: skip


def _show(_: argparse.Namespace) -> int:
    rows = read_lines(RESULTS)
    heads = ("launch", "reward", "KL, nats", "over baseline")
    print(f"seed trials  {heads[0]:<9} {heads[1]:<20} {heads[2]:<16} {heads[3]:<18} best over reference")
    for row in rows:
        launch = "reference" if row["answer"] == 0 else f"trial {row['answer']}"
        over = f"trial {row['best']}: {row['over_reference']}" if row["over_reference"] else "-"
        print(
            f"{row['seed']:>4} {row['trials']:>6}  {launch:<9} {row['reward']:<20} {row['kl']:<16} "
            f"{row['over_baseline']:<18} {over}"
        )
    print(f"{sum(row['is_gain'] for row in rows)} of {len(rows)} seeds confirm a gain over the baseline")
    return 0


def main() -> int:
    """Read the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser("run", help="run what is missing, then show")
    run.add_argument("--seeds", type=int, metavar="N", default=10, help="studies, with seeds from 0 (10)")
    run.set_defaults(run=_run)
    commands.add_parser("show", help="print what has run").set_defaults(run=_show)
    return run_command(parser)


if __name__ == "__main__":
    sys.exit(main())
