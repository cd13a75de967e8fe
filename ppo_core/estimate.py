"""How much memory and disk a run will take, computed from its configuration and its networks' shapes. No torch.

Bytes are counted tensor by tensor, as the code of this package and transformers' layers hold them. A run holds some of
them all the time (weights, AdamW's moments), the others at moments of an iteration; the peak is what is always held
plus the largest moment.

Activations: Korthikanti et al. 2022, arXiv 2205.05198, section 4, count what a layer keeps for its backward pass. Here
the same is counted for today's layers: no dropout, so no masks of it; attention in one kernel (SDPA), which keeps its
inputs and its output instead of the matrices [heads, L, L]; gated MLPs; and frozen weights, whose inputs are not kept.

Symbols: R rows, P prompt tokens, T response tokens, L = P + T, V vocabulary, H hidden width, I the MLP's width, Q heads
times their width. All sizes are bytes, of one device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ppo_core.hyperparameters import PPOConfig

ERROR = 0.15
"""How far the predicted peak may be from the measured one, as a share of it."""

FLOAT32, BFLOAT16, FLOAT64 = 4, 2, 8

LIBRARIES = 32 * 2**20
"""What torch's kernels and the tokenizer take on a CPU when they are first used; measured."""
HEAP = 1.2
"""On a CPU, what activations and logits take with the gaps between them, which short-lived tensors leave; measured."""
HEAP_LIMIT = 32 * 2**20
"""Larger tensors are mapped, and given back at once (mallopt(3), M_MMAP_THRESHOLD)."""
IN_4_BITS = 0.516
"""NF4 with double quantisation: half a byte, and 0.127 bits of scales (Dettmers et al. 2023, section 3)."""
IN_8_BITS = 2 * (1 + 4 / 256)
"""Both moments of a weight, with a float32 scale for 256 of them."""


@dataclass(frozen=True)
class BytesPer:
    """Bytes of one number, by what it is of."""

    frozen: float = FLOAT32
    """A weight that does not learn."""
    trained: float = FLOAT32
    gradient: float = FLOAT32
    moments: float = 2 * FLOAT32
    """What AdamW keeps of one weight: the means of its gradient and of its square."""
    compute: int = FLOAT32
    """What layers compute with."""
    residual: int = FLOAT32
    """The sum that runs through the layers."""
    copies: int = 0
    """Autocast's copy of a float32 weight that learns, kept until the backward pass."""

    @classmethod
    def of(cls, config: PPOConfig) -> "BytesPer":
        """Return the sizes of a run: with `bf16` LoRA's frozen weights are bfloat16, others are copied by autocast."""
        moments = IN_8_BITS if config.optim == "adamw_8bit" else 2.0 * FLOAT32
        if not config.bf16:
            return cls(frozen=IN_4_BITS if config.load_in_4bit else FLOAT32, moments=moments)
        if config.use_peft:
            frozen = IN_4_BITS if config.load_in_4bit else BFLOAT16
            return cls(frozen=frozen, moments=moments, compute=BFLOAT16, residual=BFLOAT16)
        return cls(compute=BFLOAT16, copies=BFLOAT16, moments=moments)


@dataclass(frozen=True)
class Shape:
    """A transformer's dimensions."""

    layers: int
    hidden: int
    """H."""
    query: int
    """Q: heads times their width."""
    heads: int
    key_value: int
    """Key-value heads times their width."""
    intermediate: int
    """I; of a mixture, of the experts of one token together."""
    vocabulary: int
    """V."""
    is_gated: bool = True
    """The MLP multiplies two projections, as in Llama."""
    norms: int = 2
    """Norms of width H in a layer."""
    norms_heads: bool = False
    """Queries and keys are normalised, as in Qwen3."""
    is_rms: bool = True
    """RMSNorm, written out in torch: it keeps what it normalised, too."""
    has_matrices: bool = False
    """Attention is computed without SDPA, which keeps two matrices [heads, L, L]."""
    is_rough: bool = False
    """The architecture has other layers than these formulas know."""


@dataclass(frozen=True)
class Trained:
    """What of a network learns. None of it: a frozen network."""

    weights: int = 0
    """Numbers that learn."""
    reads: tuple[int, ...] = ()
    """Of each state of width H in a layer (what attention reads, what the MLP reads), how many weights that learn read
    it."""
    reads_product: bool = False
    """The MLP's last projection learns, so its input is kept."""
    norms: bool = False
    """Norms' weights learn."""
    rank: int = 0
    """Numbers between the two matrices of all adapters of a layer."""
    copied: int = 0
    """Numbers of the matrices that autocast copies."""
    embedding: int = 0
    """Numbers of the embedding that learns; 0: it is frozen."""


@dataclass(frozen=True)
class Network:
    """A network with the weights that it holds for itself."""

    shape: Shape
    weights: int
    """Numbers of its own; of adapters on shared weights only the adapters'."""
    trained: Trained = field(default_factory=Trained)


