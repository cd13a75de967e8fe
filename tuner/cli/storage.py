"""Open the store that `--storage` names."""

from contextlib import closing

from tuner.store import Store
from tuner.store.commands import location


def opened(given: str | None) -> closing[Store]:
    """Open the store of `--storage`; a context manager that closes it in the end."""
    return closing(Store.open(location(given)))
