"""The Triton kernels of resized crops: in the interpreter on the CPU, and compiled for devices that are not here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from h5pack.data.draws import BatchKey
from h5pack.device.augment import DRAW_ROWS, AugmentationDraws, ColorJitter, draw_augmentation
from h5pack.device.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize
from h5pack.device.operations import apply_color, erase_mask, scale_whole
from h5pack.device.resize import find_taps, resize
from h5pack.images.crops import RandomCrop, RandomResizedCrop
from tests.device.feeds import needs_gpu
from tests.device.machine_code import disassembled
from tests.device.test_kernels import needs_triton, not_interpreted, run_in_a_process
from tests.device.test_normalize import DTYPES, LAYOUTS, batch, varied
from tests.device.test_resize import CROPS
from tests.images.test_crops import key_of

VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda images: images,
    lambda images: images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    lambda images: images[:, 1:, 1::2],
)


def assert_kernel_is_right(
    device: str, images: torch.Tensor, key: BatchKey | None, **options: Any
) -> AugmentationDraws | None:
    """That the kernels' draws, which are returned, and results equal those of torch operations, bit by bit."""
    _, height, width, channels = images.shape
    mean, std = (*IMAGENET_MEAN, 0.5)[:channels], (*IMAGENET_STD, 0.3)[:channels]
    norm = Normalize(mean, std, channels="last", backend="triton", seed=2**64 - 3, **options)
    crop, draws = norm.augmentation.resize, None
    if key is not None:
        draws = draw_augmentation(key, norm.seed, norm.augmentation, height, width)
        there = dataclasses.replace(key, rows=key.rows.to(device))
        found = norm.draw(images.to(device), there)
        for name, part in vars(draws).items():
            assert part is None or torch.equal(getattr(found, name).cpu(), part), name
    levels = resize(images, *find_taps(draws, crop, images))
    if draws is not None and draws.color is not None:
        levels = apply_color(levels, draws.color)
    expected = scale_whole(levels, norm._constant_tensor(images.device, channels), norm.dtype)
    if draws is not None and norm.augmentation.erase:
        expected = expected.masked_fill(erase_mask(draws, *crop.output_size)[..., None], 0.0)
    result = norm(images.to(device), None if key is None else there)
    assert result.is_contiguous(memory_format=LAYOUTS[norm.layout])
    assert torch.equal(result.cpu(), expected.permute(0, 3, 1, 2))
    return draws


