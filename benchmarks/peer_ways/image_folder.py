"""A folder of JPEGs, as all ways get it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

_BLOCK = 64


def decode(path: Path) -> npt.NDArray[np.uint8]:
    """An image by Pillow, uint8 (H, W, 3)."""
    with Image.open(path) as opened:
        return np.array(opened.convert("RGB"))


def decode_quickly(path: Path) -> npt.NDArray[np.uint8]:
    """An image by simplejpeg, or by Pillow where that is missing: the same pixels, uint8 (H, W, 3).

    h5pack decodes so. With a slower decoder of their own the peers' conversions would measure decoders, not formats.
    """
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        return decode(path)
    image: npt.NDArray[np.uint8] = decode_jpeg(path.read_bytes(), colorspace="RGB")
    return image


class ImageFolder:
    """Images in class folders; a map-style dataset of decoded images and labels, as FFCV's writer wants one.

    Parameters
    ----------
    folder : Path
        Holds a folder of JPEGs for each class; all images are of one size.

    Attributes
    ----------
    folder : Path
    paths : list of Path
    labels : ndarray
        int64 (N,): the place of the class's name among the sorted names.
    shape : tuple of int
        (H, W, 3).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        found = [(path, label) for label, name in enumerate(classes) for path in sorted(name.glob("*.jpg"))]
        self.paths = [path for path, _ in found]
        self.labels = np.array([label for _, label in found], np.int64)
        self.shape = decode(self.paths[0]).shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        return decode_quickly(self.paths[index]), int(self.labels[index])

    def decoded(self, workers: int) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
        """All images in order, decoded by `workers` processes, for writers that have no workers of their own.

        Yields
        ------
        (ndarray, ndarray)
            Up to 64 images, uint8 (n, H, W, 3), and their labels, int64 (n,).
        """
        blocks = [range(start, min(len(self), start + _BLOCK)) for start in range(0, len(self), _BLOCK)]
        with multiprocessing.Pool(workers) as pool:
            decoded = pool.imap(_decode_all, [[self.paths[index] for index in block] for block in blocks])
            for block, images in zip(blocks, decoded, strict=True):
                yield images, self.labels[block.start : block.stop]


def _decode_all(paths: list[Path]) -> npt.NDArray[np.uint8]:
    return np.stack([decode_quickly(path) for path in paths])
