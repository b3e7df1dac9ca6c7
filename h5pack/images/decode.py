"""Decoding of image files to uint8 pixels.

The pixels are those of ``PIL.Image.open(file).convert("RGB")`` (or "L"), turned upright according to the Exif
orientation, then resized by Pillow. Rules for special kinds of images:

- gray is repeated into three channels; color is converted to gray with Pillow's ITU-R 601 weights;
- palette images are converted to their colors; transparency and alpha are dropped, never blended;
- CMYK is converted with Pillow's formula, without profiles; ICC profiles are not applied;
- 16-bit gray keeps its high byte (Pillow's own conversion would clip everything above 255 to white);
- 12-bit gray keeps its high 8 bits;
- a TIFF of 12 or 16 bits that stores white as 0 is inverted;
- 32-bit and floating-point images are rejected, because no conversion suits all of them;
- only the first frame of an animation or multi-page file is used;
- HEIF files are opened by pillow-heif, which turns them upright and converts more than 8 bits to 8.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError, features
from PIL import TiffImagePlugin as tiff

from h5pack.errors import RejectedImageError
from h5pack.images.headers import (
    SIDEWAYS,
    TURNS,
    DecodePath,
    ImageHeader,
    file_format,
    open_image,
    orientation_of,
    parse_jpeg,
    parse_png,
)  # fmt: skip
from h5pack.system.libc import held_stderr
from h5pack.system.machine import optional_module, package_version
from h5pack.version import __version__

MAX_PIXELS = 178_956_970
"""Default of `max_pixels`: images with more pixels are rejected as decompression bombs, as Pillow does by default."""

MAX_SIDE = 2**31 - 1
"""Largest height and width of an image. A survey stores sides as int32."""
_LONG_HEAD_BYTES = 65_536
# Decoders process the whole image for each scan of a progressive JPEG. 10 scans are usual. A scan has at least 11
# bytes. Images of at most `_SCANNED_PIXELS` pixels may have any number of scans.
_MAX_SCANS, _SCANNED_PIXELS, _SCAN_BYTES = 1_000, 1_000_000, 11
_ENCODER_SLACK_BYTES = 1_024
_16_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# A message of libtiff begins with "tempfile.tif", the name that Pillow gives to every TIFF file, or with the name of a
# function, such as LZWDecode. Names that end in Error, Exception or Warning are excluded, because the last line of a
# Python traceback begins with such a name.
_LIBTIFF = re.compile(rb"(?:tempfile\.tif: |(?=_?[A-Z]\w*(?<!Error)(?<!Exception)(?<!Warning): ))(.+)")


@dataclass(frozen=True)
class PixelOptions:
    """The options of decoding images into rows."""

    height: int  # of the decoded images, in pixels
    width: int
    channels: int = 3  # 1 (gray) or 3 (RGB)
    resize: bool = False  # whether images of other sizes are resized; otherwise they are rejected
    fit: str = "crop"  # how to resize; see `h5pack.convert`
    resample: str = "bicubic"  # name of Pillow's filter for resizing
    draft: bool = False  # whether JPEGs may be decoded at a reduced size
    max_pixels: int = MAX_PIXELS  # images with more pixels are rejected
    layout: str = "nhwc"  # axes of a row: nhwc (H, W, C) or nchw (C, H, W)

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Shape of a row: (H, W, C) or (C, H, W)."""
        if self.layout == "nchw":
            return self.channels, self.height, self.width
        return self.height, self.width, self.channels


class Upright(NamedTuple):
    """How an image was decoded: its upright size before it was resized, and the Exif orientation that was applied."""

    height: int
    width: int
    orientation: int = 1


@functools.cache
def decoder_versions() -> dict[str, str]:
    """Return the versions of all software that decoded pixels depend on; "not installed" for missing packages."""
    packages = {name: package_version(name) or "not installed" for name in ("Pillow", "pillow-heif", "simplejpeg")}
    return {"h5pack": __version__, "libjpeg-turbo": str(features.version_feature("libjpeg_turbo")), **packages}


@contextlib.contextmanager
def strict_pillow() -> Iterator[None]:
    """Ignore all warnings, disable Pillow's limit on pixels (see `refuse_bomb`), and reject truncated files.

    These settings are global to the process: the first context to open changes them, and the last to close restores
    them.
    """
    global _strict_contexts
    with _strict_lock:
        if not _strict_contexts:
            _strict_settings.enter_context(_strict_process())
        _strict_contexts += 1
    try:
        yield
    finally:
        with _strict_lock:
            _strict_contexts -= 1
            if not _strict_contexts:
                _strict_settings.close()


