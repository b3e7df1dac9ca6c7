"""`H5Loader`: a loader whose threads, in this process, prefetch rows directly into the memory of the batches."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5pack.data.buffers import BatchMemory, BufferPool, can_pin
from h5pack.data.chunk_groups import ROWS, GroupReader
from h5pack.data.dataset import batch_fields
from h5pack.data.gather import HeldRows, list_sizes
from h5pack.data.iteration import BatchIterator, Closeable, IdleThreads
from h5pack.data.pipeline import EpochGroups, Pipeline
from h5pack.data.samplers import BatchOrder, draw_key, order_text
from h5pack.data.samples import new_batch
from h5pack.data.selection import plan_order, require_no_transform, resolve_ranks, select_draws, warn_of_later_ranks
from h5pack.errors import OptionsError
from h5pack.format.fields import RaggedRows
from h5pack.images.crops import DecodeCrop
from h5pack.order.cursor import EpochCursor, IterationState, Resumable
from h5pack.order.permutation import derive_key
from h5pack.order.window import DEFAULT_WINDOW
from h5pack.read.engine import SCATTER_BYTES, ReadStats
from h5pack.system.machine import available_cpus, available_memory
from h5pack.system.parameters import flags, launched_number, parameter_names, require_callable, whole_number
from h5pack.system.text import counted


class LoaderIterator(BatchIterator):
    """Iterator over one epoch. Its threads stop after the last batch, or when it is closed or garbage-collected.

    `cursor` says at which batch to start and counts the delivered batches; `end` is the epoch's number of batches.
    ``start(iteration, owner)`` starts the threads that read.
    """

    def __init__(self, cursor: EpochCursor, end: int, start: Callable[[IterationState, object], Pipeline]) -> None:
        super().__init__()
        self._cursor = cursor
        self._iteration = iteration = cursor.begin()
        self._following, self._end = iteration.start, end
        self._ready: dict[int, Any] = {}
        self._pipeline: Pipeline | None = None
        if self._following < self._end:
            try:
                # The threads do not reference this iterator. So if the user drops it, its finalizer stops the threads.
                self._pipeline = start(iteration, self)
            except BaseException:
                cursor.cancel()
                raise

    def __len__(self) -> int:
        """Return the number of batches left."""
        return self._end - self._following

    @property
    def waiting(self) -> int:
        """Number of complete batches that have not been delivered yet."""
        return len(self._ready) + (0 if self._pipeline is None else self._pipeline.waiting)

    def close(self) -> None:
        """Stop reading, and wait until the threads of this iteration have stopped."""
        # After the last batch no threads are left. Skip closing then, so that `next` still raises StopIteration.
        if self._pipeline is not None:
            super().close()

    def _next_batch(self) -> Any:
        pipeline = self._pipeline
        if pipeline is None:
            raise StopIteration
        pipeline.require_own_process()
        pipeline.consumer = threading.get_ident()
        try:
            while self._following not in self._ready:
                number, batch = pipeline.fetch()
                self._ready[number] = batch
                del batch
            found = self._ready.pop(self._following)
            self._following += 1
            pipeline.return_credit()
        finally:
            pipeline.consumer = None
        if self._following == self._end:
            self._release()
        self._iteration.count += 1
        return found

    def _release(self) -> None:
        pipeline = self._pipeline
        if pipeline is not None and pipeline.process == os.getpid():
            # Stop the threads first. After an interrupt in one of the next lines, nothing else would stop them.
            pipeline.stop()
        self._pipeline = None
        self._ready.clear()
        if pipeline is not None:
            # Detach the finalizer: it references the pipeline, so the pipeline's memory would be kept until the
            # user drops this iterator.
            pipeline.finalizer.detach()
            pipeline.join()

    def _finish(self) -> None:
        self._cursor.finish(self._iteration)


_MAX_THREADS = 4
_MAX_SMALL_BYTES = 16 * 1024 * 1024
_MAX_LIST_BYTES = 64 * 1024 * 1024
"""Maximum total size of the fields with rows of different lengths that are held in memory. Read from the file, such a
field takes over 1 ms per batch."""
_SMALL_BLOCK_BYTES = 5 * 1024 * 1024
_LARGE_BLOCK_BYTES = 16 * 1024 * 1024
# The first part of the random keys of transforms; in those of orders it is `ORDER_VERSION`. Do not change this number:
# the random numbers of every seed would change.
_TRANSFORM = 4


class H5Loader(Closeable, Resumable):
    """Loader of batches from an HDF5 file that replaces a DataLoader in a training loop; a context manager.

    Threads of this process prefetch rows directly into the memory of the batches. A batch stays valid as long as any of
    its tensors is referenced; after that its memory is reused.

    Parameters
    ----------
    dataset : H5Dataset, ConcatPack or Subset
        Must have no `transform`, `target_transform` or `__getitem__` of a subclass, which handle single samples.
    batch_size, shuffle, seed, window, drop_last, rank, num_replicas, streams, lanes, indices, weights, num_samples
        As for `ChunkBatchSampler`, which yields the same order for the same parameters.
    batch_sampler : MixtureSampler or ChunkBatchSampler, optional
        A sampler of `dataset`. It determines the batches, so `batch_size` to `num_samples` must not be given. The
        loader and the sampler share one state: save and load it with either.
    num_threads : int, optional
        Reading threads, at most 1,024. None: 4, or the number of CPUs this process may use if smaller.
    prefetch_factor : int, optional
        Number of batches to prefetch, as far as `memory_bytes` allows. None: the batches of two shuffle windows. The
        chunks of a window are read together, so lower values are raised to the batches of one window. For rows in the
        page cache, and without `streams` or `lanes`, None means fewer: at least two batches, and enough to keep all
        threads busy, each with up to 5 MiB of small batches or 16 MiB of a large one.
    memory_bytes : int, optional
        Upper bound in bytes for the batches that each iteration prefetches, the small fields that are held in memory,
        and the memory for decoding. Not counted: the results of transforms, the batches that the caller holds, and the
        page cache, which belongs to the system. None: half of the memory that is available to this process, divided
        among the ranks on this machine.
    pin_memory : bool
        Yield batches in pinned memory, from which copies to a GPU can be asynchronous. Without a GPU, or with an Apple
        GPU, warn and use pageable memory.
    transform : callable, optional
        Called with the images of each batch, a tensor (n, ...), in the reading threads. So it must be thread-safe, and
        must not rely on the order of the batches. If it has a parameter ``generator``, it receives a torch Generator
        seeded by (seed, epoch, batch, rank), so that its random numbers are the same in every run.
    target_transform : callable, optional
        Called with the labels of each batch, in the same way as `transform`.
    decode, exact
        For encoded images, as for `H5Dataset`. If `decode` is given, both replace the dataset's; if not, the datasets
        of a `ConcatPack` must not differ in them. Random crops depend on (seed, epoch, row), and on the batch
        if rows may repeat (`weights`, repeated indices, `MixtureSampler`), but not on threads, ranks or resumes.
    num_workers : None
        Must be None, because an H5Loader reads in threads, not in worker processes; see `num_threads`.

    Raises
    ------
    OptionsError
        If a value is invalid, or `memory_bytes` is too small for this batch size and window.

    Notes
    -----
    A batch is what ``H5Dataset.collate`` returns: a named tuple ``(images, labels, *fields, rows)`` without the parts
    that the dataset does not have. Each iteration is the next epoch, unless `set_epoch` chose another one.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: str | bool = "window",
        seed: int = 0,
        window: int = DEFAULT_WINDOW,
        drop_last: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
        streams: int | None = None,
        lanes: int = 1,
        indices: Sequence[int] | npt.NDArray[np.int64] | None = None,
        weights: npt.ArrayLike | str | None = None,
        num_samples: int | None = None,
        batch_sampler: BatchOrder | None = None,
        num_threads: int | None = None,
        prefetch_factor: int | None = None,
        memory_bytes: int | None = None,
        pin_memory: bool = False,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        decode: DecodeCrop | None = None,
        exact: bool = True,
        num_workers: None = None,
    ) -> None:
        self.dataset = dataset
        if num_workers is not None:
            raise OptionsError(
                "H5Loader reads in threads, not in worker processes; give num_threads instead of num_workers",
                parameters=("num_threads", "num_workers"),
            )
        require_callable("transform", transform)
        require_callable("target_transform", target_transform)
        if batch_sampler is None:
            base, rows = select_draws(dataset, indices, weights, num_samples)
            if batch_size is None:
                raise OptionsError("batch_size is missing; give the rows per batch", parameters=("batch_size",))
            ranks = resolve_ranks(rank, num_replicas)
            plan = plan_order(
                rows, batch_size, shuffle, seed, window, drop_last, ranks=ranks, streams=streams, lanes=lanes
            )
            order = BatchOrder(base, base, plan, rank)
        else:
            given: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "window": window}
            given |= {"drop_last": drop_last, "rank": rank, "num_replicas": num_replicas, "streams": streams}
            given |= {"lanes": lanes, "indices": indices, "weights": weights, "num_samples": num_samples}
            _require_sampler_of(dataset, batch_sampler, given)
            order = batch_sampler
        self._base, self.plan = order.for_loader()
        self.batch_sampler, self._assumes_one_rank = batch_sampler, order.assumes_one_rank
        require_no_transform(self.dataset)
        self._base = self._base.with_decode(decode, *flags(exact=exact))
        self.batch_size, self.drop_last = self.plan.batch_size, self.plan.drop_last
        self._with_rows, self._check = self._base.with_rows, self._base.check
        self._cpus = available_cpus()
        num_threads = min(_MAX_THREADS, self._cpus) if num_threads is None else num_threads
        self.num_threads = whole_number("num_threads", num_threads, 1, 1_024)
        self.pin_memory = flags(pin_memory=pin_memory)[0] and can_pin()
        self._transforms = {
            name: (one, "generator" in parameter_names(one))
            for name, one in ((self._base.names[0], transform), (self._base.label_name, target_transform))
            if name is not None and one is not None
        }
        super().__init__(order.cursor)
        self._plan_memory(memory_bytes, prefetch_factor)
        self._reset()

    def _plan_memory(self, memory_bytes: int | None, prefetch_factor: int | None) -> None:
        """Decide how many batches to prefetch, and which fields and decoded chunks to keep in memory."""
        if memory_bytes is None:
            budget = available_memory() // 2 // max(1, launched_number("LOCAL_WORLD_SIZE", 1))
        else:
            budget = whole_number("memory_bytes", memory_bytes, 0)
        minimum = self.plan.max_group_batches + 1
        wanted = 2 * minimum if prefetch_factor is None else whole_number("prefetch_factor", prefetch_factor, 1)
        batch_bytes = self._new_pool(0).bytes
        decoding = self._base.engine.decoding_bytes(self.num_threads, keep=self.plan.reads_again)
        # Add one batch to the minimum, because the consumer holds one while the next are read.
        needed = (minimum + 1) * batch_bytes + decoding
        if budget < needed:
            window = self.plan.window if self.plan.shuffle == "window" else 0
            source = f" from windows of {counted(window, 'chunk')}" if window else ""
            threads = self.num_threads if decoding else 1
            values = {"batch_size": self.batch_size, "window": window, "num_threads": threads}
            smaller = [name for name, value in values.items() if value > 1]
            advice = "free memory" if memory_bytes is None else "raise it"
            raise OptionsError(
                f"memory_bytes is {budget:,}, but batches of {counted(self.batch_size, 'row')}{source} need "
                f"{needed:,}; {advice}{', or give a smaller ' if smaller else ''}{' or '.join(smaller)}",
                parameters=("memory_bytes", *smaller),
            )
        spare = budget - needed
        # Hold labels and other small fields in memory if they fit, because reading a few small rows at a time is slow.
        sizes = {name: self._base.engine.indexes[name].row_bytes for name in self._base.names}
        small = [name for name, size in sizes.items() if size < SCATTER_BYTES and not self._base.is_cropped(name)]
        small_bytes = self.plan.rows.unique_count * sum(sizes[name] for name in small)
        self._held_names = small if small_bytes <= min(_MAX_SMALL_BYTES, spare) else []
        spare -= small_bytes if self._held_names else 0
        # If all decoded chunks fit into the spare memory, decode each only once, not once per epoch. The doctor and the
        # monitor read `decodes_once`. If the plan reads chunks several times per epoch, `decoding` includes the cache.
        cached = 0 if self.plan.reads_again else self._base.engine.decoded_bytes()
        self.decodes_once = self._base.engine.decoded_bytes() > 0 and cached <= spare
        self._keeps_decoded = self.plan.reads_again or self.decodes_once
        spare -= cached if self.decodes_once else 0
        listed = self.plan.rows.unique_rows() if self._base.ragged else range(0)
        # Hold the rows from the first to the last, so that the position of a row is its number minus the first one.
        self._list_rows = range(int(listed[0]), int(listed[-1]) + 1) if len(listed) else range(0)
        self._list_sizes = list_sizes(self._base, self._list_rows, min(_MAX_LIST_BYTES, spare))
        spare -= sum(self._list_sizes.values())
        self.prefetch_factor = max(minimum, min(wanted, minimum + spare // max(1, batch_bytes)))
        self.memory_bytes = budget - spare + (self.prefetch_factor - minimum) * batch_bytes
        self._plan_blocks(batch_bytes, prefetch_factor)

    def _plan_blocks(self, batch_bytes: int, wanted: int | None) -> None:
        """Decide how many cached rows one task copies, and how many batches are filled in advance.

        One task fills several small batches, because its Python code takes longer than copying one of them. They have
        up to 5 MiB together: more would delay the first batch, and less would need more checks that files are
        unchanged. A large batch is divided among the threads, so that few buffers are in use, which are likely to stay
        in the CPU's cache. With batches of 38 MB and two threads, tasks of 16 MiB in 2 buffers reached 0.96 of the
        speed of a memory copy, in 4 buffers 0.87, and tasks of 4 MiB in 2 buffers 0.74.
        """
        workers = self.num_threads + 1
        size = max(1, batch_bytes)
        batches = max(1, min(_SMALL_BLOCK_BYTES // size, self.prefetch_factor // (workers + 1)))
        parts = -(-size // _LARGE_BLOCK_BYTES)
        self._block_rows = batches * self.batch_size if parts == 1 else -(-self.batch_size // parts)
        few = max(2, batches * -(-workers // parts)) if wanted is None else max(wanted, batches)
        self._max_gathered = min(few, self.prefetch_factor)

    def _new_pool(self, keep: int, rows: int | None = None) -> BufferPool:
        """Return a pool that keeps up to `keep` buffers, each for `rows` rows, by default those of a batch."""
        fields = batch_fields(self._base)
        if self._with_rows or self._check or self._base.ragged:
            fields.append((ROWS, (), np.dtype(np.int64)))
        if rows is None:
            rows = self.plan.batch_rows(0) if self.plan.num_batches else 0
        return BufferPool(fields, rows, self.pin_memory, keep)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_pool", "_iterators", "_groups", "_held", "_held_lists", "_idle", "_end_idle_threads")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        """Start without memory, threads and held rows: after creation, unpickling or `close`, and in a forked child."""
        self._process = os.getpid()
        self._pool = self._new_pool(self.prefetch_factor + 1)
        if self._block_rows >= 2 * self._pool.batch_rows:
            self._pool.blocks = self._new_pool(self.num_threads + 2, self._block_rows)
        self._groups = EpochGroups(self.plan, sum(field.row_bytes for field in self._pool.fields))
        self._held: dict[str, HeldRows] | None = None
        self._held_lists: dict[str, RaggedRows] = {}
        self._iterators: weakref.WeakSet[LoaderIterator] = weakref.WeakSet()
        self._idle = IdleThreads(self.num_threads + 1)  # those that read, and one that plans
        self._end_idle_threads = weakref.finalize(self, self._idle.close)
        self._end_idle_threads.atexit = False

    def __repr__(self) -> str:
        settings = f"batch_size={self.batch_size}, {order_text(self.plan)}, num_threads={self.num_threads}"
        if self.plan.rows.unique_count != len(self._base):
            settings = f"{self.plan.rows.unique_count:,} of them, {settings}"
        return f"H5Loader({self._base!r}, {settings})"

    def __iter__(self) -> Iterator[Any]:
        """Start the next epoch. The threads start to prefetch immediately.

        Raises
        ------
        PackChangedError
            If the file was replaced or rewritten since the dataset was created.
        """
        if self._process != os.getpid():
            self._reset()
        if self._assumes_one_rank:
            warn_of_later_ranks()
        require_no_transform(self.dataset)
        self._base.engine.check_unchanged()
        if self._held is None:
            numbers = np.arange(self._list_rows.start, self._list_rows.stop)
            self._held_lists = {name: self._base.read_ragged(name, numbers) for name in self._list_sizes}
            rows = self.plan.rows.unique_rows() if self._held_names else range(0)
            self._held = {name: HeldRows(self._base, name, rows) for name in self._held_names}
            if self.pin_memory:
                # Pinning takes long, and may fail while a CUDA graph is captured. So do it before the first batch.
                pool = self._pool.blocks or self._pool
                pool.prepare(min(self._max_gathered + 2, pool.keep))
        iterator = LoaderIterator(self.cursor, len(self), self._start)
        self._iterators.add(iterator)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state after the most recently delivered batch of the running iteration.

        Once the epoch has been consumed to its end (StopIteration), the state is the start of the next epoch.
        """
        return self.cursor.state()

    @property
    def queue_depth(self) -> int:
        """Number of complete batches of all running iterations that have not been delivered yet."""
        return sum(iterator.waiting for iterator in list(self._iterators))

    def stats(self) -> ReadStats:
        """Return statistics of the dataset's reads in this process; for a `ConcatPack`, only of this loader's reads."""
        return self._base.stats()

    def use_memory_of(self, other: H5Loader) -> bool:
        """Share another loader's buffers, for loaders used in turn; return False if their batches differ in layout."""
        mine, theirs = self._pool, other._pool
        same = mine.fields == theirs.fields and mine.bytes == theirs.bytes and self.pin_memory == other.pin_memory
        if same:
            theirs.keep = max(mine.keep, theirs.keep)
            if mine.blocks is not None and (theirs.blocks is None or theirs.blocks.batch_rows < mine.blocks.batch_rows):
                theirs.blocks = mine.blocks
            self._pool = theirs
        return same

    def prepare_memory(self) -> None:
        """Allocate and touch the memory of the batches now, so that the first batches are as fast as later ones."""
        self._pool.prepare()

    def close(self) -> None:
        """Stop all iterations, and free the loader's buffers except those in use. The loader may be used again."""
        for iterator in list(self._iterators):
            iterator.close()
        self._end_idle_threads()
        self._reset()

    def _start(self, iteration: IterationState, owner: object) -> Pipeline:
        keys, held = partial(draw_key, self.plan, iteration.epoch), self._held or {}
        return Pipeline(
            GroupReader(self._base, self._pool.fields, held, keys, keep=self._keeps_decoded),
            self.plan,
            self._groups.of(iteration.epoch, iteration.start),
            iteration.start,
            self._pool,
            num_threads=self.num_threads,
            credits=self.prefetch_factor,
            finish=partial(self._finish, iteration.epoch),
            max_gathered=self._max_gathered,
            block_rows=self._block_rows,
            cpus=self._cpus,
            # The consumer's thread may have modes, such as autocast, that would change what a transform returns.
            can_help=not self._transforms,
            owner=owner,
            idle=self._idle,
        )

    def _finish(self, epoch: int, batch: int, memory: BatchMemory) -> Any:
        """Process the fields of a complete batch, and return the batch that the loader yields."""
        engine, tensors = self._base.engine, []
        for name in self._base.names:
            # Held rows were checked and converted when they were read.
            if name not in self._held_names:
                index, array = engine.indexes[name], memory.arrays[name]
                if not index.dtype.isnative and engine.keeps_byte_order(index):
                    array.byteswap(inplace=True)
                if self._check:
                    engine.check(name, memory.arrays[ROWS], array)
            tensors.append(self._transformed(name, memory.tensor(name), epoch, batch))
        if self._with_rows:
            tensors.append(memory.tensor(ROWS))
        lists: Sequence[Any] = ()
        if self._base.ragged:
            rows = memory.arrays[ROWS]
            held = {name: values[rows - self._list_rows.start] for name, values in self._held_lists.items()}
            lists = self._base.read_lists(rows, draw_key(self.plan, epoch, batch, np.arange(len(rows))), held)
        return new_batch(self._base.field_names, self._base.arranged(tensors, lists))

    def _transformed(self, name: str, tensor: torch.Tensor, epoch: int, batch: int) -> Any:
        """Return a field's tensor, transformed if the field has a transform, and pinned if the loader pins batches."""
        if name not in self._transforms:
            return tensor
        function, seeded = self._transforms[name]
        if seeded:
            key = derive_key(_TRANSFORM, self.plan.seed, epoch, batch, self.plan.rank)
            changed = function(tensor, generator=torch.Generator().manual_seed(key >> 1))
        else:
            changed = function(tensor)
        pageable = isinstance(changed, torch.Tensor) and changed.device.type == "cpu"
        return changed.pin_memory() if self.pin_memory and pageable else changed


def _require_sampler_of(dataset: Any, sampler: Any, order: dict[str, Any]) -> None:
    """Raise an OptionsError unless `sampler` is a `BatchOrder` of `dataset` and `order` has only default values."""
    # A loader reads the sampler's plan, so it would ignore what a subclass does in these methods.
    if not isinstance(sampler, BatchOrder) or any(
        getattr(type(sampler), name) is not getattr(BatchOrder, name) for name in ("__iter__", "__len__")
    ):
        raise OptionsError(
            f"batch_sampler is a {type(sampler).__name__}; H5Loader takes only batch samplers of h5pack: give "
            "batch_size and the other parameters of the order to H5Loader instead, or give the sampler to a DataLoader",
            parameters=("batch_sampler", "batch_size"),
        )
    defaults = {name: one.default for name, one in inspect.signature(H5Loader).parameters.items()}
    given = [name for name, value in order.items() if (type(value), value) != (type(defaults[name]), defaults[name])]
    if given:
        raise OptionsError(
            f"batch_sampler says which rows are in which batch; leave out {' and '.join(given)} here",
            parameters=("batch_sampler", *given),
        )
    if sampler.dataset is not dataset:
        raise OptionsError(
            "batch_sampler draws from another dataset; give H5Loader the dataset that the sampler was made for",
            parameters=("dataset", "batch_sampler"),
        )
