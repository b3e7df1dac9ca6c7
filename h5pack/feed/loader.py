"""`H5Loader`: batches at the speed of memory, filled ahead by threads of this process."""

from __future__ import annotations

import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5pack.errors import OptionsError
from h5pack.feed.buffers import BatchMemory, BufferPool
from h5pack.feed.dataset import H5Dataset, is_class_label
from h5pack.feed.loader_iterator import LoaderIterator
from h5pack.feed.order import whole_number
from h5pack.feed.permutation import derive_key
from h5pack.feed.pipeline import Pipeline
from h5pack.feed.profile import LoaderProfile, choose_settings
from h5pack.feed.progress import Progress, Resumable, Run
from h5pack.feed.resident import ResidentRows
from h5pack.feed.segment_tasks import ROWS
from h5pack.feed.selection import plan_batches, resolve_ranks, select_draws
from h5pack.machine import available_cpus, available_memory
from h5pack.read.engine import SCATTER_BYTES
from h5pack.read.stats import ReadStats

_MOST_THREADS = 4
_MOST_SMALL_BYTES = 16 * 1024 * 1024
_RESIDENT = ("auto", "no", "host")
_TRANSFORM = 4


@dataclass(frozen=True)
class _Finishing:
    """How one part of a batch is finished: in this order."""

    name: str
    swap: bool
    check: bool
    transform: tuple[Callable[..., Any], bool] | None


