"""`h5pack preview`: draw a contact sheet of a file's images, grouped by split and class."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from h5pack.errors import DamagedRowsError, OptionsError, OutputExistsError, RejectedImageError
from h5pack.exporter.image_files import MissingRow, SourceRows, open_rows
from h5pack.format import schema
from h5pack.images.decode import MAX_PIXELS, image_of, strict_pillow
from h5pack.pack.options import parse_range
from h5pack.read.encoded import RowDecoder
from h5pack.sources.catalog import Catalog
from h5pack.sources.hdf5_catalog import HDF5Datasets
from h5pack.system.files import (
    absolute_path,
    reporting_disk_errors,
    require_replaceable,
    require_writable,
    write_atomically,
)
from h5pack.system.parameters import require_local, whole_number
from h5pack.system.text import counted, printable, printable_lines

ROWS_PER_CLASS = 8
ROWS_WITHOUT_CLASSES = 32

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_MAX_SIDES = {"JPEG": 65_500, "WEBP": 16_383}

_MARGIN, _GAP = 24, 8
_TILES_WIDTH, _MIN_WIDTH = 1_200, 640
# Font sizes in pixels, and the height of a line of text as a multiple of its font size.
_TITLE, _HEADING, _PLAIN, _SMALL = 24, 19, 14, 12
_LEADING = 1.35
_MAX_MARKS = 12
_INK, _GRAY, _PAPER, _ALARM = "#1b1b1f", "#63636b", "#ffffff", "#b3261e"


@dataclass(frozen=True)
class ShownClass:
    """A class on the sheet."""

    name: str | None  # None if the file has no class labels
    rows: int  # number of rows that have this class
    shown: list[int]  # shown rows of this class, as row numbers of the file


@dataclass(frozen=True)
class ShownSplit:
    """A split on the sheet."""

    name: str
    rows: int  # number of rows in the split
    classes: list[ShownClass]
    named: int  # number of classes in the split, shown or not; "no label" is not counted
    left_out: int  # number of these classes that are not shown


@dataclass(frozen=True)
class PreviewReport:
    """A contact sheet and its contents."""

    path: str | None  #: path of the written picture; None if `out` was not given
    source: str  #: the HDF5 file and the datasets that were read
    width: int  #: width of the sheet in pixels
    height: int  #: height of the sheet in pixels
    rows: int  #: number of rows in the selected splits
    images: int  #: number of images on the sheet
    splits: list[ShownSplit]
    damaged: tuple[MissingRow, ...]  #: selected rows that could not be shown
    sheet: Image.Image = field(repr=False, compare=False)  #: the drawn sheet, RGB; not in the result of `to_json`

    @property
    def ok(self) -> bool:
        """Whether every selected row could be shown."""
        return not self.damaged

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict. The keys are stable across versions."""
        found = {**vars(self), "ok": self.ok}
        del found["sheet"]
        found["splits"] = [asdict(split) for split in self.splits]
        found["damaged"] = [asdict(row) for row in self.damaged]
        return found

    def to_text(self) -> str:
        """Return the report as lines of text."""
        sheet = f"a sheet {self.width} pixels wide and {self.height} high"
        size = f"{counted(self.images, 'image')} of {counted(self.rows, 'row')} on {sheet}"
        lines = [size if self.path is None else f"{self.path}: {size}"]
        lines += [
            f"  {split.name}: {split.left_out:,} of {split.named:,} classes not shown"
            for split in self.splits
            if split.left_out
        ]
        return printable_lines(lines)


