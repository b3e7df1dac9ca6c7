"""The settings of a diagnosis, and the loaders that it measures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from h5pack.data.dataset import H5Dataset
from h5pack.data.loader import H5Loader
from h5pack.data.samplers import ChunkBatchSampler
from h5pack.errors import OptionsError
from h5pack.format import schema
from h5pack.order.window import DEFAULT_WINDOW
from h5pack.system.parameters import flags, invalid, real_number, require_callable, whole_number

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class DiagnoseSettings:
    """The validated parameters of `diagnose`."""

    path: str | os.PathLike[str]
    device: torch.device | str | None = None
    model: Any = None
    transform: Callable[..., Any] | None = None
    batch_size: int = 256
    num_threads: int | None = None
    num_workers: int | None = None
    split: str | None = None
    images: str = schema.IMAGES
    labels: str = schema.LABELS
    window: int = DEFAULT_WINDOW
    dtype: str = "float32"
    pin_memory: bool | None = None
    seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, minimum in (("batch_size", 1), ("window", 1), ("num_threads", 1), ("num_workers", 0)):
            if name in ("batch_size", "window") or getattr(self, name) is not None:
                # A NumPy integer becomes an int, which JSON can represent.
                object.__setattr__(self, name, whole_number(name, getattr(self, name), minimum))
        if not isinstance(self.images, str):
            raise invalid("images", self.images, "give the name of a dataset")
        if self.num_threads is not None and self.num_workers is not None:
            raise OptionsError(
                "num_threads is for H5Loader and num_workers for a DataLoader; give only one of them",
                parameters=("num_threads", "num_workers"),
            )
        if self.pin_memory is not None:
            flags(pin_memory=self.pin_memory)
        if self.dtype not in DTYPES:
            raise invalid("dtype", self.dtype, f"give one of {', '.join(DTYPES)}")
        if not 0 < real_number(self.seconds) < float("inf"):
            raise invalid("seconds", self.seconds, "give the total time, finite and above 0")
        object.__setattr__(self, "seconds", real_number(self.seconds))
        for name in ("model", "transform"):
            require_callable(name, getattr(self, name))


class _PausableSampler(ChunkBatchSampler):
    """A sampler whose epochs are empty while `paused` is true."""

    paused = False

    def __iter__(self) -> Iterator[list[int]]:
        return iter(()) if self.paused else super().__iter__()


class HostLoaders:
    """A factory of the loaders to measure: `H5Loader`s, or DataLoaders if ``settings.num_workers`` is not None.

    `dataset` must not have a transform of its own. An `H5Loader` calls `transform` with whole batches. A DataLoader
    calls it with single images, in `transformed_dataset`. `parallel` is the number of threads of an `H5Loader`, or of
    workers of a DataLoader. `decodes_once` is true if all decoded chunks stay in memory after the first epoch.
    """

    def __init__(self, dataset: H5Dataset, settings: DiagnoseSettings, pin_memory: bool) -> None:
        self._dataset, self._settings, self._pin_memory = dataset, settings, pin_memory
        self.transform, self.transformed_dataset = settings.transform, dataset
        if self.transform is not None and settings.num_workers is not None:
            images, labels = dataset.names[0], dataset.label_name
            self.transformed_dataset = H5Dataset(
                dataset.path, dataset.split, transform=self.transform, images=images, labels=labels
            )
        self._made: list[Any] = []
        loader = self.make() if settings.num_workers is None else None
        self.parallel: int = settings.num_workers or 0 if loader is None else loader.num_threads
        self.decodes_once = loader is not None and loader.decodes_once

    def make(self, rows: int | None = None, *, transform: bool = False) -> Any:
        """Make a loader of the first `rows` rows (None: all rows), with the transform if `transform` is true."""
        settings = self._settings
        options: dict[str, Any] = {"window": settings.window, "rank": 0, "num_replicas": 1}
        options["indices"] = None if rows is None or rows >= len(self._dataset) else range(rows)
        if settings.num_workers is None:
            loader: Any = H5Loader(
                self._dataset,
                settings.batch_size,
                num_threads=settings.num_threads,
                pin_memory=self._pin_memory,
                transform=self.transform if transform else None,
                **options,
            )
        else:
            dataset = self.transformed_dataset if transform else self._dataset
            loader = DataLoader(
                dataset,
                batch_sampler=_PausableSampler(dataset, settings.batch_size, **options),
                num_workers=settings.num_workers,
                # Starting workers takes seconds, which must not count in every measured epoch.
                persistent_workers=settings.num_workers > 0,
                collate_fn=dataset.collate,
                pin_memory=self._pin_memory,
            )
        self._made.append(loader)
        return loader

    def prefetch_of(self, loader: Any) -> tuple[int, Callable[[], int]]:
        """Return how many batches `loader` prefetches, and a function that returns how many images it has ready.

        For a DataLoader, the function always returns 0, because this number is unknown.
        """
        if self._settings.num_workers is not None:
            return int((loader.prefetch_factor or 0) * loader.num_workers), lambda: 0
        return loader.prefetch_factor, lambda: loader.queue_depth * loader.plan.batch_rows(0)

    def stop(self, loader: Any) -> None:
        """Stop a loader's threads or workers, and forget the loader."""
        self._made.remove(loader)
        if self._settings.num_workers is None:
            loader.close()
        else:
            _stop_workers(loader)

    def release_file(self) -> None:
        """Stop the workers of all DataLoaders, and close `transformed_dataset`.

        The next epoch starts the workers and opens the dataset again.
        """
        for loader in self._made:
            _stop_workers(loader)
        self.transformed_dataset.close()

    def start_workers(self, loader: Any) -> None:
        """Start the persistent workers of a DataLoader, without reading; ignore an H5Loader."""
        if self._settings.num_workers is not None:
            loader.batch_sampler.paused = True
            # The first epoch starts the workers. The second one begins only when all workers have answered.
            for _ in range(2):
                list(loader)
            loader.batch_sampler.paused = False

    def close(self) -> None:
        """Stop all loaders, and close the dataset that this object opened for the transform."""
        for loader in list(self._made):
            self.stop(loader)
        if self.transformed_dataset is not self._dataset:
            self.transformed_dataset.close()


def _stop_workers(loader: Any) -> None:
    """Stop the persistent workers of a DataLoader; ignore an H5Loader."""
    if getattr(loader, "_iterator", None) is not None:
        # Private API: DataLoader._iterator._shutdown_workers. Torch has no public way to end persistent workers.
        with contextlib.suppress(AttributeError):
            loader._iterator._shutdown_workers()
        loader._iterator = None
