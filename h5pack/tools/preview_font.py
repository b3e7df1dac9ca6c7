"""Text on a contact sheet: which font has the signs, what no font has, and what fits."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from PIL import ImageFont
from PIL.ImageFont import FreeTypeFont

from h5pack.errors import OptionsError

# Pillow's own font has little more than ASCII. These have more, and are where Pillow looks on many machines.
_USUAL = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "LiberationSans-Regular.ttf",
    "NotoSansCJK-Regular.ttc",
    "Arial Unicode.ttf",
    "arial.ttf",
)
_NO_SIGN = "\U0010fff0"
_ELLIPSIS = "..."


class SheetText:
    """Writes in Pillow's own font; in another one what that has no signs for; and in escapes what none has.

    Parameters
    ----------
    file : str, optional
        A font to be tried first: TrueType or OpenType.

    Raises
    ------
    OptionsError
        If it is no font.
    """

    def __init__(self, file: str | None = None) -> None:
        self._file = file
        self._fonts: dict[tuple[str, int], FreeTypeFont] = {}
        if file is not None:
            try:
                ImageFont.truetype(file, 12)
            except OSError as error:
                raise OptionsError(f"font {file!r} cannot be read ({error}); name a .ttf or .otf file") from error

    def can_write(self, texts: Iterable[str]) -> bool:
        """Whether all of some texts can be written without escapes."""
        return all(self.written(text, 12)[0] == text for text in texts)

    def fitted(self, text: str, size: int, width: float) -> tuple[str, FreeTypeFont]:
        """A text, as far as it fits, and the font to write it in.

        Parameters
        ----------
        text : str
        size : int
            Of the font, in pixels.
        width : float
            In pixels.
        """
        text, font = self.written(text, size)
        if font.getlength(text) <= width:
            return text, font
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if font.getlength(text[:middle].rstrip() + _ELLIPSIS) <= width:
                low = middle
            else:
                high = middle - 1
        return text[:low].rstrip() + _ELLIPSIS, font

    def wrapped(self, text: str, size: int, width: float, most: int) -> list[tuple[str, FreeTypeFont]]:
        """A text in lines that fit; what is beyond the last one ends in dots.

        Parameters
        ----------
        text : str
        size, width
            As for `fitted`.
        most : int
            Lines.
        """
        text, font = self.written(text, size)
        lines: list[tuple[str, FreeTypeFont]] = []
        while text and len(lines) < most - 1 and font.getlength(text) > width:
            count = next(
                count for count in range(len(text), 0, -1) if count == 1 or font.getlength(text[:count]) <= width
            )
            # Where there is something to break at in the second half of the line.
            breaks = [place + 1 for place, sign in enumerate(text[:count]) if sign in " _-/" and place >= count // 2]
            count = breaks[-1] if breaks else count
            lines.append((text[:count].rstrip(), font))
            text = text[count:].lstrip()
        return [*lines, self.fitted(text, size, width)] if text or not lines else lines

    def width(self, text: str, size: int) -> float:
        """Of a text in one line, in pixels."""
        text, font = self.written(text, size)
        return font.getlength(text)

    def written(self, text: str, size: int) -> tuple[str, FreeTypeFont]:
        """A text in one line, with escapes for what cannot be shown, and a font that has all its signs."""
        plain = "".join(sign if sign.isprintable() else _escape(sign) for sign in text)
        for name in self._candidates():
            font = self._font(name, size)
            if font is not None and all(has_sign(font, sign) for sign in set(plain)):
                return plain, font
        font = self._own(size)
        return "".join(sign if has_sign(font, sign) else _escape(sign) for sign in plain), font

    def _candidates(self) -> Iterator[str]:
        if self._file is not None:
            yield self._file
        yield ""
        yield from other_fonts()

    def _font(self, name: str, size: int) -> FreeTypeFont | None:
        if not name:
            return self._own(size)
        found = self._fonts.get((name, size))
        if found is None:
            try:
                found = self._fonts[name, size] = ImageFont.truetype(name, size)
            except OSError:
                return None
        return found

    def _own(self, size: int) -> FreeTypeFont:
        found = self._fonts.get(("", size))
        if found is None:
            font = ImageFont.load_default(size)
            # Pillow has another one only where it was built without FreeType, and then refuses a size.
            assert isinstance(font, FreeTypeFont)
            found = self._fonts["", size] = font
        return found


def has_sign(font: FreeTypeFont, sign: str) -> bool:
    """Whether a font can write a sign: not by the box that stands for those it has not."""
    if sign.isspace():
        return True
    mask = font.getmask(sign)
    absent = font.getmask(_NO_SIGN)
    return mask.size != absent.size or bytes(mask) != bytes(absent)


@functools.cache
def other_fonts() -> tuple[str, ...]:
    """Fonts of this machine that have more signs than Pillow's, as far as they are found; matplotlib brings one."""
    found = list(_USUAL)
    spec = importlib.util.find_spec("matplotlib")
    if spec is not None and spec.origin is not None:
        found.append(str(Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"))
    readable = []
    for name in found:
        try:
            ImageFont.truetype(name, 12)
        except OSError:
            continue
        readable.append(name)
    return tuple(readable)


def _escape(sign: str) -> str:
    return sign.encode("unicode_escape").decode()
