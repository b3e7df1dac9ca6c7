"""Masks, boxes and keypoints, moved by the same random draws as the images to which they belong.

Coordinates are in pixels, from the upper left corner of the image: x to the right, y down. The first pixel's area is
from 0 to 1, and its center is at 0.5; add 0.5 to keypoints that are given as indices of pixels. All functions work on
whole batches, on any device. Erasing (`erase` of `Normalize`) does not change targets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from h5pack.device.augment import AugmentationDraws
from h5pack.errors import OptionsError
from h5pack.format import schema
from h5pack.images.crops import CenterCrop, RandomResizedCrop, ResizedCrop
from h5pack.system.parameters import invalid

Size = tuple[int, int]


@dataclass(frozen=True)
class AxisMap:
    """A map from rows of the images to rows of the output, or from columns to columns.

    A window of each image is resized. The output is cut out of the resized window, and is flipped for some images. A
    coordinate x becomes ``(x - begin) * resized / extent - offset``. In a flipped image, it becomes ``size`` minus this
    value. `h5pack.images.geometry.Placement` is such a map in NumPy, for both axes and without flips.
    """

    begin: torch.Tensor  # First pixel of the window in the image: int64, (N,).
    extent: torch.Tensor  # Number of pixels of the window: int64, (N,).
    resized: int  # Number of pixels of the resized window.
    offset: int  # First pixel of the output in the resized window; negative if the output begins with padding.
    size: int  # Number of pixels of the output.
    input: int  # Number of pixels of the image.
    flip: torch.Tensor  # Whether the output is flipped: bool, (N,).

    def source(self) -> torch.Tensor:
        """Return for each pixel of the output the nearest pixel of the image: int64, (N, size).

        The nearest pixel is the one under the output pixel's center, as in torch's
        ``interpolate(mode="nearest-exact")``. For padding, the result is negative or at least `input`.
        """
        # The centers of the output's pixels in the resized window, times 2: integers are exact on every device.
        first, last = 2 * self.offset + 1, 2 * (self.offset + self.size) - 1
        centers = torch.arange(first, last + 1, 2, device=self.begin.device)
        centers = torch.where(self.flip[:, None], centers.flip(0), centers)
        return self.begin[:, None] + centers * self.extent[:, None] // (2 * self.resized)

    def move(self, values: torch.Tensor) -> torch.Tensor:
        """Convert coordinates, (N, ...), from the image to the output."""
        begin, extent, flip = (_aligned(part, values) for part in (self.begin, self.extent, self.flip))
        moved = (values - begin) * (self.resized / extent.to(values.dtype)) - self.offset
        return torch.where(flip, self.size - moved, moved)

    def at(self, images: torch.Tensor) -> AxisMap:
        """Return the map of the images with these indices: int64, (n,). Indices may repeat."""
        parts = {name: getattr(self, name)[images] for name in ("begin", "extent", "flip")}
        return replace(self, **parts)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Maps unsigned types, which few of torch's operations support, to signed types of the same size, to view masks as."""
Axes = tuple[AxisMap, AxisMap]
"""The maps of rows and of columns."""


def axes_of(
    images: torch.Tensor, draws: AugmentationDraws | None, crop: Any, input_size: Size, output_size: Size
) -> Axes:
    """Return the maps by which `Normalize` moves rows and columns of images.

    Parameters
    ----------
    images : Tensor
        The batch. Only its length and its device are used.
    draws : AugmentationDraws or None
        What `Normalize.draw` returned.
    crop : int, RandomCrop, CenterCrop or RandomResizedCrop
        The option `crop` of `Normalize`.
    input_size, output_size : tuple of int
        Height and width of the images before and after the transform.
    """
    none = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    flips = (none, none) if draws is None else (draws.vertical_flip, draws.flip)
    begins, resized, offsets = (none, none), input_size, (0, 0)
    extents = tuple(torch.full_like(none, length) for length in input_size)
    if isinstance(crop, ResizedCrop):
        resized, offsets = crop.resized_size(*input_size), crop.window(*input_size)
    if draws is not None and not isinstance(crop, CenterCrop):
        begins = draws.top.long(), draws.left.long()
        if isinstance(crop, RandomResizedCrop):
            extents = draws.crop_height.long(), draws.crop_width.long()
    rows, columns = (
        AxisMap(begin, extent, length, offset, size, old, flip != 0)
        for begin, extent, length, offset, size, old, flip in zip(
            begins, extents, resized, offsets, output_size, input_size, flips, strict=True
        )
    )
    return rows, columns