@dataclass(frozen=True)
class Models:
    """What a run loads and builds."""

    reference: Network
    policy: Network
    critic: Network | None
    """None: a value head on the policy, which is counted there, or no critic."""
    rewards: Mapping[str, tuple[Network, int]]
    """Reward models by name, each with the bytes of one of its weights."""
    device: str
    """torch's type of it: `cuda` or `cpu`."""
    file: float
    """Bytes of one of the policy's weights, as it was saved."""
    longest_prompt: int
    """In tokens."""
    eval_prompts: int
    eval_response_length: int
    logits_at_once: int
    """Most logits that one chunk of tokens has: `ppo_core.policy.LOGITS_AT_ONCE`."""
    reward_rows: int
    """Most rows of one pass of a reward model: `ppo_core.rewards.model.MOST_ROWS`."""


@dataclass(frozen=True)
class Estimate:
    """What a run takes on one device."""

    held: Mapping[str, int]
    """Held all the time once the first optimizer step was taken, by part."""
    moments: Mapping[str, Mapping[str, int]]
    """What else is held at each moment of an iteration, by part."""
    checkpoint: int
    """One checkpoint on disk."""
    model: int
    """The trained policy, saved for its users."""
    is_rough: bool = False
    """Some network has layers that the formulas do not know."""

    @property
    def largest(self) -> str:
        """The moment that takes most."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> int:
        """The most memory held at once, without the process's own (see `ppo_core.fits`)."""
        return sum(self.held.values()) + sum(self.moments[self.largest].values())


Parts = dict[str, int]
"""Bytes by what they are of."""


def estimate(config: PPOConfig, models: Models) -> Estimate:
    """Return what the run of `config` takes on one device, in one process."""
    per, sizes = BytesPer.of(config), config.batch_sizes(world_size=1)
    critic = models.critic
    learning = [models.policy] if critic is None else [models.policy, critic]
    cast = models.policy.trained.copied if per.copies else 0  # the reference holds these in bfloat16
    embedding = models.reference.shape.vocabulary * models.reference.shape.hidden
    unpacked = embedding * (per.compute - per.frozen) if config.load_in_4bit else 0.0
    held = {
        "reference": round(models.reference.weights * per.frozen + unpacked) - cast * (FLOAT32 - per.copies),
        "policy": round(models.policy.weights * per.trained),
        "critic": 0 if critic is None else round(critic.weights * per.trained),
        "reward models": sum(network.weights * size for network, size in models.rewards.values()),
        "optimizer moments": sum(round(network.trained.weights * per.moments) for network in learning),
        "copies for decoding": cast * per.copies if models.device != "cpu" else 0,
        "libraries": LIBRARIES if models.device == "cpu" else 0,
    }
    forward = config.local_rollout_forward_batch_size
    rollouts = (min(forward, sizes.batch_size), config.response_length)
    evaluation = (min(forward, models.eval_prompts), models.eval_response_length)
    filters = config.top_k is not None or config.top_p < 1
    moments = {
        "sampling": _largest(
            (sampling(models, per, *rollouts, filters=filters), sampling(models, per, *evaluation, filters=False))
        ),
        "scoring": _largest(scoring(models, per, *each) for each in (rollouts, evaluation)),
        **learning_moments(config, models, per),
    }
    if models.device == "cpu" and models.file != per.frozen:  # else the file's pages are the weights
        later = sum(held.values()) - held["reference"]
        moments["loading"] = {"the policy's file": max(0, round(models.reference.weights * models.file) - later)}
    for name, (network, _) in models.rewards.items():
        rows = min(models.reward_rows, max(sizes.batch_size, models.eval_prompts))
        tokens = models.longest_prompt + max(rollouts[1], evaluation[1])
        moments[f"reward model {name}"] = {"one layer": one_layer(network.shape, BytesPer(), rows, tokens)}
    trained = sum(network.trained.weights for network in learning)
    return Estimate(
        _present(held),
        {name: _present(parts) for name, parts in moments.items()},
        round(trained * (per.trained + per.moments)),
        round(models.policy.trained.weights * per.trained),
        any(network.shape.is_rough for network in learning),
    )


def _present(parts: Parts) -> Parts:
    return {name: size for name, size in parts.items() if size}


def _largest(moments: Iterable[Parts]) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


# Passes without gradients: sampling, and scoring with the policy, the reference and the critic.


def kv_cache(shape: Shape, per: BytesPer, rows: int, tokens: int) -> int:
    """Return the reserved cache (`decoding.reserved_cache`): keys and values of every layer, R x L x 2 x kv width.

    Keys have been rotated by float32 angles where the residual stream is float32, and so are float32 themselves.
    """
    return shape.layers * rows * tokens * shape.key_value * (per.compute + max(per.compute, per.residual))


