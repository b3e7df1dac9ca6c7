"""A contact sheet: pictures in lines, a heading for each split and a name for each class, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from h5pack.tools.preview_font import SheetText

_MARGIN, _GAP = 24, 8
_TILES_WIDTH = 1_200
_LEAST_WIDTH = 640
_NAME_WIDTHS = (56, 200)
_TITLE, _HEADING, _NAME, _PLAIN, _SMALL, _MARK = 24, 19, 15, 14, 12, 11
_MOST_MARKS = 12
_INK, _GRAY, _RULE, _PAPER, _ALARM = "#1b1b1f", "#63636b", "#c9c9d1", "#ffffff", "#b3261e"
_LEADING = 1.35


@dataclass(frozen=True)
class Tile:
    """One picture.

    Attributes
    ----------
    image : Image or None
        At the size in which it is shown; None: it cannot be.
    caption : str
        Under it.
    marks : tuple of str
        Further lines under it.
    """

    image: Image.Image | None
    caption: str
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Strip:
    """The pictures of a class.

    Attributes
    ----------
    name : str or None
        On its left; None: the pictures take the whole width.
    note : str
        Under the name.
    tiles : sequence of Tile
    """

    name: str | None
    note: str
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it.

    Attributes
    ----------
    title, note : str
    strips : sequence of Strip
    ending : str
        What is to be said behind the last strip.
    """

    title: str
    note: str
    strips: Sequence[Strip]
    ending: str = ""


@dataclass(frozen=True)
class _Place:
    """A strip, laid out."""

    strip: Strip
    names: list[str]
    lines: list[Sequence[Tile]]
    line_heights: list[int]
    height: int


