"""The stages behind the loader, with as much of CUDA as can be faked, and steps made of a user's model or factory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import h5pack
from h5pack.doctor import device_stages
from h5pack.doctor.device_stages import (
    DeviceStages,
    ModuleStep,
    copies_beyond_cache,
    default_loss,
    idle_gpus,
    labels_of,
    make_step,
    name_of,
    normalizer_for,
)
from h5pack.errors import OptionsError
from h5pack.monitor.probes import GpuStatus
from tests.data.packs import ROWS, converted
from tests.doctor.conftest import Machine

CPU = torch.device("cpu")


def uint8(*shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def test_images_of_any_shape_become_floats(dataset: h5pack.H5Dataset) -> None:
    for images, scaled, shape in (
        *((uint8(2, 8, 6, 3), True, (2, 3, 8, 6)), (uint8(2, 3, 8, 6), True, (2, 3, 8, 6))),
        *((uint8(2, 8, 6, 4), True, (2, 4, 8, 6)), (uint8(2, 4, 8, 6), True, (2, 4, 8, 6))),
        *((uint8(2, 9, 8, 6), False, (2, 9, 8, 6)), (uint8(2, 9), False, (2, 9))),
        (torch.rand(2, 3, 4, 5).half(), False, (2, 3, 4, 5)),
    ):
        normalize, _ = normalizer_for(dataset, images, torch.float32)
        assert isinstance(normalize, h5pack.Normalize) == scaled
        result = normalize(images)
        assert (result.shape, result.dtype) == (shape, torch.float32)


def test_a_pack_is_normalized_by_its_statistics(tmp_path: Path) -> None:
    pack, batch = h5pack.H5Dataset(converted(tmp_path)), uint8(2, 20, 14, 3)
    normalize, _ = normalizer_for(pack, batch, torch.bfloat16)
    assert torch.equal(normalize(batch), h5pack.Normalize.from_dataset(pack, dtype=torch.bfloat16)(batch))
    assert normalizer_for(pack, torch.rand(2, 3), torch.float32)[0] is None


def test_stages_on_the_cpu(dataset: h5pack.H5Dataset) -> None:
    images, labels = uint8(8, 16, 12, 3), torch.arange(8)
    stages = DeviceStages(CPU, [images, labels], normalizer_for(dataset, images, torch.float32)[0])
    assert stages.images.shape == (8, 3, 16, 12)
    seen: list[tuple[int, list[int]]] = []
    counts = [
        stages.step(lambda images, labels: seen.append((len(images), labels.tolist())), 0.0, fraction).images
        for fraction in (1.0, 0.5)
    ]
    assert counts == [8, 4]
    assert seen == [(8, list(range(8))), (4, list(range(4)))]
    assert stages.normalize(0.0).images == 8
    alone = DeviceStages(CPU, images, None)
    assert alone.labels is labels_of((1, "words")) is None
    assert torch.equal(alone.images, images)


def test_a_batch_that_depends_on_parameters_of_a_transform_is_passed_again_and_again() -> None:
    images = torch.rand(8, 3, 16, 12) * torch.ones(1, requires_grad=True)
    stages = DeviceStages(CPU, [images, torch.arange(8)], None)
    step, _ = make_step(None, (3, 16, 12), 8, CPU, torch.float32)
    assert [stages.step(step, 0.0).images for _ in range(3)] == [8] * 3


def test_images_to_normalize_in_turns_exceed_the_cache() -> None:
    images = uint8(2, 8, 8, 3)
    for cache_bytes, count in ((0, 1), (images.nbytes // 2, 1), (images.nbytes, 2), (1000, 6), (1 << 20, 16)):
        copies = copies_beyond_cache(images, cache_bytes)
        assert len({copy.data_ptr() for copy in copies}) == len(copies) == count
        assert all(torch.equal(copy, images) for copy in copies)


def test_the_loop_passes_all_images_and_counts_waiting(dataset: h5pack.H5Dataset, machine: Machine) -> None:
    with_labels: list[int] = []

    def step(images: torch.Tensor, labels: torch.Tensor | None) -> None:
        assert images.dtype == torch.float32
        with_labels.extend(labels.tolist())

    loader = h5pack.H5Loader(dataset, 16, window=2, num_threads=1)
    batch = next(iter(loader))
    normalize, _ = normalizer_for(dataset, batch[0], torch.float32)
    run = DeviceStages(CPU, batch, normalize).everything(loader, step, lambda: 0, 4)
    for turn in range(3):
        with_labels.clear()
        found = run(1.0)
        assert found.images % ROWS == 0
        assert found.images == len(with_labels)
        assert sorted(with_labels[:ROWS]) == list(range(ROWS)), turn
        assert 0 < found.stall_seconds < found.seconds
    loader.close()


def with_rates(monkeypatch: pytest.MonkeyPatch, images: int, rates: Callable[[float], float]) -> DeviceStages:
    """Stages whose step reaches the rates that a function of the batch's fraction gives."""
    stages = DeviceStages(CPU, (uint8(images, 8, 8, 3), torch.arange(images)), None)
    monkeypatch.setattr(stages, "step", lambda step, seconds, fraction=1.0: SimpleNamespace(rate=rates(fraction)))
    return stages