class H5Loader(Resumable):
    """Batches out of an HDF5 file; takes a DataLoader's place in a training loop.

    Threads of this process read ahead, straight into the batches' memory. A batch is yours for as long as you hold it;
    its memory is used again when the last tensor over it is gone.

    Parameters
    ----------
    dataset : H5Dataset or Subset
        Without `transform`: give that to the loader.
    batch_size : int, optional
        Rows a batch of this rank. None: the profile's.
    shuffle : {"window", "full", "chunk", False}
        As for `ChunkBatchSampler`, whose order this is; True is "window".
    seed : int
    window : int, optional
        Chunks that are shuffled together. None: the profile's, else 16.
    drop_last : bool
        Leave out a last smaller batch, and rows that do not divide among ranks or streams, instead of repeating a few.
    rank, world_size : int, optional
        Both, or neither: then torch.distributed's, where that is initialised.
    streams, lanes : int
        As for `ChunkBatchSampler`.
    rows : sequence of int, optional
        Draw from these indices of `dataset` only.
    weights, samples : optional
        As for `ChunkBatchSampler`: draw rows in proportion to their weights.
    threads : int, optional
        That read. None: the profile's, else 4; as many CPUs as this process may use where those are fewer.
    memory_bytes : int, optional
        The most that the loader may hold: batches it reads ahead (each iteration its own), and the rows it keeps in
        memory. What a transform gives is not counted, nor what you hold. None: half of the memory that is available to
        this process, shared among the ranks of this machine.
    resident : {"auto", "no", "host"}
        host: keep the rows in memory once they were read; no: read them from the file each time, from the system's page
        cache if it still has them; auto: the first epoch as no, the others as host where that fits into `memory_bytes`
        (fresh memory is slow to fill, which a single epoch would not win back).
    pin_memory : bool
        Give batches in pinned memory, from which a GPU copies without waiting. Without a GPU: warns, and does not.
    transform : callable, optional
        Called with the images of each batch, a tensor (n, ...), in a reading thread: several batches at a time, in no
        order. One with a parameter ``generator`` is given a torch Generator seeded by (seed, epoch, batch), with which
        its randomness is the same in every run.
    target_transform : callable, optional
        The same, called with the labels.
    profile : path or LoaderProfile, optional
        What a bench found: `batch_size`, `window` and `threads`, where they are not given. Batch size and window decide
        about the order of rows: with other ones a saved state belongs to another order. Warns where the profile was
        measured with chunks of another size.

    Raises
    ------
    OptionsError
        If a value makes no sense, the profile cannot be read, or `memory_bytes` is too little for this batch size and
        window.

    Notes
    -----
    Yields a list ``[images, labels, *fields, rows]`` of what the dataset has, as ``H5Dataset.collate`` gives it, or the
    images alone. Each iteration is the next epoch; `set_epoch` says another.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: str | bool = "window",
        seed: int = 0,
        window: int | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        streams: int | None = None,
        lanes: int = 1,
        rows: Sequence[int] | npt.NDArray[np.int64] | None = None,
        weights: npt.ArrayLike | str | None = None,
        samples: int | None = None,
        threads: int | None = None,
        memory_bytes: int | None = None,
        resident: str = "auto",
        pin_memory: bool = False,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        profile: str | os.PathLike[str] | LoaderProfile | None = None,
    ) -> None:
        rank, world_size = resolve_ranks(rank, world_size)
        self.dataset = dataset
        self._base, row_set = select_draws(dataset, rows, weights, samples)
        _require_plain(self._base)
        if resident not in _RESIDENT:
            raise OptionsError(f"resident {resident!r} is none of 'auto', 'no', 'host'")
        chosen = choose_settings(profile, self._base.unit_rows, batch_size, window, threads)
        self.plan = plan_batches(
            row_set, chosen.batch_size, shuffle, seed, chosen.window, drop_last, rank, world_size, streams, lanes
        )
        self.batch_size = chosen.batch_size
        self.drop_last = drop_last
        self._with_rows, self._check = self._base.with_rows, self._base.check
        threads = min(_MOST_THREADS, available_cpus()) if chosen.threads is None else chosen.threads
        self.threads = whole_number("threads", threads, 1)
        self.pin_memory = pin_memory and _can_pin()
        self._transforms = {
            name: (function, "generator" in _parameters(function))
            for name, function in ((self._base.names[0], transform), (self._base.label_name, target_transform))
            if name is not None and function is not None
        }
        super().__init__(Progress(self.plan.identity(), "batches", self.plan.batches))
        self._plan_memory(memory_bytes, resident)
        self._renew()

    def _plan_memory(self, memory_bytes: int | None, resident: str) -> None:
        """Decide how many batches to read ahead, and whether to keep the rows."""
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
        budget = (
            available_memory() // 2 // ranks if memory_bytes is None else whole_number("memory_bytes", memory_bytes, 0)
        )
        wanted, least = 2 * self.plan.span + 2, self.plan.span + 1
        batch_bytes = self._new_pool(0).bytes
        decoding = self._base.engine.decoding_bytes(self.threads, keep=self.plan.shuffle == "full")
        # One more is with the consumer.
        needed = (least + 1) * batch_bytes + decoding
        if budget < needed:
            raise OptionsError(
                f"memory_bytes is {budget:,}, and batches of {self.batch_size} rows from windows of "
                f"{self.plan.pieces} chunks need {needed:,}; give more, or a smaller batch_size or window"
            )
        rows = self.plan.rows.distinct
        kept = ResidentRows.bytes_needed(self._base, rows)
        self.resident = resident == "host" or (resident == "auto" and kept + needed <= budget)
        self._first_resident = 0 if resident == "host" else 1
        if self.resident and kept + needed > budget:
            raise OptionsError(
                f"memory_bytes is {budget:,}, and keeping {rows:,} rows in memory needs "
                f"{kept + needed:,}; give more, or resident='auto'"
            )
        # Labels and the like cost more to read a few at a time than to keep, while they are few.
        indexes = self._base.engine.indexes
        small = [name for name in self._base.names if indexes[name].row_bytes < SCATTER_BYTES]
        small_bytes = rows * sum(indexes[name].row_bytes for name in small)
        kept = (kept if self.resident else 0) + decoding
        keep_small = 0 < small_bytes <= min(_MOST_SMALL_BYTES, budget - needed - kept + decoding)
        self._small_names = small if keep_small else []
        kept += small_bytes if keep_small else 0
        self._credits = max(least, min(wanted, (budget - kept) // max(1, batch_bytes) - 1))
        self.memory_bytes = (self._credits + 1) * batch_bytes + kept

    def _new_pool(self, keep: int) -> BufferPool:
        indexes = self._base.engine.indexes
        parts = []
        for name in self._base.names:
            # Whole-number labels are int64 in the end, so their memory (pinned, perhaps) is from the start.
            whole = name == self._base.label_name and is_class_label(indexes[name])
            dtype = np.dtype(np.int64) if whole else indexes[name].native_dtype
            parts.append((name, indexes[name].row_shape, dtype))
        if self._with_rows or self._check:
            parts.append((ROWS, (), np.dtype(np.int64)))
        largest = self.plan.batch_rows(0) if self.plan.batches else 0
        return BufferPool(parts, largest, self.pin_memory, keep)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_pool", "_iterators", "_kept", "_small")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew()

    def _renew(self) -> None:
        """Begin without memory, threads or rows: at first, and in a forked child."""
        self._process = os.getpid()
        self._pool = self._new_pool(self._credits + 1)
        self._begun = 0
        self._kept: ResidentRows | None = None
        self._small: ResidentRows | None = None
        self._iterators: weakref.WeakSet[LoaderIterator] = weakref.WeakSet()

    def __len__(self) -> int:
        """Batches of this rank's epoch."""
        return self.plan.batches

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch; the threads start reading at once.

        Raises
        ------
        PackChangedError
            If the file was replaced or rewritten since the dataset was made.
        """
        if self._process != os.getpid():
            self._renew()
        _require_plain(self._base)
        self._base.engine.look()
        if self.resident and self._kept is None and self._begun >= self._first_resident:
            self._kept = ResidentRows(self._base, self.plan.rows.stored())
        if self._small_names and self._small is None:
            small = ResidentRows(self._base, self.plan.rows.stored(), self._small_names)
            small.load_all()
            self._small = small
        self._begun += 1
        iterator = LoaderIterator(self._progress, len(self), self._start)
        self._iterators.add(iterator)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Where the running iteration is: behind the last batch that was handed out. Numbers and texts only.

        After the loop over an epoch it is the beginning of the next.
        """
        return self._progress.state()

    @property
    def queue_depth(self) -> int:
        """Batches that are full, and wait to be asked for, of all running iterations."""
        return sum(iterator.waiting for iterator in list(self._iterators))

    def stats(self) -> ReadStats:
        """What was read so far: rows, chunk hits and misses, bytes, amplification."""
        return self._base.stats()

    def use_memory_of(self, other: H5Loader) -> bool:
        """Take batches' memory from another loader's, if their batches are alike; for loaders that take turns.

        Returns
        -------
        bool
            Whether they are: parts, shapes, dtypes and rows.
        """
        mine, theirs = self._pool, other._pool
        alike = mine.parts == theirs.parts and mine.bytes == theirs.bytes and self.pin_memory == other.pin_memory
        if alike:
            theirs.keep = max(mine.keep, theirs.keep)
            self._pool = theirs
        return alike

    def prepare_memory(self) -> None:
        """Take the memory that batches will need, and touch it: the first batches are then as fast as later ones."""
        self._pool.prepare()

    def close(self) -> None:
        """Stop all iterations, and let go of all memory that no batch uses."""
        for iterator in list(self._iterators):
            iterator.close()
        self._renew()

    def _start(self, run: Run) -> Pipeline:
        return Pipeline(
            self._base,
            self.plan,
            run.epoch,
            run.begun,
            self._pool,
            self.threads,
            self._credits,
            partial(self._finish, run.epoch, self._recipe(self._kept is not None)),
            self._kept,
            self._small,
        )

    def _recipe(self, resident: bool) -> list[_Finishing]:
        """What becomes of each part of a full batch; rows that were kept were checked and converted before."""
        recipe = []
        for name in self._base.names:
            index = self._base.engine.indexes[name]
            recipe.append(
                _Finishing(
                    name,
                    swap=not resident and not index.dtype.isnative and self._base.engine.places(index),
                    check=not resident and self._check and name not in self._small_names,
                    transform=self._transforms.get(name),
                )
            )
        return recipe

    def _finish(self, epoch: int, recipe: list[_Finishing], batch: int, memory: BatchMemory) -> Any:
        """A consumer's batch out of a full memory."""
        parts = []
        for part in recipe:
            array = memory.arrays[part.name]
            if part.swap:
                array.byteswap(inplace=True)
            if part.check:
                self._base.check_rows(part.name, memory.arrays[ROWS], array)
            tensor: Any = memory.tensor(part.name)
            if part.transform is not None:
                function, seeded = part.transform
                if seeded:
                    key = derive_key(_TRANSFORM, self.plan.seed, epoch, batch, self.plan.rank)
                    tensor = function(tensor, generator=torch.Generator().manual_seed(key >> 1))
                else:
                    tensor = function(tensor)
                if self.pin_memory and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                    tensor = tensor.pin_memory()
            parts.append(tensor)
        if self._with_rows:
            parts.append(memory.tensor(ROWS))
        return parts[0] if len(parts) == 1 else parts


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _require_plain(dataset: H5Dataset) -> None:
    if dataset.transform is not None or dataset.target_transform is not None:
        raise OptionsError(
            "H5Loader handles whole batches, so it cannot call the dataset's transform for each sample; give it "
            "transform= (and target_transform=) itself, or use a DataLoader"
        )


def _can_pin() -> bool:
    if torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available():
        return True
    warnings.warn("pin_memory needs a GPU, and there is none; batches are in ordinary memory", stacklevel=3)
    return False
