"""What every generator and every world of processes must do: each check raises AssertionError that says what is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.prompts import encode
from ppo_core.data.task import Prompt
from ppo_core.distributed.world import World
from ppo_core.models.networks import build_network
from ppo_core.models.policy import ActorCritic
from ppo_core.randomness import Key, Purpose
from ppo_core.sampling.generation import MakeGenerator, Request, Rollouts
from ppo_core.sampling.next_token import SamplingSettings

Result = TypeVar("Result")

# A world: the processes of one trial.


class RunWorld(Protocol):
    """Starts processes (or threads) of one world."""

    def __call__(self, n: int, function: Callable[[World], Result], /) -> Sequence[Result]:
        """Return what `function(world)` returned in each of `n` processes, in the order of ranks."""
        ...


def check_world(run: RunWorld, sizes: Sequence[int] = (1, 2, 3)) -> None:
    """Raise AssertionError where a world does not do what `ppo_core.distributed.world.World` says, in worlds of these sizes.

    What is run is a function of a module, and returns plain Python, so it can be sent to processes.
    """
    for n in sizes:
        seen = list(run(n, _observed))
        _require(len(seen) == n, f"run({n}, ...) returned {len(seen)} results, not one of each process")
        for rank, observed in enumerate(seen):
            expected = _expected(n, rank)
            for what, wanted in expected.items():
                found = observed[what]
                _require(found == wanted, f"{what}, in process {rank} of {n}: found {found}, not {wanted}")
        sums = [observed["sum of fractions"] for observed in seen]
        _require(sums == sums[:1] * n, f"sum: not the same on all processes, bit for bit: {sums}")
        exact = sum(_fraction(rank) for rank in range(n))
        _require(abs(sums[0] - exact) < 1e-12, f"sum of fractions: found {sums[0]}, not {exact}")


def _observed(world: World) -> dict[str, Any]:
    """Return what one process sees of the world."""
    n, rank = world.size, world.rank
    own = torch.tensor([[1, 2], [3, 4]]) * 10**rank
    added = world.sum(own)
    scalar = world.sum(torch.tensor(0.5 + rank))
    rows = world.gather(torch.tensor([2.0 * rank, 2.0 * rank + 1], dtype=torch.float64))
    flags = world.gather(torch.tensor([rank == 0]))
    return {
        "size": n,
        "rank": rank,
        "sum": added.tolist(),
        "sum: type and shape": _kind(added),
        "sum: what was given": own.tolist(),
        "sum of a scalar": scalar.item(),
        "sum of a scalar: type and shape": _kind(scalar),
        "sum of fractions": world.sum(torch.tensor(_fraction(rank), dtype=torch.float64)).item(),
        "gather": rows.tolist(),
        "gather: type and shape": _kind(rows),
        "gather of matrices": world.gather(own).tolist(),
        "gather of booleans": flags.tolist(),
        "gather of booleans: type and shape": _kind(flags),
        "gather_objects": world.gather_objects([("rank", rank)] * rank),
        "broadcast": world.broadcast(("rank", rank)),
        "agree where all say yes": world.agree(True),
        "agree where one says no": [world.agree(rank != no) for no in range(n)],
        "agree where all say no": world.agree(False),
        "one after the other": [world.sum(torch.tensor(i * (rank + 1))).item() for i in range(20)],
    }


def _expected(n: int, rank: int) -> dict[str, Any]:
    """Return what one process must see of a world of `n`."""
    powers = sum(10**other for other in range(n))
    return {
        "size": n,
        "rank": rank,
        "sum": [[powers, 2 * powers], [3 * powers, 4 * powers]],
        "sum: type and shape": "torch.int64 [2, 2]",
        "sum: what was given": [[10**rank, 2 * 10**rank], [3 * 10**rank, 4 * 10**rank]],
        "sum of a scalar": n * 0.5 + n * (n - 1) / 2,
        "sum of a scalar: type and shape": "torch.float32 []",
        "gather": [float(row) for row in range(2 * n)],
        "gather: type and shape": f"torch.float64 [{2 * n}]",
        "gather of matrices": [[a * 10**other, b * 10**other] for other in range(n) for a, b in ((1, 2), (3, 4))],
        "gather of booleans": [other == 0 for other in range(n)],
        "gather of booleans: type and shape": f"torch.bool [{n}]",
        "gather_objects": [("rank", other) for other in range(n) for _ in range(other)],
        "broadcast": ("rank", 0),
        "agree where all say yes": True,
        "agree where one says no": [False] * n,
        "agree where all say no": False,
        "one after the other": [i * n * (n + 1) // 2 for i in range(20)],
    }


def _fraction(rank: int) -> float:
    """Return a number whose sum over ranks depends on the order in its last bits."""
    return 1 / (3 + 7 * rank)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


# A generator: what samples the responses.

_KEY = Key(11, Purpose.ROLLOUT, 3)
_SAMPLING = SamplingSettings(temperature=0.8, response_length=9, stop_ids=(1, 4, 7))


def check_generator(make: MakeGenerator, tolerance: float = 1e-3) -> None:
    """Raise AssertionError where a generator does not do what `ppo_core.sampling.generation.Generator` says.

    `make(network, tokenizer)` returns it for a small random GPT-2. `tolerance`, in nats, is how far its
    log-probabilities may be from those of a plain pass of the model.
    """
    reference, tokenizer = small_policy()
    network = build_network(PPOConfig(), reference.eval().requires_grad_(False), None)
    generator = make(network, tokenizer)
    requests = [
        Request(row, Prompt(" ".join(WORDS[(row + word) % 20] for word in range(1 + row % 5)))) for row in range(24)
    ]

    def sample(some: Sequence[Request] = requests, sampling: SamplingSettings = _SAMPLING, key: Key = _KEY) -> Rollouts:
        return generator.generate(some, sampling, key)

    rollouts = sample()
    _check_answer(requests, rollouts, tokenizer)
    _check_endings(rollouts, _SAMPLING)
    _check_logprobs(network, rollouts, _SAMPLING, tolerance)
    _check_randomness(sample, requests, _responses(rollouts))

    filtered = replace(_SAMPLING, top_k=5, top_p=0.9)
    _check_logprobs(network, sample(sampling=filtered), filtered, tolerance)

    for _ in range(2):
        with torch.no_grad():
            for parameter in network.policy.parameters():
                parameter.mul_(1.2)
        generator.update_weights()
        _check_logprobs(network, sample(), _SAMPLING, tolerance, "after update_weights(), ")


WORDS = tuple(f"w{i}" for i in range(20))
"""What `small_policy` reads and writes."""


def small_policy() -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    """Return a random GPT-2 of 2 layers x 32, always the same one, and its tokenizer of `WORDS`; <eos> has id 1."""
    words = ["<pad>", "<eos>", "<unk>", *WORDS]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = GPT2Config(
        vocab_size=len(words),
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        eos_token_id=1,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.2,  # far enough from uniform for a wrong mask, position or temperature to show
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
    return model, PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _check_answer(requests: Sequence[Request], rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Require one response per request, in their order, and texts that are those of the tokens."""
    prompts = tuple(request.prompt for request in requests)
    _require(rollouts.prompts == prompts, "prompts: not those of the requests, in their order")
    sequences = rollouts.sequences
    for row, (prompt, response) in enumerate(zip(prompts, _responses(rollouts), strict=True)):
        used = sequences.attention_mask[row, : sequences.prompt_width] > 0
        found = sequences.ids[row, : sequences.prompt_width][used].tolist()
        _require(found == encode(prompt, tokenizer), f"sequences: row {row} has prompt {found}, not its request's")
        text, wanted = rollouts.responses[row], str(tokenizer.decode(response, skip_special_tokens=True))
        _require(text.strip() == wanted.strip(), f"responses: row {row} is {text!r}, its tokens say {wanted!r}")


