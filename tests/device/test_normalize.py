"""Normalize: one rounding step from the truth, in any layout, augmented as drawn."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset

import h5pack
from h5pack.data.buffers import unfilled_memory
from h5pack.data.concat import ConcatPack
from h5pack.data.draws import BatchKey
from h5pack.device.augment import DRAW_ROWS, AugmentationDraws, ColorJitter, draw_augmentation
from h5pack.device.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize
from h5pack.errors import OptionsError
from h5pack.images.crops import CenterCrop, RandomCrop, RandomResizedCrop
from tests.data import packs
from tests.images.test_crops import key_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
MOVED_AND_ERASED: dict[str, Any] = {"flip": True, "crop": 20, "erase": 0.7, "vertical_flip": 0.5}
COLORED: dict[str, Any] = {"crop": CenterCrop((15, 6)), "flip": 0.5, "color": ColorJitter(0.4, 0.5, 0.6, 0.2, 0.3)}
AUGMENTATIONS: tuple[dict[str, Any], ...] = (
    {"flip": 0.5}, {"crop": 3}, {"erase": 0.7}, MOVED_AND_ERASED,
    {"crop": RandomCrop((9, 12), padding=6), "vertical_flip": True}, COLORED,
)  # fmt: skip


def batch(count: int = 6, height: int = 13, width: int = 11, channels: int = 3) -> torch.Tensor:
    """uint8, (N, H, W, C): noise, which any error of a weight changes, or of a place."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, height, width, channels), dtype=torch.uint8, generator=generator)


def ulp(values: npt.NDArray[np.float64], dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """The distance of neighboring numbers of a dtype at some values; float64."""
    kind = torch.finfo(dtype)
    magnitudes = np.maximum(np.abs(values), kind.tiny)
    return 2.0 ** (np.frexp(magnitudes)[1] - 1) * kind.eps


def draws_of(norm: Normalize, key: BatchKey | None, height: int, width: int) -> AugmentationDraws | None:
    if key is None or not norm.keyed:
        return None
    return draw_augmentation(key, norm.seed, norm.augmentation, height, width)


def varied(drawn: list[AugmentationDraws | None]) -> set[str]:
    """The names of the draws that differ between images of a batch, so that no kernel may ignore them."""
    parts = [draws.geometry for draws in drawn if draws is not None]
    return {name for number, name in enumerate(DRAW_ROWS) if any(len(part[number].unique()) > 1 for part in parts)}


def by_operations(norm: Normalize, images: torch.Tensor, key: BatchKey | None, out: Any = None) -> torch.Tensor:
    """The result of the torch operations for any device; of images (N, H, W, 3) on the CPU."""
    with patch.object(torch.compiler, "is_compiling", return_value=True):
        return norm(images, key, out=out)


def reference(norm: Normalize, images: torch.Tensor, key: BatchKey | None = None) -> npt.NDArray[np.float64]:
    """float64, (N, C, H, W), image by image with numpy; of uint8 images (N, H, W, C)."""
    found = []
    draws = draws_of(norm, key, *images.shape[1:3])
    height, width = norm.output_size(*images.shape[1:3])
    pad = 30
    for number, image in enumerate(images.numpy()):
        if draws is not None:
            padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))
            top, left = int(draws.top[number]) + pad, int(draws.left[number]) + pad
            image = padded[top : top + height, left : left + width]
            image = image[:, ::-1] if draws.flip[number] else image
            image = image[::-1] if draws.vertical_flip[number] else image
            if draws.color is not None:
                matrix = draws.color[:, number].double().reshape(3, 4).numpy() / 65536
                image = np.floor(image @ matrix[:, :3].T + matrix[:, 3] + 0.5).clip(0, 255)
        values = (image / 255 - np.array(norm.mean)) / np.array(norm.std)
        if draws is not None:
            top, left = int(draws.box_top[number]), int(draws.box_left[number])
            values[top : top + int(draws.box_height[number]), left : left + int(draws.box_width[number])] = 0
        found.append(values.transpose(2, 0, 1))
    return np.stack(found)


