"""Decoding a window of a JPEG, with less work than decoding the whole image.

nvImageCodec decodes only the window, on the CPU; no GPU is needed. simplejpeg decodes all rows from the top of the
image to the end of the window. Each of these two packages is used only if it is installed and gives the same pixels as
Pillow.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.images.decode import sample_jpegs
from h5pack.images.headers import DecodePath, ImageHeader, with_height
from h5pack.system.libc import held_stderr

Pixels = npt.NDArray[np.uint8]

_END = b"\xff\xd9"
_CONTEXT_ROWS = 2
"""Rows to decode below a window, because the chroma of a row is interpolated from the rows around it."""

MAX_SHARE = 0.65
"""Largest window, as a share of the image's pixels, that `RegionDecoder` decodes faster than `decode_top`.

The CPU time of decoding and resizing with `RegionDecoder`, relative to `decode_top`, was 0.85 for windows with a share
of 0.1 to 0.2, 0.96 for 0.3 to 0.5, 1.00 for 0.6 to 0.7, and 1.05 for 0.7 to 0.8. This was measured with 600 windows of
200 photos of 512 pixels.
"""


Window = tuple[int, int, int, int]
"""Top, left, height and width, in pixels of the image."""

_Decode = Callable[[bytes, ImageHeader, Window], "Pixels | None"]


class _Scratch(threading.local):
    memory = np.empty(0, np.uint8)

    def __call__(self, height: int, width: int) -> Pixels:
        size = height * width * 3
        if self.memory.size < size:
            self.memory = np.empty(size, np.uint8)
        return self.memory[:size].reshape(height, width, 3)


scratch = _Scratch()
"""``scratch(height, width)`` returns memory for the RGB pixels of an image, uint8 (height, width, 3).

The next call of the same thread reuses the memory, because fresh memory would cost page faults.
"""


class RegionDecoder:
    """A decoder of windows of upright 8-bit JPEGs, gray or YCbCr, to RGB. Each thread needs its own decoder."""

    def __init__(self) -> None:
        from nvidia import nvimgcodec

        self._codec = nvimgcodec
        self._decoder: Any = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
        )

    def decode(self, data: bytes, window: Window) -> Pixels | None:
        """Return the pixels of a window within the image, uint8 (height, width, 3), or None if decoding fails."""
        codec, (top, left, height, width) = self._codec, window
        if width == 1:
            # nvImageCodec 0.9 does not interpolate the chroma of some windows of one column.
            return None
        region = codec.Region(top, left, top + height, left + width)
        found = self._decoder.decode(codec.CodeStream(data).get_sub_code_stream(region=region))
        pixels = None if found is None else np.asarray(found)
        return pixels if pixels is not None and pixels.shape == (height, width, 3) else None


def decode_top(data: bytes, header: ImageHeader, window: Window) -> Pixels | None:
    """Return a window of a JPEG, uint8 (height, width, 3); decode only the rows down to the end of the window.

    The result is a view of the memory of `scratch`. Return None if decoding fails, if simplejpeg cannot be used, if
    the file does not end with its end marker, or if all rows would have to be decoded.
    """
    saves = window[0] + window[2] + _CONTEXT_ROWS < header.height
    return _decode_top(data, header, window) if saves and header.decode_path in _exact_paths(_decode_top) else None


def _decode_top(data: bytes, header: ImageHeader, window: Window) -> Pixels | None:
    import simplejpeg

    top, left, height, width = window
    whole = scratch(min(top + height + _CONTEXT_ROWS, header.height), header.width)
    # With strict=False, simplejpeg accepts data after the last row. It would also accept a truncated file, so check the
    # end marker here.
    if not data.endswith(_END):
        return None
    try:
        simplejpeg.decode_jpeg(
            with_height(data, len(whole)), "RGB", fastdct=False, fastupsample=False, buffer=whole, strict=False
        )
    except ValueError:
        return None
    return whole[top : top + height, left : left + width]


class _Decoders(threading.local):
    process = 0
    decoder: RegionDecoder


_decoders = _Decoders()


def region_decoder(decode_path: DecodePath) -> RegionDecoder | None:
    """Return this thread's `RegionDecoder`, or None if nvImageCodec cannot be used for this kind of JPEG."""
    return _thread_decoder() if decode_path in _exact_paths(_decode_region) else None


def _thread_decoder() -> RegionDecoder:
    # A forked child has none of the parent's threads, on which a decoder may depend, so it needs a new decoder.
    if _decoders.process != os.getpid():
        _decoders.process, _decoders.decoder = os.getpid(), RegionDecoder()
    return _decoders.decoder


def _decode_region(data: bytes, header: ImageHeader, window: Window) -> Pixels | None:
    with held_stderr():  # nvImageCodec writes messages about libraries that it does not need here.
        return _thread_decoder().decode(data, window)


@functools.cache
def _exact_paths(decode: _Decode) -> frozenset[DecodePath]:
    """Return the kinds of JPEG whose windows `decode` decodes exactly as Pillow does."""
    try:
        return frozenset(path for path in DecodePath if path != DecodePath.PILLOW and _is_exact(decode, path))
    except Exception:
        # The package is not installed, is too old, or does not work on this machine. Then the caller uses another
        # decoder, which gives the same pixels.
        return frozenset()


def _is_exact(decode: _Decode, path: DecodePath) -> bool:
    # The sample images are baseline and progressive. Some of the windows begin and end within JPEG blocks.
    for data, expected in sample_jpegs(path, "RGB"):
        header = ImageHeader(expected.shape[0], expected.shape[1], path)
        for window in ((0, 0, header.height, header.width), (7, 11, 23, 35), (17, 1, 1, 51), (16, 16, 16, 32)):
            found, (top, left, height, width) = decode(data, header, window), window
            if found is None or not np.array_equal(found, expected[top : top + height, left : left + width]):
                return False
    return True