def preview(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    splits: str | Sequence[str] = (),
    per_class: int | None = None,
    max_classes: int = 20,
    tile: int = 128,
    seed: int | None = None,
    images: str | None = None,
    labels: str | None = None,
    channel_axis: str | None = None,
    value_range: str | tuple[float, float] | None = None,
) -> PreviewReport:
    """Draw a contact sheet: some images of each class in each split, with names, counts and row numbers.

    Fields of a pack that are masks or images are drawn beside the images; mask values are drawn in 256 colors. Only
    rows that are shown are read.

    Parameters
    ----------
    path : path
        A pack, or any HDF5 file with a dataset of images.
    out : path, optional
        The picture to write (.png, .jpg, .jpeg or .webp); an existing file is replaced. Default: write no file.
    splits : str or sequence of str
        Show only these splits. Default: all.
    per_class : int, optional
        Maximum number of images per class and split. Default: 8. If there are no classes, the default is 32 per split.
    max_classes : int
        Maximum number of classes shown per split. Some rows without a label are shown in addition.
    tile : int
        Maximum length of an image's longer side on the sheet, in pixels, 16 to 4096.
    seed : int, optional
        Select rows at random with this seed. Default: select evenly spaced rows in stored order.
    images, labels, channel_axis, value_range
        How to interpret an HDF5 file; see `h5pack.convert`.

    Returns
    -------
    PreviewReport

    Raises
    ------
    OptionsError
        If the sheet would be too large, or `out` has an unsupported extension.
    DamagedRowsError
        If none of the selected rows can be shown.
    H5PackError
        The base class of all errors; see `h5pack.errors` for the others.
    """
    # `own_fields=False` leaves out a pack's fields that are not masks or images, because they would be read completely.
    bounds = None if value_range is None else parse_range(value_range)
    datasets = HDF5Datasets(images, labels, (), channel_axis, bounds, own_fields=False)
    tile = whole_number("tile", tile, 16, 4_096)
    max_classes = whole_number("max_classes", max_classes, 1)
    per_class, seed = (
        None if value is None else whole_number(name, value, minimum)
        for name, value, minimum in (("per_class", per_class, 1), ("seed", seed, 0))
    )
    require_local(path)
    if out is not None:
        require_local(out, "out")
    path = os.fsdecode(path)
    target = None if out is None else Path(absolute_path(out))
    file_format = "PNG" if target is None else _require_output(target, path)
    source = open_rows(path, datasets, splits)
    shown = _sample_rows(source, per_class, max_classes, seed)
    rows = sorted(row for split in shown for one in split.classes for row in one.shown)
    index_of = dict(zip(rows, np.searchsorted(source.rows, rows).tolist(), strict=True))
    pictures, errors = _read(path, source, index_of, tile)
    lines = list(_lines(os.path.basename(path), source, seed, shown))
    sheet = _draw(lines, pictures, _captions(source.catalog, index_of), file_format)
    if target is not None:
        stream = io.BytesIO()
        sheet.save(stream, file_format, quality=90, subsampling=0)
        with reporting_disk_errors(target, "make room, or choose another folder"):
            write_atomically(Path(os.path.realpath(target)), stream.getvalue())
    names = source.catalog.names
    return PreviewReport(
        path=None if target is None else str(target),
        source=f"{os.fspath(path)} ({source.catalog.about})",
        width=sheet.width,
        height=sheet.height,
        rows=len(source),
        images=len(pictures),
        splits=shown,
        damaged=tuple(MissingRow(row, names[index_of[row]], str(error)) for row, error in errors.items()),
        sheet=sheet,
    )


def _require_output(target: Path, source: str | os.PathLike[str]) -> str:
    """Return the file format for `target`; raise if no picture can be written there."""
    file_format = _FORMATS.get(target.suffix.lower())
    if file_format is None:
        raise OptionsError.at(target, f"unknown format; give a name that ends in {', '.join(_FORMATS)}")
    require_writable(target.parent)
    require_replaceable(Path(os.path.realpath(target)), writable=False)
    if target.is_dir():
        raise OutputExistsError.at(target, "is a folder; give the name of a file")
    if target.exists() and os.path.exists(source) and os.path.samefile(target, source):
        raise OptionsError.at(target, "is the source file; give the picture another name")
    return file_format


def _require_size(width: int, height: int, file_format: str) -> None:
    max_side = _MAX_SIDES.get(file_format, MAX_PIXELS)
    if width * height > MAX_PIXELS or max(width, height) > max_side:
        raise OptionsError(
            f"the sheet would have {width:,} x {height:,} pixels; a {file_format} file may have at most "
            f"{MAX_PIXELS:,} pixels in total and {max_side:,} on each side; reduce per_class, max_classes or tile, or "
            "give only one split",
            parameters=("per_class", "max_classes", "tile"),
        )


