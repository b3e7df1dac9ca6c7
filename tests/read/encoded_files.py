"""HDF5 files whose rows are encoded images, and their pixels as decoded by Pillow."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from tests.makers import pixels

SIZE = (20, 14)


def encode(image: Image.Image | npt.NDArray[np.uint8], kind: str = "JPEG", **settings: Any) -> bytes:
    """An image file's bytes."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def oriented(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def jpegs(count: int, size: tuple[int, int] = SIZE) -> list[bytes]:
    """Different JPEGs of one size."""
    return [encode(pixels(seed, size)) for seed in range(count)]


def kinds() -> dict[str, bytes]:
    """Images of many kinds, all 20x14 upright."""
    image = Image.fromarray(pixels(1, SIZE))
    found = {
        "jpeg": encode(image),
        "jpeg 444": encode(image, subsampling=0),
        "progressive": encode(image, progressive=True),
        "gray jpeg": encode(image.convert("L")),
        "cmyk jpeg": encode(image.convert("CMYK")),
        "png": encode(image, "PNG"),
        "gray png": encode(image.convert("L"), "PNG"),
        "palette png": encode(image.convert("P"), "PNG"),
        "webp": encode(image, "WEBP", lossless=True),
        "bmp": encode(image, "BMP"),
        "tiff": encode(image, "TIFF"),
        "gif": encode(image.convert("P"), "GIF"),
    }
    for orientation in range(1, 9):
        turned = Image.fromarray(pixels(2, SIZE if orientation < 5 else SIZE[::-1]))
        found[f"orientation {orientation}"] = encode(turned, exif=oriented(orientation))
        found[f"png, orientation {orientation}"] = encode(turned, "PNG", exif=oriented(orientation))
    return found


def write_encoded(path: Path, rows: Sequence[bytes], name: str = "images", dtype: str = "u1", **settings: Any) -> Path:
    """Write a dataset of encoded rows, and labels that are their row numbers."""
    with h5py.File(path, "a") as file:
        dataset = file.create_dataset(name, (len(rows),), h5py.vlen_dtype(np.dtype(dtype)), **settings)
        for row, data in enumerate(rows):
            dataset[row] = np.frombuffer(data, dtype)
        if "labels" not in file:
            file["labels"] = np.arange(len(rows))
    return path


def write_kept(path: Path, rows: Sequence[bytes], chunk: int = 1000, compression: str | None = None) -> Path:
    """Write what a pack that keeps JPEG bytes has for its images, and labels that are the rows' numbers."""
    with h5py.File(path, "w") as file:
        joined = np.frombuffer(b"".join(rows), np.uint8)
        file.create_dataset("encoded/data", data=joined, chunks=(chunk,), maxshape=(None,), compression=compression)
        file["encoded/offsets"] = np.cumsum([0, *map(len, rows)])
        sizes = {row: decoded(row).shape[:2] for row in set(rows)}
        file["encoded/size"] = np.array([sizes[row] for row in rows], np.int32).reshape(-1, 2)
        file["checksums/encoded"] = np.array([zlib.crc32(row) for row in rows], np.uint32)
        file["labels"] = np.arange(len(rows))
    return path


def decoded(data: bytes) -> npt.NDArray[np.uint8]:
    """Pixels of an image, upright, uint8 (h, w, 3)."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image.convert("RGB") if image.mode == "P" else image).convert("RGB"))
