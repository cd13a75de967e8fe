"""What is told of a run when it begins to train. Never imports torch."""

from ppo_core.checkpoints_kept import DiskUse
from ppo_core.command.output import KL_UNIT, params_line, plain, short
from ppo_core.command.run_folder import Run
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig
from ppo_core.hyperparameters.rules import cautions


def lines(run: Run, kl_budget: float, room: DiskUse | None) -> list[str]:
    """Return what a run does, where it writes and with what, one line each."""
    changed = {n: v for n, v in run.config.to_dict().items() if v != HYPERPARAMETERS[n].default}
    told = [
        f"task {plain(run.task)}, KL budget {short(kl_budget)} {KL_UNIT}, output {run.output}",
        _length(run.config),
        f"other than the defaults: {params_line(changed)}" if changed else "all hyperparameters have their defaults",
        *(f"note: {line}" for line in cautions(run.config)),
    ]
    if room is not None:
        told.append(room.line)
    if run.first_step:
        told.append(f"going on from {run.resume_from}")
    return told


def _length(config: PPOConfig) -> str:
    """Return how long the run is, how often it is evaluated, and what became of the episodes that were asked for."""
    batch, iterations = config.batch_sizes(1).batch_size, config.num_iterations()
    plural = "" if iterations == 1 else "s"
    text = f"{iterations} iteration{plural} of {batch} episodes, evaluated every {max(config.eval_interval, batch)}"
    asked, run = config.total_episodes, iterations * batch
    return text if asked == run else f"{text}; {asked} asked, {run} run (whole batches of {batch})"
