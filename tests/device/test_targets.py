"""Masks, boxes and keypoints move as their images do, compared pixel by pixel with exact fractions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from h5pack.data.draws import BatchKey
from h5pack.device.augment import AugmentationDraws
from h5pack.device.normalize import Normalize
from h5pack.device.targets import Axes, axes_of, move_boxes, move_field, move_keypoints, move_masks
from h5pack.errors import OptionsError
from h5pack.format import schema
from h5pack.format.fields import RaggedRows
from h5pack.images.crops import CenterCrop, RandomCrop, RandomResizedCrop
from h5pack.images.geometry import Placement
from tests.device.feeds import needs_gpu
from tests.device.test_kernels import Dispatched

INPUT = (11, 13)
COUNT = 24
CROPS = {
    "none": None,
    "random": RandomCrop((6, 5), padding=4),
    "larger": RandomCrop((15, 16), padding=4),
    "center": CenterCrop((6, 5)),
    "padded center": CenterCrop((14, 16)),
    "resized center": CenterCrop((6, 5), resize=7),
    "random resized": RandomResizedCrop((6, 5)),
    "random enlarged": RandomResizedCrop((14, 15)),
}
every_crop = pytest.mark.parametrize("name", CROPS)
Line = tuple[Fraction, Fraction, int, int]
"""How a coordinate moves: ``x * scale + shift``, and if the last number is 1, the size minus that."""


def below(bound: torch.Tensor | int, random: torch.Generator) -> torch.Tensor:
    return (torch.rand(COUNT, generator=random) * bound).to(torch.int32)


def axes_and_lines(name: str, seed: int) -> tuple[Axes, list[tuple[Line, Line]]]:
    """The maps of random draws, and for each sample how y and x move."""
    crop: Any = CROPS[name]
    output = INPUT if crop is None else crop.output_size
    random = torch.Generator().manual_seed(seed)
    flips = below(2, random), below(2, random)
    assert flips[0].unique().tolist() == flips[1].unique().tolist() == [0, 1]
    begins, extents, lines = [], [], []
    for axis, (old, new, flip) in enumerate(zip(INPUT, output, flips, strict=True)):
        if isinstance(crop, CenterCrop):
            extents.append(torch.full((COUNT,), new))
            begins.append(torch.full((COUNT,), crop.window(*INPUT)[axis]))
            scale, shift = Fraction(crop.resized_size(*INPUT)[axis], old), Fraction(-crop.window(*INPUT)[axis])
            lines.append([(scale, shift, new, flipped) for flipped in flip.tolist()])
            continue
        if isinstance(crop, RandomResizedCrop):
            extents.append(1 + below(old, random))
            begins.append(below(old - extents[-1] + 1, random))
            scales = [Fraction(new, extent) for extent in extents[-1].tolist()]
        else:
            extents.append(torch.full((COUNT,), new))
            begins.append(below(old + 8 - new + 1, random) - 4)
            scales = [Fraction(1)] * COUNT
        lines.append(
            [
                (scale, -begin * scale, new, flipped)
                for scale, begin, flipped in zip(scales, begins[-1].tolist(), flip.tolist(), strict=True)
            ]
        )
    nothing = torch.zeros(COUNT, dtype=torch.int32)
    boxes = [nothing] * 4
    draws = AugmentationDraws(torch.stack([*reversed(flips), *begins, *boxes, *extents]).to(torch.int32))
    return axes_of(nothing, draws, crop, INPUT, output), list(zip(*lines, strict=True))


def exact(value: Fraction, line: Line) -> Fraction:
    """Where a coordinate of the input is in the output."""
    scale, shift, size, flipped = line
    moved = value * scale + shift
    return size - moved if flipped else moved


def slow_masks(masks: torch.Tensor, lines: list[tuple[Line, Line]]) -> torch.Tensor:
    """Find the input pixel under the center of each output pixel, in exact arithmetic."""
    sizes = [line[2] for line in lines[0]]
    result = torch.zeros(COUNT, *sizes, dtype=masks.dtype)
    for n, y, x in itertools.product(range(COUNT), *map(range, sizes)):
        where = []
        for place, (scale, shift, size, flipped) in zip((y, x), lines[n], strict=True):
            center = size - place - Fraction(1, 2) if flipped else place + Fraction(1, 2)
            where.append(math.floor((center - shift) / scale))
        if all(0 <= place < length for place, length in zip(where, INPUT, strict=True)):
            result[n, y, x] = masks[n, where[0], where[1]]
    return result


@every_crop
def test_masks_take_the_pixel_under_the_center(name: str) -> None:
    axes, lines = axes_and_lines(name, 1)
    masks = torch.arange(1, COUNT * INPUT[0] * INPUT[1] + 1).reshape(COUNT, *INPUT)
    expected = slow_masks(masks, lines)
    assert torch.equal(move_masks(masks, axes), expected)
    # With channels, last or first, and of other dtypes.
    two = torch.stack([masks, -masks], -1).float()
    moved = move_masks(two, axes)
    assert torch.equal(moved, torch.stack([expected, -expected], -1).float())
    assert torch.equal(move_masks(two.movedim(-1, 1), axes), moved.movedim(-1, 1))
    assert torch.equal(move_masks(masks % 2 == 1, axes), expected % 2 == 1)
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        unsigned = move_masks((two + 40_000).to(dtype), axes)
        assert unsigned.dtype == dtype
        assert torch.equal(unsigned.long(), torch.where(moved == 0, 0, moved + 40_000).long())


@every_crop
def test_boxes_and_keypoints_move_by_exact_coordinates(name: str) -> None:
    axes, lines = axes_and_lines(name, 2)
    random = torch.Generator().manual_seed(5)
    low = torch.randint(0, 40, (COUNT, 6, 2), generator=random)
    high = low + torch.randint(0, 14, (COUNT, 6, 2), generator=random)
    quarters = torch.cat([low, high], -1)
    visible = torch.randint(0, 3, (COUNT, 6, 1), generator=random)
    boxes, points = move_boxes(quarters / 4, axes), move_keypoints(torch.cat([low / 4, visible], -1), axes)
    assert (boxes.dtype, points.dtype) == (torch.float32, torch.float32)
    expected_boxes, expected_points = [], []
    for n, (y, x) in enumerate(lines):
        for box, seen in zip(quarters[n].tolist(), visible[n, :, 0].tolist(), strict=True):
            left, top, right, bottom = (exact(Fraction(v, 4), line) for v, line in zip(box, (x, y, x, y), strict=True))
            inside = 0 <= left <= x[2] and 0 <= top <= y[2]
            expected_points.append([left, top, seen if inside else 0])
            sides = (min(left, right), x), (min(top, bottom), y), (max(left, right), x), (max(top, bottom), y)
            expected_boxes.append([min(max(side, 0), line[2]) for side, line in sides])
    torch.testing.assert_close(boxes.flatten(0, 1), _tensor(expected_boxes), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(points.flatten(0, 1), _tensor(expected_points), rtol=1e-5, atol=1e-5)
    # Boxes of any other container, number of axes and precision are the same boxes.
    double, nested = move_boxes(quarters.double() / 4, axes), quarters.reshape(COUNT, 3, 2, 4) / 4
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), boxes)
    assert torch.equal(move_boxes(nested, axes), boxes.reshape(COUNT, 3, 2, 4))  # type: ignore[arg-type]
    assert torch.equal(move_keypoints(low / 4, axes), points[..., :2])
    counts = [n % 4 for n in range(COUNT)]
    ragged = move_boxes([quarters[n, :count] / 4 for n, count in enumerate(counts)], axes)
    assert [len(one) for one in ragged] == counts
    assert all(torch.equal(one, boxes[n, : len(one)]) for n, one in enumerate(ragged))
    for numbers in (2, 3):
        given = torch.cat([low / 4, visible], -1)[..., :numbers]
        some = move_keypoints([given[n, :count] for n, count in enumerate(counts)], axes)
        assert [len(one) for one in some] == counts
        assert all(torch.equal(one, points[n, : len(one), :numbers]) for n, one in enumerate(some))
    assert move_boxes([], axes) == []


@every_crop
@pytest.mark.parametrize("kind", schema.COORDINATE_KINDS)
def test_coordinates_move_as_in_decoded_crops(name: str, kind: str) -> None:
    axes, lines = axes_and_lines(name, 3)
    # Decoded crops are not flipped.
    rows, columns = (replace(axis, flip=torch.zeros_like(axis.flip)) for axis in axes)
    numbers = np.array([[[float(part) for part in line[:3]] for line in (x, y)] for y, x in lines])
    placement = Placement(*numbers.transpose(2, 0, 1))
    for shape in schema.KINDS[kind].shapes:
        entries = (13 * torch.rand(COUNT, 5, *shape, generator=torch.Generator().manual_seed(7))).sort().values
        ragged = RaggedRows.of(kind, [one.numpy() for one in entries], np.zeros((0, *shape)))
        moved = torch.from_numpy(placement.moved(ragged).data)
        assert not torch.equal(moved, entries.flatten(0, 1))
        torch.testing.assert_close(torch.cat(move_field(kind, list(entries), (rows, columns))), moved)


def _tensor(rows: list[list[Any]]) -> torch.Tensor:
    return torch.tensor([[float(value) for value in row] for row in rows])


SQUARES = {
    "none": None,
    "padded": 9,
    "random": RandomCrop((32, 30), padding=5),
    "center": CenterCrop((34, 38)),
    "reduced center": CenterCrop((28, 34), resize=32),
    "enlarged center": CenterCrop(60, resize=64),
    "random resized": RandomResizedCrop((32, 40), scale=(0.5, 1)),
}


@pytest.mark.parametrize("name", SQUARES)
def test_images_show_squares_where_their_masks_boxes_and_centers_are(name: str) -> None:
    crop, count, size = SQUARES[name], 300, (48, 44)
    random = torch.Generator().manual_seed(8)
    top, left = (torch.randint(4, length - 13, (count,), generator=random) for length in size)
    rows, columns = (torch.arange(length) - begin[:, None] for length, begin in zip(size, (top, left), strict=True))
    squares = ((rows >= 0) & (rows < 9))[:, :, None] & ((columns >= 0) & (columns < 9))[:, None]
    images = squares[..., None].to(torch.uint8).mul(255).expand(-1, -1, -1, 3)
    normalize = Normalize(crop=crop, flip=0.5, vertical_flip=0.5)
    key = BatchKey(torch.arange(count), 1)
    draws = normalize.draw(images, key)
    axes = axes_of(images, draws, crop, size, normalize.output_size(*size))
    shown = normalize(images, key, draws=draws)[:, 0]
    masks = move_masks(squares, axes)
    assert masks.shape == shown.shape
    boxes = move_boxes(torch.stack([left, top, left + 9, top + 9], 1)[:, None], axes)
    centers = move_keypoints(torch.stack([left + 4.5, top + 4.5], 1)[:, None], axes)[:, 0]
    # Half of the brightness is the edge, which resizing may move by a rounding of half a pixel.
    resized = getattr(crop, "resize", None) is not None or isinstance(crop, RandomResizedCrop)
    assert ((shown > 0.5) == masks).float().mean() > (0.99 if resized else 0.9999999)
    whole, (x, y) = masks.sum((1, 2)), (torch.arange(axes[axis].size) + 0.5 for axis in (1, 0))
    inside = 0
    for image, box, center, pixels in zip(shown, boxes[:, 0].tolist(), centers.tolist(), whole.tolist(), strict=True):
        margins = box[0], box[1], axes[1].size - box[2], axes[0].size - box[3]
        if min(margins) < 2 or not pixels:
            continue
        inside += 1
        weight = image.sum()
        area = (box[2] - box[0]) * (box[3] - box[1])
        assert weight.item() == pytest.approx(area, rel=0.02)
        found = (image.sum(0) @ x / weight).item(), (image.sum(1) @ y / weight).item()
        assert found == pytest.approx(tuple(center), abs=0.1)
    assert inside > 20


def test_a_field_of_another_shape_is_refused() -> None:
    axes, _ = axes_and_lines("random", 5)
    wrong: list[tuple[str, Any]] = [
        ("mask", torch.zeros(COUNT, 10, 13)),
        ("mask", torch.zeros(COUNT - 1, *INPUT)),
        ("mask", torch.zeros(COUNT, *INPUT, 1, 1)),
        ("mask", "text"),
        ("boxes", torch.zeros(COUNT, 5)),
        ("boxes", [torch.zeros(1, 4)] * (COUNT - 1)),
        ("boxes", [torch.zeros(4)] * COUNT),
        ("keypoints", torch.zeros(COUNT, 4)),
        ("keypoints", [torch.zeros(2)] * COUNT),
        ("keypoints", [torch.zeros(1, 4)] * COUNT),
        ("keypoints", [torch.zeros(1, 2)] * (COUNT - 1) + [torch.zeros(1, 3)]),
    ]
    for kind, field in wrong:
        with pytest.raises(OptionsError) as caught:
            move_field(kind, field, axes)
        assert caught.value.parameters == ("fields",)


@pytest.mark.parametrize("count", [3, 50])
def test_the_number_of_launches_does_not_depend_on_that_of_images(count: int) -> None:
    images = torch.zeros(count, *INPUT, 3, dtype=torch.uint8)
    normalize = Normalize(crop=CROPS["random resized"], flip=0.5, vertical_flip=0.5)
    draws = normalize.draw(images, BatchKey(torch.arange(count), 0))
    with Dispatched() as dispatched:
        axes = axes_of(images, draws, CROPS["random resized"], INPUT, (6, 5))
    found = {"axes": len(dispatched.launches())}
    fields: dict[str, Any] = {"mask": images[..., 0], "boxes": [torch.zeros(n % 3, 4) for n in range(count)]}
    fields["keypoints"] = torch.zeros(count, 7, 3)
    assert fields.keys() == {schema.MASK, *schema.COORDINATE_KINDS}
    for kind, field in fields.items():
        with Dispatched() as dispatched:
            move_field(kind, field, axes)
        found[kind] = len(dispatched.launches())
    assert found.pop("axes") <= 10
    assert found.pop("mask") <= 22
    assert max(found.values()) <= 34


def test_boxes_do_not_move_to_torchs_default_device() -> None:
    axes, _ = axes_and_lines("random", 6)
    boxes = [torch.ones(number % 3, 4) for number in range(COUNT)]
    expected = move_boxes(boxes, axes)
    with torch.device("meta"):
        found = move_boxes(boxes, axes)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@needs_gpu
@every_crop
def test_targets_on_a_gpu_equal_those_on_the_cpu(name: str) -> None:
    axes, _ = axes_and_lines(name, 6)
    there: Any = tuple(
        replace(axis, **{part: getattr(axis, part).cuda() for part in ("begin", "extent", "flip")}) for axis in axes
    )
    random = torch.Generator().manual_seed(9)
    masks = torch.randint(0, 9, (COUNT, *INPUT), generator=random)
    assert torch.equal(move_masks(masks.cuda(), there).cpu(), move_masks(masks, axes))
    corners = 13 * torch.rand(COUNT, 5, 4, generator=random)
    for move, values in ((move_boxes, corners), (move_keypoints, corners[..., :3])):
        torch.testing.assert_close(move(values.cuda(), there).cpu(), move(values, axes))
    ragged = list(corners[:, :2])
    found = move_boxes([one.cuda() for one in ragged], there)
    torch.testing.assert_close([one.cpu() for one in found], move_boxes(ragged, axes))
