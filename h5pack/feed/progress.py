"""How far an order has come, and where it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from h5pack.errors import StateError


@dataclass
class Run:
    """One iteration.

    Attributes
    ----------
    epoch : int
    begun : int
        The batch or row it began with.
    count : int
        Batches or rows handed out since.
    """

    epoch: int = 0
    begun: int = 0
    count: int = 0


class Progress:
    """Where an order is: which epoch comes next, from which batch, and how far the running iteration is.

    An iteration begins the epoch that `set_epoch` named; without that call, the one behind the last. What
    `load_state_dict` restored is where the next iteration begins.

    Parameters
    ----------
    identity : dict
        Of the order; a state saved with another one is refused.
    unit : str
        What is counted: ``"batches"`` or ``"rows"``.
    """

    def __init__(self, identity: dict[str, Any], unit: str) -> None:
        self.identity = identity
        self.unit = unit
        self.run = Run()
        self._next_epoch = 0
        self._next_begun = 0
        self._running = False

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one; where a state of that very epoch was loaded, its place is kept."""
        if epoch != self._next_epoch:
            self._next_epoch, self._next_begun = epoch, 0
        self._running = False

    def begin(self) -> Run:
        """Begin the next epoch; the caller counts in what it gets."""
        self.run = Run(self._next_epoch, self._next_begun)
        self._next_epoch, self._next_begun = self.run.epoch + 1, 0
        self._running = True
        return self.run

    def state(self, count: int | None = None) -> dict[str, Any]:
        """The state after `count` batches or rows of the running iteration, or those counted here."""
        if not self._running:
            return {"order": self.identity, "epoch": self._next_epoch, self.unit: self._next_begun}
        done = self.run.begun + (self.run.count if count is None else count)
        return {"order": self.identity, "epoch": self.run.epoch, self.unit: done}

    def load(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where the state was saved.

        Raises
        ------
        StateError
            If it belongs to another order.
        """
        try:
            order, epoch, done = state["order"], int(state["epoch"]), int(state[self.unit])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"not a state of {self.unit} in an order ({error!r}); give what state_dict() returned"
            ) from error
        for name in {**self.identity, **order}:
            if order.get(name) != self.identity.get(name):
                hint = "; orders for several numbers of ranks need the same streams=" if name == "streams" else ""
                raise StateError(
                    f"the state was saved with {name} {order.get(name)!r}, and this order has "
                    f"{self.identity.get(name)!r}; resume with the same{hint}"
                )
        self._next_epoch, self._next_begun = epoch, done
        self._running = False
