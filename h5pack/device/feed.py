"""`DeviceFeed`, which copies batches to the device and transforms them there while the previous step runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from h5pack.data.iteration import BatchIterator
from h5pack.device.batch import map_tensors
from h5pack.device.copier import CudaOperations, DeviceCopier, apply_transform, outside_inference_mode
from h5pack.device.echo import EchoLoader
from h5pack.device.loader_wrapper import (
    BatchFetcher,
    DeliveryCursor,
    FetchedBatch,
    LoaderWrapper,
    first_attribute,
    layers_of,
    rank_of_copies,
)
from h5pack.device.prefetch import DevicePrefetcher
from h5pack.device.profiling import profiler_range
from h5pack.device.transforms import ImageTransform
from h5pack.errors import OptionsError
from h5pack.system.parameters import invalid, launched_number, whole_number
from h5pack.system.text import counted


class DeviceFeed(LoaderWrapper):
    """A loader that delivers the batches of another loader on a device.

    On CUDA, a thread fetches batches from the loader and queues their copies from pinned memory. The copies and the
    transforms run on separate CUDA streams, while the training step runs. On any other device, such as the CPU, each
    batch is fetched, copied and transformed in the caller's thread when it is requested. The batches on CUDA and on the
    CPU are the same if the transform gives the same results on both.

    Parameters
    ----------
    loader : iterable of batches
        An `H5Loader`, `EchoLoader`, DataLoader, StatefulDataLoader or any other iterable of batches. A batch is a
        tensor, or lists, tuples, named tuples or mappings of tensors, nested in any way. Other objects in a batch are
        passed on unchanged.
    device : torch.device or str, optional
        Default: the CUDA device whose index is in torchrun's environment variable LOCAL_RANK, else the current CUDA
        device. Without CUDA, the CPU.
    transform : callable or sequence of callable, optional
        Called with a batch's images on the device. The result replaces the images. If `transform.whole_batch` is true,
        the transform is called with the batch, and the result replaces the batch. If `transform.keyed` is true, a
        `BatchKey` is the second argument. A sequence of transforms is applied in order. If any of them is not keyed,
        torch's generators of the CPU and of the CUDA device are seeded for each batch before the first transform, and
        restored after the last. The seed depends on `torch.initial_seed()`, the epoch, the batch's number in the epoch,
        and the rank.
    prefetch_factor : int
        Maximum number of batches that are copied to the device before the step requests them. The device also holds
        the batch of the current step, and the batch of the previous step until that step has finished. So up to
        ``prefetch_factor + 2`` batches are on the device. Batches are prefetched only for CUDA devices.
    image_key : int or str, optional
        Where the images are in a batch: an index, a key, or the field name of a named tuple. Default: the tensor itself
        if the batch is a tensor, the key "images" or "image" of a mapping, and the first element of a list or tuple.

    Raises
    ------
    OptionsError
        If an option is invalid, the device does not exist, or the transform needs row numbers but the batches of the
        loader's dataset have none.

    Notes
    -----
    `loader`, `device`, `prefetch_factor` and `transform` are also attributes.

    A batch is ready for use on the CUDA stream that was current when the batch was requested. To use it on another
    stream, synchronize as for any tensor (``wait_stream``, ``record_stream``).

    Threads of the loader and the feed allocate memory while the training step runs. To capture a CUDA graph meanwhile,
    give ``torch.cuda.graph`` the argument ``capture_error_mode="thread_local"``, as with any loader with threads.

    The results of a transform that was compiled with ``mode="reduce-overhead"`` are copied, because the next call
    overwrites them. A compiled function called inside another transform is not recognized: clone its results there.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device | str | int | None = None,
        *,
        transform: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        prefetch_factor: int = 2,
        image_key: Hashable | None = None,
    ) -> None:
        super().__init__(loader)
        self.device = resolve_device(device)
        self.prefetch_factor = whole_number("prefetch_factor", prefetch_factor, 1)
        self._image_key = image_key
        self._transform: ImageTransform | None = None
        self.transform = transform

    @property
    def transform(self) -> Any:
        """The transform. If another is assigned, a running iteration still uses the old one."""
        return self._given_transform

    @transform.setter
    def transform(self, transform: Callable[..., Any] | Sequence[Callable[..., Any]] | None) -> None:
        """Use another transform from the next iteration on; raise OptionsError if it is invalid."""
        dataset, rank = getattr(self.loader, "dataset", None), rank_of_copies(self.loader)
        before = self._transform
        self._transform = None if transform is None else ImageTransform(transform, self._image_key, dataset, rank)
        if before is not None and self._transform is not None:
            self._transform.seconds = before.seconds
        self._given_transform = transform

    def __repr__(self) -> str:
        return f"DeviceFeed({self.loader!r}, device={str(self.device)!r}, prefetch_factor={self.prefetch_factor})"

    @property
    def transform_seconds(self) -> float:
        """Total seconds spent in the transform so far, 0 if there is none; on CUDA, only the time to launch kernels."""
        return 0.0 if self._transform is None else self._transform.seconds

    def __iter__(self) -> Iterator[Any]:
        """Begin the loader's next epoch. Return an iterator over its batches, which prefetches them on CUDA."""
        # A DataLoader with persistent workers has a single iterator, so a new iteration must end all earlier ones.
        persistent = first_attribute(layers_of(self.loader), "persistent_workers")
        for thread in list(self._threads):
            if persistent:
                thread.stop()
            if thread.stopping:
                # Wait until the thread has ended, because it may still be using the loader's iterator.
                thread.join()
        copier = self._begin_copying()
        # The loader's state counts batches that were only prefetched, or whose transform failed. Record the state with
        # each batch, so that the feed's own state counts only batches that the step received.
        cursor, fetcher = self._begin(record=copier is not None or self._transform is not None)
        if copier is None:
            return _FeedIterator(self, cursor, _DirectFetcher(fetcher, self.device, self._transform))
        prefetcher = DevicePrefetcher(fetcher, copier, self.prefetch_factor)
        self._threads.add(prefetcher.thread)
        return _FeedIterator(self, cursor, prefetcher)

    def _begin_copying(self) -> DeviceCopier | None:
        operations = self._operations()
        if operations is None:
            return None
        echoes = any(isinstance(layer, EchoLoader) for layer in layers_of(self.loader))
        return DeviceCopier(operations, self._transform, keep_images=echoes)

    def _operations(self) -> CudaOperations | None:
        """Return the operations with which to prefetch batches; None if the device is not a CUDA device."""
        return CudaOperations(self.device) if self.device.type == "cuda" else None


