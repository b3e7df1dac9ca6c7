"""Encoded bytes to uint8 pixels.

The pixels are those of ``PIL.Image.open(file).convert("RGB")`` (or "L"), turned upright by the Exif orientation, then
resized by Pillow. The rules for the odd ones:

- gray is repeated into three channels; colour becomes gray by Pillow's ITU-R 601 weights;
- a palette is looked up; transparency and alpha are dropped, never blended;
- CMYK is converted by Pillow's formula, without profiles; ICC profiles are not applied;
- 16-bit gray keeps its high byte (Pillow's own conversion would clip everything above 255 to white);
- 32-bit and floating-point images are rejected, for no rule would suit all of them;
- of an animation or a multi-page file the first frame is taken.
"""

from __future__ import annotations

import contextlib
import errno
import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from h5pack.decode.headers import Header, Kind, parse_jpeg, parse_png
from h5pack.errors import RejectedImageError

MAX_PIXELS = 178_956_970
"""Images with more pixels are rejected as decompression bombs; the count at which Pillow refuses one."""

_ORIENTATION = 0x0112
_TIFF_WIDTH, _TIFF_HEIGHT = 0x0100, 0x0101
_LONG_HEAD_BYTES = 65_536
_ENCODER_SLACK_BYTES = 1_024
_SIDEWAYS = (5, 6, 7, 8)
_16_BIT = ("I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True)
class PixelOptions:
    """How images become rows.

    Attributes
    ----------
    height, width, channels : int
        Of a row.
    resize : bool
        Whether other sizes are brought to this one; if not, they are rejected.
    fit, resample : str
        See `h5pack.ConvertOptions`.
    draft : bool
        Whether JPEGs may be decoded at a reduced size.
    max_pixels : int
        Larger images are rejected.
    """

    height: int
    width: int
    channels: int
    resize: bool
    fit: str
    resample: str
    draft: bool
    max_pixels: int


@contextlib.contextmanager
def strict_pillow() -> Iterator[None]:
    """Pillow without its warnings, without its own bomb limit (ours holds), and with truncated files refused."""
    limit, truncated = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = limit, truncated


def read_header(head: bytes, open_file: Callable[[], BinaryIO], max_pixels: int) -> Header:
    """Learn an image's upright size.

    Parameters
    ----------
    head : bytes
        The first bytes of the file.
    open_file : callable
        Opens the file, for the images whose first bytes do not tell.
    max_pixels : int

    Raises
    ------
    OSError
        If the storage fails.
    RejectedImageError
        If it is no image, or too large a one.
    """
    if not head:
        raise RejectedImageError("zero bytes")
    header = parse_jpeg(head)
    if header is None:
        with open_file() as stream:
            # An ICC profile, say, lies between the first bytes and the first scan.
            header = parse_jpeg(stream.read(_LONG_HEAD_BYTES)) if head.startswith(b"\xff\xd8") else parse_png(stream)
            if header is None:
                stream.seek(0)
                header = _pillow_header(stream)
    refuse_bomb(header.height, header.width, max_pixels)
    return header


def _pillow_header(stream: BinaryIO) -> Header:
    _refuse_programs(stream.read(4))
    stream.seek(0)
    with _rejecting(), Image.open(stream) as image:
        _refuse_deep(image)
        # Pillow's releases differ in whether a TIFF that is not loaded has its coded or its upright size.
        width, height = _coded_size(image) if isinstance(image, TiffImageFile) else image.size
        sideways = _orientation(image) in _SIDEWAYS
    return Header(width, height, Kind.PILLOW) if sideways else Header(height, width, Kind.PILLOW)


def _coded_size(image: TiffImageFile) -> tuple[int, int]:
    return image.tag_v2[_TIFF_WIDTH], image.tag_v2[_TIFF_HEIGHT]


class Decoder:
    """Decodes images into rows; one a worker.

    Parameters
    ----------
    options : PixelOptions
    """

    def __init__(self, options: PixelOptions) -> None:
        self._options = options
        self._fast = _proven_kinds(options.channels) if not options.draft else frozenset()
        if self._fast:
            import simplejpeg

            self._decode_jpeg = simplejpeg.decode_jpeg
        self._colorspace = "GRAY" if options.channels == 1 else "RGB"
        self._resample = Image.Resampling[options.resample.upper()]

    def decode(self, source: bytes | npt.NDArray[np.uint8], kind: int, out: npt.NDArray[np.uint8]) -> None:
        """Decode one image into `out`.

        Parameters
        ----------
        source : bytes or ndarray
            The encoded file, or pixels, uint8 (h, w, 1 or 3).
        kind : int
            The header's `Kind`.
        out : ndarray
            uint8, (H, W, C), contiguous.

        Raises
        ------
        RejectedImageError
            If it cannot be decoded, or has another size and `resize` is off.
        """
        if not isinstance(source, bytes):
            if source.shape[:2] == out.shape[:2] and source.shape[2] in (1, out.shape[2]):
                # As Pillow would: gray is repeated.
                out[...] = source
            else:
                self._place(_image(source), out)
        elif kind == Kind.PILLOW or self._options.draft or not self._decode_plain(source, kind, out):
            _refuse_programs(source)
            with _rejecting(), Image.open(io.BytesIO(source)) as image:
                refuse_bomb(image.height, image.width, self._options.max_pixels)
                self._place(self._upright(image), out)

    def _decode_plain(self, data: bytes, kind: int, out: npt.NDArray[np.uint8]) -> bool:
        """An upright JPEG of the usual colour, by simplejpeg or by Pillow's JPEG decoder; False where that fails or
        warns, and the general way must judge.
        """
        try:
            if kind not in self._fast:
                # What Image.open comes to for such a file, without trying formats and looking for tags.
                image: Image.Image = JpegImageFile(io.BytesIO(data))
                refuse_bomb(image.height, image.width, self._options.max_pixels)
                image.load()
            else:
                buffer = None if self._options.resize else out
                pixels = self._decode_jpeg(data, self._colorspace, fastdct=False, fastupsample=False, buffer=buffer)
                if buffer is not None:
                    return bool(pixels.shape == out.shape)
                image = _image(pixels)
        except Exception:
            return False
        self._place(image, out)
        return True

    def _upright(self, image: Image.Image) -> Image.Image:
        options = self._options
        if options.draft:
            size = (options.width, options.height)
            image.draft(None, size[::-1] if _orientation(image) in _SIDEWAYS else size)
        _refuse_deep(image)
        image.load()
        # Read after loading, since Pillow turns a TIFF upright while it loads, and removes the tag.
        orientation = _orientation(image)
        if image.mode in _16_BIT or image.mode == "I":
            high = (np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)
            flat: Image.Image = Image.fromarray(high)
        else:
            mode = "L" if options.channels == 1 else "RGB"
            # Pillow copies an image that it need not convert.
            flat = image if image.mode == mode else image.convert(mode)
        return _turn(flat, orientation)

    def _place(self, image: Image.Image, out: npt.NDArray[np.uint8]) -> None:
        options = self._options
        mode = "L" if options.channels == 1 else "RGB"
        if image.mode != mode:
            image = image.convert(mode)
        size = (options.width, options.height)
        if image.size != size:
            if not options.resize:
                raise RejectedImageError(
                    f"size {image.height}x{image.width} where the others are {options.height}x{options.width}"
                )
            if options.fit == "crop":
                image = ImageOps.fit(image, size, self._resample)
            elif options.fit == "pad":
                image = ImageOps.pad(image, size, self._resample)
            else:
                image = image.resize(size, self._resample)
        _copy_pixels(image, out)


def _copy_pixels(image: Image.Image, out: npt.NDArray[np.uint8]) -> None:
    """Copy the pixels of an "L" or "RGB" image into `out`, contiguous.

    By Pillow's raw encoder in one step: ``tobytes``, which numpy calls, encodes 64 KiB at a time and joins, and that
    cost a conversion with Pillow 6 % (median of 6 interleaved pairs). The encoder is no public name, so whatever it
    does unexpectedly leaves the copying to numpy.
    """
    try:
        encoder = Image._getencoder(image.mode, "raw", (image.mode, 0, 1))
        encoder.setimage(image.im, (0, 0, *image.size))
        data = encoder.encode(out.nbytes + _ENCODER_SLACK_BYTES)[2]
    except (AttributeError, TypeError, ValueError):
        data = b""
    if len(data) == out.nbytes:
        out.data.cast("B")[:] = data
    else:
        out[...] = np.asarray(image).reshape(out.shape)


def _image(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _orientation(image: Image.Image) -> int:
    value = image.getexif().get(_ORIENTATION, 1)
    return value if isinstance(value, int) else 1


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _turn(image: Image.Image, orientation: int) -> Image.Image:
    method = _TURNS.get(orientation)
    return image if method is None else image.transpose(method)


def _refuse_programs(head: bytes) -> None:
    if head.startswith((b"%!PS", b"\xc5\xd0\xd3\xc6")):
        raise RejectedImageError("PostScript, which only a program can draw")


def _refuse_deep(image: Image.Image) -> None:
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise RejectedImageError(f"{image.mode} pixels of 32 bits; convert it to 8 or 16 bits first")


def refuse_bomb(height: int, width: int, max_pixels: int) -> None:
    """Refuse an image of too many pixels.

    Raises
    ------
    RejectedImageError
    """
    if height * width > max_pixels:
        raise RejectedImageError(f"decompression bomb: {height}x{width} is over {max_pixels} pixels")


@contextlib.contextmanager
def _rejecting() -> Iterator[None]:
    """Turn whatever a decoder raises into a reason that depends on the image alone."""
    try:
        yield
    except RejectedImageError:
        raise
    except OSError as error:
        # Pillow reports bad bytes as OSError without a number; one with a number is the storage's.
        # Seeking to where a damaged header points is the file's fault again.
        if error.errno not in (None, errno.EINVAL, errno.EOVERFLOW):
            raise
        raise _rejected(error) from error
    except MemoryError:
        # Not the image's fault, whose size is bounded: nothing good may be dropped for it.
        raise
    except Exception as error:
        # Decoders meet hostile bytes; any of their errors means this image, not this program.
        raise _rejected(error) from error


def _rejected(error: Exception) -> RejectedImageError:
    if isinstance(error, UnidentifiedImageError):
        return RejectedImageError("not an image, or of an unknown format")
    text = re.sub(r"<[^>]*>| at 0x[0-9a-f]+", "", str(error)).strip()
    if "truncated" in text.lower():
        return RejectedImageError("truncated")
    return RejectedImageError(f"cannot be decoded: {type(error).__name__}: {text}")


def _proven_kinds(channels: int) -> frozenset[Kind]:
    """The kinds of JPEG for which simplejpeg, as installed, gives Pillow's pixels; none without simplejpeg.

    Both wrap libjpeg-turbo, in versions of their own; so each kind is tried on small images of odd sizes, baseline
    and progressive, in two milliseconds.
    """
    try:
        import simplejpeg
    except ImportError:
        return frozenset()
    mode, colorspace = ("L", "GRAY") if channels == 1 else ("RGB", "RGB")
    proven = set(Kind) - {Kind.PILLOW}
    if channels == 1:
        # Colour becomes gray by dropping chroma in libjpeg but by weights in convert("L").
        proven = {Kind.JPEG_GRAY}
    for kind in tuple(proven):
        for sample in _sample_jpegs(kind):
            with Image.open(io.BytesIO(sample)) as image:
                expected = np.asarray(image.convert(mode))
            found = simplejpeg.decode_jpeg(sample, colorspace, fastdct=False, fastupsample=False)
            if not np.array_equal(np.squeeze(found), expected):
                proven.discard(kind)
    return frozenset(proven)


def _sample_jpegs(kind: Kind) -> Iterator[bytes]:
    height, width = 37, 53
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x * y / 40 + phase) * 90 + 2 * x + y for phase in range(3)], axis=2)
    pixels = np.clip(waves + 20 * ((x * 7919 + y * 104729) % 5)[:, :, None], 0, 255).astype(np.uint8)
    if kind == Kind.JPEG_GRAY:
        image, settings = Image.fromarray(pixels[:, :, 0]), {}
    else:
        image, settings = Image.fromarray(pixels), {"subsampling": kind - Kind.JPEG_444}
    for progressive in (False, True):
        for quality in (50, 95):
            stream = io.BytesIO()
            image.save(stream, "JPEG", quality=quality, progressive=progressive, **cast("dict[str, Any]", settings))
            yield stream.getvalue()
