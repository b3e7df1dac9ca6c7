"""The benchmark of the device runs, tiny, and says on which device."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import h5pack
from benchmarks import device
from benchmarks.device import resnet50
from tests.test_benchmarks import run


def test_it_runs_without_a_gpu(tmp_path: Path) -> None:
    result = run(tmp_path, device, "--device cpu --batch 4 --size 16 --repeats 2")
    assert result["device"] == "cpu"
    # Nothing is said about a GPU where there is none.
    assert not {"training", "pinned_copy_gb_per_s"} & result.keys()
    assert result["normalize"]["copy_gb_per_s"] is None
    cases = result["normalize"]["cases"]
    found = [(case["precision"], case["augmentation"]) for case in cases]
    assert found == list(itertools.product(("float32", "bfloat16"), ("plain", "flip and crop")))
    for case in cases:
        assert case["of_copy"] is None
        # A float32 image is 16 x 16 x 3 values of 1 + 4 bytes; rates are rounded to 4 digits behind the point.
        value_bytes = 5 if case["precision"] == "float32" else 3
        expected = case["images_per_s"]["median"] * 16 * 16 * 3 * value_bytes / 1e9
        assert case["gb_per_s"]["median"] == pytest.approx(expected, abs=1e-3)
    assert result["pass_through"]["added_microseconds"]["repeats"] == 2


def test_training_out_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(h5pack, "convert", partial(h5pack.convert, num_workers=1))
    small = partial(resnet50, device.CLASSES, width=4, blocks=(1, 1))
    figures = device.training_figures(torch.device("cpu"), tmp_path, 40, 32, 8, 4, 0, small)
    assert sorted(figures["cases"]) == ["jpeg folder", "one batch", "pack"]
    assert len(list((tmp_path / "jpeg").glob("*/*.jpg"))) == 40
    assert figures["cases"]["one batch"]["stall_fraction"] == 0
    for case in figures["cases"].values():
        assert case["images_per_s"] == pytest.approx(4 * 8 / case["seconds"], rel=0.1)
        assert 0 <= case["stall_fraction"] < 1
        assert case["gpu"] == {"period_seconds": 0.2, "percent": [], "mean_percent": None}


def test_the_network_is_a_resnet_50() -> None:
    network = resnet50(1000).eval()
    # As torchvision's: https://pytorch.org/vision/stable/models/generated/torchvision.models.resnet50.html
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
