"""State of controllers and statistics, as a run's checkpoint holds it."""

from collections.abc import Mapping
from typing import Any, ClassVar


class Stateful:
    """Has changing attributes that a checkpoint keeps: plain values that JSON stores without loss."""

    changing: ClassVar[tuple[str, ...]]
    """Their names; all else is in the config."""

    def state_dict(self) -> dict[str, Any]:
        """Return them by name."""
        return {name: getattr(self, name) for name in self.changing}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set them to those of a `state_dict`."""
        for name in self.changing:
            setattr(self, name, state[name])
