"""Shape checks for the mathematics: a wrong shape would often broadcast and silently give a wrong number."""

from torch import Tensor


def require_same_shape(where: str, rank: int | None = None, /, **tensors: Tensor) -> None:
    """Raise ValueError, which names `where`, unless all tensors have one shape, of `rank` dimensions if given."""
    first, wanted = next((name, tensor.shape) for name, tensor in tensors.items())
    if rank is not None and len(wanted) != rank:
        raise ValueError(f"{where}: {first} has shape {list(wanted)}, which is not of {rank} dimensions")
    for name, tensor in tensors.items():
        if tensor.shape != wanted:
            raise ValueError(f"{where}: {name} has shape {list(tensor.shape)}, not {list(wanted)} as {first}")
