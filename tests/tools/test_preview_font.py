"""Every name can be read: in a font that has its signs, or in escapes, and never beyond its place."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from h5pack.tools import preview_font
from h5pack.tools.preview import PreviewOptions, preview
from h5pack.tools.preview_font import SheetText, has_sign, other_fonts


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> SheetText:
    """On a machine without fonts."""
    monkeypatch.setattr(preview_font, "other_fonts", lambda: ())
    return SheetText()


def test_what_pillows_own_font_has(bare: SheetText) -> None:
    text, font = bare.written("Cat, dog_1 (x/y)", 14)
    assert text == "Cat, dog_1 (x/y)"
    assert all(has_sign(font, sign) for sign in text)
    assert not has_sign(font, "\u732b")
    assert font.getlength("wide") > font.getlength("i")


def test_signs_that_no_font_has_are_escaped(bare: SheetText) -> None:
    assert bare.written("\u732b cat", 14)[0] == "\\u732b cat"
    assert bare.written("line\nbreak\u200e", 14)[0] == "line\\nbreak\\u200e"
    assert bare.can_write(["cat", "dog"])
    assert not bare.can_write(["cat", "\u732b"])


def test_another_font_writes_what_pillows_has_not() -> None:
    fonts = other_fonts()
    if not any("DejaVu" in font for font in fonts):
        pytest.skip("needs the font DejaVu Sans, which matplotlib brings: pip install matplotlib")
    text, font = SheetText().written("caf\u00e9 \u0416", 14)
    assert text == "caf\u00e9 \u0416"
    assert "Aileron" not in font.getname()
    assert "Aileron" in SheetText().written("plain", 14)[1].getname()
    chosen = next(name for name in fonts if "DejaVu" in name)
    assert "DejaVu Sans" in SheetText(chosen).written("plain", 14)[1].getname()


def test_text_that_is_too_long_ends_in_dots(bare: SheetText) -> None:
    text, font = bare.fitted("a very long name of a class", 14, 90)
    assert text.endswith("...")
    assert text.startswith("a very")
    assert font.getlength(text) <= 90
    assert bare.fitted("short", 14, 90)[0] == "short"
    assert bare.fitted("wide", 14, 3)[0] == "..."


def test_names_are_broken_where_they_can_be(bare: SheetText) -> None:
    lines = bare.wrapped("great white shark, white shark, man-eater", 14, 110, 3)
    assert [font.getlength(line) <= 110 for line, font in lines] == [True] * 3
    assert lines[0][0] == "great white"
    assert " ".join(line for line, _ in lines).startswith("great white shark, white shark")
    (one,) = bare.wrapped("x" * 60, 14, 110, 1)
    assert one[0].endswith("...")
    unbroken = bare.wrapped("x" * 20, 14, 110, 3)
    assert "".join(line for line, _ in unbroken) == "x" * 20
    assert [line for line, _ in bare.wrapped("", 14, 110, 3)] == [""]


def test_the_sheet_says_that_there_are_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heights = {}
    monkeypatch.setattr(preview_font, "other_fonts", lambda: ())
    for name in ("cat", "\u732b"):
        with h5py.File(tmp_path / "f.h5", "w") as file:
            file["images"] = np.zeros((2, 9, 9), np.uint8)
            file["labels"] = [0, 0]
            file["labels"].attrs["classes"] = [name]
        heights[name] = preview(tmp_path / "f.h5", tmp_path / "o.png", PreviewOptions(tile=32)).height
        with Image.open(tmp_path / "o.png") as image:
            assert image.height == heights[name]
    # A line more under the title.
    assert heights["\u732b"] > heights["cat"]