_strict_contexts, _strict_settings, _strict_lock = 0, contextlib.ExitStack(), threading.Lock()
# Fork only while no thread holds the lock, because in the child, nothing would release it.
_release = _strict_lock.release
os.register_at_fork(before=_strict_lock.acquire, after_in_parent=_release, after_in_child=_release)


@contextlib.contextmanager
def _strict_process() -> Iterator[None]:
    limit, truncated = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
    # If a program has no handler, Python writes what Pillow logs about damaged files to standard error.
    logger, handler = logging.getLogger("PIL"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = limit, truncated
        logger.removeHandler(handler)


def read_header(head: bytes, open_file: Callable[[], BinaryIO], max_pixels: int) -> ImageHeader:
    """Return an image's size after applying its Exif orientation, and its decode path.

    `head` has the first bytes of the file; `open_file` is called only if more bytes are needed. Raise
    RejectedImageError if the file is not an image or has more than `max_pixels` pixels, OSError if the storage fails.
    """
    if not head:
        raise RejectedImageError("the image is empty (0 bytes)")
    header = parse_jpeg(head)
    if header is None:
        with open_file() as stream:
            # Segments such as an ICC profile can move the first scan beyond `head`, so try again with more bytes.
            header = parse_jpeg(stream.read(_LONG_HEAD_BYTES)) if file_format(head) == "jpeg" else parse_png(stream)
            if header is None:
                stream.seek(0)
                header = _pillow_header(stream, max_pixels)
    refuse_bomb(header.height, header.width, max_pixels)
    return header


def _pillow_header(stream: BinaryIO, max_pixels: int) -> ImageHeader:
    with rejecting(), open_image(stream, max_pixels) as image:
        _refuse_deep(image)
        # Before a TIFF is loaded, some releases of Pillow report its stored size, others its upright size. Its tags
        # have the stored size.
        width, height = image.size
        if isinstance(image, tiff.TiffImageFile):
            width, height = image.tag_v2[tiff.IMAGEWIDTH], image.tag_v2[tiff.IMAGELENGTH]
        orientation = orientation_of(image)
    height, width = (width, height) if orientation in SIDEWAYS else (height, width)
    return ImageHeader(height, width, DecodePath.PILLOW, orientation)


def upright_of(data: bytes) -> Upright:
    """Return the upright size and the orientation of the image in a file, however many pixels it has."""
    header = read_header(data, lambda: io.BytesIO(data), MAX_SIDE**2)
    return Upright(header.height, header.width, header.orientation)


class Decoder:
    """A decoder of images into rows. It must not be used by several threads at a time.

    With `quiet`, libtiff's messages do not reach standard error: while a TIFF file is decoded, standard error is
    redirected for the whole process.
    """

    def __init__(self, options: PixelOptions, quiet: bool = False) -> None:
        self._options, self._quiet = options, quiet
        self._decode_jpeg = None if options.draft else _simplejpeg()
        self._colorspace = "GRAY" if options.channels == 1 else "RGB"
        self._resample = Image.Resampling[options.resample.upper()]
        self._decoded: Image.Image | None = None
        self.upright = Upright(0, 0)  # of the image that was decoded most recently
        shape = (options.height, options.width, options.channels)
        self._channels_last = None if options.layout == "nhwc" else np.empty(shape, np.uint8)

    def decode(self, source: bytes | npt.NDArray[np.uint8], decode_path: int, out: npt.NDArray[np.uint8]) -> None:
        """Decode one image into `out`, a contiguous uint8 array (H, W, C) or (C, H, W), depending on the layout.

        `source` is the bytes of an image file, or pixels, uint8 (h, w, 1 or 3). `decode_path`, from the image's header,
        is ignored for pixels. Raise RejectedImageError if the image cannot be decoded, or if it has another size and
        the options do not allow resizing.
        """
        pixels = out if self._channels_last is None else self._channels_last
        plain = decode_path != DecodePath.PILLOW and not self._options.draft
        if not isinstance(source, bytes):
            self.upright = Upright(*source.shape[:2])
            if source.shape[:2] == pixels.shape[:2] and source.shape[2] in (1, pixels.shape[2]):
                # NumPy's broadcasting repeats gray into all channels, as Pillow does.
                pixels[...] = source
            else:
                self._place(image_of(source), pixels)
        elif not (plain and self._decode_plain(source, decode_path, pixels)):
            messages = _libtiff_messages() if self._quiet and source[:4] in _TIFF_STARTS else contextlib.nullcontext()
            max_pixels = self._options.max_pixels
            with rejecting(), messages, open_image(io.BytesIO(source), max_pixels) as image:
                refuse_bomb(image.height, image.width, max_pixels)
                refuse_scans(source, image.height * image.width)
                self._place(self._upright(image), pixels)
        if pixels is not out:
            out[...] = pixels.transpose(2, 0, 1)

    def _decode_plain(self, data: bytes, decode_path: int, out: npt.NDArray[np.uint8]) -> bool:
        """Decode an upright gray or YCbCr JPEG with simplejpeg or directly with Pillow's JPEG decoder.

        Return True if this works. Return False if it fails or if simplejpeg warns. The caller then decodes with
        ``Image.open``, whose error gives the reason if the image must be rejected.
        """
        header = parse_jpeg(data) if len(data) > _SCAN_BYTES * _MAX_SCANS else None
        if header is not None:
            refuse_scans(data, header.height * header.width)
        decode_jpeg = self._decode_jpeg
        if decode_jpeg is not None and not _is_exact(decode_jpeg, decode_path, self._options.channels):
            decode_jpeg = None
        try:
            if decode_jpeg is None:
                image = self._decode_with_pillow(data)
                if image is None:
                    return False
            else:
                buffer = None if self._options.resize else out
                pixels = decode_jpeg(data, self._colorspace, fastdct=False, fastupsample=False, buffer=buffer)
                if buffer is not None:
                    self.upright = Upright(*pixels.shape[:2])
                    return bool(pixels.shape == out.shape)
                image = image_of(pixels)
        except Exception:
            return False
        self.upright = Upright(image.height, image.width)
        self._place(image, out)
        return True

    def _decode_with_pillow(self, data: bytes) -> Image.Image | None:
        """Decode an upright JPEG with Pillow's decoder, without identifying the format or searching for tags.

        Return None if the JPEG is damaged or unusual (see `parse_jpeg`). The result is valid until the next call.
        Pillow's own header parser is not used, because it takes a tenth of the time of decoding a small photo.
        """
        header = parse_jpeg(data)
        if header is None:
            return None
        refuse_bomb(header.height, header.width, self._options.max_pixels)
        mode, size = "L" if header.decode_path == DecodePath.JPEG_GRAY else "RGB", (header.width, header.height)
        image = self._decoded
        if image is None or image.mode != mode or image.size != size:
            image = self._decoded = Image.new(mode, size, None)
        # Private API: Pillow has no public function to decode with a given decoder. If this fails, Image.open is used.
        decoder = Image._getdecoder(mode, "jpeg", (mode, ""), ())
        decoder.setimage(image.im, (0, 0, *size))
        consumed, error = decoder.decode(data)
        # `consumed` is negative if the decoder has finished. Else it needs more bytes, because the file is truncated.
        return image if consumed < 0 and error >= 0 else None

    def _upright(self, image: Image.Image) -> Image.Image:
        options = self._options
        if options.draft:
            size = (options.width, options.height)
            image.draft(None, size[::-1] if orientation_of(image) in SIDEWAYS else size)
        applied = orientation_of(image)
        flat = eight_bits(image)
        # Read the orientation after loading, because Pillow turns a TIFF upright while loading and removes the tag.
        orientation = orientation_of(image)
        # Pillow converts CIELAB only to RGB.
        mode = "L" if options.channels == 1 and flat.mode != "LAB" else "RGB"
        # Skip conversions to the same mode, because Pillow would copy the image. Leave gray images for `_place` to
        # convert, because they have fewer bytes to turn upright.
        flat = flat if flat.mode in (mode, "L") else flat.convert(mode)
        flat = flat.transpose(TURNS[orientation]) if orientation in TURNS else flat
        self.upright = Upright(flat.height, flat.width, applied)
        return flat

    def _place(self, image: Image.Image, out: npt.NDArray[np.uint8]) -> None:
        options = self._options
        mode = "L" if options.channels == 1 else "RGB"
        if image.mode != mode:
            image = image.convert(mode)
        size = (options.width, options.height)
        if image.size != size:
            if not options.resize:
                raise RejectedImageError(
                    f"its size is {image.height}x{image.width}, but the others are {options.height}x{options.width}"
                )
            image = resized(image, size, options.fit, self._resample)
        _copy_pixels(image, out)


def eight_bits(image: Image.Image) -> Image.Image:
    """Load an image and return it with 8 bits per channel; 12-bit and 16-bit gray keeps its high 8 bits.

    Raise RejectedImageError if the image has 32-bit or floating-point pixels.
    """
    _refuse_deep(image)
    image.load()
    if image.mode in _16_BIT or image.mode == "I":
        pixels, bits = np.asarray(image).astype(np.int64), 16
        if isinstance(image, tiff.TiffImageFile):
            # Pillow scales and inverts the values of a TIFF only if they have at most 8 bits.
            bits = image.tag_v2[tiff.BITSPERSAMPLE][0]
            pixels = (1 << bits) - 1 - pixels if image.tag_v2.get(tiff.PHOTOMETRIC_INTERPRETATION, 0) == 0 else pixels
        return Image.fromarray((pixels >> bits - 8).astype(np.uint8))
    return image


def resized(
    image: Image.Image, size: tuple[int, int], fit: str, resample: Image.Resampling, border: int = 0
) -> Image.Image:
    """Return an image resized to `size`, (width, height); for `fit`, see `h5pack.convert`. Padding has value `border`.

    Unlike in ``ImageOps.pad``, both sides of a very thin image keep at least one pixel. If one side were scaled to 0
    pixels, Pillow before version 13 would raise ValueError, and later versions would return only padding.
    """
    if fit == "crop":
        return ImageOps.fit(image, size, resample)
    if fit == "stretch":
        return image.resize(size, resample)
    width, height = size
    if round(image.width / image.height * height) == 0:
        image = image.resize((1, height), resample)
    elif round(image.height / image.width * width) == 0:
        image = image.resize((width, 1), resample)
    return ImageOps.pad(image, size, resample, border or None)


def image_of(pixels: npt.NDArray[Any]) -> Image.Image:
    """Return a Pillow image of pixels (h, w, c): gray if c is 1, else RGB. The dtype is uint8, or uint16 if c is 1."""
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))


