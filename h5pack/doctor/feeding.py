"""The loaders that are measured: as a training would make them, over all rows or some, transformed or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from h5pack.doctor.options import DoctorOptions
from h5pack.feed.batch_parts import tensors_of
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.loader import H5Loader
from h5pack.feed.loader_layers import measure
from h5pack.feed.samplers import ChunkBatchSampler
from h5pack.measure.consuming import touch

_PREFETCHED = 2
"""Batches that a DataLoader reads ahead for each worker."""


class Feeding:
    """Makes loaders.

    Parameters
    ----------
    options : DoctorOptions
    dataset : H5Dataset
        Without transforms.
    transform : callable or None
        The user's.
    pin : bool
    """

    def __init__(
        self, options: DoctorOptions, dataset: H5Dataset, transform: Callable[..., Any] | None, pin: bool
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.pin = pin
        self._options = options
        self._made: list[Any] = []
        self.transformed_dataset = dataset
        if transform is not None and options.workers is not None:
            self.transformed_dataset = H5Dataset(
                options.path, options.split, transform=transform, images=options.images, labels=dataset.label_name
            )
        default = self.make().threads if options.workers is None else options.workers
        self.parallel: int = default
        """Threads of an `H5Loader`, or a DataLoader's workers."""

    def make(self, rows: int | None = None, *, transform: bool = False, parallel: int | None = None) -> Any:
        """A loader.

        Parameters
        ----------
        rows : int, optional
            Of the first so many rows of the split; None: of all.
        transform : bool
            With the user's transform.
        parallel : int, optional
            Threads or workers; None: those of the options.
        """
        options = self._options
        chosen = None if rows is None or rows >= len(self.dataset) else range(rows)
        if options.workers is None:
            loader: Any = H5Loader(
                self.dataset,
                options.batch_size,
                window=options.window,
                rank=0,
                world_size=1,
                rows=chosen,
                threads=options.threads if parallel is None else parallel,
                # Rows that were kept would be no reading.
                resident="no",
                pin_memory=self.pin,
                transform=self.transform if transform else None,
            )
        else:
            workers = options.workers if parallel is None else parallel
            dataset = self.transformed_dataset if transform else self.dataset
            loader = DataLoader(
                dataset,
                batch_sampler=ChunkBatchSampler(
                    dataset, options.batch_size, window=options.window, rank=0, world_size=1, rows=chosen
                ),
                num_workers=workers,
                # To start workers takes seconds, and is no part of an epoch that goes on.
                persistent_workers=workers > 0,
                collate_fn=dataset.collate,
                pin_memory=self.pin,
            )
        self._made.append(loader)
        return loader

    def lead(self, loader: Any) -> int:
        """Batches that wait in a loader that is faster than its consumer."""
        if isinstance(loader, H5Loader):
            return 2 * loader.plan.span + 2
        return _PREFETCHED * int(loader.num_workers)

    def waiting(self, loader: Any) -> Callable[[], int]:
        """What tells how many images wait ready in a loader, as far as it says."""
        if not isinstance(loader, H5Loader):
            return lambda: 0
        return lambda: loader.queue_depth * loader.plan.batch_rows(0)

    def stop(self, loader: Any) -> None:
        """Stop a loader's threads or workers."""
        self._made.remove(loader)
        if isinstance(loader, H5Loader):
            loader.close()
        elif getattr(loader, "_iterator", None) is not None:
            # torch has no public way to end workers that stay.
            with contextlib.suppress(AttributeError):
                loader._iterator._shutdown_workers()
            loader._iterator = None

    def close(self) -> None:
        """Stop all of them."""
        for loader in list(self._made):
            self.stop(loader)


def look_at(batch: Any) -> int:
    """Look at every page of a batch on the host, as a copy to a device would; its images."""
    for tensor in tensors_of(batch):
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
            touch(tensor.view(-1).view(torch.uint8).numpy())
    return measure(batch)[0] or 0