def test_half_a_batch_is_compared_with_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = iter((30.0, 60.0, 50.0))
    stages = with_rates(monkeypatch, 8, lambda fraction: next(halves) if fraction == 0.5 else 100.0)
    assert stages.half_batch_ratio(lambda images, labels: None, 0.06) == 0.6
    assert with_rates(monkeypatch, 1, lambda _: 1.0).half_batch_ratio(lambda images, labels: None, 0.06) is None


def test_synchronizations_of_a_step_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        if mode == "warn":
            # As torch does, to say that it may miss some.
            warnings.warn("Synchronization debug mode is a prototype and does not detect all", stacklevel=1)

    def step(images: torch.Tensor, labels: Any) -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    stages = DeviceStages(CPU, uint8(4, 3), None)
    count, where = stages.synchronizations(step)
    assert (count, where.partition(":")[0], modes) == (2, "test_device_stages.py", ["warn", 0])
    assert stages.synchronizations(lambda images, labels: None) == (0, None)


@pytest.mark.parametrize(("used", "idle"), [((90.0, 0.0, 3.0), 2), ((0.0, 50.0, 50.0), 0), ((5.0, None, 0.0), None)])
def test_counts_of_idle_gpus(monkeypatch: pytest.MonkeyPatch, used: tuple[float | None, ...], idle: int | None) -> None:
    class Probe:
        def __init__(self, device: torch.device) -> None:
            self.found = used[device.index]

        def sample(self) -> GpuStatus | None:
            return None if self.found is None else GpuStatus(utilization_percent=self.found)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(device_stages, "GpuProbe", Probe)
    assert idle_gpus(torch.device("cuda", 0)) == idle


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_stages_on_a_gpu(dataset: h5pack.H5Dataset) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    loader = h5pack.H5Loader(dataset, 16, window=2, pin_memory=True)
    batch = next(iter(loader))
    stages = DeviceStages(device, batch, normalizer_for(dataset, batch[0], torch.float32)[0])
    assert stages.images.device == device
    assert stages.copy(0.05).rate > 0
    assert stages.normalize(0.05).rate > 0
    assert stages.synchronizations(lambda images, labels: images.sum().item())[0] == 1
    assert stages.synchronizations(lambda images, labels: images.sum())[0] == 0
    found = stages.everything(loader, lambda images, labels: images.sum(), lambda: 0, 4)(0.1)
    assert 0 <= found.stall_seconds <= found.seconds
    loader.close()


IMAGES, LABELS = torch.rand(5, 3, 16, 12), torch.tensor([0, 1, 2, 3, -1])


class Net(nn.Module):
    """Remembers the types of its results."""

    def __init__(self, classes: int = 4, trains: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 16 * 12, classes).requires_grad_(trains)
        self.seen: list[torch.dtype] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(images.flatten(1))
        self.seen.append(result.dtype)
        return result


