"""Where things stand on a sheet."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from h5pack.tools.contact_sheet import ContactSheet, Section, Strip, Tile, scaled
from h5pack.tools.preview_font import SheetText
from tests.makers import pixels

COLOURS = ("#ff0000", "#00ff00", "#0000ff", "#ffff00", "#00ffff", "#ff00ff")


def tiles(count: int, size: tuple[int, int] = (40, 30), **settings: tuple[str, ...]) -> list[Tile]:
    return [Tile(Image.new("RGB", size, COLOURS[n % 6]), f"row {n}", **settings) for n in range(count)]


def drawn(*sections: Section) -> npt.NDArray[np.uint8]:
    sheet = ContactSheet("file.h5", ["a note"], sections, SheetText())
    image = sheet.draw()
    assert image.size == (sheet.width, sheet.height)
    return np.asarray(image)


def boxes(sheet: npt.NDArray[np.uint8], colour: str) -> list[tuple[int, int, int, int]]:
    """Top, left, height and width of each rectangle of a colour."""
    wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    here = (sheet == wanted).all(axis=2)
    corners = here & ~np.roll(here, 1, axis=0) & ~np.roll(here, 1, axis=1)
    found = []
    for top, left in zip(*map(np.ndarray.tolist, np.nonzero(corners)), strict=True):
        height = int(np.argmin(here[top:, left])) or len(sheet) - top
        width = int(np.argmin(here[top, left:]))
        assert here[top : top + height, left : left + width].all()
        found.append((top, left, height, width))
    return found


def test_lines_of_pictures() -> None:
    sheet = drawn(Section("train", "60 rows", [Strip("cat", "60 rows", tiles(60))]))
    found = sorted(box for colour in COLOURS for box in boxes(sheet, colour))
    assert len(found) == 60
    assert {box[2:] for box in found} == {(30, 40)}
    lines = sorted({box[0] for box in found})
    # 25 pictures of 40 and gaps of 8 would fit; 20 leave no rest.
    assert [sum(box[0] == top for box in found) for top in lines] == [20, 20, 20]
    lefts = sorted({box[1] for box in found})
    assert set(np.diff(lefts).tolist()) == {48}
    assert lefts[-1] + 40 + 24 == sheet.shape[1]
    assert lines[-1] + 30 < len(sheet) - 20


def test_captions_and_marks_lie_between_the_lines() -> None:
    plain = drawn(Section("all", "", [Strip(None, "", tiles(2))]))
    marked = drawn(Section("all", "", [Strip(None, "", tiles(2, marks=("one", "two")))]))
    many = drawn(Section("all", "", [Strip(None, "", tiles(2, marks=tuple("abcdefghijklmnop")))]))
    # At most twelve lines, the last of which counts the others.
    assert len(marked) - len(plain) == 2 * 15
    assert len(many) - len(plain) == 12 * 15
    (top, left, height, width), *_ = boxes(marked, COLOURS[0])
    below = marked[top + height + 1 :, left : left + width]
    assert (below < 80).any()
    assert left == 24


def test_names_stand_on_the_left_and_long_ones_stay_there() -> None:
    sheet = drawn(Section("all", "", [Strip("class " * 30, "9 rows", tiles(3)), Strip("b", "1 row", tiles(1))]))
    (top, left, *_), (other, second, *_) = sorted(boxes(sheet, COLOURS[0]))
    assert left == second == 24 + 200 + 16
    assert other - top >= 3 * 20
    names = sheet[top:other, : left - 1]
    assert (names[:, 24:225] < 80).any()
    assert (names[:, :24] > 250).all()
    assert (names[:, 226:] > 250).all()


def test_an_ending_and_a_heading_cost_a_line() -> None:
    strips = [Strip("a", "1 row", tiles(1))]
    plain, ended = drawn(Section("all", "", strips)), drawn(Section("all", "", strips, "3 more classes not shown"))
    assert len(ended) - len(plain) == 19
    two = drawn(Section("all", "", strips), Section("more", "", strips))
    assert len(boxes(two, COLOURS[0])) == 2


def test_a_picture_that_there_is_not() -> None:
    sheet = drawn(Section("all", "", [Strip(None, "", [*tiles(1), Tile(None, "row 1: damaged")])]))
    ((top, left, height, width),) = boxes(sheet, COLOURS[0])
    cell = sheet[top : top + height, left + 48 : left + 48 + width]
    red = (cell == (0xB3, 0x26, 0x1E)).all(axis=2)
    assert red[0, 0]
    assert red[0, -1] or red[1, -1]
    assert 40 < red.sum() < 150


def test_a_sheet_without_pictures() -> None:
    assert drawn(Section("val", "0 rows", [])).shape[1] == 640
    assert drawn().shape[1] == 640


@pytest.mark.parametrize(
    ("size", "tile", "wanted"),
    [
        ((28, 28), 128, (112, 112)),
        ((100, 60), 128, (100, 60)),
        ((64, 128), 128, (64, 128)),
        ((218, 178), 109, (109, 89)),
        ((9, 1000), 100, (1, 100)),
    ],
)
def test_sizes(size: tuple[int, int], tile: int, wanted: tuple[int, int]) -> None:
    picture = pixels(0, size)
    image = scaled(picture, tile)
    assert image.size == wanted[::-1]
    found = np.asarray(image).astype(int)
    if wanted == size:
        assert np.array_equal(found, picture)
    elif wanted > size:
        factor = wanted[0] // size[0]
        assert np.array_equal(found, picture.repeat(factor, 0).repeat(factor, 1))
    else:
        assert np.abs(found.mean((0, 1)) - picture.mean((0, 1))).max() < 3


def test_gray_and_turned_pictures() -> None:
    gray = pixels(0, (20, 14))[:, :, :1]
    assert np.array_equal(np.asarray(scaled(gray, 20)), gray.repeat(3, 2))
    first = pixels(0, (20, 14)).transpose(2, 0, 1).copy().transpose(1, 2, 0)
    assert np.array_equal(np.asarray(scaled(first, 20)), first)
