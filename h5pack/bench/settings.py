"""What a bench sweeps, and how long it may take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from h5pack.errors import OptionsError
from h5pack.pack.compression import parse_compression

ORDERS = ("sequential", "window", "full", "single")
ENGINES = ("direct", "tuned", "default")
CACHES = ("hot", "cold")
DEFAULT_CHUNK_BYTES = tuple(1024 * size for size in (64, 256, 1024, 4096, 16384))


@dataclass(frozen=True)
class BenchSettings:
    """What to measure.

    Attributes
    ----------
    seconds : float
        The whole time, packing included.
    chunk_rows, chunk_bytes : tuple of int
        Sizes of chunks to try, in rows or in bytes; neither: 64 KiB to 16 MiB.
    contiguous : bool
        Try the rows without chunks, too.
    orders : tuple of str
        Of `ORDERS`. sequential: as stored; window: chunks permuted, and the rows of some of them among each other;
        full: rows permuted one by one; single: one random index a call.
    engines : tuple of str
        Of `ENGINES`. direct: beside the HDF5 library; tuned: through it, with an rdcc cache that suits the order;
        default: plain h5py.
    caches : tuple of str
        Of `CACHES`: page cache warm, or dropped.
    compressions : tuple of str
        As ``ConvertOptions.compression``.
    batch_sizes : tuple of int
        Rows a batch; the first is that of everything but the other batch sizes.
    threads : tuple of int
        Reading threads of H5Loader to try; empty: powers of two up to the CPUs of this process.
    workers : tuple of int
        Worker processes of a DataLoader to try; empty: the same.
    windows : tuple of int
        Chunks that are shuffled together; the first is that of everything but the other windows.
    size : (int, int), optional
        Height and width of a row, as ``ConvertOptions.size``.
    rows : int, optional
        Rows of the sample. None: as many as time, memory and disk allow, up to 512 MiB.
    images, labels : str, optional
        Of an HDF5 file: the datasets.
    scratch : str, optional
        A folder for the sample's files, on the disk in question. None: the working directory.
    seed : int

    Raises
    ------
    OptionsError
        If a value makes no sense.
    """

    seconds: float = 60.0
    chunk_rows: tuple[int, ...] = ()
    chunk_bytes: tuple[int, ...] = ()
    contiguous: bool = True
    orders: tuple[str, ...] = ORDERS
    engines: tuple[str, ...] = ENGINES
    caches: tuple[str, ...] = CACHES
    compressions: tuple[str, ...] = ("none",)
    batch_sizes: tuple[int, ...] = (256,)
    threads: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    windows: tuple[int, ...] = (16,)
    size: tuple[int, int] | None = None
    rows: int | None = None
    images: str | None = None
    labels: str | None = None
    scratch: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise OptionsError(f"seconds is {self.seconds:g}; it must be above 0")
        for name, allowed in (("orders", ORDERS), ("engines", ENGINES), ("caches", CACHES)):
            values = getattr(self, name)
            wrong = [value for value in values if value not in allowed]
            if wrong or not values:
                raise OptionsError(f"{name} {', '.join(wrong) or '(none)'}: give some of {', '.join(allowed)}")
        for name, least in (("batch_sizes", 1), ("windows", 1), ("threads", 1), ("workers", 0)):
            for value in getattr(self, name):
                if value < least:
                    raise OptionsError(f"{name} has {value}; each must be at least {least}")
        for value in (*self.chunk_rows, *self.chunk_bytes, *(() if self.rows is None else (self.rows,))):
            if value < 1:
                raise OptionsError(f"{value} is no size of a chunk or sample; it must be at least 1")
        for compression in self.compressions:
            parse_compression(compression)
        object.__setattr__(self, "compressions", tuple(dict.fromkeys(self.compressions)))
        for name in ("batch_sizes", "windows", "compressions"):
            if not getattr(self, name):
                raise OptionsError(f"{name} is empty; give at least one")

    @property
    def window(self) -> int:
        """The window of all cells but the other windows'."""
        return self.windows[0]