def _copy_pixels(image: Image.Image, out: npt.NDArray[np.uint8]) -> None:
    """Copy the pixels of an "L" or "RGB" image into `out`, which must be contiguous.

    ``np.asarray`` would call ``tobytes``, which encodes 64 KiB at a time and joins the pieces. With ``np.asarray``, a
    conversion that decodes with Pillow takes 6% longer (median of 6 interleaved pairs of conversions).
    """
    # Private API: Pillow has no public function to return raw pixels in one step. If this fails, NumPy copies them.
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


def _refuse_deep(image: Image.Image) -> None:
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise RejectedImageError(f"{image.mode} pixels cannot be packed; convert them to unsigned 8 or 16 bits")
    if isinstance(image, tiff.TiffImageFile) and image.tag_v2.get(tiff.PLANAR_CONFIGURATION) == 2:
        # Pillow takes each byte of uncompressed 16-bit planes for a pixel, which gives noise.
        bits = image.tag_v2.get(tiff.BITSPERSAMPLE, ())
        if len(bits) > 1 and max(bits) > 8 and image.tag_v2.get(tiff.COMPRESSION, 1) == 1:
            raise RejectedImageError("uncompressed 16-bit planes cannot be decoded; save the channels interleaved")


def refuse_bomb(height: int, width: int, max_pixels: int) -> None:
    """Raise RejectedImageError if an image has more than `max_pixels` pixels, or a side that exceeds `MAX_SIDE`."""
    if height > MAX_SIDE or width > MAX_SIDE:
        raise RejectedImageError(f"{height}x{width} is larger than any image that can be decoded")
    if height * width > max_pixels:
        raise RejectedImageError(f"decompression bomb: {height}x{width} is more than {max_pixels} pixels")