def _sample_rows(source: SourceRows, per_class: int | None, max_classes: int, seed: int | None) -> list[ShownSplit]:
    catalog, generator = source.catalog, None if seed is None else np.random.default_rng(seed)
    names, found = catalog.label_names, []
    for number, name in enumerate(catalog.split_names):
        rows = source.rows[catalog.split_ids == number]
        if catalog.labels is None or catalog.labels.ndim > 1:
            shown = _some(rows, per_class or ROWS_WITHOUT_CLASSES, generator)
            found.append(ShownSplit(name, len(rows), [ShownClass(None, len(rows), shown)] if shown else [], 0, 0))
            continue
        labels = catalog.labels[catalog.split_ids == number]
        present = np.unique(labels).tolist()
        named = [label for label in present if label != schema.NO_LABEL or names is None]
        classes = []
        for label in (*named[:max_classes], *present[: len(present) - len(named)]):
            of_label = rows[labels == label]
            shown = _some(of_label, per_class or ROWS_PER_CLASS, generator)
            label_name = f"label {label}" if names is None else "no label" if label == schema.NO_LABEL else names[label]
            classes.append(ShownClass(label_name, len(of_label), shown))
        found.append(ShownSplit(name, len(rows), classes, len(named), max(0, len(named) - max_classes)))
    return found


