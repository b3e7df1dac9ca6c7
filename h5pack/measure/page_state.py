"""Whether the files under a dataset can be made cold, and making them so."""

from __future__ import annotations

import os
from pathlib import Path

from h5pack.feed.dataset import H5Dataset
from h5pack.measure.page_cache import drop_cache

_PROBES = 16


class PageState:
    """Drops the files of a dataset from the page cache.

    Parameters
    ----------
    dataset : H5Dataset

    Attributes
    ----------
    files : tuple of Path
        The file itself, and those that its rows come from.
    """

    def __init__(self, dataset: H5Dataset) -> None:
        self._dataset = dataset
        others = {other.path for index in dataset.engine.indexes.values() for other in index.files}
        self.files = (Path(dataset.path), *sorted(Path(other) for other in others - {dataset.path}))

    def drop(self) -> str | None:
        """Have the system forget the files; why it does not, in words, or None where it did."""
        if not hasattr(os, "posix_fadvise"):
            return "this system has no call that drops a file from the page cache"
        for path in self.files:
            try:
                left = drop_cache(path)
            except OSError as error:
                return f"{path} cannot be dropped from the page cache ({error.strerror or error})"
            if left and (path != self.files[0] or self._seems_cached()):
                return (
                    f"{left:,} pages of {path} stay in the page cache: its file system keeps them there (tmpfs, some "
                    "network file systems), or another process does"
                )
        return None

    def _seems_cached(self) -> bool:
        """Whether bytes of the file are in the page cache after all.

        To those who may not write a file, mincore(2) says that all of it is there. A read that may not wait knows
        better.
        """
        index = self._dataset.engine.indexes[self._dataset.names[0]]
        offsets = index.addresses.reshape(-1)
        offsets = offsets[offsets >= 0]
        if not len(offsets) or not hasattr(os, "RWF_NOWAIT"):
            return True
        step = max(1, len(offsets) // _PROBES)
        return any(self._dataset.engine.storage.is_cached(int(offset)) for offset in offsets[::step])
