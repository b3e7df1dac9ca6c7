"""Crops of encoded images: if possible, only a part of an image is decoded, then resized into a batch's memory.

By default the pixels are exactly the same as if the whole image was decoded, then cropped and resized with torch's
``interpolate(mode="bilinear", antialias=True)``, which torchvision's transforms of tensors use.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from h5pack.data.draws import BatchKey, crop_windows
from h5pack.data.iteration import serial_torch
from h5pack.errors import OptionsError, RejectedImageError
from h5pack.format import schema
from h5pack.images.crops import DecodeCrop, RandomResizedCrop, Resize
from h5pack.images.decode import MAX_PIXELS, refuse_scans, rejecting
from h5pack.images.geometry import Placement
from h5pack.images.headers import DecodePath, ImageHeader, is_incomplete
from h5pack.images.masks import PADDING, read_mask
from h5pack.images.regions import MAX_SHARE, decode_top, region_decoder, scratch
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.encoded import EncodedIndex, row_decoder
from h5pack.system.parameters import invalid

Pixels = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DrawKey:
    """The key that, together with a sample's row number, determines the sample's random crop.

    `repeat` differs between the copies of a row in an epoch (see `h5pack.data.draws.first_use`). It is an int, or an
    int64 tensor (n,) with an element per sample. It may be 0 if each row comes only once.
    """

    seed: int
    epoch: int
    repeat: Any = 0

    def at(self, positions: Rows) -> DrawKey:
        """Return the key of the samples at these positions, int64 (n,)."""
        return replace(self, repeat=self.repeat[positions]) if isinstance(self.repeat, torch.Tensor) else self


NO_KEY = DrawKey(0, 0)
"""The key of crops that are not random."""


class DrawnIndex(int):
    """An index that a sampler yields, with the key of the sample's crop. Workers of a DataLoader receive both."""

    key: DrawKey

    @classmethod
    def of(cls, indices: Iterable[int], key: DrawKey) -> list[DrawnIndex]:
        """Return the indices as `DrawnIndex`, each with its key."""
        found = [cls(index) for index in indices]
        repeats = key.repeat.tolist() if isinstance(key.repeat, torch.Tensor) else None
        for position, made in enumerate(found):
            made.key = key if repeats is None else replace(key, repeat=repeats[position])
        return found


def key_of(indices: Sequence[Any]) -> DrawKey:
    """Return the key of indices that come from one iteration of an h5pack sampler; for other indices, a random key."""
    keys = [index.key for index in indices if isinstance(index, DrawnIndex)]
    if not keys or len(keys) < len(indices):
        # Use torch's random generator, as torchvision's transforms do, so that `torch.manual_seed` determines crops.
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        return DrawKey(seed, 0, torch.arange(len(indices), device="cpu") if len(indices) > 1 else 0)
    repeats = [key.repeat for key in keys]
    return replace(keys[0], repeat=torch.tensor(repeats, device="cpu") if any(repeats) else 0)


