"""The truth of every study: studies, trials, steps, samples and orders in a database.

The controller that holds a study's lease writes; everyone else reads, and places orders. Each write is one
transaction that first checks the lease's token, so a controller that lost its lease can write nothing.
"""

from pathlib import Path

from ppo_core.errors import StoreError
from tuner.store import schema
from tuner.store.curves import Curves
from tuner.store.orders import Order, Orders, OrderState
from tuner.store.rows import INTERRUPTED, LEASE_SECONDS, Lease, Outcome, StudyRow, TrialRow
from tuner.store.studies import Studies
from tuner.store.trials import NewTrial, Trials

__all__ = [
    "DEFAULT_STORAGE",
    "INTERRUPTED",
    "LEASE_SECONDS",
    "Lease",
    "NewTrial",
    "Order",
    "OrderState",
    "Outcome",
    "Store",
    "StudyRow",
    "TrialRow",
]

DEFAULT_STORAGE = "sqlite:///runs/ppo-tuner.db"


class Store(Studies, Trials, Curves, Orders):
    """A database of studies. Open it with `Store.open`."""

    @classmethod
    def open(cls, storage: str = DEFAULT_STORAGE, *, create: bool = False) -> "Store":
        """Open the store at a URL or path, making it first if asked.

        Raises:
            StoreError: there is none, it cannot be reached, is not ours, or has another schema version.
        """
        url = schema.parse_url(storage)
        if url.get_backend_name() == "sqlite" and url.database:
            path = Path(url.database)
            if not path.exists() and not create:
                raise StoreError(f"there is no store at {path} yet; `ppo-tuner demo` makes one")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"cannot make the store's folder {path.parent}: {error.strerror}") from error
        return cls(schema.connect(url, create=create))
