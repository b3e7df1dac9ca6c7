"""Coordinate transforms that move boxes and points with the pixels of a resized or cropped image.

The arithmetic matches `h5pack.images.decode` and `h5pack.images.encode`, which resize with Pillow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from h5pack.format import schema
from h5pack.format.fields import RaggedRows
from h5pack.images.encode import fitted_size

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """How M images are resized or cropped: the point (x, y) of image i becomes ``(x, y) * scale[i] + offset[i]``.

    Coordinates are in pixels from the upper left corner; the first pixel covers 0 to 1. All arrays are float64, (M, 2),
    horizontal before vertical. `h5pack.device.targets.AxisMap` is such a map in torch, for one axis and with flips.
    """

    scale: Floats
    offset: Floats
    size: Floats  # width and height of the results

    @classmethod
    def of(
        cls, heights: npt.NDArray[np.int32], widths: npt.NDArray[np.int32], height: int, width: int, fit: str
    ) -> Placement:
        """Return how M images of `heights` x `widths` pixels are resized to `height` x `width` pixels.

        `fit` is the option of `h5pack.convert`: crop, pad or stretch.
        """
        old = np.maximum(np.stack([widths, heights], axis=1), 1).astype(np.float64)
        new = np.broadcast_to(np.array([width, height], np.float64), old.shape)
        if fit == "stretch":
            return cls(new / old, np.zeros_like(old), new)
        ratio, wanted = old[:, 0] / old[:, 1], width / height
        wide = ratio >= wanted
        if fit == "crop":
            # As in ImageOps.fit, the crop around the center may begin at a fraction of a pixel.
            crop = old.copy()
            crop[wide, 0], crop[~wide, 1] = wanted * old[wide, 1], old[~wide, 0] / wanted
            scale = new / crop
            return cls(scale, -(old - crop) / 2 * scale, new)
        # As in `h5pack.images.decode.resized`, both sides get at least one pixel.
        inner = new.copy()
        inner[wide, 1] = np.maximum(1, np.rint(old[wide, 1] / old[wide, 0] * width))
        inner[~wide, 0] = np.maximum(1, np.rint(ratio[~wide] * height))
        return cls(inner / old, np.rint((new - inner) * 0.5), new)

    @classmethod
    def shrunk(cls, heights: npt.NDArray[np.int32], widths: npt.NDArray[np.int32], max_side: int | None) -> Placement:
        """Return how M images of `heights` x `widths` pixels are shrunk so that no side exceeds `max_side` pixels.

        If `max_side` is None, no image is shrunk.
        """
        old = np.maximum(np.stack([widths, heights], axis=1), 1)
        new = old.copy()
        for index in np.flatnonzero(old.max(axis=1) > (max_side or math.inf)).tolist():
            new[index] = fitted_size(int(old[index, 1]), int(old[index, 0]), max_side)[::-1]
        return cls(new / old, np.zeros(old.shape), new.astype(np.float64))

    def moved(self, rows: RaggedRows) -> RaggedRows:
        """Return boxes or keypoints, float32, moved with their images; row i belongs to image i."""
        counts = np.diff(rows.offsets)
        own = Placement(*(np.repeat(part, counts, axis=0) for part in (self.scale, self.offset, self.size)))
        move = {schema.BOXES: own.boxes, schema.KEYPOINTS: own.points}[rows.kind]
        return replace(rows, data=move(rows.data.astype(np.float64)).astype(np.float32))

    def boxes(self, boxes: Floats) -> Floats:
        """Return box corners, (M, 4), one box of each image, moved with the images and clipped to the results.

        A box that is completely outside of the result gets an area of 0.
        """
        scale, offset, size = (np.tile(part, 2) for part in (self.scale, self.offset, self.size))
        return np.minimum(np.maximum(boxes * scale + offset, 0), size)

    def points(self, points: Floats) -> Floats:
        """Return points, (M, 2) or with visibility (M, 3), one of each image, moved with the images.

        They are not clipped. The visibility of a point outside of the result becomes 0.
        """
        placed: Floats = points.copy()
        placed[:, :2] = points[:, :2] * self.scale + self.offset
        if points.shape[1] == 3:
            placed[:, 2] *= ((placed[:, :2] >= 0) & (placed[:, :2] <= self.size)).all(axis=1)
        return placed


def turned_upright(points: Floats, orientation: int, height: int, width: int) -> Floats:
    """Convert points, (n, 2), from the coordinates of a stored image to those of the upright image.

    `orientation` is the image's Exif orientation, 5 to 8; `height` and `width` are the size of the upright image.
    """
    x, y = points[:, 1], points[:, 0]
    if orientation in (6, 7):
        x = width - x
    if orientation in (7, 8):
        y = height - y
    return np.stack([x, y], axis=1)
