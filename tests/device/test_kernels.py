"""The Triton kernels: in Triton's interpreter on the CPU, compiled without a device, and on a GPU if there is one."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from h5pack.data import draws as data_draws
from h5pack.data.draws import BatchKey
from h5pack.device.augment import DRAW_ROWS, Augmentation, AugmentationDraws, ColorJitter, draw_augmentation
from h5pack.device.normalize import Normalize
from h5pack.errors import OptionsError
from h5pack.images.crops import CenterCrop, RandomCrop, RandomResizedCrop
from tests.device.feeds import needs_gpu
from tests.device.machine_code import main_loop
from tests.device.test_normalize import (
    AUGMENTATIONS,
    COLORED,
    DTYPES,
    LAYOUTS,
    MOVED_AND_ERASED,
    FilledMemory,
    assert_near,
    batch,
    reference,
    varied,
)
from tests.forking import output_of
from tests.images.test_crops import key_of

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="pip install triton")
not_interpreted = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="kernels are interpreted")
SIZES = [(2, 5, 7), (1, 1, 1, 1), (2, 23, 31, 4), (1, 11, 300), (2, 40, 16)]
"""Batches of one to four channels. Some fill one program of a kernel, others need several, or several turns of one.
Lines begin at multiples of 16 bytes only in the last.
"""


def assert_kernel_is_right(
    device: str, settings: dict[str, Any], sizes: list[tuple[int, ...]], view: int | None = None, epoch: int = 3
) -> list[AugmentationDraws | None]:
    """That the kernel's results are those of torch operations, bit by bit, and within one rounding step of the truth.

    Triton's interpreter rounds to bfloat16 towards zero, which is within one step but not the same bits.
    Return the draws.
    """
    drawn = []
    for size in sizes:
        images, key = batch(*size), key_of(size[0], epoch=epoch)
        if needs_three_channels(settings) and images.shape[3] != 3:
            continue
        mean, std = (0.485, 0.456, 0.406, 0.5)[: images.shape[3]], (0.229, 0.224, 0.225, 0.25)[: images.shape[3]]
        first = images.permute(0, 3, 1, 2).contiguous().to(device)
        views = [(images.to(device), "last"), (first, "first"), (images.to(device).flip(3)[:, :, ::2], "last")]
        for stored, channels in views if view is None else views[view : view + 1]:
            norm = Normalize(mean, std, channels=channels, backend="triton", **settings)
            plain = Normalize(mean, std, channels=channels, backend="torch", **settings)
            result, host = norm(stored, key), stored.cpu()
            assert result.device == stored.device
            assert_near(norm, result, reference(norm, host if channels == "last" else host.permute(0, 2, 3, 1), key))
            if device != "cpu" or norm.dtype != torch.bfloat16:
                assert torch.equal(result.cpu(), plain(host, key))
            drawn.append(plain.draw(host, key))
    return drawn


def needs_three_channels(settings: dict[str, Any]) -> bool:
    return Normalize(**settings).augmentation.color is not None


def interpret() -> None:
    """What has to run in a process with Triton's interpreter."""
    assert "triton" not in sys.modules, "importing Normalize imports Triton"
    check_kernels()
    check_draws()
    check_wide_strides()
    check_far_results()
    check_launches()