def refuse_scans(data: bytes, pixels: int) -> None:
    """Raise RejectedImageError if `data` is a large JPEG with over `_MAX_SCANS` scans, which may decode for minutes.

    `pixels` is the number of pixels of the JPEG. Small JPEGs are decoded fast enough with any number of scans.
    """
    if pixels > _SCANNED_PIXELS and file_format(data) == "jpeg" and data.count(b"\xff\xda") > _MAX_SCANS:
        raise RejectedImageError(f"decompression bomb: more than {_MAX_SCANS} scans")


@contextlib.contextmanager
def rejecting() -> Iterator[None]:
    """Turn decoding errors into a RejectedImageError with a reproducible text; let storage and memory errors pass."""
    try:
        yield
    except RejectedImageError:
        raise
    except OSError as error:
        # Pillow reports malformed files as OSError without an errno. An OSError with an errno comes from the storage,
        # except for EINVAL and EOVERFLOW, which occur when a damaged header points outside the file.
        if error.errno not in (None, errno.EINVAL, errno.EOVERFLOW):
            raise
        raise _rejected(error) from error
    except MemoryError:
        # The size of images is limited, so the cause is not this image: the machine is short of memory.
        raise
    except Exception as error:
        # Any other exception means a damaged image, because malformed bytes can make decoders raise any exception.
        raise _rejected(error) from error


