"""A transform of the images of whole batches, and by which key it draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils.data import Subset

from h5pack.errors import OptionsError
from h5pack.feed.batch_key import BatchKey, repeats_of
from h5pack.feed.batch_parts import images_of, rows_of, with_images
from h5pack.feed.concat_pack import ConcatPack
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.stage import stage

_HINT = "open the dataset with H5Dataset(..., with_rows=True)"


class ImageTransform:
    """Applies a transform to the images of a batch.

    Parameters
    ----------
    transform : callable
        Called with the images; with the images and a `BatchKey` where its attribute `keyed` is true.
    images : int or str, optional
        Where the images are in a batch, as for `images_of`.
    dataset : optional
        Where the batches come from, if that is known.

    Attributes
    ----------
    seconds : float
        What all calls took together.

    Raises
    ------
    OptionsError
        If the transform needs rows, and the dataset does not give them.
    """

    def __init__(self, transform: Callable[..., Any], images: Hashable | None, dataset: Any = None) -> None:
        self.transform = transform
        self.keyed = bool(getattr(transform, "keyed", False))
        self.seconds = 0.0
        self._images = images
        self._gives_rows = gives_rows(dataset)
        if self.keyed and self._gives_rows is False:
            raise OptionsError(f"{_named(transform)} draws by row, and the dataset's batches have no rows; {_HINT}")

    def __call__(self, batch: Any, epoch: int) -> Any:
        """The batch with its images transformed.

        Raises
        ------
        OptionsError
            If there are no images, or no rows for a transform that needs them.
        """
        images = images_of(batch, self._images)
        with stage("transform"):
            keys = (self._key(batch, images, epoch),) if self.keyed else ()
            begin = time.perf_counter()
            changed = self.transform(images, *keys)
            self.seconds += time.perf_counter() - begin
        return with_images(batch, self._images, changed)

    def _key(self, batch: Any, images: torch.Tensor, epoch: int) -> BatchKey:
        rows = rows_of(batch)
        if rows is None or rows is images or len(rows) != len(images):
            raise OptionsError(
                f"{_named(self.transform)} draws by row, and the batch does not end in its {len(images)} row numbers, "
                f"int64 (nor has it 'rows'); {_HINT}"
            )
        if _is_pair(batch) and not self._gives_rows:
            # Labels look like rows; taken for rows they would give all images of a class the same draws.
            raise OptionsError(
                f"{_named(self.transform)} draws by row, and the second of a batch's two parts may be labels as well; "
                f"{_HINT}, or give batches as dicts with 'rows'"
            )
        repeats = repeats_of(batch)
        if isinstance(repeats, torch.Tensor):
            repeats = repeats.to(images.device, non_blocking=True)
        return BatchKey(rows.to(images.device, non_blocking=True), epoch, repeats)


def gives_rows(dataset: Any) -> bool | None:
    """Whether a dataset's batches end in row numbers; None where that is not known."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatPack):
        dataset = dataset.datasets[0]
    return dataset.with_rows if isinstance(dataset, H5Dataset) else None


def _is_pair(batch: Any) -> bool:
    """Whether a batch is two parts without names."""
    return isinstance(batch, (list, tuple)) and len(batch) == 2 and not hasattr(batch, "_fields")


def _named(transform: Any) -> str:
    return getattr(transform, "__name__", type(transform).__name__)
