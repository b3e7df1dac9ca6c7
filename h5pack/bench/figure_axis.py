"""Where the forms of chunks stand along a picture's axis, and where in it there is room for words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from h5pack.bench.cell import Stored

_LABEL_INCHES = 0.72
_SIGN_INCHES = 0.068
"""Of a name in 8 points, with the room beside it."""


class ChunkAxis:
    """Places of stored forms: chunks by the logarithm of their bytes, whatever has none of its own to the right.

    Parameters
    ----------
    forms : sequence of Stored
    inches : float
        Length of the axis, about.

    Attributes
    ----------
    line : list of Stored
        Chunks that were made, ascending.
    apart : list of Stored
        Rows without chunks, and the file that was asked about.
    places : dict of str to float
        By label.
    limits : (float, float)
    border : float or None
        Between `line` and `apart`, where there are both.
    """

    def __init__(self, forms: Sequence[Stored], inches: float) -> None:
        self.line = [form for form in forms if not form.own and form.chunk_bytes]
        self.apart = [form for form in forms if form not in self.line]
        self.apart.sort(key=lambda form: form.own)
        self.places = {form.label: math.log2(form.chunk_bytes or 1) for form in self.line}
        low, high = min(self.places.values(), default=0.0), max(self.places.values(), default=0.0)
        # Of the whole width W a share r is a name's: what stands apart takes r W each, the margins r W together.
        share = _LABEL_INCHES / inches
        whole = max(high - low, 1.0) / max(0.2, 1 - share * (len(self.apart) + 1))
        step = share * whole
        self.border = high + 0.5 * step if self.line and self.apart else None
        for number, form in enumerate(self.apart):
            self.places[form.label] = high + step * (number + (1 if self.line else 0))
        right = max(self.places.values(), default=0.0)
        margin = max(step, whole - (right - low)) / 2
        self.limits = (low - margin, right + margin)
        self._unit_inches = inches / (self.limits[1] - self.limits[0])

    def place(self, form: Stored) -> float | None:
        """Where a form stands, also a compressed one, which is at its chunks' bytes; None: nowhere."""
        return self.places.get(form.label, None if not form.chunk_bytes else math.log2(form.chunk_bytes))

    def labelled(self, important: str | None, names: dict[str, str]) -> list[Stored]:
        """Forms whose names fit under the axis without touching: the important one, what stands apart, ends, others.

        Parameters
        ----------
        important : str or None
            Label of a form.
        names : dict of str to str
            By label; of one line or several.
        """
        widths = {label: _SIGN_INCHES * max(map(len, name.split("\n"))) for label, name in names.items()}
        forms = [*self.line, *self.apart]
        first = [form for form in forms if form.label == important] + self.apart + self.line[:1] + self.line[-1:]
        chosen: list[Stored] = []
        for form in [*first, *forms]:
            if all(self._apart(form, other) > (widths[form.label] + widths[other.label]) / 2 for other in chosen):
                chosen.append(form)
        return sorted(chosen, key=lambda form: self.places[form.label])

    def _apart(self, form: Stored, other: Stored) -> float:
        return abs(self.places[form.label] - self.places[other.label]) * self._unit_inches


def free_height(heights: Sequence[float], top: float, close_to: float) -> float:
    """The middle of the widest free band between 0 and `top`; of bands about as wide, the nearest to `close_to`."""
    edges = [0.0, *sorted(height for height in heights if 0 <= height <= top), top]
    bands = [(high - low, (low + high) / 2) for low, high in pairwise(edges)]
    widest = max(width for width, _ in bands)
    return min((abs(middle - close_to), middle) for width, middle in bands if width >= 0.8 * widest)[1]