class Forwarding(Net):
    """Its constructor passes on what it gets; only its `forward` has a parameter `device`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def forward(self, images: torch.Tensor, device: Any = None) -> torch.Tensor:
        return super().forward(images)


def made(
    model: Any, shape: tuple[int, ...] = (3, 16, 12), classes: int | None = 4, dtype: torch.dtype = torch.float32
) -> tuple[Any, str]:
    return make_step(model, shape, classes, CPU, dtype)


def test_a_class_gets_no_parameters_of_its_forward() -> None:
    step, _ = made(Forwarding)
    step(IMAGES, LABELS)


def test_the_built_in_step_accepts_images_of_any_size() -> None:
    for shape, classes in (((3, 16, 12), 5), ((1, 1, 1), None), ((2, 3), 5)):
        step, text = made(None, shape, classes)
        step(torch.rand(3, *shape), torch.tensor([0, 1, 9_999]))
        step(torch.rand(3, *shape), None)
        assert text.startswith("a small built-in network of ")


@pytest.mark.parametrize("as_factory", [True, False])
def test_a_step_of_a_module_leaves_its_weights_unchanged(as_factory: bool) -> None:
    net = Net()
    before = net.linear.weight.detach().clone()
    step, text = made((lambda: net) if as_factory else net)
    step(IMAGES, LABELS)
    assert text.endswith("a Net of 2,308 parameters")
    assert net.training
    assert net.linear.weight.grad.abs().sum() > 0
    assert torch.equal(net.linear.weight, before)


def test_a_factory_is_called_with_the_keywords_that_it_names() -> None:
    got: dict[str, Any] = {}

    def factory(shape: Any, num_classes: int = 9, device: Any = None, other: int = 1) -> nn.Module:
        got.update(shape=shape, num_classes=num_classes, device=device, other=other)
        return Net(num_classes)

    for classes, passed in ((4, 4), (None, 9)):
        made(factory, classes=classes)
        assert got == {"shape": (3, 16, 12), "num_classes": passed, "device": CPU, "other": 1}
    # A class is a factory, too, and so is one of torchvision's, which takes any keyword.
    assert made(Net)[1] == f"{__name__}:Net, a Net of 2,308 parameters"
    assert made(lambda *, weights=None, **settings: Net(**settings))[1].endswith("2,308 parameters")


def test_a_pair_has_its_own_loss_and_any_other_callable_is_the_step() -> None:
    seen: list[Any] = []
    net = Net()
    step, _ = made(lambda: (net, lambda output, labels: (seen.append((output.shape, labels)), output.sum())[1]))
    step(IMAGES, None)
    assert seen == [((5, 4), None)]
    assert net.linear.weight.grad is not None
    step, text = made(lambda: lambda images, labels: seen.append((images, labels)))
    step(IMAGES, LABELS)
    assert seen[1:] == [(IMAGES, LABELS)]
    assert text.endswith("<lambda>, which returned a step function")


def test_modules_without_shapes_yet_without_training_and_with_autocast() -> None:
    lazy, text = made(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)))
    lazy(IMAGES, LABELS)
    assert text.endswith("<lambda>, a Sequential")
    frozen, net = Net(trains=False), Net()
    made(lambda: frozen)[0](IMAGES, LABELS)
    assert frozen.linear.weight.grad is None
    made(lambda: net, dtype=torch.bfloat16)[0](IMAGES.bfloat16(), LABELS)
    assert (net.seen, net.linear.weight.dtype) == ([torch.bfloat16], torch.float32)


def test_the_default_loss_fits_labels_and_output() -> None:
    output = torch.rand(5, 4)
    table = torch.tensor([[0, 1, 1, 0]] * 5, dtype=torch.uint8)
    mean = output.square().mean()
    for labels, expected in (
        (LABELS, nn.functional.cross_entropy(output[:4], LABELS[:4])),
        *(
            (table.to(dtype), nn.functional.binary_cross_entropy_with_logits(output, table.float()))
            for dtype in (torch.uint8, torch.uint16, torch.bool)
        ),
        *((labels, mean) for labels in (None, torch.rand(5), torch.rand(5, 2), torch.zeros(3, dtype=torch.long))),
    ):
        assert torch.allclose(default_loss(output, labels), expected)
    assert torch.allclose(default_loss({"logits": output, "aux": 1}, None), mean)
    # No number of a class may stop it.
    assert default_loss(output, torch.tensor([0, 1, 2, 3, 10**9])).isfinite()
    with pytest.raises(TypeError):
        default_loss("text", None)


@pytest.mark.parametrize(
    ("factory", "word"),
    [(lambda: 3, "int"), (lambda needed: needed, "TypeError"), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_factories_that_fail_say_why_in_a_line(factory: Any, word: str) -> None:
    with pytest.raises(OptionsError, match=word) as caught:
        made(factory)
    assert "\n" not in str(caught.value)
    assert name_of(factory) in str(caught.value)


def test_gradients_that_are_not_finite_leave_the_weights_unchanged() -> None:
    module = torch.nn.Linear(4, 2, bias=False)
    before = module.weight.detach().clone()

    def distances(output: torch.Tensor, _: Any) -> torch.Tensor:
        return (output[:, None] - output[None]).square().sum(-1).sqrt().sum()

    step = ModuleStep(module, distances, torch.device("cpu"), torch.float32)
    for _ in range(2):
        step(torch.rand(3, 4), None)
    assert module.weight.grad is not None
    assert module.weight.grad.isnan().any()
    assert torch.equal(module.weight, before)
