"""How responses are drawn, and what ends one."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ppo_core.declare import Bounds, Hyper
from ppo_core.hyperparameters.shared import COUNT, POSITIVE, TRL


@dataclass(frozen=True)
class Sampling:
    """Sampling."""

    response_length: Annotated[
        int,
        Hyper(
            label="Response length",
            doc="Most new tokens of a response.",
            source=TRL,
            unit="tokens",
            valid=COUNT,
        ),
    ] = 53
    temperature: Annotated[
        float,
        Hyper(
            label="Temperature",
            doc="Divides the logits, in sampling and in training alike.",
            source=TRL,
            valid=POSITIVE,
        ),
    ] = 0.7
    top_p: Annotated[
        float,
        Hyper(
            label="Top-p",
            doc="Sample only from the likeliest tokens that hold this much probability, and train that filtered "
            "policy. The reference is not filtered, so it adds up to -log(top_p) nats per token to the training KL, "
            "from the first step on.",
            source="TRL; Holtzman et al. 2020, arXiv 1904.09751",
            unit="share",
            valid=Bounds(0, 1, low_open=True),
        ),
    ] = 1.0
    top_k: Annotated[
        int | None,
        Hyper(
            label="Top-k",
            doc="Sample only from this many likeliest tokens, and train that filtered policy. The reference is not "
            "filtered, so it adds to the training KL, from the first step on. Unset: from all.",
            source="TRL; Fan et al. 2018, arXiv 1805.04833",
            unit="tokens",
            valid=COUNT,
        ),
    ] = None
    stop_token: Annotated[
        Literal["eos", "none"],
        Hyper(
            label="Stop token",
            doc="eos: a response ends with the end-of-sequence tokens of the model and its tokenizer. none: those are "
            "tokens like others.",
            source=TRL,
        ),
    ] = "eos"
    stop_token_id: Annotated[
        int | None,
        Hyper(
            label="Stop token id",
            doc="A further token of the policy that ends a response, by id.",
            source=TRL,
            valid=Bounds(0),
        ),
    ] = None
    stop_strings: Annotated[
        str | None,
        Hyper(
            label="Stop strings",
            doc="A text that ends a response, which keeps it; or several as a JSON list.",
            source="transformers GenerationConfig",
        ),
    ] = None