def check_kernels() -> None:
    """Compare both kernels: each layout with each dtype, augmentation and size; views of batches; an empty batch."""
    from h5pack.device.kernels import normalize

    settings, drawn = ({}, *AUGMENTATIONS), []
    for number, (turn, position) in enumerate(itertools.product(range(3), range(len(settings)))):
        shift = turn + position
        options = {"dtype": DTYPES[shift % 3], "layout": list(LAYOUTS)[shift % 2], **settings[position]}
        size = SIZES[(0, 3, 4)[turn] if needs_three_channels(options) else (number // 2 + number // 10) % 5]
        drawn += assert_kernel_is_right("cpu", options, [size], (number + number // 3) % 3, epoch=number)
    assert varied(drawn) == set(DRAW_ROWS) - {"crop_height", "crop_width"}
    # The flat kernel, with programs that take several steps.
    with patch.object(normalize, "_FLAT_PROGRAMS", 2):
        for dtype in DTYPES:
            assert_kernel_is_right("cpu", {"dtype": dtype}, SIZES[2:4], 0)
    for options in ({}, COLORED):
        empty = Normalize.imagenet(backend="triton", **options)
        assert empty(batch()[:0], key_of(0)).shape == (0, 3, *empty.output_size(13, 11))
    # Padding around nothing is black.
    black = Normalize.imagenet()(torch.zeros(6, 4, 4, 3, dtype=torch.uint8))
    for nothing, layout in zip((batch()[:, :0], batch()[:, :, :0]), LAYOUTS, strict=True):
        norm = Normalize.imagenet(crop=CenterCrop(4), flip=0.5, layout=layout, backend="triton")
        assert torch.equal(norm(nothing, key_of(6)), black)
    images = batch(4)[1:3]
    assert torch.equal(Normalize.imagenet(backend="triton")(images), Normalize.imagenet()(images))
    # Draws of another transform, and memory that is given.
    norm = Normalize.imagenet(backend="triton", layout="contiguous")
    draws = Normalize.imagenet(**MOVED_AND_ERASED).draw(images, key_of(2))
    draws.top.add_(50)
    draws.left.sub_(3)
    out = torch.full((2, 3, 13, 11), 7.0)
    assert norm(images, draws=draws, out=out) is out
    assert torch.equal(out, Normalize.imagenet(layout="contiguous", backend="torch")(images, draws=draws))


def check_draws(device: str = "cpu") -> None:
    """The kernel of draws against the torch operations, for augmentations of each kind and keys of each kind."""
    from h5pack.device.kernels import draw

    rows = torch.arange(70) * 7919 + 2**40
    colors = ColorJitter(0.8, 0.7, 0.9, 0.3, 0.3)
    for number, options in enumerate(
        (
            Augmentation(flip=0.5, crop=3),
            Augmentation(erase=0.8, crop=RandomCrop((5, 7), 1), vertical_flip=0.4),
            Augmentation(color=colors, crop=CenterCrop(9), flip=1.0, erase=1.0, erase_scale=(0.3, 0.9)),
        )
    ):
        for repeats, view in ((2, number), (torch.arange(70) % 5, 0)):
            expected = draw_augmentation(BatchKey(rows, 3, repeats, view), -5, options, 13, 11)
            found = draw.draw(BatchKey(rows.to(device), 3, repeats, view), -5, options, 13, 11)
            for name, part in vars(expected).items():
                other = getattr(found, name)
                assert torch.equal(other.cpu(), part) if part is not None else other is None, name
        assert found.geometry.is_contiguous(), "the images' kernel needs no copy of these draws"
    none = draw.draw(BatchKey(rows[:0], 0), 0, options, 13, 11).color
    assert none.shape == (12, 0)
    # Batches may have images of any number of sizes, and what is kept of each size is small.
    cached = [draw_bytes(RandomResizedCrop(8), 13, width, device) for width in range(11, 15)]
    assert all(0 < other - one < 1_000 for one, other in itertools.pairwise(cached))


def draw_bytes(crop: RandomResizedCrop, height: int, width: int, device: str) -> int:
    """Draw windows in images of one size, and return the size of all cached tables in bytes."""
    from h5pack.device.kernels import draw

    draw.draw(BatchKey(torch.arange(2, device=device), 0), 0, Augmentation(crop=crop), height, width)
    return sum(table.nbytes for table in data_draws._cached_tables.values())


def check_wide_strides() -> None:
    """Offsets in the source beyond 2^32. The memory between the pixels is never touched, so it takes none."""
    far = 3 << 29
    memory = torch.empty(3 * far + 64, dtype=torch.uint8)
    images = memory.as_strided((1, 4, 4, 3), (far, far, 3, 1))
    images.copy_(batch(1, 4, 4))
    key = key_of(1)
    for options in ({}, {"flip": 1.0, "vertical_flip": 1.0, "crop": 1}):
        for layout in LAYOUTS:
            norm, plain = (Normalize.imagenet(backend=one, layout=layout, **options) for one in ("triton", "torch"))
            assert torch.equal(norm(images, key), plain(images.contiguous(), key))


class LastPrograms:
    """A kernel of which only the programs of the last of `images` images run."""

    def __init__(self, kernel: Any, images: int) -> None:
        self.kernel, self.images = kernel, images

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        from triton.runtime.interpreter import interpreter_builder as builder

        width, height, depth = (*grid, 1, 1)[:3]
        # The image may begin in a program of the one before, and the number of programs may be rounded up.
        count = width * height * depth // self.images + 4

        def run(*args: Any, **options: Any) -> None:
            # Triton's interpreter calls these with the size of the grid, and with the number of each program.
            def full_size(*_: int) -> None:
                builder.grid_dim = (width, height, depth)

            def shifted(x: int, y: int, z: int) -> None:
                number = width * height * depth - count + x
                builder.grid_idx = (number % width, number // width % height, number // width // height)

            with patch.object(builder, "set_grid_idx", shifted), patch.object(builder, "set_grid_dim", full_size):
                self.kernel[(count,)](*args, **options)

        return run


def check_far_results() -> None:
    """Values beyond 2^31 of a result. Its other memory, 4 GiB, is never touched, so it takes none."""
    from h5pack.device.kernels import normalize, resize

    cases: tuple[tuple[tuple[int, int], str, dict[str, Any]], ...] = (
        ((65, 63), "channels_last", {}),
        *(((65, 63), layout, {"flip": 0.5, "crop": 3}) for layout in LAYOUTS),
        # The interpreter takes long for its many tiles.
        ((17, 31), "contiguous", {"crop": CenterCrop((17, 31), resize=32)}),
    )
    for size, layout, options in cases:
        one = batch(1, *size)
        count = (1 << 31) // one.numel() + 2
        rows, images = torch.arange(count), one.expand(count, -1, -1, -1)
        if not options:
            images = torch.empty(images.shape, dtype=torch.uint8)
            images[-1] = one
        settings = {**options, "layout": layout, "dtype": torch.float16}
        norm, plain = (Normalize.imagenet(backend=name, **settings) for name in ("triton", "torch"))
        near = norm(images[-1:], BatchKey(rows[-1:], 0))
        draws = plain.draw(images, BatchKey(rows, 0)) if norm.keyed else None
        out = torch.empty(count * one.numel(), dtype=torch.float16)
        out = out.view(count, 3, *size) if layout == "contiguous" else out.view(images.shape).permute(0, 3, 1, 2)
        with (
            patch.object(normalize, "_flat_kernel", LastPrograms(normalize._flat_kernel, count)),
            patch.object(normalize, "image_kernel", LastPrograms(normalize.image_kernel, count)),
            patch.object(resize, "_resize_kernel", LastPrograms(resize._resize_kernel, count)),
            # Each program of the flat kernel takes one step.
            patch.object(normalize, "_FLAT_PROGRAMS", 1 << 31),
        ):
            norm(images, draws=draws, out=out)
        assert torch.equal(out[-1:], near)


def check_launches() -> None:
    """A keyed batch takes two launches, or three with resizing: one for all draws. torch computes nothing.

    New memory is not filled, although algorithms are deterministic.
    """
    from h5pack.device.kernels import draw, launch, normalize, resize

    launched: list[str] = []

    resizing = ["_tap_kernel", "_resize_kernel"]
    names = {draw: ["_draw_kernel"], normalize: ["_flat_kernel", "image_kernel"], resize: resizing}
    for module, name in ((module, name) for module, those in names.items() for name in those):
        kernel = MagicMock()  # It is not run, because Triton's interpreter calls torch.
        kernel.__getitem__.side_effect = lambda grid, name=name: launched.append(name) or Mock()
        setattr(module, name, kernel)
    launch.interpreted = lambda: True
    images, key = batch(4), key_of(4, repeats=torch.arange(4))
    center = {"crop": CenterCrop(9, resize=10)}
    resized = {"crop": RandomResizedCrop(9), "flip": 0.5, "erase": 0.5, "color": ColorJitter(0.4)}
    for options in ({}, *AUGMENTATIONS, center, resized):
        norm = Normalize.imagenet(backend="triton", **options)
        norm(images, key)  # Makes the tables and constants.
        launched.clear()
        with FilledMemory() as memory, Dispatched() as dispatched:
            norm(images, key)
        kernels = resizing if norm.augmentation.resize else ["image_kernel" if norm.keyed else "_flat_kernel"]
        assert launched == ["_draw_kernel"] * norm.keyed + kernels
        assert not dispatched.launches()
        assert memory.filled
        assert not any(memory.filled)


class Dispatched(TorchDispatchMode):
    """Names of the operations that torch dispatches."""

    views = {"empty", "permute", "select", "slice", "split_with_sizes", "unbind", "unsqueeze", "view"}

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def launches(self) -> list[str]:
        """Names of those that would launch a kernel."""
        return [name for name in self.names if name not in self.views]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def run_in_a_process(function: Callable[[], None], tmp_path: Path, **variables: str) -> None:
    """Call a function, which changes Triton, in a process of its own."""
    output_of(call_with_variables, function, {"TRITON_CACHE_DIR": str(tmp_path), **variables})


def call_with_variables(function: Callable[[], None], variables: dict[str, str]) -> None:
    os.environ.update(variables)
    function()


@needs_triton
def test_interpreted_kernels_equal_the_slow_twin(tmp_path: Path) -> None:
    # Earlier interpreters expect arguments to be annotated by types, not by strings.
    pytest.importorskip("triton", minversion="3.3")
    # Triton reads TRITON_INTERPRET when it is imported.
    run_in_a_process(interpret, tmp_path, TRITON_INTERPRET="1")


CROP = {"MOVES": True, "PADDED": True}
ALL = {**CROP, "ERASES": True}
COLORS = {**ALL, "COLORS": True}


@needs_triton
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("capability", "dtype", "planes", "changes", "budget"),
    [
        # Interleaved channels (0), three planes together (3), planes alone (1).
        (75, "bf16", 3, CROP, 12.5),  # GPUs before sm_80 convert to bfloat16 by five instructions.
        (80, "bf16", 0, CROP, 9.2),
        (80, "fp32", 0, ALL, 14),
        (80, "fp32", 3, ALL, 11.5),
        (80, "fp16", 1, ALL | {"WHOLE": False}, 10.2),
        (90, "bf16", 0, CROP | {"WHOLE": False}, 9),
        (90, "fp16", 3, CROP, 7.6),
        (90, "fp32", 0, {"MOVES": True}, 11.2),
        (90, "bf16", 0, COLORS, 24),
        (90, "fp16", 0, CROP | {"unaligned": True}, 17),
        (100, "bf16", 0, ALL, 9.5),
        (100, "fp32", 1, {"WHOLE": False}, 11),
        (100, "bf16", 3, COLORS, 17.5),
    ],
)
def test_the_machine_code_of_the_image_kernel_stays_short(
    capability: int, dtype: str, planes: int, changes: dict[str, bool], budget: float
) -> None:
    """Compile for GPUs that are not here: instructions before the loop over lines, and in it for each value."""
    from h5pack.device.kernels import image

    values = 4 if dtype == "fp32" else 8
    is_unaligned = changes.get("unaligned", False)  # The memory that was given begins at another address.
    changes = {name: value for name, value in changes.items() if name != "unaligned"}
    constants = dict.fromkeys(("MOVES", "PADDED", "ERASES", "COLORS", "WIDE"), False) | {"WHOLE": True, **changes}
    constants |= {"CHANNELS": 3, "PLANES": planes, "FINE": dtype == "fp32", "VECTORS": 64, "VALUES": values}
    aligned = ("constants",) if is_unaligned else ("constants", "result")
    kernel = image.image_kernel
    loop = main_loop(kernel, capability, dtype, constants, aligned=aligned, ones=("stride_channel",))
    assert loop.instructions_per_value <= budget
    assert loop.before <= (700 if is_unaligned else 350)
    assert (loop.store_bytes, loop.exchanges_again, loop.spills) == (2 if is_unaligned else 16, False, False)
    # Only what computes the ends of lines, or stores value by value, may exchange values once, before its loop.
    assert not loop.exchanges or is_unaligned or not constants["WHOLE"]


@needs_triton
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("capability", "dtype", "aligned", "load_bytes", "budget"),
    [(75, "fp16", True, 8, 12), (80, "fp32", True, 4, 12), (100, "bf16", False, 1, 12)],
)
def test_the_machine_code_of_the_flat_kernel_stays_short(
    capability: int, dtype: str, aligned: bool, load_bytes: int, budget: float
) -> None:
    """As above; of images whose first pixel is at a multiple of 16 bytes, or not."""
    from h5pack.device.kernels import normalize

    fine = dtype == "fp32"
    constants = {"CHANNELS": 3, "FINE": fine, "VALUES": 512 if fine else 1024}
    pointers = ("result", "constants", "stride", *(("pixels",) if aligned else ()))
    loop = main_loop(normalize._flat_kernel, capability, dtype, constants, warps=4, aligned=pointers)
    assert loop.instructions_per_value <= budget
    assert (loop.store_bytes, loop.load_bytes, loop.exchanges, loop.spills) == (16, load_bytes, False, False)


def compile_batches() -> None:
    """Launch all kernels as on a GPU, but stop when they are compiled: of full, odd and single batches, at any address.

    Triton compiles again if an argument becomes 1, or divisible by 16 or not, except those that the decorator lists.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from h5pack.device.kernels import draw, image, launch, normalize, resize

    target = GPUTarget("cuda", 80, 32)
    stub = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0}
    driver.set_active(SimpleNamespace(**stub, get_current_target=lambda: target))
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
    launch.interpreted = lambda: True
    made = (normalize._flat_kernel, image.image_kernel, draw._draw_kernel)
    made += (resize._tap_kernel, resize._resize_kernel)
    resized = {"crop": RandomResizedCrop(24), "flip": 0.5}
    for settings, layout in zip(({}, {}, MOVED_AND_ERASED, COLORED, resized), list(LAYOUTS) * 3, strict=False):
        norm = Normalize.imagenet(backend="triton", layout=layout, dtype=torch.bfloat16, **settings)
        counts = []
        for number, size in enumerate((64, 64, 63, 1, 17, 16)):
            memory = torch.empty(size * 31 * 31 * 3 + number % 2, dtype=torch.uint8)
            rows = torch.arange(size + number % 2)[number % 2 :]
            norm(memory[number % 2 :].view(size, 31, 31, 3), BatchKey(rows, number, torch.zeros_like(rows)))
            counts.append([len(kernel.device_caches[0][0]) for kernel in made])
        # The flat kernel loads 8 bytes at a time from addresses divisible by 8, so it exists twice.
        assert counts[1:] == [counts[1]] * 5, counts
    assert counts[-1] == [2, 3, 3, 1, 1], counts[-1]


@needs_triton
@not_interpreted
def test_an_odd_last_batch_compiles_nothing_again(tmp_path: Path) -> None:
    pytest.importorskip("triton", minversion="3.3")
    run_in_a_process(compile_batches, tmp_path)


@needs_triton
@not_interpreted
def test_the_plan_of_lines_covers_an_image() -> None:
    from h5pack.device.kernels.normalize import plan_lines

    for lines, length, values in itertools.product((1, 5, 32, 224, 1000), (1, 7, 93, 96, 534, 672), (4, 8)):
        period, blocks = plan_lines(lines, length, values, 64, 4)
        # In lines that are a period apart, columns are at the same distance from multiples of 16 bytes.
        assert period * length % values == 0
        assert blocks * 64 >= period * (length // values)
        assert lines / period <= 4
    # Of 224 x 224 x 3 values, hardly a thread is idle.
    assert plan_lines(224, 672, 8, 64, 4) == (56, 74)


# Which backend is used.


@needs_triton
@not_interpreted
def test_kernels_need_a_gpu() -> None:
    with pytest.raises(OptionsError, match="CUDA"):
        Normalize.imagenet(backend="triton")(batch())


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("h5pack.device.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    import h5pack.device

    monkeypatch.delattr(h5pack.device, "kernels", raising=False)
    with pytest.raises(OptionsError, match="pip install triton"):
        Normalize.imagenet(backend="triton")(batch())
    norm = Normalize.imagenet()
    # As for a CUDA tensor, for which Triton is tried first.
    monkeypatch.setattr(norm, "_by_triton", lambda device: not norm._kernels_fail)
    assert torch.equal(norm(batch()), Normalize.imagenet()(batch()))
    assert norm._kernels_fail


@needs_triton
def test_a_kernel_that_cannot_be_compiled_or_loaded_is_replaced_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.compiler.errors import CompilationError

    from h5pack.device.kernels import draw, launch, normalize

    images, key = batch(), key_of(6)
    expected = Normalize.imagenet(flip=0.5)(images, key)

    def fail_to_compile(*args: Any) -> None:
        raise CompilationError(None, ast.parse("x"), "too new")

    unusable = Mock(side_effect=launch.UnusableError("no C compiler"))
    for module, fail, text in ((launch, unusable, "no C compiler"), (normalize, fail_to_compile, "too new")):
        norm = Normalize.imagenet(flip=0.5)
        monkeypatch.setattr(norm, "_by_triton", lambda device, norm=norm: not norm._kernels_fail)
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(launch, "interpreted", lambda: True)
            patched.setattr(draw, "draw", draw_augmentation)
            patched.setattr(module, "load" if module is launch else "normalize", fail)
            for _ in range(3):
                assert torch.equal(norm(images, key), expected)
            assert caplog.text.count(text) == 1
            with pytest.raises(launch.UnusableError, match=text):
                Normalize.imagenet(backend="triton")(images)


@needs_triton
def test_errors_of_a_launch_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be errors of an earlier kernel, after which nothing works on this device."""
    from h5pack.device.kernels import launch, normalize

    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    monkeypatch.setattr(normalize, "normalize", Mock(side_effect=error))
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    norm = Normalize.imagenet()
    monkeypatch.setattr(norm, "_by_triton", lambda device: not norm._kernels_fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            norm(batch())
    assert not norm._kernels_fail


@needs_triton
def test_kernels_are_launched_with_the_device_of_the_images_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from h5pack.device.kernels import launch

    current = [torch.device("cuda", 0)]

    @contextlib.contextmanager
    def change(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(launch, "load", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", change)
    assert launch.run(torch.device("cuda", 1), lambda number: (number, current[-1]), 5) == (5, torch.device("cuda", 1))
    assert current == [torch.device("cuda", 0)]
    assert launch.run(torch.device("cpu"), lambda: current[-1]) == torch.device("cuda", 0)


@needs_triton
@not_interpreted
def test_loading_tells_earlier_errors_from_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from h5pack.device.kernels import launch

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch._empty_kernel, "warmup", Mock(side_effect=RuntimeError("no kernel image")))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(launch.UnusableError, match="no kernel image"):
        launch.load(device)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=RuntimeError("illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch.load(device)
    monkeypatch.setattr(launch._empty_kernel, "warmup", Mock())
    launch.load(device)
    launch.load.cache_clear()


def test_operations_draw_with_few_launches() -> None:
    """Without Triton each operation is a launch, so what is not enabled is not computed."""
    counts = []
    for options in (Augmentation(flip=0.5), Augmentation(flip=0.5, crop=4), Augmentation(flip=0.5, erase=0.5)):
        with Dispatched() as dispatched:
            draw_augmentation(key_of(4), 0, options, 32, 32)
        counts.append(len(dispatched.names))
    # With views, which launch nothing. Older versions of torch have a few more.
    budgets = (45, 55, 130) if torch.__version__ >= (2, 13) else (47, 59, 138)
    assert all(count <= budget for count, budget in zip(counts, budgets, strict=True)), counts


# On a GPU.


@needs_gpu
@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [{}, *AUGMENTATIONS], ids=str)
def test_on_a_gpu(settings: dict[str, Any], dtype: torch.dtype, layout: str) -> None:
    sizes = [*SIZES, (8, 218, 178), (64, 32, 32)]
    assert_kernel_is_right("cuda", {"dtype": dtype, "layout": layout, **settings}, sizes)


@needs_gpu
@needs_triton
def test_draws_of_the_kernel_on_a_gpu() -> None:
    check_draws("cuda")


@needs_gpu
@needs_triton
def test_results_in_memory_at_any_address_on_a_gpu() -> None:
    """Also results beyond 2^31 values."""
    images, key = batch(9, 40, 30), key_of(9)
    norm = Normalize.imagenet(flip=0.5, crop=3, layout="contiguous", dtype=torch.float16)
    expected = norm(images, key)
    memory = torch.empty(expected.numel() + 1, dtype=torch.float16, device="cuda")
    out = memory[1:].view(expected.shape)
    assert norm(images.cuda(), key, out=out) is out
    assert torch.equal(out.cpu(), expected)
    many = images[:1].cuda().expand(600_000, -1, -1, -1)
    keys = BatchKey(torch.arange(600_000, device="cuda") % 7, 0)
    found = norm(many, keys)
    assert found.numel() > 1 << 31
    assert torch.equal(found[-7:].cpu(), norm(images[:1].expand(7, -1, -1, -1), BatchKey(keys.rows[-7:].cpu(), 0)))


@needs_gpu
def test_operations_on_a_gpu() -> None:
    for settings in ({}, *AUGMENTATIONS):
        norm = Normalize.imagenet(backend="torch", **settings)
        result = norm(batch(9, 40, 30).cuda(), key_of(9))
        assert torch.equal(result.cpu(), norm(batch(9, 40, 30), key_of(9)))


@needs_gpu
def test_auto_takes_the_kernel_on_a_gpu() -> None:
    norm = Normalize.imagenet(flip=0.5)
    norm(batch().cuda(), key_of(6))
    assert norm._kernels_fail == (importlib.util.find_spec("triton") is None)
