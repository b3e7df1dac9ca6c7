"""How far an order has come, and where it goes on."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from h5pack.errors import OptionsError, StateError


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
    most : int
        How many of them an epoch has.
    world_size : int, optional
        Where each rank counts its own rows: how many ranks there are. Then a state goes on with another number of them
        only from a place where all streams gave equally many rows.
    """

    def __init__(self, identity: dict[str, Any], unit: str, most: int, world_size: int | None = None) -> None:
        self.identity = identity
        self._most = most
        self.unit = unit
        self.run = Run()
        self._world_size = world_size
        self._next_epoch = 0
        self._next_begun = 0
        self._running = False

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one; where a state of that very epoch was loaded, its place is kept."""
        try:
            epoch = operator.index(epoch)
        except TypeError as error:
            raise OptionsError(f"epoch is {epoch!r}; it must be a whole number") from error
        if epoch != self._next_epoch:
            self._next_epoch, self._next_begun = epoch, 0
        self._running = False

    def pause(self) -> None:
        """An iteration was made, and has yet to begin: the state is where it will."""
        self._running = False

    def finish(self, run: Run) -> None:
        """An iteration was asked for more than there is: the state is where the next one will begin."""
        if run is self.run:
            self._running = False

    def begin(self) -> Run:
        """Begin the next epoch; the caller counts in what it gets."""
        self.run = Run(self._next_epoch, self._next_begun)
        self._next_epoch, self._next_begun = self.run.epoch + 1, 0
        self._running = True
        return self.run

    def state(self, count: int | None = None) -> dict[str, Any]:
        """The state after `count` batches or rows of the running iteration, or those counted here."""
        return self.state_of(self.run if self._running else None, count)

    def state_of(self, run: Run | None, count: int | None = None) -> dict[str, Any]:
        """The state of one iteration; None: of the next."""
        epoch, done = self._next_epoch, self._next_begun
        if run is not None:
            epoch, done = run.epoch, run.begun + (run.count if count is None else count)
        ranks = {} if self._world_size is None else {"world_size": self._world_size}
        return {"order": self.identity, "epoch": epoch, self.unit: done, **ranks}

    def load(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where the state was saved.

        Raises
        ------
        StateError
            If it belongs to another order.
        """
        try:
            order, epoch, done = dict(state["order"]), int(state["epoch"]), int(state[self.unit])
            saved_ranks = None if self._world_size is None else int(state["world_size"])
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
        if self._world_size is not None and saved_ranks is not None and saved_ranks != self._world_size:
            done = self._for_our_ranks(done, saved_ranks)
        if not 0 <= done <= self._most:
            raise StateError(f"the state is behind {done} {self.unit}, and an epoch has {self._most}; it was damaged")
        self._next_epoch, self._next_begun = epoch, done
        self._running = False

    def _for_our_ranks(self, done: int, ranks: int) -> int:
        """Our rank's rows at the place where each of `ranks` ranks had `done`."""
        streams = self.identity["streams"]
        if done * ranks % streams:
            raise StateError(
                f"the state was saved after {done} rows on each of {ranks} ranks, amid a turn of the {streams} "
                f"streams; resume with {ranks} ranks, or save after a multiple of {streams // ranks} rows"
            )
        assert self._world_size is not None
        return done * ranks // self._world_size


class Resumable:
    """What goes through epochs, and on from a saved state: the part that samplers and loaders share.

    Parameters
    ----------
    progress : Progress
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @property
    def epoch(self) -> int:
        """The epoch of the running or last iteration."""
        return self._progress.run.epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; without a call each iteration is the one after the last."""
        self._progress.set_epoch(epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where `state` was saved: behind the last batch or row that was handed out.

        Raises
        ------
        StateError
            If it belongs to another order.
        """
        self._progress.load(state)
