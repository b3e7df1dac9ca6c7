"""What an examination is asked to do."""

from __future__ import annotations

import os
from dataclasses import dataclass

from h5pack import schema
from h5pack.errors import OptionsError
from h5pack.feed.order import DEFAULT_WINDOW, whole_number

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `diagnose`.

    Attributes
    ----------
    path : path
        A pack, or any HDF5 file that `H5Dataset` reads.
    device : str or None
        "cpu", "cuda" or "cuda:1", say; None: CUDA where there is some, else the CPU.
    model : str or None
        MODULE:FACTORY, as `load_step` takes it; None: a small network of our own.
    transform : str or None
        MODULE:FUNCTION: the user's own transform on the host; `H5Loader`'s, of whole batches, or with `workers`
        `H5Dataset`'s, of single images.
    batch_size : int
    threads : int or None
        Of `H5Loader`; None: its default.
    workers : int or None
        Feed by an `H5Dataset` in a DataLoader with so many workers; None: by an `H5Loader`.
    split : str or None
        None: all rows.
    images, labels : str
        The datasets, as of `H5Dataset`.
    window : int
        Chunks that are shuffled together.
    dtype : str
        Of the images on the device, one of `DTYPES`; below float32 the step runs under autocast.
    pin : bool or None
        Whether batches are in pinned memory; None: with a GPU.
    seconds : float
        What all measurements may take together.

    Raises
    ------
    OptionsError
        If a value makes no sense.
    """

    path: str | os.PathLike[str]
    device: str | None = None
    model: str | None = None
    transform: str | None = None
    batch_size: int = 256
    threads: int | None = None
    workers: int | None = None
    split: str | None = None
    images: str = schema.IMAGES
    labels: str = schema.LABELS
    window: int = DEFAULT_WINDOW
    dtype: str = "float32"
    pin: bool | None = None
    seconds: float = 30.0

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, 1)
        whole_number("window", self.window, 1)
        if self.threads is not None:
            whole_number("threads", self.threads, 1)
        if self.workers is not None:
            whole_number("workers", self.workers, 0)
        if self.threads is not None and self.workers is not None:
            raise OptionsError("threads are H5Loader's and workers a DataLoader's; give one of the two")
        if self.dtype not in DTYPES:
            raise OptionsError(f"dtype is {self.dtype!r}; give one of {', '.join(DTYPES)}")
        if not 0 < self.seconds < float("inf"):
            raise OptionsError(f"seconds is {self.seconds!r}; give the time that measuring may take, above 0")
        for name, value in (("model", self.model), ("transform", self.transform)):
            if value is not None and not all(value.partition(":")):
                raise OptionsError(f"{name} is {value!r}; give MODULE:NAME, such as mypackage.models:build")
