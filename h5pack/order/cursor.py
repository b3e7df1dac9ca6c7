"""Progress within an epoch, and resuming from a saved state on the same or another number of ranks (GPUs)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any

from h5pack.errors import StateError
from h5pack.order.window import BatchPlan
from h5pack.system.parameters import whole_number

# For some keys of saved states: the parameter that determines the value, if its name is not the key.
_PARAMETERS = {"samples": "num_samples", "trim": "drop_last", "pack_digest": "dataset", "chunk_rows": "dataset"}
_OF_SPLIT = ("start", "rows")
_PACK_DIGEST = "pack_digest"
# The end of the message "the state was saved ...", which is raised if a saved value differs from our value. `_PROBLEMS`
# has other ends of the message for some keys of saved states. {saved} and {ours} stand for the two values.
_PROBLEM = "with {parameter}={saved!r}, but this sampler or loader has {ours!r}; resume with the same value"
_PROBLEMS = {
    "streams": f"{_PROBLEM}. The default is one stream per rank and lane: give every run the same streams= if their "
    "numbers of ranks differ",
    "global_batch": _PROBLEM.replace("{parameter}", "batch_size*num_replicas"),
    **dict.fromkeys(
        ("order", "mixture"),
        "by another kind of sampler, or by another version of h5pack; resume with the same sampler and version",
    ),
    _PACK_DIGEST: "for a pack with other rows, or with the same rows in another order; resume with the same pack",
    "chunk_rows": "for chunks of {saved} rows, but this file has chunks of {ours} rows; resume with the same file",
    "rows_digest": "for other rows of the file, or other indices; resume with the same split, indices or Subset",
    "weights_digest": "with other weights; resume with the same weights",
    "counts": "with other weights of the packs; resume with the same weights",
    "packs": "for other packs, or with another seed, shuffle or window; resume with the same packs and values",
}


def _rows_text(order: dict[str, Any]) -> str:
    """Describe the rows in the identity of an order: their range if it is known, else only their number."""
    start, rows = order.get("start"), order.get("rows")
    if isinstance(start, int) and isinstance(rows, int):
        return f"rows {start} to {start + rows - 1}" if rows > 0 else f"{rows} rows from row {start}"
    return f"{rows} rows"


def _agrees(saved: Any, ours: Any, name: str = "") -> bool:
    """Return whether a saved value and our value are equal. A pack digest also agrees with None, an unknown digest."""
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
    exhausted: bool = False  # whether a sampler was asked for an item after the last item of its epoch
    # Returns how many of the `count` batches or rows the training loop has received. If `received` is None or returns
    # None, the loop is assumed to have received all.
    received: Callable[[], int | None] | None = None
    in_order: bool = True  # whether the loop receives batches in the order in which a DataLoader requested them

    def __getstate__(self) -> dict[str, Any]:
        # `received` may reference a DataLoader's iterator, which cannot be pickled. So store the number that it returns
        # now as the count.
        return {**self.__dict__, "received": None, "count": self.received_count()}

    def received_count(self, given: int | None = None) -> int:
        """Return how many batches or rows the training loop has received.

        `given` is the number that the loop has counted itself; None: use `received`, or else `count`. Raise StateError
        if a DataLoader with ``in_order=False`` may have delivered batches that are not the first ones of the iteration.
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

    An epoch has `length` batches or rows; `unit` is "batches" or "rows". A batch or row is counted when it is
    delivered. An iteration starts the epoch that was passed to `set_epoch`, by default the epoch after the previous
    one. After `load`, the next iteration continues where the state was saved. `load` refuses a state that was saved
    with another `identity`.

    If each rank counts its own rows, `num_replicas` is the number of ranks. A state then resumes on another number of
    ranks only if all streams (equal parts of the order, see `h5pack.order.window`) had delivered the same number of
    rows. None: the count is the same on every rank.
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
        """Choose the next epoch. If a state of the same epoch was loaded, the next iteration still resumes from it."""
        epoch = whole_number("epoch", epoch, None)
        if epoch != self._next_epoch:
            self._next_epoch, self._next_start = epoch, 0
        self._running = False

    def pause(self) -> None:
        """Record that an iterator was created but not started: `state` then returns the start of the next iteration."""
        self._running = False

    def finish(self, iteration: IterationState) -> None:
        """Record that an iteration was consumed to its end: `state` then returns the start of the next epoch.

        Do nothing if a later iteration is running.
        """
        if iteration is self.iteration:
            self._running = False

    def begin(self) -> IterationState:
        """Start the next iteration. The caller must add 1 to the result's `count` for each delivered batch or row."""
        self.iteration = IterationState(self._next_epoch, self._next_start)
        self._next_epoch, self._next_start = self.iteration.epoch + 1, 0
        self._running = True
        return self.iteration

    def cancel(self) -> None:
        """Make the next iteration begin where the running one began. Call this if the running one failed to start."""
        self._next_epoch, self._next_start = self.iteration.epoch, self.iteration.start
        self._running = False

    def state(self, count: int | None = None) -> dict[str, Any]:
        """Return the state after `count` batches or rows of the running iteration.

        If `count` is None, return the state after all batches or rows that the training loop has received so far. If
        the loop has received the whole epoch, and the sampler has raised StopIteration, return the state at the start
        of the next epoch instead. If no iteration is running, return the state at the start of the next iteration.
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
        # Saved states have these keys. So do not change the keys, such as "world_size", to the names of parameters.
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
                f"{self.unit}; load what state_dict() of such a sampler or loader returned"
            ) from error
        # Compare the pack first. In another pack, splits and chunks may differ, too, and the message would name those.
        for name in {_PACK_DIGEST: None, **self.identity, **order}:
            if not _agrees(order.get(name), self.identity.get(name), name):
                parameter, problem = _PARAMETERS.get(name, name), _PROBLEMS.get(name, _PROBLEM)
                saved, ours = order.get(name), self.identity.get(name)
                if name in _OF_SPLIT:
                    saved, ours = _rows_text(order), _rows_text(self.identity)
                    chosen = "split" if "start" in order and "start" in self.identity else "split, indices or Subset"
                    problem = (
                        "for {saved} of its file, but this sampler or loader is for {ours}; "
                        "resume with the same " + chosen
                    )
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
        """Convert a number of rows delivered on each of `saved_ranks` ranks to the number on each of `ranks` ranks."""
        streams = self.identity["streams"]
        if saved_ranks < 1 or streams % saved_ranks:
            problem = f"{saved_ranks} ranks cannot have had {streams} streams"
            raise StateError(f"the state is damaged: {problem}; load another saved state")
        if done * saved_ranks % streams:
            raise StateError(
                f"the state was saved after {done} rows on each of {saved_ranks} ranks, when not all {streams} streams "
                f"had delivered equally many rows; resume with {saved_ranks} ranks, or load a state that was saved "
                f"after a multiple of {streams // saved_ranks} rows on each rank"
            )
        return done * saved_ranks // ranks


class Resumable:
    """Base class of samplers and loaders that implements epochs and states with an `EpochCursor`."""

    plan: BatchPlan

    def __init__(self, cursor: EpochCursor) -> None:
        self.cursor = cursor

    def __len__(self) -> int:
        """Return the number of items of this rank per epoch: batches, or rows if the sampler yields single rows."""
        return self.cursor.length

    @property
    def epoch(self) -> int:
        """The epoch of the iteration that was started last; 0 before the first iteration."""
        return self.cursor.iteration.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. By default it is the epoch after that of the previous iteration."""
        self.cursor.set_epoch(epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where `state` was saved, after the last delivered batch or row.

        Raises
        ------
        StateError
            If `state` is malformed, belongs to another order, or cannot be converted to this number of ranks.
        """
        self.cursor.load(state)
