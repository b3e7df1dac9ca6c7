"""What an export is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from h5pack.errors import OptionsError
from h5pack.sources.hdf5_catalog import HDF5Datasets
from h5pack.tools.export_image import SUFFIXES

FORMATS = tuple(SUFFIXES)
DEFAULT_QUALITY = 95


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `h5pack.export`, each also a flag of ``h5pack export``.

    Attributes
    ----------
    format : str
        png (the very pixels) or jpeg.
    quality : int, optional
        Of JPEGs, 1 to 100; None: 95.
    splits : tuple of str
        Only these; none: all.
    limit : int, optional
        Export at most this many rows, evenly spaced in stored order.
    images, labels, fields, channel_axis, value_range
        How to read an HDF5 file; see `h5pack.sources.hdf5_catalog.HDF5Datasets`.
    workers : int, optional
        Worker processes; None: the CPUs this process may use. 1 works in this process.
    start_method : str, optional
        fork, forkserver or spawn; None: fork where that is safe, else forkserver.
    overwrite : bool
        Replace an earlier export, at the very end, and drop an unfinished one.
    resume : bool
        Continue an interrupted export.
    """

    format: str = "png"
    quality: int | None = None
    splits: tuple[str, ...] = ()
    limit: int | None = None
    images: str | None = None
    labels: str | None = None
    fields: tuple[str, ...] = ()
    channel_axis: str | None = None
    value_range: tuple[float, float] | None = None
    workers: int | None = None
    start_method: str | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise OptionsError(f"format {self.format!r} is none of {', '.join(FORMATS)}")
        if self.quality is not None:
            if self.format != "jpeg":
                raise OptionsError(f"quality is of JPEGs, and the format is {self.format}; leave one out")
            if not 1 <= self.quality <= 100:
                raise OptionsError(f"quality is {self.quality}; it must be 1 to 100")
        for name in ("limit", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionsError(f"{name} is {value}; it must be at least 1")
        if self.start_method not in (None, "fork", "forkserver", "spawn"):
            raise OptionsError(f"start_method {self.start_method!r} is none of fork, forkserver, spawn")
        # It checks what it is made of.
        _ = self.datasets

    @property
    def datasets(self) -> HDF5Datasets:
        """The part that says how to read the file."""
        return HDF5Datasets(self.images, self.labels, self.fields, self.channel_axis, self.value_range)

    def content(self) -> dict[str, Any]:
        """The options that change what is written, for comparing on resume."""
        return {
            "format": self.format,
            "quality": self.quality or DEFAULT_QUALITY,
            "splits": sorted(self.splits),
            "limit": self.limit,
            "images": self.images,
            "labels": self.labels,
            "fields": list(self.fields),
            "channel_axis": self.channel_axis,
            "value_range": None if self.value_range is None else list(self.value_range),
        }