class ContactSheet:
    """Lays out and draws a sheet.

    Parameters
    ----------
    title : str
    notes : sequence of str
        Lines under the title.
    sections : sequence of Section
    text : SheetText

    Attributes
    ----------
    width, height : int
        In pixels.
    """

    def __init__(self, title: str, notes: Sequence[str], sections: Sequence[Section], text: SheetText) -> None:
        self._title, self._notes, self._sections, self._text = title, notes, sections, text
        tiles = [tile for section in sections for strip in section.strips for tile in strip.tiles]
        sizes = [tile.image.size for tile in tiles if tile.image is not None] or [(64, 64)]
        self._cell = max(width for width, _ in sizes), max(height for _, height in sizes)
        longest = max((len(strip.tiles) for section in sections for strip in section.strips), default=1)
        self._columns = _even_columns(longest, max(1, (_TILES_WIDTH + _GAP) // (self._cell[0] + _GAP)))
        named = [strip.name for section in sections for strip in section.strips if strip.name is not None]
        least, most = _NAME_WIDTHS
        widest = max((text.width(name, _NAME) for name in named), default=0)
        self._names_width = round(min(max(widest, least), most)) if named else 0
        self._left = _MARGIN + (self._names_width + 2 * _GAP if named else 0)
        used = min(longest, self._columns)
        # Whatever the names are, headings need some room.
        self.width = max(_LEAST_WIDTH, self._left + used * (self._cell[0] + _GAP) - _GAP + _MARGIN)
        self._places = [[self._place(strip) for strip in section.strips] for section in sections]
        *_, end = self._heights()
        self.height = end + _MARGIN // 2

    def draw(self) -> Image.Image:
        """The sheet."""
        sheet = Image.new("RGB", (self.width, self.height), _PAPER)
        pen = ImageDraw.Draw(sheet)
        self._write(pen, (_MARGIN, _MARGIN), self._title, _TITLE, _INK, self.width - 2 * _MARGIN)
        for top, line in zip(self._note_tops(), self._notes, strict=True):
            self._write(pen, (_MARGIN, top), line, _PLAIN, _GRAY, self.width - 2 * _MARGIN)
        for section, places, top in zip(self._sections, self._places, self._heights(), strict=False):
            self._draw_section(sheet, pen, section, places, top)
        return sheet

    def _place(self, strip: Strip) -> _Place:
        names = [] if strip.name is None else self._text.wrapped(strip.name, _NAME, self._names_width, 3)
        lines = [strip.tiles[first : first + self._columns] for first in range(0, len(strip.tiles), self._columns)]
        heights = []
        for line in lines:
            marked = max(len(self._shown_marks(tile)) for tile in line)
            heights.append(self._cell[1] + _leading(_SMALL) + _leading(_MARK) * marked + _GAP)
        beside = _leading(_NAME) * len(names) + _leading(_SMALL) + _GAP if names else 0
        return _Place(strip, [name for name, _ in names], lines, heights, max(sum(heights), beside))

    @staticmethod
    def _shown_marks(tile: Tile) -> list[str]:
        """The lines under a picture; what is too much is counted."""
        if len(tile.marks) <= _MOST_MARKS:
            return list(tile.marks)
        left = len(tile.marks) - _MOST_MARKS + 1
        return [*tile.marks[: _MOST_MARKS - 1], f"+ {left} more"]

    def _note_tops(self) -> Iterator[int]:
        top = _MARGIN + _leading(_TITLE)
        return (top + _leading(_PLAIN) * number for number in range(len(self._notes)))

    def _heights(self) -> Iterator[int]:
        """Where each section begins, and where the sheet ends."""
        first = _MARGIN + _leading(_TITLE) + _leading(_PLAIN) * len(self._notes)
        sections = zip(self._sections, self._places, strict=True)
        return accumulate((self._section_height(section, places) for section, places in sections), initial=first)

    def _section_height(self, section: Section, places: list[_Place]) -> int:
        ending = _leading(_PLAIN) if section.ending else 0
        return self._heading_height + sum(place.height for place in places) + ending

    @property
    def _heading_height(self) -> int:
        return _MARGIN + _leading(_HEADING) + 2 * _GAP

    def _draw_section(
        self, sheet: Image.Image, pen: ImageDraw.ImageDraw, section: Section, places: list[_Place], top: int
    ) -> None:
        base = top + _MARGIN
        right = self._write(pen, (_MARGIN, base), section.title, _HEADING, _INK, self.width // 2)
        # On the same line of writing.
        down = round((_HEADING - _PLAIN) * 0.8)
        self._write(pen, (right + 2 * _GAP, base + down), section.note, _PLAIN, _GRAY, self.width - right - 3 * _MARGIN)
        rule = base + _leading(_HEADING) + 2
        pen.line((_MARGIN, rule, self.width - _MARGIN, rule), _RULE)
        top += self._heading_height
        for place in places:
            self._draw_names(pen, place, top)
            tops = accumulate(place.line_heights, initial=top)
            for line, line_top in zip(place.lines, tops, strict=False):
                for column, tile in enumerate(line):
                    self._draw_tile(sheet, pen, tile, (self._left + column * (self._cell[0] + _GAP), line_top))
            top += place.height
        if section.ending:
            self._write(pen, (_MARGIN, top), section.ending, _PLAIN, _INK, self.width - 2 * _MARGIN)

    def _draw_names(self, pen: ImageDraw.ImageDraw, place: _Place, top: int) -> None:
        if place.strip.name is None:
            return
        for name in place.names:
            self._write(pen, (_MARGIN, top), name, _NAME, _INK, self._names_width)
            top += _leading(_NAME)
        self._write(pen, (_MARGIN, top), place.strip.note, _SMALL, _GRAY, self._names_width)

    def _draw_tile(self, sheet: Image.Image, pen: ImageDraw.ImageDraw, tile: Tile, corner: tuple[int, int]) -> None:
        left, top = corner
        width, height = self._cell if tile.image is None else tile.image.size
        # In the middle of its cell.
        box_left, box_top = left + (self._cell[0] - width) // 2, top + (self._cell[1] - height) // 2
        frame = (box_left - 1, box_top - 1, box_left + width, box_top + height)
        if tile.image is None:
            pen.rectangle(frame, outline=_ALARM)
            pen.line((frame[0], frame[1], frame[2], frame[3]), _ALARM)
            pen.line((frame[0], frame[3], frame[2], frame[1]), _ALARM)
        else:
            # So that a white picture has an edge.
            pen.rectangle(frame, outline=_RULE)
            sheet.paste(tile.image, (box_left, box_top))
        top += self._cell[1] + 2
        self._write(pen, (left, top), tile.caption, _SMALL, _ALARM if tile.image is None else _GRAY, self._cell[0])
        top += _leading(_SMALL)
        for mark in self._shown_marks(tile):
            self._write(pen, (left, top), mark, _MARK, _INK, self._cell[0])
            top += _leading(_MARK)

    def _write(
        self, pen: ImageDraw.ImageDraw, corner: tuple[int, int], text: str, size: int, colour: str, width: int
    ) -> int:
        """Write as much of a line as fits; gives where it ends."""
        text, font = self._text.fitted(text, size, width)
        pen.text(corner, text, colour, font)
        return round(corner[0] + font.getlength(text))


def scaled(pixels: npt.NDArray[np.uint8], tile: int) -> Image.Image:
    """A picture that fits a square of `tile` pixels; small ones grow by whole factors, with hard edges.

    Parameters
    ----------
    pixels : ndarray
        uint8, (h, w, 1 or 3).
    tile : int
    """
    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)).convert("RGB")
    longest = max(image.size)
    if longest <= tile:
        factor = tile // longest
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    size = (max(1, round(image.width * tile / longest)), max(1, round(image.height * tile / longest)))
    return image.resize(size, Image.Resampling.LANCZOS)


def _even_columns(count: int, most: int) -> int:
    """Pictures a line: as many as leave no rest, where that is at least half of what fits."""
    return next((columns for columns in range(most, most // 2, -1) if count % columns == 0), most)


def _leading(size: int) -> int:
    """Height of a line of text."""
    return round(size * _LEADING)
