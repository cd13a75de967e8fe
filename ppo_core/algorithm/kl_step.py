"""The policy's learning rate as the means to a wanted KL step: a run that keeps its pace needs no rate to be guessed.

The KL step of an iteration is the KL from the policy that sampled its batch to the one after its updates, on that
batch, in nats per response:

    step = mean over responses of Σ_t ½ (log π_new(a_t) - log π_old(a_t))²

read by one forward pass after the last optimizer step, since what the mini-batches show before theirs misses the last
of them. A step's KL grows with the square of the rate. Half of that way is gone after each iteration, for a reading is
noisy where an iteration has few optimizer steps:

    rate *= clip((wanted / step)^¼, 1/1.5, 1.5)

- **The search.** The rate begins at a hundredth of the configured one. Until a step of a quarter of the wanted one has
  been read the whole way is gone, up to a hundredfold, so that it takes two iterations from a right rate and three from
  one a hundred times too low.
- **The wanted step.** √KL from the reference moves by up to √step in an iteration. So a step is wanted that is at most
  half of the way from there (in the mean of two batches) to 1.1 times the target, at most the whole step, and at least
  a fifth of the configured one:

      wanted = clip((½ (√(1.1 target) - √KL))², configured / 5, whole)

- **The whole step** is the configured one, unless the run would be late. √KL rises with the path so far, Σ √step, by a
  share that depends on task and settings. Where the KL would come to 0.8 of its target only after half of the run, the
  whole step is raised to what takes it there, up to four times the default one.
- **The cut.** A mini-batch that, before its own optimizer step, already shows twice the wanted step ends the policy's
  updates of the iteration.
- **The ceiling.** From the eighth iteration after the search on the rate is at most twice its highest of the fourth to
  the seventh: a policy that has become deterministic shows no KL at any rate.
- **The floor.** In bfloat16 two readings of one policy differ by rounding. Its KL (`rounding_floor`) is subtracted from
  each reading, and the wanted step is at least twice that.

Source: this project; docs/benchmarks.md has the measurements. A rate that is multiplied or divided by 1.5 where the KL
of an update leaves a wanted range is rsl_rl's (Rudin et al. 2022, arXiv 2109.11978).
"""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.algorithm.experience import Experience
from ppo_core.algorithm.kl_controller import LEAST_KL
from ppo_core.algorithm.state import Stateful
from ppo_core.config.hyperparameters import PPOConfig, default_kl_step
from ppo_core.distributed.world import World
from ppo_core.models import fsdp as sharding
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic, response_states, token_readings
from ppo_core.models.rounding import rounded_otherwise

logger = logging.getLogger(__name__)

FIRST_SHARE = 0.01
"""The first rate, as a share of the configured one."""
MOST_CHANGE, MOST_SEARCHED = 1.5, 100.0
"""Most that the rate changes by in one iteration, and rises by during the search."""
FOUND = 0.25
"""Share of the wanted step that ends the search."""
MOST_KL, WAY = 1.1, 0.5
"""KL that no step is to pass, as a share of the KL target, and the most of the way there that one takes, in √KL."""
LEAST_SHARE = 0.2
"""Least wanted step, as a share of the configured one."""
NEAR_TARGET, ARRIVAL, LEAST_LEFT = 0.8, 0.5, 0.2
"""Share of the KL target to come to, share of the run to do it in, and least share that is left for it."""
RAISED_FROM, MOST_RAISED, RAISED_AT_ONCE = 2, 4.0, 1.25
"""Iterations after the search before the whole step is raised, most that it is raised to, in times the default one, and
most that it changes by in one iteration."""
CUT = 2.0
"""Times the wanted step at which an iteration's updates end."""
SETTLED, WATCHED = 4, 8
"""Iterations after the search between which the highest rate counts for the ceiling."""
CEILING = 2.0
"""Highest rate, in times that."""
FLOORS = 2.0
"""Least wanted step, in times the floor of rounding."""
RESOLVED = 0.2
"""Least step that a reading can tell from none, in times the floor."""