def _some(rows: npt.NDArray[np.int64], max_count: int, generator: np.random.Generator | None) -> list[int]:
    """Return at most `max_count` rows in ascending order: random ones if a generator is given, else evenly spaced."""
    if len(rows) > max_count and generator is not None:
        rows = np.sort(generator.choice(rows, max_count, replace=False))
    elif len(rows) > max_count:
        rows = rows[np.arange(max_count) * len(rows) // max_count]
    found: list[int] = rows.tolist()
    return found


def _read(
    path: str | os.PathLike[str], source: SourceRows, index_of: dict[int, int], tile: int
) -> tuple[dict[int, Image.Image], dict[int, RejectedImageError]]:
    """Read and scale the images; return the pictures by row, and the errors of rows that cannot be shown."""
    reader, pictures, errors = source.reader, {}, {}
    reader.announce(list(index_of.values()))
    with strict_pillow():
        decoder = RowDecoder(quiet=True)
        for row, index in index_of.items():
            try:
                data = reader.read(index, "")
                picture = scaled(data if isinstance(data, np.ndarray) else decoder.pixels(data), tile)
                masks = [reader.read_field(number, index, "") for number in range(len(reader.pixel_fields))]
                pictures[row] = _beside(picture, masks)
                # All cells of the sheet have at least the size of this picture.
                _require_size(len(index_of) * pictures[row].width, pictures[row].height, file_format="PNG")
            except RejectedImageError as error:
                errors[row] = error
    if not pictures:
        first = next(iter(errors.values()))
        hint = "; give value_range" if "value_range" in first.parameters else ""
        raise DamagedRowsError(
            f"{os.fspath(path)}: none of the selected rows can be shown; reason for the first row: {first}{hint}",
            path=path,
            rows=tuple(errors),
            parameters=first.parameters,
        )
    return pictures, errors


def scaled(pixels: npt.NDArray[np.uint8], tile: int) -> Image.Image:
    """Scale uint8 pixels (h, w, 1 or 3) so that no side exceeds `tile` pixels; enlarge only by a whole factor."""
    image = image_of(pixels).convert("RGB")
    longest = max(image.size)
    if longest <= tile:
        factor = tile // longest
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    size = (max(1, round(image.width * tile / longest)), max(1, round(image.height * tile / longest)))
    return image.resize(size, Image.Resampling.LANCZOS)


def _beside(picture: Image.Image, masks: Sequence[npt.NDArray[Any]]) -> Image.Image:
    """Return a picture with its masks and further images to the right; mask values are drawn in 256 colors."""
    joined = Image.new("RGB", (picture.width * (1 + len(masks)), picture.height))
    joined.paste(picture)
    for number, mask in enumerate(masks, 1):
        if mask.ndim == 2:
            # No value outside 0 to 255 is drawn in the color of 0.
            colored = Image.fromarray(_COLORS[np.where(mask == mask & 255, mask, mask % 255 + 1)])
        else:
            colored = image_of(mask).convert("RGB")
        joined.paste(colored.resize(picture.size, Image.Resampling.NEAREST), (number * picture.width, 0))
    return joined


# The colors of Pascal VOC for the mask values 0 to 255, (256, 3): each channel has every third bit of the value, in
# reversed order.
_BITS = np.arange(256)[:, None] >> np.arange(24) & 1
_COLORS = (_BITS.reshape(256, 8, 3) << np.arange(7, -1, -1)[:, None]).sum(1).astype(np.uint8)


class _Line(NamedTuple):
    """A line of text on the sheet, or the images of `rows` side by side, wrapped if necessary."""

    text: str = ""
    size: int = _PLAIN
    color: str = _INK
    rows: Sequence[int] = ()


def _lines(name: str, source: SourceRows, seed: int | None, shown: list[ShownSplit]) -> Iterator[_Line]:
    form, index = source.reader.form, source.reader.index
    pixels = "encoded images" if form is None else f"{index.dtype} {index.row_shape}"
    yield _Line(name, _TITLE)
    yield _Line(f"{source.reader.images}: {counted(len(source), 'row')} of {pixels}", color=_GRAY)
    yield _Line("evenly spaced rows" if seed is None else f"rows drawn with seed {seed}", color=_GRAY)
    for split in shown:
        count = counted(split.rows, "row") + (f", {counted(split.named, 'class')}" if split.named else "")
        yield _Line()
        yield _Line(f"{split.name}: {count}", _HEADING)
        for one in split.classes:
            if one.name is not None:
                yield _Line(f"{one.name}: {counted(one.rows, 'row')}")
            yield _Line(rows=one.shown)
        if split.left_out:
            yield _Line(f"{counted(split.left_out, 'more class')} not shown")


def _captions(catalog: Catalog, index_of: dict[int, int]) -> dict[int, list[str]]:
    """Return the lines of text below each image: the row number and, if labels have columns, columns that are not 0."""
    found = {row: [f"row {row}"] for row in index_of}
    table, names = catalog.labels, catalog.label_names or ()
    if table is not None and table.ndim == 2:
        for row, index in index_of.items():
            values = zip(names, table[index].tolist(), strict=True)
            marks = [name if value == 1 else f"{name} = {value}" for name, value in values if value != 0]
            if len(marks) > _MAX_MARKS:
                marks[_MAX_MARKS - 1 :] = [f"+ {len(marks) - _MAX_MARKS + 1} more"]
            found[row] += marks
    return found


def _draw(
    lines: Sequence[_Line], pictures: dict[int, Image.Image], captions: dict[int, list[str]], file_format: str
) -> Image.Image:
    """Draw the lines from top to bottom, with images in cells of equal size; a damaged row gets a crossed-out cell."""
    cell = Image.new("RGB", np.max([picture.size for picture in pictures.values()], axis=0).tolist(), _PAPER)
    pen = ImageDraw.Draw(cell)
    pen.rectangle((0, 0, cell.width - 1, cell.height - 1), outline=_ALARM)
    pen.line((0, 0, cell.width - 1, cell.height - 1), _ALARM)
    pen.line((0, cell.height - 1, cell.width - 1, 0), _ALARM)

    columns = max(1, (_TILES_WIDTH + _GAP) // (cell.width + _GAP))
    lines = [
        line._replace(rows=line.rows[first : first + columns])
        for line in lines
        for first in range(0, len(line.rows) or 1, columns)
    ]
    tops, bottom = [], _MARGIN
    for line in lines:
        tops.append(bottom)
        texts = [_SMALL] * max((len(captions[row]) for row in line.rows), default=0) or [line.size]
        bottom += sum(round(size * _LEADING) for size in texts) + (cell.height + _GAP if line.rows else 0)
    used = max(len(line.rows) for line in lines)
    size = max(_MIN_WIDTH, 2 * _MARGIN + used * (cell.width + _GAP) - _GAP), bottom + _MARGIN
    _require_size(*size, file_format)
    sheet = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(sheet)
    for line, top in zip(lines, tops, strict=True):
        _write(pen, (_MARGIN, top), line.text, line.size, line.color, sheet.width - 2 * _MARGIN)
        for column, row in enumerate(line.rows):
            left = _MARGIN + column * (cell.width + _GAP)
            sheet.paste(pictures.get(row, cell), (left, top))
            for number, text in enumerate(captions[row]):
                below = top + cell.height + number * round(_SMALL * _LEADING)
                _write(pen, (left, below), text, _SMALL, _INK if number else _GRAY, cell.width)
    return sheet


def _write(pen: ImageDraw.ImageDraw, corner: tuple[int, int], text: str, size: int, color: str, max_width: int) -> None:
    """Draw a line of text, cut off at `max_width` pixels. Control characters, such as line breaks, are escaped."""
    text, font = printable(text), ImageFont.load_default(size)
    while text and font.getlength(text) > max_width:
        text = text[:-1]
    pen.text(corner, text, color, font)