@contextlib.contextmanager
def _libtiff_messages() -> Iterator[None]:
    """Keep libtiff, which decodes TIFF files, from writing its messages to standard error.

    If decoding fails, libtiff's first message becomes the reason, because it says more than Pillow's error. Other lines
    that are written to standard error meanwhile are held back until the end.
    """
    lines: list[bytes] = []
    try:
        with held_stderr() as lines:
            yield
    except Exception as error:
        reason = next(filter(None, map(_LIBTIFF.match, lines)), None)
        if reason is None or isinstance(error, (RejectedImageError, MemoryError)):
            raise
        text = reason[1].decode(errors="replace").strip()
        raise RejectedImageError(f"cannot be decoded: libtiff: {text}") from error
    finally:
        others = b"".join(line for line in lines if not _LIBTIFF.match(line))
        if others:
            os.write(2, others)


def _rejected(error: Exception) -> RejectedImageError:
    if isinstance(error, UnidentifiedImageError):
        return RejectedImageError("not an image, or of an unknown format")
    text = re.sub(r"<[^>]*>| at 0x[0-9a-f]+", "", str(error)).strip()
    if "truncated" in text.lower():
        return RejectedImageError("truncated")
    return RejectedImageError(f"cannot be decoded: {type(error).__name__}: {text}")


def _simplejpeg() -> Callable[..., npt.NDArray[np.uint8]] | None:
    """Return the function of simplejpeg that decodes JPEGs, or None if the package is not installed, or broken."""
    return getattr(optional_module("simplejpeg"), "decode_jpeg", None)


@functools.cache
def _is_exact(decode_jpeg: Callable[..., npt.NDArray[np.uint8]], decode_path: int, channels: int) -> bool:
    """Return whether simplejpeg's `decode_jpeg` decodes a kind of JPEG to exactly Pillow's pixels.

    simplejpeg and Pillow each bundle their own version of libjpeg-turbo, so their pixels may differ. The comparison
    takes about 1 ms, once per process and kind.
    """
    if channels == 1 and decode_path != DecodePath.JPEG_GRAY:
        # To convert color to gray, libjpeg drops the chroma, but Pillow's convert("L") computes a weighted sum of RGB.
        return False
    mode, colorspace = ("L", "GRAY") if channels == 1 else ("RGB", "RGB")
    for sample, expected in sample_jpegs(DecodePath(decode_path), mode):
        found = decode_jpeg(sample, colorspace, fastdct=False, fastupsample=False)
        if not np.array_equal(np.squeeze(found), expected):
            return False
    return True


def sample_jpegs(decode_path: DecodePath, mode: str) -> Iterator[tuple[bytes, npt.NDArray[np.uint8]]]:
    """Yield small JPEGs of the kind `decode_path`, each with the pixels that Pillow decodes from it, in `mode`.

    Height and width are odd. Two of the JPEGs are baseline and two are progressive, each in low and high quality.
    """
    height, width = 37, 53
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x * y / 40 + phase) * 90 + 2 * x + y for phase in range(3)], axis=2)
    pixels = np.clip(waves + 20 * ((x * 7919 + y * 104729) % 5)[:, :, None], 0, 255).astype(np.uint8)
    if decode_path == DecodePath.JPEG_GRAY:
        image, settings = Image.fromarray(pixels[:, :, 0]), {}
    else:
        image, settings = Image.fromarray(pixels), {"subsampling": decode_path - DecodePath.JPEG_444}
    for progressive in (False, True):
        for quality in (50, 95):
            stream = io.BytesIO()
            image.save(stream, "JPEG", quality=quality, progressive=progressive, **cast("dict[str, Any]", settings))
            with Image.open(stream) as decoded:
                yield stream.getvalue(), np.asarray(decoded.convert(mode))
