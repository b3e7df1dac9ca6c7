"""`EchoLoader`: shows each batch of another loader several times, while that one is slower than the training step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from fractions import Fraction
from numbers import Rational
from typing import Any

import torch.distributed

from h5pack.errors import LoaderError, OptionsError, StateError
from h5pack.feed.ahead import Reader
from h5pack.feed.echo_course import AutomaticCourse, FixedCourse, MixedCourse, Place
from h5pack.feed.order import whole_number
from h5pack.feed.upstream import Position, Upstream

_VERSION = 1
_AUTO = "auto"
_FINEST = 10_000
"""Factors are fractions of at most this denominator, so that 2.3 is 23/10."""


class EchoLoader:
    """Gives each batch of a loader several times: data echoing (Choi, Passos, Shallue and Dahl 2019, arXiv:1907.05550).

    Inside of a `DeviceFeed` raw batches are repeated, and each showing is augmented in another way; outside of it the
    repeats are what came out of the transform. The first showing is the loader's own batch; a repeat is the same
    tensors, in an `EchoedBatch` that says which showing it is. What is written into them in place stays for the
    repeats.

    Parameters
    ----------
    loader : iterable of batches
        An `H5Loader`, `DataLoader`, `DeviceFeed` or the like.
    factor : float or "auto"
        How often each batch is shown, at least 1 and to 1 in 10,000; 2.5: 2 and 3 times in turns. "auto": until a fresh
        batch is ready, which a thread of this process fetches, one ahead. How often that is depends on the time that
        things take, so the order of two runs differs.
    shuffle_buffer : int
        Rows to mix repeats among. 0: none, the showings of a batch follow each other. Otherwise batches are made of
        rows from a buffer of so many, which is filled first; a batch never has a row twice, and an epoch's showings of
        a row are as many as without. Fewer than two batches mix nothing.
    seed : int
        Of the buffer's order, which is a function of (seed, epoch).
    most : int
        The largest `factor`; with "auto" the most showings of a batch.

    Raises
    ------
    OptionsError
        If a value makes no sense.

    Notes
    -----
    The buffer holds `shuffle_buffer` rows or one batch, whichever is more, on the device that they come from. To resume
    with it, the loader gives again the batches of which rows are still in it, two to seven times its size.

    The ranks of a distributed training must take the same number of steps, so "auto" is refused there.
    """

    def __init__(
        self,
        loader: Any,
        factor: float | str = 2,
        *,
        shuffle_buffer: int = 0,
        seed: int = 0,
        most: int = 8,
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise OptionsError(
                f"a {type(loader).__name__} gives no batches; give an H5Loader, a DataLoader or the like"
            )
        self.loader = loader
        self.most = whole_number("most", most, 1)
        self.factor: Fraction | str = _AUTO if factor == _AUTO else _fraction(factor, self.most)
        self.shuffle_buffer = whole_number("shuffle_buffer", shuffle_buffer, 0)
        self.seed = whole_number("seed", seed, None)
        if self.factor == _AUTO and self.shuffle_buffer:
            raise OptionsError("a shuffle_buffer needs a factor to count by, not 'auto'; give a number, or no buffer")
        self._require_one_rank()
        self._upstream = Upstream(loader)
        self._place: Place | None = None
        self._last = Place(Position(0), 0)
        self._reader: weakref.ref[Reader] | None = None
        # Where a loaded state has the next iteration begin.
        self._next: Place | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    @property
    def dataset(self) -> Any:
        """The wrapped loader's."""
        return self.loader.dataset

    @property
    def epoch(self) -> int:
        """The epoch of the running or last iteration."""
        return self._upstream.epoch

    @property
    def shown(self) -> int:
        """Batches (with a buffer: rows) that the running or last iteration handed out."""
        return self._last.shown

    @property
    def fresh(self) -> int:
        """How many of `shown` were handed out for the first time."""
        return self._last.fresh

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; where a state of that very epoch was loaded, its place is kept."""
        self._upstream.set_epoch(epoch)
        self._place = None
        if self._next is not None and self._next.epoch != epoch:
            self._next = None

    def __len__(self) -> int:
        """Batches of an epoch, repeats included."""
        if not isinstance(self.factor, Fraction):
            raise TypeError("an EchoLoader with factor 'auto' has no length; it repeats batches while it must wait")
        return int(len(self.loader) * self.factor // 1)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch.

        Raises
        ------
        OptionsError
            If `factor` is "auto", and there are several ranks.
        """
        self._require_one_rank()
        reader = None if self._reader is None else self._reader()
        if reader is not None:
            # A DataLoader that keeps its workers has one iterator, which the last thread may still be using.
            reader.stop()
            reader.join()
        place, self._next = self._next, None
        position, pulling = self._upstream.begin(record=True)
        if place is None:
            place = Place(position, self._upstream.epoch)
        place.loader = position
        self._place = self._last = place
        course: FixedCourse | MixedCourse | AutomaticCourse
        if not isinstance(self.factor, Fraction):
            course = AutomaticCourse(pulling, place, self.most)
            self._reader = weakref.ref(course.reader)
        elif self.shuffle_buffer:
            course = MixedCourse(pulling, place, self.factor, self.shuffle_buffer, self.seed)
        else:
            course = FixedCourse(pulling, place, self.factor)
        return _EchoIterator(self, place, course)

    def state_dict(self) -> dict[str, Any]:
        """Where the running iteration is: behind the last batch that was handed out. Numbers, texts, lists and dicts.

        After the loop over an epoch it is the beginning of the next.

        Raises
        ------
        StateError
            If the wrapped loader has no state.
        """
        loader = self._upstream.state_dict(None if self._place is None else self._place.loader)
        place = self._place or self._next or Place(Position(0), 0)
        return {
            "echo": self._identity(),
            "loader": loader,
            "epoch": place.epoch,
            "batch": place.batch,
            "showing": place.showing,
            "sizes": [list(pair) for pair in place.sizes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where `state` was saved: behind the last batch that was handed out.

        Raises
        ------
        StateError
            If it was saved with other settings, or another loader.
        """
        try:
            echo, loader = dict(state["echo"]), state["loader"]
            sizes = [[int(rows), int(count)] for rows, count in state["sizes"]]
            place = Place(Position(0), int(state["epoch"]), int(state["batch"]), int(state["showing"]), sizes)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not a state of an EchoLoader ({error!r}); give what state_dict() returned") from error
        identity = self._identity()
        for name in {**identity, **echo}:
            if echo.get(name) != identity.get(name):
                raise StateError(
                    f"the state was saved with {name} {echo.get(name)!r}, and this EchoLoader has "
                    f"{identity.get(name)!r}; resume with the same"
                )
        self._upstream.load_state_dict(loader)
        self._place, self._next = None, place

    def _identity(self) -> dict[str, Any]:
        fixed = isinstance(self.factor, Fraction)
        return {
            "version": _VERSION,
            "factor": [self.factor.numerator, self.factor.denominator] if isinstance(self.factor, Fraction) else _AUTO,
            "most": None if fixed else self.most,
            "shuffle_buffer": self.shuffle_buffer,
            "seed": self.seed if self.shuffle_buffer else None,
        }

    def _require_one_rank(self) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.factor == _AUTO and distributed and torch.distributed.get_world_size() > 1:
            raise OptionsError(
                "factor 'auto' would have each rank take another number of steps; with several ranks give a number"
            )

    def _finish(self, place: Place) -> None:
        """An iteration was asked for more than there is: the state is where the next one will begin."""
        if place is self._place:
            self._upstream.finish()
            self._place = None


class _EchoIterator(Iterator[Any]):
    """One epoch; it ends the wrapped loader's iteration with itself."""

    def __init__(self, loader: EchoLoader, place: Place, course: FixedCourse | MixedCourse | AutomaticCourse) -> None:
        self._loader, self._place = loader, place
        self._course: FixedCourse | MixedCourse | AutomaticCourse | None = course
        self._broken = ""

    def __next__(self) -> Any:
        if self._broken:
            raise LoaderError(f"this iterator {self._broken} its epoch's end; begin a new one with iter(loader)")
        if self._course is None:
            raise StopIteration
        try:
            return self._course.next()
        except StopIteration:
            self._let_go()
            self._loader._finish(self._place)
            raise
        except BaseException:
            # Whatever it was, and Ctrl-C may come at any line: half-done bookkeeping must not go on.
            self._broken = "failed before"
            self._let_go()
            raise

    def close(self) -> None:
        """End it, and its thread after the batch that is being fetched."""
        if self._course is not None:
            self._broken = "was closed before"
        self._let_go()

    def _let_go(self) -> None:
        course, self._course = self._course, None
        if course is not None:
            course.close()


def _fraction(factor: Any, most: int) -> Fraction:
    found = None
    if not isinstance(factor, (str, bool)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            exact = Fraction(factor if isinstance(factor, Rational) else float(factor))
            found = exact.limit_denominator(_FINEST) if exact >= 1 else None
    if found is None:
        raise OptionsError(f"factor is {factor!r}; it must be a number of at least 1, or 'auto'")
    if found > most:
        raise OptionsError(f"factor is {factor}, above most={most}; give less, or a larger most")
    return found
