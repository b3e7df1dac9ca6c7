"""`DeviceFeed`: batches on the device, copied and transformed there while the step before them runs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from h5pack.errors import LoaderError, OptionsError
from h5pack.feed.ahead import Ahead, Reader
from h5pack.feed.batch_parts import map_tensors
from h5pack.feed.cuda_copier import CudaCopier
from h5pack.feed.image_transform import ImageTransform
from h5pack.feed.loader_wrapper import LoaderWrapper
from h5pack.feed.order import whole_number
from h5pack.feed.stage import stage
from h5pack.feed.upstream import Position, Pulled, Pulling


class DeviceFeed(LoaderWrapper):
    """A loader's batches, on a device.

    On CUDA a stream beside the step's copies each batch out of pinned memory and runs the transform there, while the
    step before it runs; a thread pulls the batches out of the loader. On the CPU it hands each batch on, transformed in
    the caller's thread. The results are the same.

    Parameters
    ----------
    loader : iterable
        `H5Loader`, `EchoLoader`, a DataLoader or StatefulDataLoader, or anything else that gives batches: tensors,
        lists, tuples, named tuples or mappings of them, nested as you like. What is no tensor passes untouched.
    device : torch.device or str, optional
        None: the CUDA device that torchrun's LOCAL_RANK names, else the current one; the CPU where there is none.
    transform : callable, optional
        Called with a batch's images on the device, and, where its attribute `keyed` is true, with a `BatchKey`.
    depth : int
        Batches that are copied ahead of the step, at most. As many more may wait in host memory. Without CUDA nothing
        is read ahead here.
    images : int or str, optional
        Where in a batch the images are: an index, a key or the name of a field. None: the first part, the key "images"
        or "image", or the tensor itself.

    Attributes
    ----------
    loader : iterable
    device : torch.device
    depth : int

    Raises
    ------
    OptionsError
        If the device is not there, or the transform needs row numbers and the loader's dataset gives none.

    Notes
    -----
    A batch that was handed out may be used on the stream that was current when it was asked for; hand it to another
    one as any tensor (``wait_stream``, ``record_stream``).
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device | str | int | None = None,
        *,
        transform: Callable[..., Any] | None = None,
        depth: int = 2,
        images: Hashable | None = None,
    ) -> None:
        super().__init__(loader)
        self.device = resolve_device(device)
        self.depth = whole_number("depth", depth, 1)
        dataset = getattr(loader, "dataset", None)
        self._transform = None if transform is None else ImageTransform(transform, images, dataset)
        self._renew()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_copier", "_readers", "_position")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew()

    def _renew(self) -> None:
        self._copier: CudaCopier | None = None
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._position: Position | None = None

    def __repr__(self) -> str:
        return f"DeviceFeed({self.loader!r}, device={str(self.device)!r}, depth={self.depth})"

    @property
    def dataset(self) -> Any:
        """The loader's."""
        return self.loader.dataset

    @property
    def transform_seconds(self) -> float:
        """What calling the transform took so far in this process; on CUDA that is to launch it."""
        return 0.0 if self._transform is None else self._transform.seconds

    def __iter__(self) -> Iterator[Any]:
        """Begin the loader's next epoch; on CUDA its batches are read and copied ahead."""
        # One that was broken off may still be in the loader's iterator. A DataLoader whose workers stay has only one
        # iterator, so there every earlier iteration is over.
        single = getattr(self.loader, "persistent_workers", False)
        for reader in list(self._readers):
            if single:
                reader.stop()
            if reader.stopping:
                reader.join()
        copier = self._begin_copying()
        # Between the pull and the step a batch may fail, so that the loader's own state would count it.
        self._position, pulling = self._upstream.begin(record=copier is not None or self._transform is not None)
        if copier is None:
            return FeedIterator(self, self._position, _Direct(pulling, self.device, self._transform))
        ahead = Ahead(pulling, copier, self.depth)
        self._readers.add(ahead.reader)
        return FeedIterator(self, self._position, ahead)

    def close(self) -> None:
        """Stop all iterations, and wait until their threads have ended; the loader stays as it is."""
        for reader in list(self._readers):
            reader.stop()
            reader.join()

    def _begin_copying(self) -> CudaCopier | None:
        if self.device.type != "cuda":
            return None
        if self._copier is None:
            self._copier = CudaCopier(self.device, self._transform)
        self._copier.begin()
        return self._copier


class FeedIterator(Iterator[Any]):
    """One iteration of a feed.

    Parameters
    ----------
    feed : DeviceFeed
    position : Position
        Is told what was handed out.
    batches : Ahead or _Direct
    """

    def __init__(self, feed: DeviceFeed, position: Position, batches: Ahead | _Direct) -> None:
        self._feed, self._position = feed, position
        self._batches: Ahead | _Direct | None = batches
        self._broken = ""

    def __next__(self) -> Any:
        if self._broken:
            raise LoaderError(f"this iterator {self._broken} its epoch's end; begin a new one with iter(feed)")
        if self._batches is None:
            raise StopIteration
        try:
            pulled = next(self._batches)
        except StopIteration:
            self._let_go()
            self._feed.finish(self._position)
            raise
        except BaseException as error:
            # Whatever it was: half-done bookkeeping must not go on.
            self._broken = "failed before"
            self._let_go()
            if isinstance(error, torch.cuda.OutOfMemoryError):
                _advise(error, self._feed)
            raise
        self._position.handed, self._position.state = pulled.number, pulled.state
        return pulled.batch

    def close(self) -> None:
        """Stop reading ahead."""
        if self._batches is not None:
            self._broken = "was closed before"
        self._let_go()

    def _let_go(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()


class _Direct(Iterator[Pulled]):
    """The batches of an iteration, each when it is asked for."""

    def __init__(self, pulling: Pulling, device: torch.device, transform: ImageTransform | None) -> None:
        self._pulling, self._device, self._transform = pulling, device, transform

    def __next__(self) -> Pulled:
        with stage("read"):
            pulled = self._pulling.pull()
        if self._device.type != "cpu":
            with stage("copy"):
                pulled.batch = map_tensors(pulled.batch, self._move)
        if self._transform is not None:
            pulled.batch = self._transform(pulled.batch, pulled.epoch)
        return pulled

    def close(self) -> None:
        """Let the loader's iterator go."""
        self._pulling.close()

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device that is meant; a CUDA device with its index.

    Raises
    ------
    OptionsError
        If it is a CUDA device that is not there, or no device.
    """
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        # A launcher may also show each process a single device, which is number 0 then.
        rank = int(os.environ.get("LOCAL_RANK", "-1") or -1)
        return torch.device("cuda", rank if 0 <= rank < torch.cuda.device_count() else torch.cuda.current_device())
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionsError(f"device {device!r} is none; give 'cpu', 'cuda' or 'cuda:0', say") from error
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        why = "found no CUDA device" if torch.version.cuda else "was built without CUDA"
        raise OptionsError(f"device {str(found)!r} was asked for, and torch {why}; leave device out, or say 'cpu'")
    if str(found) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    if found.index >= torch.cuda.device_count():
        raise OptionsError(
            f"device {str(found)!r} was asked for, and there are {torch.cuda.device_count()}, counted from 0"
        )
    return found


def _advise(error: BaseException, feed: DeviceFeed) -> None:
    """Say beside an error of device memory what could be lowered."""
    batches = feed.depth + 1 if feed.device.type == "cuda" else 1
    note = f"h5pack: DeviceFeed holds up to {batches} batches on {feed.device} at a time; lower the batch size or depth"
    # Python 3.10 has no notes.
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}",)