@torch.no_grad()
def read_kl_step(
    network: ActorCritic, experience: Experience, temperature: float, chunk: ChunkRows, world: World
) -> float:
    """Return the KL step from the policy that sampled a batch to the one of now, in nats per response.

    `experience` holds this process's rows; the mean is over those of all processes. Rounding is included.
    """
    order = experience.sequences.by_length()

    def attempt(rows: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for index in order.split(rows):
            part = experience.rows(index)
            states = response_states(network.passes, part.sequences)
            logprobs, _ = token_readings(network.head, states, part.sequences, temperature, with_entropy=False)
            log_ratio = (logprobs - part.logprobs) * part.sequences.response_mask
            total += (0.5 * log_ratio**2).sum().cpu().double()
        return total

    with sharding.gathered(network), network.precision():
        total = world.sum(chunk.run(attempt, most=len(order)))
    return float(total) / (len(order) * world.size)


def rounding_floor(
    network: ActorCritic, experience: Experience, temperature: float, chunk: ChunkRows, world: World
) -> float:
    """Return the KL step that rounding alone shows (`rounded_otherwise`), in nats per response; 0 in float32."""
    if not network.bf16:
        return 0.0
    with network.precision():
        embeddings = network.passes.get_input_embeddings()
    with rounded_otherwise(embeddings):
        return read_kl_step(network, experience, temperature, chunk, world)


@dataclass
class KLStepController(Stateful):
    """Moves the policy's learning rate so that each iteration takes the wanted KL step."""

    changing = ("rate", "floor", "done", "raised", "path", "last", "recent", "searching", "since", "top")

    configured: float
    """Wanted step that the run begins with, in nats per response."""
    target: float
    """KL target, in nats per response."""
    iterations: int
    """Iterations of the run in which the policy learns."""
    rate: float
    floor: float | None = None
    """KL that rounding alone shows, in nats per response; None: not measured yet."""
    done: int = 0
    raised: float = 1.0
    """Whole step over the configured one."""
    path: float = 0.0
    """Sum of the square roots of the steps."""
    last: float = 0.0
    recent: float = 0.0
    """Mean KL of the last two."""
    searching: bool = True
    since: int = 0
    """Iterations since the search ended."""
    top: float = 0.0
    """Highest rate from SETTLED to WATCHED."""

    @classmethod
    def of(cls, config: PPOConfig, world_size: int) -> "KLStepController":
        """Return the controller of a run that begins."""
        assert config.kl_target is not None
        iterations = config.num_iterations(world_size) - config.critic_warmup
        rate = FIRST_SHARE * config.learning_rate
        return cls(config.wanted_kl_step(world_size), config.kl_target, max(1, iterations), rate)

    @property
    def wanted(self) -> float:
        """Step wanted of the coming iteration, in nats per response."""
        way = WAY * (math.sqrt(MOST_KL * self.target) - math.sqrt(self.recent))
        step = min(max(way, 0.0) ** 2, self.raised * self.configured)
        return max(step, LEAST_SHARE * self.configured, FLOORS * (self.floor or 0.0))

    @property
    def cut(self) -> float:
        """Step, in nats per response, over which an iteration's updates end."""
        return CUT * self.wanted + (self.floor or 0.0)

    def set_floor(self, floor: float) -> None:
        """Set the floor of rounding, in nats per response; a warning says where it raises the wanted step."""
        self.floor = floor
        if self.configured < FLOORS * floor:
            text = "the KL step of %.2g nats per response is too near to what rounding shows (%.2g), so it is %.2g"
            logger.warning(text, self.configured, floor, FLOORS * floor)

    def update(self, reading: float | None, kl: float, *, was_cut: bool) -> None:
        """Move the rate after an iteration, by the step as read and the batch's exact KL, in nats per response.

        No `reading`: there was nothing to learn; one that is not finite moves nothing. `was_cut`: a mini-batch ended
        the updates.
        """
        wanted = self.wanted
        self.done += 1
        if self.since >= RAISED_FROM:
            self.raised = self._raised(kl)
        self.last, self.recent = kl, (kl + self.last) / 2
        if reading is not None and math.isfinite(reading):
            self._follow(max(reading - (self.floor or 0.0), 0.0), wanted, was_cut)
        self.rate *= math.sqrt(self.wanted / wanted)

    def _raised(self, kl: float) -> float:
        """Return the whole step that brings the KL near its target in time, over the configured one."""
        left = max(ARRIVAL * self.iterations - self.done, LEAST_LEFT * self.iterations)
        here, there = math.sqrt(max(kl, LEAST_KL * self.target)), math.sqrt(NEAR_TARGET * self.target)
        needed = (max(there / here - 1, 0.0) * self.path / left) ** 2 / self.configured
        raised = min(max(needed, self.raised / RAISED_AT_ONCE), self.raised * RAISED_AT_ONCE)
        return max(min(raised, MOST_RAISED * default_kl_step(self.iterations) * self.target / self.configured), 1.0)

    def _follow(self, step: float, wanted: float, was_cut: bool) -> None:
        self.path += math.sqrt(step)
        self.searching = self.searching and not was_cut and step <= FOUND * wanted
        least = max(wanted / MOST_SEARCHED**2, RESOLVED * (self.floor or 0.0))
        change = math.sqrt(wanted / max(step, least))
        self.rate *= change if self.searching else min(max(math.sqrt(change), 1 / MOST_CHANGE), MOST_CHANGE)
        self.since = 0 if self.searching else self.since + 1
        if SETTLED <= self.since < WATCHED:
            self.top = max(self.top, self.rate)
        elif self.since >= WATCHED:
            self.rate = min(self.rate, CEILING * self.top)