def one_layer(shape: Shape, per: BytesPer, rows: int, tokens: int) -> int:
    """Return what one layer holds at once in a pass without gradients over R x L tokens.

    Beside the residual stream and what was normalised of it (2 H) either attention's queries with their two halves of
    the rotation, the keys and values repeated for all heads, and its output (6 Q), or the MLP's (gated: 3 I, else 2 I).
    And the mask of attention, L x L for each row; without SDPA two matrices for each head.
    """
    wide = max(6 * shape.query, (3 if shape.is_gated else 2) * shape.intermediate)
    matrices = 2 * shape.heads if shape.has_matrices else 1
    return rows * tokens * (2 * shape.hidden * per.residual + wide * per.compute + matrices * tokens * per.compute)


def sampling(models: Models, per: BytesPer, rows: int, response: int, *, filters: bool) -> Parts:
    """Return what sampling R responses holds: the cache, a layer at work, and the distribution of the next token.

    The layer works on all prompts at first (R x P), later on one token per row, for which it repeats the cached keys
    and values for all heads (2 R L Q). The distribution (`generation.next_token`), R x V: the model's logits, the
    logits over the temperature and their logarithm of the softmax in float32, the probabilities and their cumulative
    sums in float64. Top-k and top-p sort before: values, int64 indices, a mask, and three times float64.
    """
    shape, width = models.policy.shape, models.longest_prompt
    decode = 2 * rows * (width + response) * shape.query * per.compute
    steps = per.compute + 2 * FLOAT32 + 2 * FLOAT64
    if filters:
        steps = max(steps, per.compute + 2 * FLOAT32 + FLOAT64 + 1 + 3 * FLOAT64)
    return {
        "KV cache": kv_cache(shape, per, rows, width + response),
        "logits": rows * shape.vocabulary * steps,
        "one layer": max(one_layer(shape, per, rows, width), decode),
        "bfloat16 copies": models.policy.trained.copied * per.copies,
    }


def scoring(models: Models, per: BytesPer, rows: int, response: int) -> Parts:
    """Return what scoring R responses holds (`experience.read_policy`, `policy.compare`).

    The last states of policy and reference (2 R L H) and those of the response tokens (2 R T H); then a layer at work,
    or the logits of one chunk of tokens: both models' log-probabilities, the policy's probabilities, the KL's terms,
    zeros and their choice, six in float32 and a mask.
    """
    shape, tokens = models.policy.shape, models.longest_prompt + response
    states = 2 * rows * (tokens + response) * shape.hidden * per.residual
    logits = _chunk(rows * response, models) * shape.vocabulary * (6 * FLOAT32 + 1)
    copied = models.policy.trained.copied + (0 if models.critic is None else models.critic.trained.copied)
    work = one_layer(shape, per, rows, tokens)
    logits = round(_heap(models, _chunk(rows * response, models) * shape.vocabulary * FLOAT32) * logits)
    return {
        "states": states,
        **({"logits": logits} if logits > work else {"one layer": work}),
        "bfloat16 copies": copied * per.copies,
    }


def _heap(models: Models, tensor: int) -> float:
    """Return what tensors of so many bytes take for each of them."""
    return HEAP if models.device == "cpu" and tensor < HEAP_LIMIT else 1.0


