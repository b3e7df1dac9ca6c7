"""The Triton kernels: in Triton's interpreter on the CPU, compiled without a device, and on a GPU if there is one."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from h5pack.device.normalize import Normalize
from h5pack.errors import OptionsError
from tests.device.feeds import needs_gpu
from tests.device.test_normalize import AUGMENTATIONS, DTYPES, LAYOUTS, assert_near, batch, key_of, reference

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="pip install triton")
not_interpreted = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="kernels are interpreted")
ROOT = Path(__file__).parents[2]
SIZES = [(2, 5, 7), (1, 1, 1, 1), (2, 23, 31, 4), (1, 11, 300)]
"""Batches of one to four channels; some fill one program of a kernel, others need several."""


def assert_kernel_is_right(device: str, settings: dict[str, Any], sizes: list[tuple[int, ...]]) -> None:
    """That the kernel's results are those of torch operations, bit by bit, and within one rounding step of the truth.

    Triton's interpreter rounds to bfloat16 towards zero, which is within one step but not the same bits.
    """
    for size in sizes:
        images, key = batch(*size), key_of(size[0])
        mean, std = (0.485, 0.456, 0.406, 0.5)[: images.shape[3]], (0.229, 0.224, 0.225, 0.25)[: images.shape[3]]
        first = images.permute(0, 3, 1, 2).contiguous().to(device)
        views = [(images.to(device), "last"), (first, "first"), (images.to(device).flip(3)[:, :, ::2], "last")]
        for stored, channels in views:
            norm = Normalize(mean, std, channels=channels, backend="triton", **settings)
            plain = Normalize(mean, std, channels=channels, backend="torch", **settings)
            result, host = norm(stored, key), stored.cpu()
            assert result.device == stored.device
            assert_near(norm, result, reference(norm, host if channels == "last" else host.permute(0, 2, 3, 1), key))
            if device != "cpu" or norm.dtype != torch.bfloat16:
                assert torch.equal(result.cpu(), plain(host, key))


def interpret() -> None:
    """Compare both kernels: each layout with each dtype, augmentation and size; views of batches; an empty batch."""
    assert "triton" not in sys.modules, "importing Normalize imports Triton"
    for number in range(12):
        settings = {"dtype": DTYPES[number % 3], "layout": list(LAYOUTS)[number % 2]}
        settings |= ({}, *AUGMENTATIONS)[number % 5]
        assert_kernel_is_right("cpu", settings, [SIZES[number // 2 % 4]])
    for dtype in DTYPES:
        assert_kernel_is_right("cpu", {"dtype": dtype}, SIZES[2:])
    assert Normalize.imagenet(backend="triton")(batch()[:0]).shape == (0, 3, 13, 11)
    images = batch(4)[1:3]
    assert torch.equal(Normalize.imagenet(backend="triton")(images), Normalize.imagenet()(images))


@needs_triton
def test_interpreted_kernels_equal_the_slow_twin(tmp_path: Path) -> None:
    # Triton reads TRITON_INTERPRET when it is imported, so this needs a process of its own.
    code = "from tests.device import test_kernels; test_kernels.interpret()"
    variables = {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


@needs_triton
@not_interpreted
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_compiled_kernel_moves_whole_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Compile the flat kernel for a GPU that is not here, and check how it loads and stores its values."""
    triton = pytest.importorskip("triton", minversion="3.3", reason="its compiler expects the arguments of 3.3")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from h5pack.device import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    values = 512 if dtype == "fp32" else 1024
    constants = {"CHANNELS": 3, "FINE": dtype == "fp32", "VALUES": values}
    signature = {"pixels": "*u8", "result": f"*{dtype}", "constants": "*fp32", "total": "i32", "stride": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    names = list(signature)
    # As of tensors, whose memory is aligned, and any number of values.
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("pixels", "result", "constants", "stride")}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernels._flat_kernel, signature=signature, constexprs=places, attrs=aligned)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"]
    assert "st.global.v4.b32" in ptx, "stores are of 16 bytes"
    assert ("ld.global.v2.b32" in ptx) == (dtype != "fp32"), "loads are of 8 bytes, of 4 for float32"
    assert "fma.rn.f32" in ptx
    assert "ld.shared" not in ptx, "threads exchange no values"


# Which backend is used.


@needs_triton
@not_interpreted
def test_kernels_need_a_gpu() -> None:
    with pytest.raises(OptionsError, match="CUDA"):
        Normalize.imagenet(backend="triton")(batch())


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "h5pack.device.kernels", raising=False)
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
def test_a_failing_kernel_is_replaced_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from h5pack.device import kernels

    fail = Mock(side_effect=RuntimeError("no C compiler"))
    monkeypatch.setattr(kernels, "normalize", fail)
    monkeypatch.setattr(kernels, "interpreted", lambda: True)
    norm = Normalize.imagenet()
    monkeypatch.setattr(norm, "_by_triton", lambda device: not norm._kernels_fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(norm(batch()), Normalize.imagenet()(batch()))
    assert fail.call_count == caplog.text.count("no C compiler") == 1
    with pytest.raises(RuntimeError, match="no C compiler"):
        Normalize.imagenet(backend="triton")(batch())


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
