"""The samples of one batch, read when they are looked at: one by one for `default_collate`, or all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class SampleBatch(Sequence[Any]):
    """Samples of known rows, as a sequence; ``list`` makes a list of it.

    Nothing is read until the first sample is asked for, so that a collate function which knows this class can have the
    rows read to their final place instead.

    Parameters
    ----------
    rows : ndarray
        int64, (n,): rows of the file.
    load : callable
        Gives the samples of those rows, as a list.
    """

    def __init__(self, rows: npt.NDArray[np.int64], load: Callable[[npt.NDArray[np.int64]], list[Any]]) -> None:
        self.rows = rows
        self._load = load
        self._samples: list[Any] | None = None

    def comes_from(self, load: Callable[[npt.NDArray[np.int64]], list[Any]]) -> bool:
        """Whether it is `load` that gives the samples; the rows of another dataset are others."""
        return self._load == load

    def samples(self) -> list[Any]:
        """The samples, read once."""
        if self._samples is None:
            self._samples = self._load(self.rows)
        return self._samples

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self.samples()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples())
