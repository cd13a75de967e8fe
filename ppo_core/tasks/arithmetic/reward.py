"""The reward: is the answer right? Its mean is the exact-match rate."""

from collections.abc import Sequence


def exact(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Return 1 for each response that is its sum's answer and nothing else, else 0."""
    return [float(response == right) for response, right in zip(responses, answer, strict=True)]
