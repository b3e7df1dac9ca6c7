"""Progress within an epoch, and resuming from a saved state on the same or another number of ranks (GPUs)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any

from h5pack.errors import StateError
from h5pack.system.parameters import whole_number

# Parameters whose names differ from their keys in saved states.
_PARAMETERS = {"samples": "num_samples", "trim": "drop_last", "pack_digest": "dataset", "chunk_rows": "dataset"}
_OF_SPLIT = ("start", "rows")
_PACK_DIGEST = "pack_digest"
# The end of the message "the state was saved ...", which is raised if a saved value differs from this order's value.
# Keys of saved states in `_PROBLEMS` have an end of their own. {saved} and {ours} stand for the two values.
_PROBLEM = "with {parameter} {saved!r}, but this order has {ours!r}; resume with the same value"
_PROBLEMS = {
    "streams": f"{_PROBLEM}; to change the number of ranks, give streams= from the first run",
    "global_batch": _PROBLEM.replace("{parameter}", "batch_size times num_replicas"),
    **dict.fromkeys(
        ("order", "mixture"),
        "by another kind of sampler or h5pack version; resume with the same sampler and version",
    ),
    _PACK_DIGEST: "for a pack with other rows, or in another order; resume with the pack of the first run",
    "chunk_rows": "for chunks of {saved} rows, but this file's have {ours}; resume with the same file",
    "rows_digest": "for other rows of the file, or other indices; resume with the same indices or Subset",
    "weights_digest": "with other weights; resume with the same weights",
    "counts": "with other weights of the packs; resume with the same weights",
    "packs": "for other packs, or with another seed, shuffle or window; resume with the same packs and values",
}


def _rows_text(order: dict[str, Any]) -> str:
    """Describe the rows in an order's identity: their range or, for a subset, only their number."""
    start, rows = order.get("start"), order.get("rows")
    if isinstance(start, int) and isinstance(rows, int):
        return f"rows {start} to {start + rows - 1}"
    return f"{rows} rows"


def _agrees(saved: Any, ours: Any, name: str = "") -> bool:
    """Return whether a saved value and our value are equal. A pack's digest also agrees with None (unknown)."""
    if name == _PACK_DIGEST:
        return saved is None or ours is None or bool(saved == ours)
    if isinstance(saved, dict) and isinstance(ours, dict):
        return all(_agrees(saved.get(key), ours.get(key), key) for key in {**saved, **ours})
    if isinstance(saved, list) and isinstance(ours, list):
        return len(saved) == len(ours) and all(map(_agrees, saved, ours))
    return bool(saved == ours)


@dataclass
class IterationState:
    """The progress of one iteration over an epoch."""

    epoch: int = 0
    start: int = 0  # the batch or row at which this iteration started: above 0 if it resumed from a saved state
    count: int = 0  # batches or rows delivered since `start`
    exhausted: bool = False  # whether a sampler was asked for more rows than the epoch had left
    # Returns how many of the `count` batches or rows the training loop has received. If there is no function, or it
    # returns None, all were received.
    received: Callable[[], int | None] | None = None
    in_order: bool = True  # whether the loop receives batches in the order in which a DataLoader requested them

    def __getstate__(self) -> dict[str, Any]:
        # `received` may reference a DataLoader's iterator, which cannot be pickled, so store what it returns now.
        return {**self.__dict__, "received": None, "count": self.received_count()}

    def received_count(self, given: int | None = None) -> int:
        """Return how many batches or rows the training loop has received: `given`, if the loop has counted them itself.

        Raise StateError if these may not be the first batches or rows of the iteration.
        """
        count = self.received() if given is None and self.received is not None else given
        count = self.count if count is None else count
        if not self.in_order and 0 < count < self.count:
            raise StateError(
                "a DataLoader with in_order=False yields batches in another order than its sampler, so there is no "
                "state in the middle of an epoch; leave in_order out, or save the state after the loop over batches",
                parameters=("in_order=False", "in_order"),
            )
        return count


