"""Decoding a region of a JPEG, with less work than decoding all of it.

nvImageCodec does so on the CPU; no GPU is needed. It is used if it is installed and gives Pillow's pixels.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.images.decode import sample_jpegs
from h5pack.images.headers import DecodePath

Pixels = npt.NDArray[np.uint8]

MAX_SHARE = 0.55
"""Fraction of an image's pixels up to which decoding a region is faster than decoding all of it with simplejpeg.

CPU time of a region as a part of that of the whole image, 1,200 windows of 200 photos of 512 pixels, by the share of
the pixels: 0.67 (0.1 to 0.2), 0.81 (0.3 to 0.4), 0.99 (0.5 to 0.6), 1.11 (0.7 to 0.8).
"""


class RegionDecoder:
    """Decodes regions of upright 8-bit JPEGs, gray or YCbCr, to RGB. Each thread has its own."""

    def __init__(self) -> None:
        from nvidia import nvimgcodec

        self._codec = nvimgcodec
        self._decoder: Any = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
        )

    def decode(self, data: bytes, top: int, left: int, height: int, width: int) -> Pixels | None:
        """Return the pixels of a region within the image, uint8 (height, width, 3), or None if decoding fails."""
        codec = self._codec
        region = codec.Region(top, left, top + height, left + width)
        found = self._decoder.decode(codec.CodeStream(data).get_sub_code_stream(region=region))
        pixels = None if found is None else np.asarray(found)
        return pixels if pixels is not None and pixels.shape == (height, width, 3) else None


class _Decoders(threading.local):
    process = 0
    decoder: RegionDecoder | None = None


_decoders = _Decoders()


def region_decoder(decode_path: DecodePath) -> RegionDecoder | None:
    """Return this thread's decoder, or None if whole images of this kind must be decoded."""
    if decode_path not in _proven_paths():
        return None
    # A forked child has none of the parent's threads, on which a decoder may depend.
    if _decoders.process != os.getpid():
        _decoders.process, _decoders.decoder = os.getpid(), RegionDecoder()
    return _decoders.decoder


@functools.cache
def _proven_paths() -> frozenset[DecodePath]:
    """Return the kinds of JPEG of which the installed nvImageCodec, if any, decodes regions to exactly Pillow's pixels.

    Every kind is tested on small images, baseline and progressive, with regions that begin and end inside of blocks.
    """
    try:
        with _quiet():
            decoder = RegionDecoder()
            return frozenset(path for path in DecodePath if path != DecodePath.PILLOW and _is_exact(decoder, path))
    except Exception:
        # It is not installed, or does not work on this machine. Whole images give the same pixels.
        return frozenset()


def _is_exact(decoder: RegionDecoder, decode_path: DecodePath) -> bool:
    for data in sample_jpegs(decode_path):
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(image.convert("RGB"))
        height, width = expected.shape[:2]
        for top, left, bottom, right in ((0, 0, height, width), (7, 11, 30, 46), (17, 1, 18, 52), (16, 16, 32, 48)):
            found = decoder.decode(data, top, left, bottom - top, right - left)
            if found is None or not np.array_equal(found, expected[top:bottom, left:right]):
                return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what is written to standard error meanwhile: nvImageCodec reports each GPU library that is not installed."""
    try:
        original, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:
        # A daemon may have closed its standard error.
        yield
        return
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(nothing)
