"""How the KL from the reference is estimated, priced and controlled."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ppo_core.declare import Bounds, Hyper, Range
from ppo_core.hyperparameters.shared import COUNT, POSITIVE, TRL, ZIEGLER


@dataclass(frozen=True)
class KLControl:
    """KL from the reference."""

    kl_coef: Annotated[
        float,
        Hyper(
            label="KL coefficient β",
            doc="Price of one nat of KL in reward. The starting point where kl_target makes β adaptive.",
            source=TRL,
            unit="reward per nat",
            valid=Bounds(0),
            search=Range(0.01, 0.2, "log"),
        ),
    ] = 0.05
    kl_target: Annotated[
        float | None,
        Hyper(
            label="KL target",
            doc="Set: β adapts so that the exact KL of a response goes to this. Unset: β is fixed.",
            source=f"{ZIEGLER}, section 2.2 (6 nats for 24 tokens)",
            unit="nats per response",
            valid=POSITIVE,
            search=Range(3, 12, "log"),
        ),
    ] = None
    kl_horizon: Annotated[
        int | None,
        Hyper(
            label="KL horizon",
            doc="Episodes over which adaptive β can change by about e^0.2 fold. Unset: a tenth of total_episodes "
            "(the classic 10,000 does nothing in a short trial).",
            source=f"{ZIEGLER}, section 2.2",
            unit="episodes",
            valid=COUNT,
        ),
    ] = None
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3", "abs"],
        Hyper(
            label="KL estimator",
            doc="Per-token estimate of the KL that β prices, of the log-ratio r: k1 = r, k2 = r²/2, "
            "k3 = exp(-r) - 1 + r, abs = |r|.",
            source=f"{TRL} (k1, k3); verl (k2, abs); J. Schulman, Approximating KL Divergence, 2020",
        ),
    ] = "k1"
    use_kl_loss: Annotated[
        bool,
        Hyper(
            label="KL as a loss",
            doc="The KL to the reference is a term of the policy's loss, priced by β, instead of a part of the reward.",
            source="OpenRLHF and verl use_kl_loss; Shao et al. 2024, arXiv 2402.03300",
        ),
    ] = False
    kl_clamp: Annotated[
        float | None,
        Hyper(
            label="KL clamp",
            doc="The sampled KL of a token stays within ± this. Unset: no bound.",
            source="OpenRLHF (10)",
            unit="nats per token",
            valid=POSITIVE,
        ),
    ] = None