def _check_endings(rollouts: Rollouts, sampling: SamplingSettings) -> None:
    """Require that a stop id ends a response and belongs to it, and that none is too long."""
    most = sampling.response_length
    ended = rollouts.ended.tolist()
    for row, (ids, mask) in enumerate(
        zip(rollouts.sequences.response_ids.tolist(), rollouts.sequences.response_mask.tolist(), strict=True)
    ):
        length = int(sum(mask))
        _require(mask == sorted(mask, reverse=True), f"attention_mask: row {row}'s response has gaps: {mask}")
        _require(1 <= length <= most, f"response_length: row {row} has {length} tokens, not 1 to {most}")
        stops = [token in sampling.stop_ids for token in ids[:length]]
        _require(not any(stops[:-1]), f"stop_ids: row {row} continues behind a stop id: {ids[:length]}")
        _require(stops[-1] == ended[row], f"ended: row {row} says {ended[row]}, its tokens are {ids[:length]}")
        _require(ended[row] or length == most, f"ended: row {row} stops after {length} tokens without a stop id")
    _require(0 < sum(ended) < len(ended), f"ended: {sum(ended)} of {len(ended)} responses, which cannot be chance")


@torch.no_grad()
def _check_logprobs(
    network: ActorCritic, rollouts: Rollouts, sampling: SamplingSettings, tolerance: float, when: str = ""
) -> None:
    """Require the log-probabilities of a plain pass of the policy, row by row, without padding or cache."""
    sequences = rollouts.sequences
    for row, response in enumerate(_responses(rollouts)):
        ids = sequences.ids[row][sequences.attention_mask[row] > 0]
        logits = network.policy(input_ids=ids.unsqueeze(0)).logits[0, -len(response) - 1 : -1].float()
        logits = logits / sampling.temperature
        if sampling.filters:
            allowed = sequences.rows(torch.tensor([row], device=ids.device)).allowed
            _require(allowed is not None, "allowed: None, although top-k or top-p left tokens out")
            assert allowed is not None
            kept = allowed.members()
            _require(int(kept.sum(-1).max()) <= (sampling.top_k or 0), f"allowed: row {row} has more than top_k tokens")
            logits = logits.masked_fill(~kept, -torch.inf)
        taken = ids[-len(response) :].unsqueeze(-1)
        expected = logits.log_softmax(-1).gather(-1, taken).squeeze(-1)
        apart = float((rollouts.sampler_logprobs[row, : len(response)] - expected).abs().max())
        _require(
            apart <= tolerance,
            f"sampler_logprobs: {when}row {row} is {apart:.3g} nats from the model's, more than {tolerance:g}",
        )