def move_field(kind: str, field: Any, axes: Axes) -> Any:
    """Return a field of a batch, moved like its images.

    Parameters
    ----------
    kind : {"mask", "boxes", "keypoints"}
    field : Tensor or list of Tensor
        See `move_masks`, `move_boxes` and `move_keypoints`.
    axes : tuple of AxisMap
        What `axes_of` returned.

    Raises
    ------
    OptionsError
        If the field does not have the shape of its kind, or does not have as many entries as there are images.
    """
    count, size = len(axes[0].flip), (axes[0].input, axes[1].input)
    (move, wanted), shapes = _MOVERS[kind], schema.KINDS[kind].shapes
    valid = False
    if isinstance(field, torch.Tensor):
        valid = is_mask(field.shape, size) if kind == schema.MASK else field.ndim > 1 and field.shape[-1:] in shapes
    elif isinstance(field, (list, tuple)) and kind != schema.MASK:
        # The tensors are concatenated, so they must have equal numbers of columns.
        valid = all(isinstance(one, torch.Tensor) and one.shape[1:] in shapes for one in field)
        valid = valid and len({one.shape[1] for one in field}) < 2
    if not valid or len(field) != count:
        found = f"has shape {tuple(field.shape)}" if isinstance(field, torch.Tensor) else f"is a {type(field).__name__}"
        raise OptionsError(
            f"a field of kind {kind!r} {found}, which does not fit {count} images of {size[0]} x {size[1]} pixels; "
            f"give {wanted}",
            parameters=("fields",),
        )
    return move(field, axes)