class EpochCursor:
    """The progress of a sampler or loader: the next epoch, the batch or row it starts at, and the running iteration.

    An epoch has `length` batches or rows; `unit` is "batches" or "rows". Each is counted when it is delivered. An
    iteration starts the epoch that was passed to `set_epoch`, by default the epoch after the previous one. After `load`
    the next iteration continues where the state was saved. A state that was saved with another `identity` is refused.

    If each rank counts its own rows, give `num_replicas`: a state then resumes on another number of ranks only if all
    streams (equal parts of the order, see `h5pack.order.window`) had delivered the same number of rows.
    """

    def __init__(self, identity: dict[str, Any], unit: str, length: int, num_replicas: int | None = None) -> None:
        self.identity = identity
        self.unit = unit
        self.iteration = IterationState()
        self.length = length
        self._num_replicas = num_replicas
        self._next_epoch = 0
        self._next_start = 0
        self._running = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch. If a state was loaded for the same epoch, the next iteration still resumes from it."""
        epoch = whole_number("epoch", epoch, None)
        if epoch != self._next_epoch:
            self._next_epoch, self._next_start = epoch, 0
        self._running = False

    def pause(self) -> None:
        """Record that an iterator was created but not started, so that `state` returns its starting point."""
        self._running = False

    def finish(self, iteration: IterationState) -> None:
        """Record that an iteration was consumed to its end, so that `state` returns the start of the next epoch."""
        if iteration is self.iteration:
            self._running = False

    def begin(self) -> IterationState:
        """Start the next epoch. The caller must increase the result's `count` for each batch or row it delivers."""
        self.iteration = IterationState(self._next_epoch, self._next_start)
        self._next_epoch, self._next_start = self.iteration.epoch + 1, 0
        self._running = True
        return self.iteration

    def cancel(self) -> None:
        """Make the next iteration begin where the current one began, because the current one failed to start."""
        self._next_epoch, self._next_start = self.iteration.epoch, self.iteration.start
        self._running = False

    def state(self, count: int | None = None) -> dict[str, Any]:
        """Return the state after `count` batches or rows of the running iteration.

        If `count` is None, return the state after everything received so far, or at the start of the next epoch if the
        epoch is exhausted and everything was received. If no iteration is running, return the state at the start of the
        next iteration.
        """
        if count is not None:
            # `load` would refuse a state past the end of the epoch.
            left = self.length - self.iteration.start if self._running else None
            count = whole_number(f"{self.unit}_consumed", count, 0, left)
        if not self._running:
            return self.state_of(None)
        iteration, received = self.iteration, self.iteration.received_count(count)
        if count is None and iteration.exhausted and iteration.start + received >= self.length:
            return self.state_of(None)
        return self.state_of(iteration, received)

    def state_of(self, iteration: IterationState | None, count: int | None = None) -> dict[str, Any]:
        """Return the state after `count` batches or rows (None: `iteration.count`) of `iteration`.

        If `iteration` is None, return the state at the start of the next iteration.
        """
        epoch, done = self._next_epoch, self._next_start
        if iteration is not None:
            epoch, done = iteration.epoch, iteration.start + (iteration.count if count is None else count)
        # These keys are part of saved states, so they stay the same even if the parameters are renamed.
        ranks = {} if self._num_replicas is None else {"world_size": self._num_replicas}
        return {"order": self.identity, "epoch": epoch, self.unit: done, **ranks}

    def load(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where `state` was saved; raise a StateError if that is impossible."""
        try:
            order, epoch, done = dict(state["order"]), index(state["epoch"]), index(state[self.unit])
            saved_ranks = None if self._num_replicas is None else index(state["world_size"])
        except (LookupError, TypeError, ValueError) as error:
            raise StateError(
                f"the state is invalid ({error!r}): it was not saved by a sampler or loader of this kind, which counts "
                f"{self.unit}; give what its state_dict() returned"
            ) from error
        # Compare the pack first, because in another pack, splits and chunks may differ, too.
        for name in {_PACK_DIGEST: None, **self.identity, **order}:
            if not _agrees(order.get(name), self.identity.get(name), name):
                parameter, problem = _PARAMETERS.get(name, name), _PROBLEMS.get(name, _PROBLEM)
                saved, ours = order.get(name), self.identity.get(name)
                if name in _OF_SPLIT:
                    saved, ours = _rows_text(order), _rows_text(self.identity)
                    chosen = "split" if "start" in order and "start" in self.identity else "split, indices or Subset"
                    problem = "for {saved} of its file, but this order is for {ours}; resume with the same " + chosen
                problem = problem.format(parameter=parameter, saved=saved, ours=ours)
                raise StateError(f"the state was saved {problem}", parameters=(parameter,))
        if self._num_replicas is not None and saved_ranks is not None and saved_ranks != self._num_replicas:
            done = self._for_our_ranks(done, saved_ranks, self._num_replicas)
        if not 0 <= done <= self.length:
            raise StateError(
                f"the state is damaged: its position is {done}, but an epoch has {self.length} {self.unit}; load "
                "another saved state"
            )
        self._next_epoch, self._next_start = epoch, done
        self._running = False

    def _for_our_ranks(self, done: int, saved_ranks: int, ranks: int) -> int:
        """Convert the rows delivered on each of `saved_ranks` ranks to the rows delivered on each of `ranks` ranks."""
        streams = self.identity["streams"]
        if saved_ranks < 1 or streams % saved_ranks:
            problem = f"{saved_ranks} ranks cannot have had {streams} streams"
            raise StateError(f"the state is damaged: {problem}; load another saved state")
        if done * saved_ranks % streams:
            raise StateError(
                f"the state was saved after {done} rows on each of {saved_ranks} ranks, when not all {streams} streams "
                f"had delivered equally many rows; resume with {saved_ranks} ranks, or save after a multiple of "
                f"{streams // saved_ranks} rows"
            )
        return done * saved_ranks // ranks


class Resumable:
    """Base class of samplers and loaders that implements epochs and states with an `EpochCursor`."""

    def __init__(self, cursor: EpochCursor) -> None:
        self._cursor = cursor

    def __len__(self) -> int:
        """Return the number of batches of this rank per epoch, or of rows if each item is a single row."""
        return self._cursor.length

    @property
    def epoch(self) -> int:
        """The epoch of the running iteration, else of the previous one."""
        return self._cursor.iteration.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. By default each iteration is the epoch after the previous one."""
        self._cursor.set_epoch(epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where `state` was saved, after the last delivered batch or row.

        Raises
        ------
        StateError
            If `state` is malformed, belongs to another order, or cannot be converted to this number of ranks.
        """
        self._cursor.load(state)


def finish_epoch(resumable: Resumable) -> None:
    """Make the state that of the next iteration, because all batches of the running one, if any, were received."""
    resumable._cursor.finish(resumable._cursor.iteration)