def _check_randomness(
    sample: Callable[..., Rollouts], requests: Sequence[Request], responses: Sequence[list[int]]
) -> None:
    """Require that a sample is a function of the key, its request's id and the position alone."""
    again = _responses(sample())
    _require(
        again == responses, f"key: the same requests and key gave other samples, in rows {_rows(again, responses)}"
    )
    for what, order in {
        "order: the reverse": list(range(24))[::-1],
        "subset: every third": list(range(0, 24, 3)),
        "subset: one alone": [5],
        "subset: the last ones": list(range(17, 24)),
    }.items():
        found = _responses(sample([requests[row] for row in order]))
        wanted = [responses[row] for row in order]
        _require(found == wanted, f"{what} of the requests gave other samples, in rows {_rows(found, wanted)}")
    for part, key in {
        "seed": replace(_KEY, seed=12),
        "purpose": replace(_KEY, purpose=Purpose.EVALUATION),
        "index": replace(_KEY, index=4),
    }.items():
        _require(_responses(sample(key=key)) != responses, f"key: another {part} gave the same samples")
    twins = _responses(sample([Request(i, requests[4].prompt) for i in range(8)]))
    _require(any(twin != twins[0] for twin in twins), "id: one prompt under 8 ids gave 8 equal samples")
    renamed = _responses(sample([Request(request.id + 100, request.prompt) for request in requests]))
    _require(renamed != responses, "id: other ids gave the same samples")


def _responses(rollouts: Rollouts) -> list[list[int]]:
    """Return the response tokens of each row."""
    rows = zip(rollouts.sequences.response_ids.tolist(), rollouts.sequences.response_mask.tolist(), strict=True)
    return [[token for token, on in zip(ids, mask, strict=True) if on] for ids, mask in rows]


def _rows(found: Sequence[list[int]], wanted: Sequence[list[int]]) -> list[int]:
    return [row for row, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other]


def _require(holds: bool, message: str) -> None:
    assert holds, message