class _FeedIterator(BatchIterator):
    """An iterator over one epoch of a `DeviceFeed`."""

    def __init__(self, feed: DeviceFeed, cursor: DeliveryCursor, batches: DevicePrefetcher | _DirectFetcher) -> None:
        super().__init__("feed")
        self._feed, self._cursor = feed, cursor
        self._batches: DevicePrefetcher | _DirectFetcher | None = batches

    def close(self) -> None:
        batches = self._batches
        super().close()
        if isinstance(batches, DevicePrefetcher):
            # Only `close` waits for the thread. After an error or an interrupt, the iterator does not wait, because the
            # loader may need long for the batch that it is reading.
            batches.thread.join()

    def _next_batch(self) -> Any:
        assert self._batches is not None
        try:
            fetched = next(self._batches)
        except torch.cuda.OutOfMemoryError as error:
            _add_memory_advice(error, self._feed)
            raise
        self._cursor.advance(fetched)
        return fetched.batch

    def _release(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()

    def _finish(self) -> None:
        self._feed._finish(self._cursor)


class _DirectFetcher(Iterator[FetchedBatch]):
    """A fetcher without prefetching: it fetches, copies and transforms a batch on request, in the caller's thread."""

    def __init__(self, fetcher: BatchFetcher, device: torch.device, transform: ImageTransform | None) -> None:
        self._fetcher, self._device, self._transform = fetcher, device, transform

    def __next__(self) -> FetchedBatch:
        # Leave inference mode while fetching. The transform could not change tensors in place that were made in this
        # mode, and autograd could not use them later.
        with outside_inference_mode(), profiler_range("read"):
            fetched = self._fetcher.fetch()
        if self._device.type != "cpu":
            with profiler_range("copy"):
                fetched.batch = map_tensors(fetched.batch, lambda tensor: tensor.to(self._device))
        if self._transform is not None:
            fetched.batch = apply_transform(self._transform, fetched, self._device)
        return fetched

    def close(self) -> None:
        self._fetcher.close()


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device to use, with an index if it is CUDA. None selects the default of `DeviceFeed`.

    Raises OptionsError if there is no such device.
    """
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        # LOCAL_RANK may be too large: some launchers show each process only its own device, which has index 0.
        rank = launched_number("LOCAL_RANK", -1)
        return torch.device("cuda", rank if 0 <= rank < torch.cuda.device_count() else torch.cuda.current_device())
    try:
        found = torch.device(f"cuda:{device}" if type(device) is int else device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise invalid("device", device, "give 'cpu', 'cuda' or 'cuda:0'") from error
    if found.type != "cuda":
        try:
            torch.empty(0, device=found)
        except Exception as error:  # torch raises errors of several types.
            raise invalid("device", str(found), "give 'cpu', or 'cuda' for a GPU", "does not exist here") from error
        return found
    if not torch.cuda.is_available():
        asked = f"device={str(found)!r}"
        why = "torch finds no CUDA device" if torch.version.cuda else "torch was built without CUDA"
        raise OptionsError(f"{asked}: {why}; give device='cpu'", parameters=(asked, "device='cpu'"))
    if found == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    if found.index >= torch.cuda.device_count():
        count = counted(torch.cuda.device_count(), "CUDA device")
        problem = f"does not exist: torch finds {count}, numbered from 0"
        raise invalid("device", str(found), "give a lower index", problem)
    return found


def _add_memory_advice(error: BaseException, feed: DeviceFeed) -> None:
    batches = feed.prefetch_factor + 2 if feed.device.type == "cuda" else 1
    note = (
        f"h5pack: DeviceFeed holds up to {batches} batches on {feed.device} at a time; lower the batch size, or "
        "prefetch_factor if it is above 1"
    )
    # Python 3.10 does not have BaseException.add_note.
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}",)