def _chunk(tokens: int, models: Models) -> int:
    """Return the response tokens whose logits are held at once: `policy.ResponseTokens.chunks`."""
    return min(tokens, max(1, models.logits_at_once // models.policy.shape.vocabulary))


# Passes with gradients, and the optimizer's step.


def kept_per_token(shape: Shape, trained: Trained, per: BytesPer) -> int:
    """Return what one layer keeps of one token for its backward pass, but for attention's mask or matrices.

    For each norm: its input, in float32 (LayerNorm: as it is); of an RMSNorm one factor, and what it normalised where
    its weight learns. Of a LayerNorm the mean and the factor. The same of queries and keys where they are normalised.
    What projections that learn read, H: in float32 once for all that read the same, under autocast one bfloat16 copy
    for each. Attention by SDPA: queries, keys and values (repeated for all heads) and its output, 4 Q, and one float32
    a head. A gated MLP: gate, activation and the other projection, 3 I; another one: what is activated, I; and I for
    the product where the last projection learns. And what lies between the two matrices of each adapter.

    A Llama in float32 that learns as a whole: 24 H + 16 Q + 16 I + 4 heads + 8.
    """
    norm_input = FLOAT32 if shape.is_rms else per.residual
    each_norm = norm_input + (FLOAT32 if shape.is_rms and trained.norms else 0)
    norms = shape.norms * (shape.hidden * each_norm + FLOAT32 * (1 if shape.is_rms else 2))
    if shape.norms_heads:
        norms += (shape.query + shape.key_value) * each_norm
    reads = sum(trained.reads) if per.compute < FLOAT32 else len(trained.reads)
    attention = 4 * shape.query * per.compute + shape.heads * FLOAT32
    inner = (3 if shape.is_gated else 1) + trained.reads_product
    return (
        norms
        + reads * shape.hidden * per.compute
        + attention
        + inner * shape.intermediate * per.compute
        + trained.rank * per.compute
    )


def activations(network: Network, per: BytesPer, rows: int, tokens: int, *, checkpointing: bool) -> int:
    """Return what all layers keep of R x L tokens for the backward pass.

    Each layer keeps `kept_per_token`, and the mask of attention as SDPA adds it, R x L x L; without SDPA two matrices
    for each head. With gradient checkpointing it keeps its input alone (Chen et al. 2016, arXiv 1604.06174), and one
    layer at a time what it computes again.
    """
    shape, count = network.shape, rows * tokens
    matrices = 2 * shape.heads * FLOAT32 if shape.has_matrices else per.compute
    layer = count * (kept_per_token(shape, network.trained, per) + matrices * tokens)
    if checkpointing:
        return shape.layers * count * shape.hidden * per.residual + layer
    return shape.layers * layer


def layer_gradients(shape: Shape, per: BytesPer, rows: int, tokens: int) -> int:
    """Return the gradients of one layer's states in the backward pass: of the residual stream, 2 H, and of the MLP."""
    inner = (3 if shape.is_gated else 2) * shape.intermediate
    return rows * tokens * (2 * shape.hidden * per.residual + inner * per.compute)


def training_logits(vocabulary: int, tokens: int, *, with_entropy: bool) -> int:
    """Return what the logits of so many tokens take in a pass with gradients (`policy.token_readings`), in float32.

    The log-probabilities that are kept and two gradients of that size; with the entropy also the logits and their
    softmax, and the gradients of both.
    """
    return tokens * vocabulary * FLOAT32 * (7 if with_entropy else 3)


def learning_moments(config: PPOConfig, models: Models, per: BytesPer) -> dict[str, Parts]:
    """Return what learning holds in the policy's pass, in that of a separate critic, and in the optimizer's step.

    Gradients of a mini-batch of one micro-batch come to be as its activations go; with more of them, all are there
    while the next one's activations are. On a CPU they always add up: what is freed in blocks of less than 32 MiB stays
    the process's own (mallopt(3), M_MMAP_THRESHOLD). A separate critic's pass comes after the policy's, whose
    activations are gone by then.
    """
    sizes = config.batch_sizes(world_size=1)
    rows, response = sizes.per_device_train_batch_size, config.response_length
    tokens = models.longest_prompt + response
    policy, critic = models.policy, models.critic
    shape = policy.shape
    gradients = {
        network_name: round(network.trained.weights * per.gradient)
        for network_name, network in (("policy", policy), ("critic", critic))
        if network is not None
    }
    heap = HEAP if models.device == "cpu" else 1.0
    is_single = sizes.micro_batches_per_step == 1 and models.device != "cpu"
    chunk = _chunk(rows * response, models)
    head = round(policy.trained.embedding * per.gradient) * (1 if chunk == rows * response else 2)
    logits = training_logits(shape.vocabulary, chunk, with_entropy=config.entropy_coef > 0)
    logits = round(_heap(models, chunk * shape.vocabulary * FLOAT32) * logits)
    found: dict[str, Parts] = {}
    before = 0
    for name, network in (("policy", policy), ("critic", critic)):
        if network is None:
            continue
        is_policy = name == "policy"
        found[f"{name}'s pass"] = {
            "gradients": before if is_single else sum(gradients.values()),
            "activations": round(
                heap * activations(network, per, rows, tokens, checkpointing=config.gradient_checkpointing is True)
            ),
            "states": rows * tokens * shape.hidden * per.residual,
            "logits": logits if is_policy else 0,
            "head's gradient": head if is_policy else 0,
            "one layer": 0 if is_policy else layer_gradients(network.shape, per, rows, tokens),
            "bfloat16 copies": network.trained.copied * per.copies,
        }
        before += gradients[name]
    # The gradient of an embedding is dense, and added to what the head, which may share its weight, left of it.
    found["optimizer's step"] = {"gradients": before, "embedding's gradient": head}
    return found


# Time, from what one iteration took.


def seconds_left(config: PPOConfig, step: int, last_step: int, iteration: float, evaluation: float) -> float:
    """Return how long a run takes from after `step` to `last_step`, at so many seconds an iteration and evaluation."""
    batch, every = config.batch_sizes(1).batch_size, config.eval_interval
    due = last_step * batch // every - step * batch // every
    evaluations = min(last_step - step, due + (last_step * batch % every >= batch))
    return (last_step - step) * iteration + evaluations * evaluation
