"""What one writes with Optuna alone: TPE under a KL constraint, successive halving, and a limit on the KL.

    .venv/bin/python benchmarks/support/optuna_alone.py studies/reviews.toml --budget 12 --seed 0

Space, fixed values, KL budget and KL limit are a study file's, and so is the trainer. A file that searches the rate
gets a β as well, fixed or adaptive; one that does not has runs that keep their own pace. The study ends with the trial
in which the budget, in trials of full length, is spent. The last line is JSON, for `search.py live`.
"""

import argparse
import json
import math
import time

import optuna
import torch

from ppo_core.config.hyperparameters import PPOConfig
from tuner.study.space import read_by_sampler
from tuner.study.spec import StudySpec
from tuner.study.study_file import import_object

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("study")
parser.add_argument("--budget", type=float, required=True, help="in trials of full length")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--random", action="store_true", help="random search instead, whose trials run to their ends")
arguments = parser.parse_args()
spec = StudySpec.load(arguments.study)
spent = 0
evaluations: list[dict[str, float]] = []
is_paced = "learning_rate" not in spec.search


def make_config(trial: optuna.Trial) -> PPOConfig:
    params: dict[str, object] = {}
    left_out = None
    if not is_paced:
        control = trial.suggest_categorical("kl_control", ["fixed", "adaptive"])
        left_out = "kl_target" if control == "fixed" else "kl_coef"
    for name, span in spec.search.items():
        if name == left_out:
            continue
        if span.scale == "log2":
            params[name] = 2 ** trial.suggest_int(name, int(math.log2(span.low)), int(math.log2(span.high)))
        elif span.scale == "log_from_1":
            params[name] = 1 - trial.suggest_float(name, 1 - span.high, 1 - span.low, log=True)
        elif name == "num_ppo_epochs":
            params[name] = trial.suggest_int(name, int(span.low), int(span.high))
        else:
            params[name] = trial.suggest_float(name, span.low, span.high, log=span.is_log)
    values = spec.config({}).to_dict() | ({} if is_paced else {"kl_target": None}) | params | {"seed": arguments.seed}
    return PPOConfig.from_dict(values, "trial")


def objective(trial: optuna.Trial) -> float:
    global spent
    config, rewards, seen = make_config(trial), [], 0
    for report in import_object(spec.trainer, "trainer")(config, spec.task, device="cpu"):
        spent, seen = spent + report.episode - seen, report.episode
        training_kl = report.metrics.get("objective/kl_exact", 0.0)
        if not math.isfinite(training_kl) or training_kl > spec.kl_limit:
            trial.set_constraint("kl", 1.0)
            raise optuna.TrialPruned("the KL is over the limit")
        if report.is_evaluation:
            reward, kl, kl_se = (report.metrics[name] for name in ("eval/reward", "eval/kl", "eval/kl_se"))
            at = {"cpu_seconds": time.process_time(), "trial": trial.number, "step": report.step}
            evaluations.append({**at, "reward": reward, "kl": kl, "kl_se": kl_se})
            if report.step > 0:
                rewards.append(reward)
                trial.report(reward, len(rewards))
                if trial.should_prune():
                    trial.set_constraint("kl", kl - spec.kl_budget)
                    raise optuna.TrialPruned("its reward is among the lower ones")
    trial.set_constraint("kl", kl - spec.kl_budget)
    trial.set_user_attr("kl", kl)
    return sum(rewards[-2:]) / len(rewards[-2:])


def stop_when_spent(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
    if spent >= arguments.budget * spec.total_episodes:
        study.stop()


torch.set_num_threads(1)
sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=arguments.seed, multivariate=True, group=True)
pruner: optuna.pruners.BasePruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
if arguments.random:
    sampler, pruner = optuna.samplers.RandomSampler(seed=arguments.seed), optuna.pruners.NopPruner()
study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
units = read_by_sampler(
    {name: span for name, span in spec.search.items() if span.scale in ("log2", "log_from_1")},
    spec.config({}).to_dict(),
)
reference = dict(spec.reference_params())
if not is_paced:
    del reference["kl_target"]
    reference["kl_control"] = "fixed"
study.enqueue_trial({**reference, **(units or {})})
study.optimize(objective, callbacks=[stop_when_spent])
completed = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
within = [trial for trial in completed if trial.user_attrs["kl"] <= spec.kl_budget]
best = max(within, key=lambda trial: trial.value or -math.inf, default=None)
print(json.dumps({
    "value": None if best is None else best.value, "trial": None if best is None else best.number,
    "trials": len(study.trials), "episodes": spent, "evaluations": evaluations,
}))  # fmt: skip