def cases() -> Iterator[tuple[torch.Tensor, BatchKey | None, dict[str, Any]]]:
    """Windows that grow and shrink, layouts, strides, one to four channels, several programs, far rows."""
    extras: tuple[dict[str, Any], ...] = ({"flip": 0.5}, {"vertical_flip": 0.5, "erase": 0.7})
    extras += ({"flip": 0.5, "erase": 0.7, "color": ColorJitter(0.4, 0.4, 0.4, 0.1, 0.2)},)
    # A tile has 4 rows, so 13 rows are several tiles, too; 64 would only take longer in the interpreter.
    crops = [dataclasses.replace(crop, size=(13, 3)) if crop.size == (64, 3) else crop for crop in CROPS]
    for number, crop in enumerate(crops):
        options = {"crop": crop, "dtype": DTYPES[number % 2], "layout": list(LAYOUTS)[number // 2 % 2]}
        options |= extras[number % 3]
        images = batch(2, 23, 18, 3 if "color" in options else 1 + number % 4)
        yield VIEWS[number % 3](images), key_of(2, epoch=3 + number), options
    for number, crop in enumerate(crops[-2:]):
        yield batch(2, 23, 18), None, {"crop": crop, "layout": list(LAYOUTS)[number]}
    colorful = {"crop": RandomResizedCrop((9, 70)), "layout": "contiguous", **extras[2]}
    yield batch(1, 30, 31), key_of(1, repeats=torch.tensor([3])), colorful
    # The last row begins 2^31 values after the first. Memory that is not written costs nothing.
    far = torch.empty((1 << 31) + 64, dtype=torch.uint8).as_strided((1, 3, 5, 3), (1, 1 << 30, 3, 1))
    far.copy_(batch(1, 3, 5))
    yield far, key_of(1), {"crop": RandomResizedCrop(4, (1, 1), (1, 2))}


def interpret() -> None:
    """Compare all cases."""
    drawn = [assert_kernel_is_right("cpu", images, key, **options) for images, key, options in cases()]
    assert varied(drawn) == set(DRAW_ROWS)
    for layout in LAYOUTS:
        empty = Normalize.imagenet(crop=RandomResizedCrop(9), layout=layout, backend="triton")
        assert empty(batch(2, 20, 18)[:0], key_of(0)).shape == (0, 3, 9, 9)
    # Windows that exceed the images.
    images, padded = batch(2, 20, 18), Normalize.imagenet(crop=RandomCrop((40, 30), padding=15))
    draws = padded.draw(images, key_of(2))
    for layout in LAYOUTS:
        norm, host = (
            Normalize.imagenet(crop=RandomResizedCrop((9, 25)), layout=layout, backend=backend)
            for backend in ("triton", "auto")
        )
        assert torch.equal(norm(images, draws=draws), host(images, draws=draws))
    # Windows of many samples, and some that do not fit.
    for size in ((256, 256), (20, 100)):
        norm = Normalize.imagenet(crop=RandomResizedCrop(224), erase=0.5, backend="triton")
        found = norm.draw(torch.empty(1, 1, 1, 1, dtype=torch.uint8).expand(70, *size, 3), key_of(70, view=2))
        expected = draw_augmentation(key_of(70, view=2), 0, norm.augmentation, *size)
        for name in DRAW_ROWS:
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@needs_triton
def test_interpreted_kernels_equal_the_slow_twin(tmp_path: Path) -> None:
    pytest.importorskip("triton", minversion="3.3")
    run_in_a_process(interpret, tmp_path, TRITON_INTERPRET="1")


@needs_triton
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("capability", "dtype", "planar", "changes", "budget"),
    [
        (75, "fp16", True, False, 48),
        (80, "bf16", False, False, 64),
        (90, "fp32", False, True, 139),
        (100, "fp32", True, True, 133),
    ],
)
def test_the_machine_code_stays_short(capability: int, dtype: str, planar: bool, changes: bool, budget: float) -> None:
    """Instructions for each value of a plane's tile, those of a loop counted once; `changes`: with colors and boxes."""
    from h5pack.device.kernels import resize

    rows, columns, warps = resize._ROWS, resize._COLUMNS, resize._WARPS
    # One of them is of a center crop.
    constants = {"RANDOM": capability != 75, "SHARED": capability == 75}
    constants |= {"CHANNELS": 3, "PLANAR": planar, "COLORS": changes}
    constants |= {"ERASES": changes, "FINE": dtype == "fp32", "WIDE": False, "ROWS": rows, "COLUMNS": columns}
    code = disassembled(
        *(resize._resize_kernel, capability, dtype, constants),
        warps=warps,
        # As of images of 256 x 256 pixels.
        aligned=("result", "constants", "height", "width", "out_height", "out_width", "stride_y"),
        ones=("stride_channel",),
    )
    instructions = [text for text in code.values() if "NOP" not in text]
    values = rows * columns // (32 * warps)
    assert 0 < len(instructions) <= budget * values
    assert any("STG.E.128" in text for text in instructions)
    assert not any(re.search(r"\b(LDL|STL)\b", text) for text in instructions), "registers are kept in memory"


@needs_gpu
@needs_triton
def test_on_a_gpu() -> None:
    for images, key, options in cases():
        if images.nbytes < 1 << 30:
            assert_kernel_is_right("cuda", images, key, **options)