class Steps(NamedTuple):
    """How an image becomes a crop: decode a window of the image, resize the window, and cut the crop out of it."""

    window: tuple[int, int, int, int]  # top, left, height and width, in pixels of the image
    resized: tuple[int, int]  # height and width of the resized window
    offset: tuple[int, int]  # row and column of the resized window where the crop begins; negative if padding precedes
    size: tuple[int, int]  # height and width of the crop, including padding

    def move_mask(self, mask: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Write the crop of an image's mask, (h, w), into `out`. Each pixel is a copy of the mask's nearest pixel.

        The nearest pixel is the one under the center of the crop's pixel, as in torch's
        ``interpolate(mode="nearest-exact")``. Padding has the same value as in packs: 255, or -1 in int32.
        """
        found = []
        for axis in range(2):
            pixels = np.arange(self.size[axis]) + self.offset[axis]
            inside = (pixels >= 0) & (pixels < self.resized[axis])
            extent = self.window[2 + axis]
            sources = self.window[axis] + (2 * pixels + 1) * extent // (2 * self.resized[axis])
            found.append((sources.clip(0, mask.shape[axis] - 1), inside))
        (rows, inside_rows), (columns, inside_columns) = found
        out[...] = mask[rows[:, None], columns]
        out[~(inside_rows[:, None] & inside_columns)] = PADDING[out.dtype.str]


def can_crop(kind: str, images: ChunkIndex, is_encoded: bool) -> bool:
    """Return whether a field of this kind can be used with crops of `images`.

    Masks and further images must be encoded; `is_encoded` says whether the field is. Boxes and keypoints need encoded
    images, whose sizes are known.
    """
    if kind in schema.PIXEL_KINDS:
        return is_encoded
    return kind not in schema.MOVED_KINDS or isinstance(images, EncodedIndex)


class CropDecoder:
    """Decodes crops of `images`, a dataset of the file `path`.

    If `exact` is false, images may be decoded at a fraction of their size. `unmoved` has the names of the fields
    that cannot be cropped with the images, such as boxes. If there are any, the constructor raises an OptionsError.
    """

    def __init__(self, path: str, images: ChunkIndex, crop: DecodeCrop, exact: bool, unmoved: Sequence[str]) -> None:
        if not images.is_encoded:
            problem = "the images are stored as pixels, so decode has no effect; give Normalize(crop=...) the crop, or "
            problem += "convert with keep='jpeg'"
            raise OptionsError.at(path, problem, "decode", "keep='jpeg'", dataset=images.name)
        if unmoved:
            problem = f"{', '.join(map(repr, unmoved))} cannot be cropped with the images; leave them out of fields"
            raise OptionsError.at(path, problem, "decode", "fields", dataset=images.name)
        if not isinstance(crop, DecodeCrop):
            raise invalid(
                "decode",
                crop,
                "give RandomResizedCrop(size), CenterCrop(size, resize=size) or Resize((height, width)); for other "
                "transforms, such as RandomCrop, see the options of Normalize",
            )
        self.crop, self.exact = crop, exact

    def decode(
        self,
        rows: Rows,
        encoded: Sequence[bytes],
        outs: Sequence[Pixels],
        key: DrawKey,
        named: Callable[[int], Any],
    ) -> None:
        """Decode the crops of encoded images into `outs`, each uint8 (height, width, 3).

        ``encoded[i]`` has the bytes of the image in row ``rows[i]``. `rows` and `key` determine random crops.
        ``named(row)`` must return a context manager that names the row in errors.
        """
        headers = []
        for row, data in zip(rows.tolist(), encoded, strict=True):
            with named(row):
                headers.append(row_decoder().header(data))
        plans = self.plan(rows, [(header.height, header.width) for header in headers], key)
        with serial_torch, torch.inference_mode(False):
            for row, data, header, steps, out in zip(rows.tolist(), encoded, headers, plans, outs, strict=True):
                with named(row):
                    self._decode(data, header, steps, out)

    def decode_masks(
        self,
        rows: Rows,
        encoded: Sequence[bytes],
        outs: Sequence[npt.NDArray[Any]],
        key: DrawKey,
        named: Callable[[int], Any],
    ) -> None:
        """Decode masks, which are PNG files, and write their crops into `outs`, each (height, width).

        The other parameters are as for `decode`.
        """
        masks = []
        for row, data, out in zip(rows.tolist(), encoded, outs, strict=True):
            with named(row):
                masks.append(read_mask(data, out.dtype))
        plans = self.plan(rows, [mask.shape for mask in masks], key)
        for mask, steps, out in zip(masks, plans, outs, strict=True):
            steps.move_mask(mask, out)

    def placement(self, rows: Rows, sizes: npt.NDArray[np.int32], key: DrawKey) -> Placement:
        """Return the transform that converts coordinates in the images of `rows` to coordinates in their crops.

        `sizes`, (n, 2), has the heights and widths of the images.
        """
        steps = [sum(one, ()) for one in self.plan(rows, sizes.tolist(), key)]
        corner, extent, resized, offset, size = np.array(steps, np.float64).reshape(-1, 5, 2)[..., ::-1].swapaxes(0, 1)
        scale = resized / extent
        return Placement(scale, -corner * scale - offset, size)

    def plan(self, rows: Rows, sizes: Sequence[tuple[int, int]], key: DrawKey) -> Iterator[Steps]:
        """Yield the steps that crop the image of each row; `sizes` has the images' heights and widths in pixels."""
        crop, size = self.crop, self.crop.output_size
        if isinstance(crop, RandomResizedCrop):
            heights, widths = torch.tensor(sizes, dtype=torch.int64, device="cpu").reshape(-1, 2).T
            batch = BatchKey(torch.from_numpy(rows), key.epoch, key.repeat)
            windows = torch.stack(crop_windows(batch, key.seed, crop, heights, widths), 1)
            for top, left, height, width in windows.tolist():
                yield Steps((top, left, height, width), size, (0, 0), size)
            return
        for height, width in sizes:
            if isinstance(crop, Resize):
                yield Steps((0, 0, height, width), size, (0, 0), size)
            elif crop.resize is not None:
                resized = crop.resized_size(height, width)
                yield Steps((0, 0, height, width), resized, crop.window(height, width), size)
            else:
                top, left = crop.window(height, width)
                window = max(0, top), max(0, left), min(size[0], height), min(size[1], width)
                yield Steps(window, window[2:], (min(0, top), min(0, left)), size)

    def _decode(self, data: bytes, header: ImageHeader, steps: Steps, out: Pixels) -> None:
        if steps.resized[0] * steps.resized[1] > MAX_PIXELS:
            raise RejectedImageError(
                f"an image of {header.height}x{header.width} pixels has too many pixels when resized to "
                f"{steps.resized[0]}x{steps.resized[1]}"
            )
        pixels = torch.from_numpy(self._window(data, header, steps))
        if pixels.shape[:2] != steps.resized:
            # A view of this form has torch's memory format channels_last, in which resizing is fastest.
            found = F.interpolate(pixels[None].permute(0, 3, 1, 2), steps.resized, mode="bilinear", antialias=True)
            pixels = found[0].permute(1, 2, 0)
        target = torch.from_numpy(out)
        if pixels.shape != target.shape:
            # Pixels outside of the resized window are black.
            target.zero_()
            for axis, first in enumerate(steps.offset):
                begin, end = max(0, first), min(pixels.shape[axis], first + target.shape[axis])
                pixels = pixels.narrow(axis, begin, end - begin)
                target = target.narrow(axis, begin - first, end - begin)
        target.copy_(pixels)

    def _window(self, data: bytes, header: ImageHeader, steps: Steps) -> Pixels:
        """Return the pixels of an image's window. The next call in this thread may overwrite the result."""
        top, left, height, width = steps.window
        refuse_scans(data, header.height * header.width)
        if not self.exact and (smaller := self._scaled(data, header, steps)) is not None:
            return smaller
        found = None
        if header.decode_path != DecodePath.PILLOW and not is_incomplete(data):
            if height * width <= MAX_SHARE * header.height * header.width:
                decoder = region_decoder(header.decode_path)
                found = None if decoder is None else decoder.decode(data, steps.window)
            if found is None:
                found = decode_top(data, header, steps.window)
        if found is not None:
            return found
        whole = scratch(header.height, header.width)
        row_decoder().decode(data, header.decode_path, whole)
        return whole[top : top + height, left : left + width]

    def _scaled(self, data: bytes, header: ImageHeader, steps: Steps) -> Pixels | None:
        """Decode the image at a fraction of its size, and return the pixels of the window.

        Return None if the resized window is more than half as high or more than half as wide as the window, or if the
        image is of a kind that is decoded with Pillow.
        """
        top, left, height, width = steps.window
        share = max(one / other for one, other in zip(steps.resized, (height, width), strict=True))
        if share > 0.5 or header.decode_path == DecodePath.PILLOW:
            return None
        lowest, narrowest = math.ceil(header.height * share), math.ceil(header.width * share)
        try:
            import simplejpeg

            small: Pixels = simplejpeg.decode_jpeg(
                data, "RGB", fastdct=True, fastupsample=True, min_height=lowest, min_width=narrowest, min_factor=2
            )
        except Exception:  # simplejpeg is not installed, or broken, or cannot decode this image.
            with rejecting(), Image.open(io.BytesIO(data)) as image:
                image.draft("RGB", (narrowest, lowest))
                small = np.array(image.convert("RGB"))  # torch needs a writable array.
        scale = [one / other for one, other in zip(small.shape[:2], (header.height, header.width), strict=True)]
        first = round(top * scale[0]), round(left * scale[1])
        last = max(first[0] + 1, round((top + height) * scale[0])), max(first[1] + 1, round((left + width) * scale[1]))
        return small[first[0] : last[0], first[1] : last[1]]
