"""The stages behind the loader, with as much of CUDA as can be faked."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import h5pack
from h5pack.doctor import device_stages
from h5pack.doctor.device_stages import DeviceStages, idle_gpus, labels_of, normalizer_for
from h5pack.monitor.probes import GpuStatus
from tests.data.packs import ROWS, converted, labelled
from tests.doctor.conftest import Machine

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(labelled(tmp_path / "x.h5"))


def uint8(*shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("images", "scaled", "shape"),
    [
        (uint8(2, 8, 6, 3), True, (2, 3, 8, 6)),
        (uint8(2, 3, 8, 6), True, (2, 3, 8, 6)),
        (uint8(2, 8, 6, 4), True, (2, 4, 8, 6)),
        (uint8(2, 4, 8, 6), True, (2, 4, 8, 6)),
        (uint8(2, 9, 8, 6), False, (2, 9, 8, 6)),
        (uint8(2, 9), False, (2, 9)),
        (torch.rand(2, 3, 4, 5).half(), False, (2, 3, 4, 5)),
    ],
)
def test_images_of_any_shape_become_floats(
    dataset: h5pack.H5Dataset, images: torch.Tensor, scaled: bool, shape: tuple[int, ...]
) -> None:
    normalize, _ = normalizer_for(dataset, images, torch.float32)
    assert isinstance(normalize, h5pack.Normalize) == scaled
    result = normalize(images)
    assert (result.shape, result.dtype) == (shape, torch.float32)


def test_a_pack_is_normalized_by_its_statistics(tmp_path: Path) -> None:
    pack = h5pack.H5Dataset(converted(tmp_path))
    batch = uint8(2, 20, 14, 3)
    normalize, _ = normalizer_for(pack, batch, torch.bfloat16)
    assert torch.equal(normalize(batch), h5pack.Normalize.from_dataset(pack, dtype=torch.bfloat16)(batch))
    assert normalizer_for(pack, torch.rand(2, 3), torch.float32)[0] is None


def test_stages_on_the_cpu(dataset: h5pack.H5Dataset) -> None:
    images, labels = uint8(8, 16, 12, 3), torch.arange(8)
    normalize, _ = normalizer_for(dataset, images, torch.float32)
    stages = DeviceStages(CPU, [images, labels], normalize)
    assert stages.images.shape == (8, 3, 16, 12)
    seen: list[tuple[int, Any]] = []
    found = stages.step(lambda images, labels: seen.append((len(images), labels)), 0.0)
    assert (found.images, seen[0][0]) == (8, 8)
    assert torch.equal(seen[0][1], labels)
    assert stages.step(lambda images, labels: seen.append((len(images), labels)), 0.0, 0.5).images == 4
    assert torch.equal(seen[1][1], labels[:4])
    assert stages.normalize(0.0).images == 8
    alone = DeviceStages(CPU, images, None)
    assert alone.labels is None
    assert torch.equal(alone.images, images)
    assert labels_of((1, "words")) is None


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


def test_synchronisations_of_a_step_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        if mode == "warn":
            # As torch does, to say that it may miss some.
            warnings.warn(
                "Synchronization debug mode is a prototype and does not detect all synchronizing", stacklevel=1
            )

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    stages = DeviceStages(CPU, uint8(4, 3), None)

    def step(images: torch.Tensor, labels: Any) -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    count, where = stages.synchronisations(step)
    assert count == 2
    assert where.startswith("test_device_stages.py:")
    assert modes == ["warn", 0]
    assert stages.synchronisations(lambda images, labels: None) == (0, None)


@pytest.mark.parametrize(
    ("used", "idle"), [((90.0, 0.0, 3.0), 2), ((90.0, 80.0, 0.0), 1), ((0.0, 50.0, 50.0), 0), ((5.0, None, 0.0), None)]
)
def test_idle_gpus_are_counted(
    monkeypatch: pytest.MonkeyPatch, used: tuple[float | None, ...], idle: int | None
) -> None:
    class Probe:
        def __init__(self, device: torch.device) -> None:
            self.number = device.index

        def sample(self) -> GpuStatus | None:
            found = used[self.number]
            return None if found is None else GpuStatus(utilisation_percent=found)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(device_stages, "GpuProbe", Probe)
    assert idle_gpus(torch.device("cuda", 0)) == idle


@pytest.mark.gpu
@needs_gpu
def test_stages_on_a_gpu(dataset: h5pack.H5Dataset) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    loader = h5pack.H5Loader(dataset, 16, window=2, pin_memory=True)
    batch = next(iter(loader))
    normalize, _ = normalizer_for(dataset, batch[0], torch.float32)
    stages = DeviceStages(device, batch, normalize)
    assert stages.images.device == device
    assert stages.copy(0.05).rate > 0
    assert stages.normalize(0.05).rate > 0
    assert stages.synchronisations(lambda images, labels: images.sum().item())[0] == 1
    assert stages.synchronisations(lambda images, labels: images.sum())[0] == 0
    found = stages.everything(loader, lambda images, labels: images.sum(), lambda: 0, 4)(0.1)
    assert 0 <= found.stall_seconds <= found.seconds
    loader.close()