def assert_near(norm: Normalize, result: torch.Tensor, expected: npt.NDArray[np.float64]) -> None:
    """That a result has its dtype and layout, and is within one rounding step of the truth."""
    assert (result.dtype, result.shape) == (norm.dtype, expected.shape)
    assert result.is_contiguous(memory_format=LAYOUTS[norm.layout])
    assert (np.abs(result.cpu().double().numpy() - expected) <= ulp(expected, norm.dtype)).all()


def assert_right(norm: Normalize, images: torch.Tensor, key: BatchKey | None = None) -> None:
    """That images, stored (N, H, W, C) or (N, C, H, W), with any strides, come out within one rounding step."""
    expected = reference(norm, images, key)
    for stored in (images, images.permute(0, 3, 1, 2).contiguous()):
        assert_near(norm, norm(stored, key), expected)


# Values.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pixel_value_is_within_one_rounding_step(dtype: torch.dtype, layout: str) -> None:
    values = torch.arange(256, dtype=torch.uint8).reshape(4, 8, 8, 1).expand(4, 8, 8, 3).contiguous()
    # Also means that are a pixel's value, where the truth is 0, and ones half-way between two.
    for mean, std in (
        (IMAGENET_MEAN, IMAGENET_STD),
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ((128 / 255, 1 / 255, 1.0), (0.25, 0.001, 1.0)),
        ((127.5 / 255, 0.5 / 255, 254.5 / 255), (0.3, 0.01, 3.0)),
        ((0.0, 0.0, 0.0), (1.0, 1 / 255, 1.0)),
    ):
        assert_right(Normalize(mean, std, dtype=dtype, layout=layout, channels=None), values)


def test_any_mean_and_deviation_are_within_one_rounding_step() -> None:
    random = np.random.default_rng(0)
    mean, std = random.uniform(0, 1, 1000), 2 ** random.uniform(-8, 2, 1000)
    values = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(1, 16, 16, 1000)
    for dtype in DTYPES:
        norm = Normalize(mean, std, dtype=dtype, channels="last")
        assert_near(norm, norm(values), reference(norm, values))


def test_without_statistics_it_is_the_pixel_over_255() -> None:
    for channels in (1, 2, 3, 4):
        images, norm = batch(channels=channels), Normalize(channels="last")
        assert_near(norm, norm(images), (images.permute(0, 3, 1, 2).double() / 255).numpy())
    assert Normalize(mean=(0.5, 0.25)).std == (1.0, 1.0)
    assert Normalize(std=(0.5, 0.25)).mean == (0.0, 0.0)


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 1, 7), (3, 5, 1), (5, 64, 2), (3, 218, 178), (1, 400, 350)])
def test_odd_sizes(size: tuple[int, int, int]) -> None:
    for channels in (1, 3, 4) if sum(size) < 100 else (3,):
        mean, std = (0.1, 0.4, 0.6, 0.9)[:channels], (0.2, 0.3, 0.4, 0.5)[:channels]
        images = batch(*size, channels)
        expected = reference(Normalize(mean, std), images)
        for stored, where in ((images, "last"), (images.permute(0, 3, 1, 2).contiguous(), "first")):
            for layout in LAYOUTS:
                norm = Normalize(mean, std, layout=layout, channels=where)
                assert_near(norm, norm(stored), expected)


def test_any_strides_and_no_images() -> None:
    images = batch(8, 20, 18)
    norm = Normalize.imagenet()
    for view in (images[::2], images[:, 3:17, 2::3], images.transpose(1, 2), images[:1].expand(4, -1, -1, -1)):
        assert not view.is_contiguous()
        assert_right(norm, view)
        assert torch.equal(norm(view), norm(view.contiguous()))
    before = images.clone()
    norm(images)
    assert torch.equal(images, before)
    for none in (images[:0], images[:0].permute(0, 3, 1, 2)):
        assert Normalize.imagenet(flip=0.5)(none, key_of(0)).shape == (0, 3, 20, 18)