def move_masks(masks: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Return masks moved like their images, without interpolation: each pixel is a copy of the nearest input pixel.

    Parameters
    ----------
    masks : Tensor
        Any dtype, (N, H, W), (N, H, W, C) or (N, C, H, W).
    axes : tuple of AxisMap

    Returns
    -------
    Tensor
        Of the same dtype, and with the height and width of the output. Pixels from outside of the image are 0.
    """
    height, width = (axis.input for axis in axes)
    channels_first = tuple(masks.shape[1:3]) != (height, width)
    source = masks.view(_SIGNED.get(masks.dtype, masks.dtype))
    source = source.movedim(1, -1) if channels_first else source
    rows, columns = (axis.source() for axis in axes)
    known_rows, known_columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    outside = (known_rows != rows)[:, :, None] | (known_columns != columns)[:, None, :]
    images = torch.arange(len(masks), device=masks.device)[:, None, None]
    moved = source[images, known_rows[:, :, None], known_columns[:, None, :]]
    moved.masked_fill_(outside.reshape(outside.shape + (1,) * (moved.ndim - 3)), 0)
    return (moved.movedim(-1, 1) if channels_first else moved).view(masks.dtype)


def move_boxes(boxes: torch.Tensor | Sequence[torch.Tensor], axes: Axes) -> torch.Tensor | list[torch.Tensor]:
    """Return boxes moved like their images, clipped to the output.

    A box that is completely outside of the output remains as a box without area, so that boxes keep their order and
    their labels. A box without area, such as four zeros that serve as padding, still has no area afterwards.
    ``(boxes[..., 2:] > boxes[..., :2]).all(-1)`` selects the boxes with an area.

    Parameters
    ----------
    boxes : Tensor or list of Tensor
        Left, top, right and bottom of each box: (N, ..., 4), or a list of N tensors (n, 4).
    axes : tuple of AxisMap

    Returns
    -------
    Tensor or list of Tensor
        Of the same shapes, as float64 if `boxes` are float64, else as float32.
    """
    if not isinstance(boxes, torch.Tensor):
        return _move_in_one(move_boxes, boxes, axes)
    corners = _floats(boxes).reshape(*boxes.shape[:-1], 2, 2)
    sides = []
    for axis, values in zip(axes, (corners[..., 1], corners[..., 0]), strict=True):
        moved = axis.move(values)  # Both sides in one call, because each call launches 8 kernels.
        # A flip exchanges the first and the last side.
        sides.append(torch.where(_aligned(axis.flip, moved), moved.flip(-1), moved).clamp(0, axis.size))
    return torch.stack(sides[::-1], -1).flatten(-2)


def _move_in_one(move: Callable[..., Any], rows: Sequence[torch.Tensor], axes: Axes) -> list[torch.Tensor]:
    """Move the boxes or points of all images in one call: a call for each image would launch many more kernels."""
    counts = [len(one) for one in rows]
    if not counts:
        return []
    device = axes[0].flip.device
    on_cuda = device.type == "cuda"
    # Without pinned memory and `output_size`, the host would wait until the device has done its queued work.
    repeats = torch.tensor(counts, device="cpu", pin_memory=on_cuda).to(device, non_blocking=on_cuda)
    images = torch.arange(len(rows), device=device).repeat_interleave(repeats, output_size=sum(counts))
    moved = move(torch.cat(list(rows)), (axes[0].at(images), axes[1].at(images)))
    return list(torch.split(moved, counts))


def move_keypoints(points: torch.Tensor | Sequence[torch.Tensor], axes: Axes) -> torch.Tensor | list[torch.Tensor]:
    """Return keypoints moved like their images. They are not clipped.

    A flip mirrors the points, but does not exchange them: if the first point is the left eye of a face, it remains the
    first point of the mirrored face.

    Parameters
    ----------
    points : Tensor or list of Tensor
        x and y of each point, (N, ..., 2), or with the visibility as a third number, (N, ..., 3); or a list of N
        tensors (n, 2) or (n, 3).
    axes : tuple of AxisMap

    Returns
    -------
    Tensor or list of Tensor
        Of the same shapes, as float64 if `points` are float64, else as float32. The visibility of a point outside of
        the output is 0.
    """
    if not isinstance(points, torch.Tensor):
        return _move_in_one(move_keypoints, points, axes)
    points = _floats(points)
    rows, columns = axes
    y, x = rows.move(points[..., 1]), columns.move(points[..., 0])
    if points.shape[-1] == 2:
        return torch.stack((x, y), -1)
    inside = (x >= 0) & (x <= columns.size) & (y >= 0) & (y <= rows.size)
    return torch.stack((x, y, points[..., 2] * inside), -1)


def _aligned(parts: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Reshape `parts`, one value per sample, (N,), to (N, 1, ...) with as many axes as `values`, (N, ...)."""
    return parts.reshape(-1, *[1] * (values.ndim - 1))


def _floats(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def is_mask(shape: tuple[int, ...], size: Size) -> bool:
    """Return whether a shape is (N, H, W), (N, H, W, C) or (N, C, H, W), where (H, W) is `size`."""
    return len(shape) in (3, 4) and size in (shape[1:3], shape[-2:])


_MOVERS: dict[str, tuple[Callable[[Any, Axes], Any], str]] = {
    schema.MASK: (move_masks, "a tensor (N, H, W), (N, H, W, C) or (N, C, H, W)"),
    schema.BOXES: (move_boxes, "a tensor (N, ..., 4) or a list of N tensors (n, 4)"),
    schema.KEYPOINTS: (
        move_keypoints,
        "a tensor (N, ..., 2) or (N, ..., 3), or a list of N tensors (n, 2) or (n, 3)",
    ),
}
"""For each kind of field: the function that moves fields of this kind, and the shapes of such fields, for messages."""


def checked_fields(fields: Any) -> dict[Hashable, str | None]:
    """Return the option `fields` of `Normalize` as a dict; raise OptionsError if it is not a mapping to known kinds."""
    if fields is None:
        return {}
    known = ", ".join(map(repr, (*_MOVERS, None)))
    if not isinstance(fields, Mapping):
        raise invalid("fields", fields, f"give a dict from names of the batch's elements to one of {known}")
    for name, kind in fields.items():
        if kind not in (*_MOVERS, None):
            problem = f"fields[{name!r}] is {kind!r}; it must be one of {known}"
            raise OptionsError(problem, parameters=("fields",))
    return dict(fields)
