"""`h5pack preview`: a contact sheet of a file's images, by split and class."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.decode.images import MAX_PIXELS, strict_pillow
from h5pack.errors import (
    DamagedRowsError,
    NoSpaceError,
    OptionsError,
    OutputExistsError,
    RejectedImageError,
    SourceError,
)
from h5pack.pack.output import write_atomically
from h5pack.read.row_decoder import RowDecoder
from h5pack.sources.hdf5_catalog import HDF5Datasets
from h5pack.tools.contact_sheet import ContactSheet, Section, Strip, Tile, scaled
from h5pack.tools.export_report import MissingRow
from h5pack.tools.export_source import SourceRows, open_rows
from h5pack.tools.preview_font import SheetText
from h5pack.tools.preview_report import PreviewReport, ShownClass, ShownSplit
from h5pack.tools.preview_rows import PER_CLASS, UNCLASSED, RowSample, SplitSample, marks, sample_rows
from h5pack.wording import counted

SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_LONGEST = {"PNG": 2**31 - 1, "JPEG": 65_500, "WEBP": 16_383}
_SETTINGS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "JPEG": {"quality": 90, "subsampling": 0},
    "WEBP": {"quality": 90},
}


@dataclass(frozen=True, kw_only=True)
class PreviewOptions:
    """Options of `h5pack.preview`, each also a flag of ``h5pack preview``.

    Attributes
    ----------
    splits : tuple of str
        Only these; none: all.
    per_class : int, optional
        Images of each class; None: 8, and 32 of each split without classes.
    classes : int
        Classes of each split, at most.
    tile : int
        The longer side of an image on the sheet, in pixels.
    seed : int, optional
        Draw the rows at random; None: evenly spaced in stored order.
    font : str, optional
        A TrueType or OpenType file, for names in signs that no usual font has.
    images, labels, channel_axis, value_range
        How to read an HDF5 file; see `h5pack.sources.hdf5_catalog.HDF5Datasets`.
    """

    splits: tuple[str, ...] = ()
    per_class: int | None = None
    classes: int = 20
    tile: int = 128
    seed: int | None = None
    font: str | None = None
    images: str | None = None
    labels: str | None = None
    channel_axis: str | None = None
    value_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("per_class", "classes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionsError(f"{name} is {value}; it must be at least 1")
        if not 16 <= self.tile <= 4_096:
            raise OptionsError(f"tile is {self.tile}; it must be 16 to 4096 pixels")
        if self.seed is not None and self.seed < 0:
            raise OptionsError(f"seed is {self.seed}; it must be at least 0")
        # It checks what it is made of.
        _ = self.datasets

    @property
    def datasets(self) -> HDF5Datasets:
        """The part that says how to read the file."""
        # A pack's fields may be as large as its images.
        return HDF5Datasets(self.images, self.labels, (), self.channel_axis, self.value_range, own_fields=False)


def preview(
    path: str | os.PathLike[str], out: str | os.PathLike[str], options: PreviewOptions | None = None
) -> PreviewReport:
    """Draw a contact sheet: for each split some images of each class, with their names, counts and row numbers.

    Of the images only the rows that are shown are read, whatever chunks they lie in.

    Parameters
    ----------
    path : path
        A pack, or any HDF5 file with a dataset of images.
    out : path
        The picture to make, .png, .jpg or .webp; one that is there is replaced.
    options : PreviewOptions, optional

    Raises
    ------
    OptionsError
        If the sheet would be too large, or `out` has another ending.
    DamagedRowsError
        If none of the chosen rows can be shown.
    H5PackError
        See `h5pack.errors`; one line that says what, where and what next.
    """
    options = options or PreviewOptions()
    target = Path(os.path.abspath(out))
    kind = _check_output(target, path)
    text = SheetText(options.font)
    source = open_rows(path, options.datasets, options.splits)
    samples = sample_rows(source.catalog, options.per_class, options.classes, options.seed)
    places = np.concatenate([sample.places for split in samples for sample in split.samples])
    _require_size(len(places) * options.tile**2)
    pictures, reasons = _read(source, np.sort(places), options.tile)
    if not pictures:
        first = int(min(reasons))
        hint = "; give --value-range LOW:HIGH" if reasons[first].startswith("values from") else ""
        raise DamagedRowsError(
            f"{os.fspath(path)}: none of its rows can be shown; the first: {reasons[first]}{hint}",
            tuple(source.rows[places].tolist()),
        )
    sections = [_section(source, split, pictures) for split in samples]
    notes = _notes(source, options, text, sections)
    sheet = ContactSheet(os.path.basename(path), notes, sections, text)
    _require_size(sheet.width * sheet.height, max(sheet.width, sheet.height), kind)
    _save(sheet.draw(), target, kind)
    return PreviewReport(
        path=str(target),
        source=f"{os.fspath(path)} ({source.catalog.about})",
        width=sheet.width,
        height=sheet.height,
        rows=len(source),
        images=len(pictures),
        splits=[_shown(source, split) for split in samples],
        damaged=tuple(
            MissingRow(int(source.rows[place]), source.catalog.names[place], reason)
            for place, reason in sorted(reasons.items())
        ),
    )


def _check_output(target: Path, source: str | os.PathLike[str]) -> str:
    kind = SUFFIXES.get(target.suffix.lower())
    if kind is None:
        raise OptionsError(f"{target}: ends in none of {', '.join(SUFFIXES)}; give the picture such a name")
    if not target.parent.is_dir():
        raise SourceError(f"{target.parent}: no such folder for the output; make it first")
    if target.is_dir():
        raise OutputExistsError(f"{target}: is a folder; name a file")
    if target.exists() and os.path.exists(source) and os.path.samefile(target, source):
        raise OptionsError(f"{target}: the source itself; give the picture another name")
    return kind


def _require_size(pixels: int, longest: int = 0, kind: str = "PNG") -> None:
    if pixels > MAX_PIXELS or longest > _LONGEST[kind]:
        most = f"{_LONGEST[kind]:,} a side" if longest > _LONGEST[kind] else f"{MAX_PIXELS:,}"
        raise OptionsError(
            f"the sheet would have {longest or pixels:,} pixels, and {kind} here at most {most}; take a smaller "
            "--per-class, --classes or --tile, or one --split"
        )


def _read(
    source: SourceRows, places: npt.NDArray[np.int64], tile: int
) -> tuple[dict[int, Image.Image], dict[int, str]]:
    """The pictures of rows, and why others have none, by place."""
    reader, pictures, reasons = source.reader, {}, {}
    wanted = places.tolist()
    reader.begin(wanted)
    with strict_pillow():
        decoder = RowDecoder() if reader.form is None else None
        for place in wanted:
            try:
                row = reader.read(place, "")
                pixels = row if isinstance(row, np.ndarray) else _decoded(decoder, row)
                pictures[place] = scaled(pixels, tile)
            except RejectedImageError as error:
                reasons[place] = str(error)
    return pictures, reasons


def _decoded(decoder: RowDecoder | None, data: bytes) -> npt.NDArray[np.uint8]:
    assert decoder is not None
    return decoder.pixels(data)


def _section(source: SourceRows, split: SplitSample, pictures: dict[int, Image.Image]) -> Section:
    note = counted(split.rows, "row") + (f", {counted(split.classes, 'class')}" if split.classes else "")
    ending = ""
    if split.left_out:
        ending = f"{counted(split.left_out, 'more class')} not shown; --classes {split.classes} shows all"
    strips = [
        Strip(sample.name, counted(sample.rows, "row"), list(_tiles(source, sample, pictures)))
        for sample in split.samples
    ]
    return Section(split.name, note, strips, ending)


def _tiles(source: SourceRows, sample: RowSample, pictures: dict[int, Image.Image]) -> Iterator[Tile]:
    catalog = source.catalog
    table = catalog.labels if catalog.labels is not None and catalog.labels.ndim == 2 else None
    for place in sample.places.tolist():
        image = pictures.get(place)
        caption = f"row {source.rows[place]}" + (": damaged" if image is None else "")
        yield Tile(image, caption, () if table is None else tuple(marks(catalog.label_names or (), table[place])))


def _notes(source: SourceRows, options: PreviewOptions, text: SheetText, sections: list[Section]) -> list[str]:
    index, form = source.reader.index, source.reader.form
    if form is None:
        shape = "encoded images"
    else:
        height, width = form.size(index.row_shape)
        colour = {1: "gray", 2: "gray and alpha", 3: "rgb", 4: "rgb and alpha"}[source.channels or 3]
        where = {"last": "nhwc", "first": "nchw", "none": "nhw"}[form.channel_axis]
        shape = f"{height}x{width} {colour}, {index.dtype}, {where}"
    labels = source.catalog.labels
    each = options.per_class or (PER_CLASS if labels is not None and labels.ndim == 1 else UNCLASSED)
    which = "evenly spaced" if options.seed is None else f"drawn with seed {options.seed}"
    of = "class" if labels is not None and labels.ndim == 1 else "split"
    lines = [
        f"{source.reader.images}: {counted(len(source), 'row')} of {shape}",
        f"up to {each:,} rows of each {of}, {which}",
    ]
    if not text.can_write(_names_on(sections)):
        lines.append("no font here has some signs, which are written as escapes; --font FILE names another")
    return lines


def _names_on(sections: list[Section]) -> set[str]:
    """All names that somebody gave: of splits, classes and columns."""
    strips = [strip for section in sections for strip in section.strips]
    marked = {mark for strip in strips for tile in strip.tiles for mark in tile.marks}
    return {section.title for section in sections} | {strip.name or "" for strip in strips} | marked


def _shown(source: SourceRows, split: SplitSample) -> ShownSplit:
    classes = [ShownClass(sample.name, sample.rows, source.rows[sample.places].tolist()) for sample in split.samples]
    return ShownSplit(split.name, split.rows, classes, split.classes, split.left_out)


def _save(sheet: Image.Image, target: Path, kind: str) -> None:
    """Write the picture beside its name, then give it that name."""
    stream = io.BytesIO()
    sheet.save(stream, kind, **_SETTINGS[kind])
    try:
        write_atomically(target, stream.getvalue())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoSpaceError(f"{target}: {os.strerror(error.errno)}; make room, or choose another place") from error
        raise