@pytest.mark.parametrize("crop", [CenterCrop(4), RandomCrop(4, padding=2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_around_images_without_pixels_is_black(crop: Any, layout: str) -> None:
    black = Normalize.imagenet()(torch.zeros(6, 4, 4, 3, dtype=torch.uint8))
    for size in ((0, 4), (4, 0), (0, 0)):
        norm = Normalize.imagenet(crop=crop, flip=0.5, vertical_flip=0.5, layout=layout)
        found = norm(torch.zeros(6, *size, 3, dtype=torch.uint8), key_of(6))
        assert torch.equal(found, black)
        assert found.is_contiguous(memory_format=LAYOUTS[layout])


def test_results_are_never_overwritten() -> None:
    """Memory of large results is used again, but only when their last view is gone."""
    norm = Normalize.imagenet()
    images = batch(4, 160, 140)
    kept = [norm(images ^ number) for number in range(6)]
    kept[3] = kept[3][1:, :, ::2]
    again = [norm(images ^ number) for number in range(6)]
    again[3] = again[3][1:, :, ::2]
    assert all(map(torch.equal, kept, again))
    address = kept[0].data_ptr()
    view = kept[0][0, 0]
    expected = view.clone()
    del kept, again
    assert norm(images ^ 255).data_ptr() != address
    assert torch.equal(view, expected)
    del view
    assert address in {one.data_ptr() for one in [norm(images) for _ in range(4)]}


# Augmentation.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("settings", AUGMENTATIONS, ids=str)
def test_augmented_images_equal_the_slow_twin(settings: dict[str, Any], layout: str) -> None:
    for dtype, size in itertools.product(DTYPES, ((40, 13, 11), (2, 70, 50))):
        norm = Normalize.imagenet(dtype=dtype, layout=layout, seed=5, **settings)
        assert_right(norm, batch(*size), key_of(size[0]))


@pytest.mark.parametrize("settings", [{}, *AUGMENTATIONS], ids=str)
def test_operations_for_any_device_give_the_same_bits(settings: dict[str, Any]) -> None:
    images, key = batch(9, 30, 21), key_of(9)
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        norm = Normalize.imagenet(dtype=dtype, layout=layout, **settings)
        slow, fast = by_operations(norm, images, key), norm(images, key)
        assert torch.equal(slow, fast)
        assert slow.stride() == fast.stride()


def test_a_sample_is_augmented_alike_in_any_batch() -> None:
    images, norm = batch(30), Normalize.imagenet(flip=0.5, crop=2, erase=0.5)
    whole = norm(images, key_of(30))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    for part in (order[:7], order[7:8], order[8:]):
        rows = key_of(30).rows[part]
        assert torch.equal(norm(images[part], key_of(0, rows=rows)), whole[part])
    for other in (key_of(30, epoch=4), key_of(30, repeats=0), key_of(30, rows=torch.arange(30))):
        assert not torch.equal(norm(images, other), whole)
    assert not torch.equal(Normalize.imagenet(flip=0.5, crop=2, erase=0.5, seed=1)(images, key_of(30)), whole)


def test_keys_are_asked_for_only_where_something_is_drawn() -> None:
    images = batch()
    plain = Normalize.imagenet()
    assert not plain.keyed
    assert torch.equal(plain(images, key_of(6)), plain(images))
    for settings in AUGMENTATIONS:
        norm = Normalize.imagenet(**settings)
        assert norm.keyed
        for key in (None, key_of(6).rows, key_of(5), key_of(6, repeats=torch.zeros(1, dtype=torch.int64))):
            with pytest.raises(OptionsError):
                norm(images, key)


@pytest.mark.parametrize("size", [(9, 8), (20, 5), (13, 30), (31, 31)])
def test_center_crops_need_no_key(size: tuple[int, int]) -> None:
    """The window of torchvision's CenterCrop, by whose formulas it is cut out here."""
    images, norm = batch(3, 14, 17), Normalize.imagenet(crop=CenterCrop(size))
    assert not norm.keyed
    assert norm.output_size(14, 17) == size
    above, before = max(0, size[0] - 14), max(0, size[1] - 17)
    pads = ((0, 0), (above // 2, (above + 1) // 2), (before // 2, (before + 1) // 2), (0, 0))
    padded = np.pad(images.numpy(), pads)
    top, left = (round((have - want) / 2) for have, want in zip(padded.shape[1:3], size, strict=True))
    window = torch.from_numpy(padded[:, top : top + size[0], left : left + size[1]].copy())
    assert_near(norm, norm(images), reference(Normalize.imagenet(), window))
    draws = norm.draw(images)
    assert torch.equal(norm(images, draws=draws), norm(images))
    assert (draws.top[0] - top + above // 2, draws.left[0] - left + before // 2) == (0, 0)
    # With random changes, the window is part of the draws.
    assert_right(Normalize.imagenet(crop=CenterCrop(size), flip=0.5), images, key_of(3))


def test_given_draws_are_applied() -> None:
    images, key = batch(9, 30, 21), key_of(9)
    for settings in AUGMENTATIONS:
        norm = Normalize.imagenet(**settings)
        draws = norm.draw(images, key)
        assert draws is not None
        assert torch.equal(norm(images, draws=draws), norm(images, key))
    assert Normalize.imagenet().draw(images) is None
    # A window outside the image is black.
    far = AugmentationDraws(draws.geometry.clone())
    far.top.add_(100)
    norm = Normalize(crop=RandomCrop(8))
    assert not norm(images, draws=far).any()
    with pytest.raises(OptionsError):
        norm.draw(images)
    gray = Normalize((0.5,), (0.5,), channels="last", crop=2)
    for wrong, stored in (
        *((draws, images[:8]), (draws, batch(9, channels=1)), (far, images.to("meta"))),
        *((3, images), (images, images)),
    ):
        with pytest.raises(OptionsError) as caught:
            (gray if stored.shape[3] == 1 else norm)(stored, draws=wrong)  # type: ignore[arg-type]
        assert [name.partition("=")[0] for name in caught.value.parameters] == ["draws"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_go_into_given_memory(layout: str) -> None:
    images, key = batch(9, 30, 21), key_of(9)
    for settings in ({}, *AUGMENTATIONS):
        norm = Normalize.imagenet(layout=layout, dtype=torch.float16, **settings)
        expected = norm(images, key)
        out = torch.full_like(expected, 7)
        assert out.stride() == expected.stride()
        assert norm(images, key, out=out) is out
        assert torch.equal(out, expected)
        assert by_operations(norm, images, key, out.zero_()) is out
        assert torch.equal(out, expected)
    norm = Normalize.imagenet(layout=layout)
    right = norm(images)
    other = torch.channels_last if layout == "contiguous" else torch.contiguous_format
    tensors = (right[:8], right.half(), right.contiguous(memory_format=other), right.to("meta"), right[..., ::2])
    for wrong in (*tensors, right.numpy(), 3):
        with pytest.raises(OptionsError) as caught:
            norm(images, out=wrong)
        assert [name.partition("=")[0] for name in caught.value.parameters] == ["out"]


@pytest.mark.parametrize(
    "crop", [3, RandomCrop(9), CenterCrop(9, resize=11), RandomResizedCrop(9), RandomResizedCrop((9, 1))], ids=str
)
def test_results_stay_on_the_device_of_the_images(crop: Any) -> None:
    images, key, norm = batch(6), key_of(6), Normalize.imagenet(flip=0.5, erase=0.5, color=ColorJitter(0.5), crop=crop)
    expected = norm(images, key)
    with torch.device("meta"):
        assert torch.equal(norm(images, key), expected)
        fixed = Normalize.imagenet(crop=crop)
        assert fixed.keyed or fixed(images).device.type == "cpu"


def test_numpy_scalars_mean_the_same_as_python_numbers() -> None:
    given = Normalize.imagenet(flip=np.bool_(True), vertical_flip=np.float32(0.25), crop=np.int64(4), seed=np.int64(3))
    assert repr(given) == repr(Normalize.imagenet(flip=True, vertical_flip=0.25, crop=4, seed=3))


def test_colors_need_three_channels() -> None:
    norm = Normalize((0.5,), (0.5,), color=ColorJitter(0.5))
    with pytest.raises(OptionsError) as caught:
        norm(batch(channels=1), key_of(6))
    assert caught.value.parameters == ("color",)
    # Contrast keeps the gray of the mean.
    assert Normalize.imagenet().augmentation.level == pytest.approx(255 * 0.458971)
    assert Normalize().augmentation.level == 127.5
    assert Normalize(std=(0.5, 0.5, 0.5)).augmentation.level == 127.5


# Under torch's modes.


traceable = pytest.mark.skipif(torch.__version__ < (2, 8), reason="older versions of torch cannot trace Normalize")


@traceable
def test_compiled_callers() -> None:
    images, key = batch(4), key_of(4)
    model = torch.nn.Conv2d(3, 2, 3)
    for settings, backend in (({}, "eager"), (COLORED, "aot_eager")):
        norm = Normalize.imagenet(**settings)

        def step(images: torch.Tensor, rows: torch.Tensor, norm: Normalize = norm) -> torch.Tensor:
            return model(norm(images, BatchKey(rows, 2, 1)))

        expected = step(images, key.rows)
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(images, key.rows), expected)
        # Tracing left nothing in the caches that breaks later calls.
        torch.testing.assert_close(step(images, key.rows), expected)


@traceable
def test_compiled_callers_take_any_epoch_and_view() -> None:
    """Dynamo makes integers symbolic that change between calls."""
    images, rows = batch(4), key_of(4).rows
    options = MOVED_AND_ERASED | {"color": COLORED["color"]}
    norm = Normalize.imagenet(seed=2**63 + 5, **options)

    def transform(images: torch.Tensor, key: BatchKey, norm: Normalize = norm) -> torch.Tensor:
        return norm(images, key)

    graphs, integers = [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        found = (node.meta.get("example_value") for node in graph.graph.nodes)
        integers.extend(value.node.hint for value in found if isinstance(value, torch.SymInt))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(transform, backend=backend, fullgraph=True)
    keys = [BatchKey(rows, epoch, repeats=epoch % 3) for epoch in range(10)]
    for key in (*keys, *(BatchKey(rows, epoch, 1, view) for epoch in (4, 11) for view in range(1, 5))):
        assert torch.equal(compiled(images, key), norm(images, key))
    # Once for the first epoch, once for each integer that becomes symbolic, and for each that is 0 or 1.
    compilations = len(graphs)
    assert compilations <= 8
    for epoch in range(12, 20):
        key = BatchKey(rows, epoch, 2, 3)
        assert torch.equal(compiled(images, key), norm(images, key))
    assert len(graphs) == compilations
    # Compilers hold symbolic integers in 64 bits, or turn larger ones into floats.
    assert 0 < max(map(abs, integers)) < 2**63
    for seed in (3, 4, 5):
        other = Normalize.imagenet(seed=seed, **options)
        assert torch.equal(compiled(images, keys[5], other), other(images, keys[5]))


def test_a_compiled_normalize_with_fields_is_refused() -> None:
    """It would leave the fields unmoved."""
    compiled = torch.compile(Normalize(flip=1.0, fields={"masks": "mask"}), backend="eager")
    with pytest.raises(OptionsError) as caught:
        h5pack.DeviceFeed([], "cpu", transform=compiled)
    assert caught.value.parameters == ("fields",)


def test_memory_is_not_filled_first() -> None:
    """``use_deterministic_algorithms`` fills new tensors with NaN, which costs as much as copying them."""
    norm, images = Normalize.imagenet(color=ColorJitter(0.5)), batch(4, 200, 200)
    draws = norm.draw(images, key_of(4))
    with FilledMemory() as mode:
        norm(images, draws=draws)
        assert not any(mode.filled)
        assert mode.filled
        torch.empty(3)
        assert mode.filled[-1]
        with unfilled_memory(), unfilled_memory():
            pass
        assert torch.utils.deterministic.fill_uninitialized_memory


class FilledMemory(TorchDispatchMode):
    """Deterministic algorithms, and whether new tensors are filled."""

    def __enter__(self) -> Any:
        torch.use_deterministic_algorithms(True)
        self.filled: list[bool] = []
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.use_deterministic_algorithms(False)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.empty.memory_format and args[0] != [0]:
            self.filled.append(torch.utils.deterministic.fill_uninitialized_memory)
        return function(*args, **(kwargs or {}))


def test_modes() -> None:
    images = batch(4)
    norm = Normalize.imagenet(flip=0.5, erase=0.5)
    expected = Normalize.imagenet(flip=0.5, erase=0.5)(images, key_of(4))
    with torch.inference_mode():
        assert torch.equal(norm(images, key_of(4)), expected)
    model = torch.nn.Conv2d(3, 2, 3)
    model(norm(images, key_of(4))).sum().backward()
    assert model.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(images, key_of(4)), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(Normalize.imagenet(flip=0.5, erase=0.5)(images, key_of(4)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_is_pickled_and_copied() -> None:
    images, key = batch(20, 80, 70), key_of(20)
    norm = Normalize.imagenet(dtype=torch.float16, flip=0.5, crop=2, erase=0.5, seed=3)
    expected = norm(images, key)
    for other in (pickle.loads(pickle.dumps(norm)), copy.deepcopy(norm)):
        assert torch.equal(other(images, key), expected)
        assert repr(other) == repr(norm)
    assert all(part in repr(norm) for part in ("mean=(0.485, ", "float16", "flip=0.5", "crop=2", "seed=3"))
    assert len(pickle.dumps(norm)) < 2000


# Statistics of packs.


def test_statistics_of_packs(tmp_path: Path) -> None:
    path = packs.converted(tmp_path)
    dataset = h5pack.H5Dataset(path, "train")
    for source in (dataset, Subset(Subset(dataset, range(5)), [1]), Subset(ConcatPack([dataset, dataset]), [1])):
        norm = Normalize.from_dataset(source, dtype=torch.float16)
        assert (norm.mean, norm.std, norm.dtype) == (tuple(dataset.mean), tuple(dataset.std), torch.float16)
    images = next(iter(torch.utils.data.DataLoader(dataset, 5, collate_fn=dataset.collate)))[0]
    assert_right(Normalize.from_dataset(dataset), images)


def test_datasets_without_statistics_or_with_different_ones_are_refused(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5"))
    with pytest.raises(OptionsError) as caught:
        Normalize.from_dataset(dataset)
    assert caught.value.path == str(dataset.path)
    one = h5pack.H5Dataset(packs.converted(tmp_path))
    other = copy.copy(one)
    other.mean = one.mean / 2
    for wrong in (None, [1], np.ones(2), ConcatPack([one, other])):
        with pytest.raises(OptionsError):
            Normalize.from_dataset(wrong)


# What is refused.


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"mean": (0.5, 0.5), "std": (0.2,)}, ("mean", "std")),
        ({"mean": (), "std": ()}, ("mean", "std")),
        ({"mean": 0.5}, ("mean", "std")),
        *(({"mean": value}, ("mean",)) for value in (("a",), "01", (True,), (b"1",))),
        ({"mean": (123.7, 116.3, 103.5)}, ("mean",)),
        ({"mean": (float("nan"),)}, ("mean",)),
        *(({"std": (value,)}, ("std",)) for value in (0.0, -1.0, float("nan"))),
        ({"std": (1e-5,), "dtype": torch.float16}, ("std",)),
        *(({name: "other"}, (f"{name}='other'",)) for name in ("dtype", "layout", "channels", "backend")),
        *(({name: np.ones(2)}, (f"{name}=array([1., 1.])",)) for name in ("dtype", "layout", "channels", "backend")),
        *(({name: value}, (f"{name}={value}",)) for name, value in (("flip", 2), ("crop", True))),
        *(({"seed": value}, (f"seed={value}",)) for value in (-1, 1.5, None)),
        *(({"fields": value}, (f"fields={value!r}",)) for value in ("mask", 5, ["masks"])),
        *(({"fields": {"masks": value}}, ("fields",)) for value in ("pixels", 1)),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], parameters: tuple[str, ...]) -> None:
    with pytest.raises(OptionsError) as caught:
        Normalize(**options)
    assert caught.value.parameters == parameters


def test_images_of_another_dtype_or_shape_are_refused() -> None:
    wrong = (batch().float(), batch().int(), batch()[0], batch().numpy())
    for norm, images in (
        *((Normalize.imagenet(), one) for one in (*wrong, batch(channels=4), batch(channels=1), batch(6, 3, 8))),
        (Normalize((0.5,), (0.5,)), batch()),
        (Normalize.imagenet(channels="first"), batch()),
        (Normalize(), batch(6, 1, 8)),
        (Normalize(), batch(channels=4)),
    ):
        with pytest.raises(OptionsError):
            norm(images)
    assert Normalize.imagenet(channels="last")(batch(6, 3, 8)).shape == (6, 3, 3, 8)
    assert Normalize.imagenet(channels="first")(batch(6, 3, 8)).shape == (6, 3, 8, 3)
    for norm in (Normalize((0.5,) * 4, (0.5,) * 4), Normalize(channels="last")):
        assert norm(batch(channels=4)).shape == (6, 4, 13, 11)
