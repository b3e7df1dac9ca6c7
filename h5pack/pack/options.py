"""What a conversion is asked to do."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from h5pack.decode.images import MAX_PIXELS
from h5pack.errors import OptionsError
from h5pack.pack.compression import NONE, Compression, parse_compression
from h5pack.sources.detect import SourceOptions, check_kind
from h5pack.sources.hdf5_catalog import HDF5Datasets
from h5pack.sources.manifest import ManifestColumns
from h5pack.sources.walk import NameFilter

LAYOUTS = ("nhwc", "nchw")
MODES = ("rgb", "gray")
ORDERS = ("shuffled", "sorted")
FITS = ("crop", "pad", "stretch")
IO = ("auto", "direct", "buffered")
RESAMPLES = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")

_LATER = ("compression", "images", "labels", "fields", "channel_axis", "value_range")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `h5pack.convert`, each also a flag of ``h5pack convert``.

    Attributes
    ----------
    source : str, optional
        Kind of source: flat, classes, splits, celeba, manifest or hdf5; None: look.
    include, exclude : tuple of str
        Shell patterns over paths relative to the source.
    limit : int, optional
        Pack at most this many images, evenly spaced in source order.
    root, path_column, label_columns, split_column, field_columns
        How to read a manifest; see `h5pack.sources.manifest.ManifestColumns`.
    images, labels, fields, channel_axis, value_range
        How to read an HDF5 file; see `h5pack.sources.hdf5_catalog.HDF5Datasets`.
    size : (int, int), optional
        Height and width in pixels of every row; None: the images' own, which must then agree.
    fit : str
        How an image gets that size: crop (cover it, cut the rest off around the centre), pad (fit in, black borders)
        or stretch.
    resample : str
        Pillow's filter for it.
    draft : bool
        Let JPEGs be decoded at a half, a quarter or an eighth where `size` allows: faster, not the same pixels.
    mode : str
        rgb (3 channels) or gray (1).
    layout : str
        nhwc or nchw.
    order : str
        shuffled (each split by `seed`) or sorted (the source's order).
    seed : int
        Of the shuffled order, 0 to 2**63 - 1.
    chunk_rows, chunk_bytes : int, optional
        Rows or bytes a chunk; see `h5pack.plan_chunks`.
    max_pixels : int
        Larger images are rejected as decompression bombs.
    compression : str
        How the images' chunks are compressed: none, gzip (or gzip:1 to gzip:9), zstd (or zstd:1 to zstd:22) or
        bitshuffle-lz4.
    compat : bool
        Write for readers of HDF5 1.8 (pyfive, jsfive) instead of 1.10.
    strict : bool
        Stop at the first image that cannot be packed.
    workers : int, optional
        Worker processes; None: the CPUs this process may use. 1 works in this process.
    start_method : str, optional
        fork, forkserver or spawn; None: fork where that is safe, else forkserver.
    io : str
        How rows are written: direct (past the page cache: less CPU, and the cache keeps what it holds), buffered, or
        auto (direct on ext4 and XFS).
    overwrite : bool
        Replace an output that exists, at the very end, and drop an unfinished one.
    resume : bool
        Continue an interrupted conversion.
    """

    source: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limit: int | None = None
    root: str | None = None
    path_column: str | None = None
    label_columns: tuple[str, ...] = ()
    split_column: str | None = None
    field_columns: tuple[str, ...] = ()
    images: str | None = None
    labels: str | None = None
    fields: tuple[str, ...] = ()
    channel_axis: str | None = None
    value_range: tuple[float, float] | None = None
    size: tuple[int, int] | None = None
    fit: str = "crop"
    resample: str = "bicubic"
    draft: bool = False
    mode: str = "rgb"
    layout: str = "nhwc"
    order: str = "shuffled"
    seed: int = 0
    chunk_rows: int | None = None
    chunk_bytes: int | None = None
    max_pixels: int = MAX_PIXELS
    compression: str = NONE
    compat: bool = False
    strict: bool = False
    workers: int | None = None
    start_method: str | None = None
    io: str = "auto"
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        check_kind(self.source)
        for name, allowed in (
            ("fit", FITS),
            ("resample", RESAMPLES),
            ("mode", MODES),
            ("layout", LAYOUTS),
            ("order", ORDERS),
            ("io", IO),
            ("start_method", (None, "fork", "forkserver", "spawn")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise OptionsError(f"{name} {value!r} is none of {', '.join(str(item) for item in allowed)}")
        for name in ("limit", "workers", "max_pixels", "chunk_rows", "chunk_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionsError(f"{name} is {value}; it must be at least 1")
        if self.chunk_rows is not None and self.chunk_bytes is not None:
            raise OptionsError("chunk_rows and chunk_bytes say the same thing twice; give one of them")
        if self.size is not None and (not isinstance(self.size, tuple) or len(self.size) != 2 or min(self.size) < 1):
            raise OptionsError(f"size is {self.size}; it must be (height, width), each at least 1 pixel")
        parse_compression(self.compression)
        # It checks what it is made of.
        _ = self.source_options
        if not 0 <= self.seed < 2**63:
            raise OptionsError(f"seed is {self.seed}; it must be 0 to 2**63 - 1")
        if self.size is None:
            if self.draft:
                raise OptionsError("draft decodes at a reduced size, so it needs size")
            if (self.fit, self.resample) != ("crop", "bicubic"):
                raise OptionsError("fit and resample say how images get a size, so they need size")

    @property
    def channels(self) -> int:
        """Channels of a row."""
        return 1 if self.mode == "gray" else 3

    @property
    def filter(self) -> Compression | None:
        """The filter that the images' chunks pass through; None: they are stored as they are."""
        return parse_compression(self.compression)

    @property
    def source_options(self) -> SourceOptions:
        """The part that says how to read the source."""
        return SourceOptions(
            kind=self.source,
            names=NameFilter(self.include, self.exclude),
            columns=ManifestColumns(
                self.path_column, self.label_columns, self.split_column, self.field_columns, self.root
            ),
            datasets=HDF5Datasets(self.images, self.labels, self.fields, self.channel_axis, self.value_range),
            limit=self.limit,
        )

    def content(self) -> dict[str, Any]:
        """The options that change what the file holds, for `h5pack_options` and for comparing on resume.

        `compression`, and what says how to read an HDF5 file, are among them only where they were given.
        """
        values = dataclasses.asdict(self)
        for name in ("root", "strict", "workers", "start_method", "io", "overwrite", "resume"):
            del values[name]
        # Left out, so that a pack without them is what it was before there was a choice.
        for name in _LATER:
            if values[name] == getattr(ConvertOptions, name):
                del values[name]
        if self.filter is None:
            values.pop("compression", None)
        else:
            values["compression"] = self.filter.name
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def parse_size(text: str) -> tuple[int, int]:
    """Read "HxW", or one number for a square, as (height, width).

    Raises
    ------
    OptionsError
    """
    match = re.fullmatch(r"(\d+)(?:[xX×](\d+))?", text.strip())
    if match is None:
        raise OptionsError(f"size {text!r} is neither HxW, such as 218x178, nor one number for a square")
    height = int(match[1])
    return height, int(match[2]) if match[2] else height


def parse_range(text: str) -> tuple[float, float]:
    """Read "LOW:HIGH", such as 0:1 or -1:1.

    Raises
    ------
    OptionsError
    """
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        raise OptionsError(f"value range {text!r} is not LOW:HIGH, such as 0:1") from None
    return low, high


def parse_bytes(text: str) -> int:
    """Read a number of bytes with an optional unit: 65536, 512KiB, 4MiB, 4MB, 1G.

    Raises
    ------
    OptionsError
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(i?)b?", text.strip().lower())
    if match is None:
        raise OptionsError(f"{text!r} is no number of bytes, such as 4MiB")
    base = 1024 if match[3] or not text.strip().lower().endswith("b") else 1000
    return int(float(match[1]) * base ** " kmg".index(match[2] or " "))
