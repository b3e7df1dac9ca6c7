"""Does the device wait for its batches, and how fast are they made ready on it?

Run ``python -m benchmarks.device``; it makes its own files. It prints one line for each figure:

- `Normalize`, plain, with flip and crop, and with resized crops: microseconds a batch, apart those of the random draws
  and of the pass over the pixels; the host's time to launch it, on CUDA; and its speed as a fraction of a copy that
  reads and writes as many bytes on the device;
- what DeviceFeed costs where it only passes batches on.

On a CUDA device also:

- copies from pinned host memory, and a feed of pinned batches that no step uses, as a fraction of these copies;
- a ResNet-50 and a ResNet-18 trained in bfloat16, fed by H5Loader and DeviceFeed from a pack; beside it by a DataLoader
  with workers that decode the same pictures from a folder of JPEG files; and with one batch that is there already,
  which is as fast as the step can be. The stall fraction is the part of the time by which a loop is slower than that.
  With the CPU seconds of all processes;
- the memory that torch reserves while a captured step is replayed on the batches of a feed, and over many validations;
- whether the losses of steps fed by DeviceFeed equal those of steps that copy and transform their batches themselves.

Without a CUDA device, ``"device"`` is ``"cpu"``, and nothing is said about a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, scratch_folder, spread, write_result
from benchmarks.device_timing import (
    HostTimer,
    Timer,
    cache_bytes_of,
    copies_beyond_cache,
    enough_calls,
    settle,
    timer_of,
    turns,
)
from benchmarks.device_training import NETWORKS, training_figures, wait_for_device
from h5pack.data.draws import BatchKey
from h5pack.device.feed import DeviceFeed
from h5pack.device.normalize import Normalize
from h5pack.images.crops import RandomResizedCrop
from h5pack.system.machine import machine_facts

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def augmentations(size: int) -> dict[str, dict[str, Any]]:
    """Arguments of `Normalize`, whose results are as large as the images."""
    return {
        "plain": {},
        "flip and crop": {"flip": 0.5, "crop": 8},
        "flip and resized crop": {"flip": 0.5, "crop": RandomResizedCrop(size)},
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:1; the GPU if there is one")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="height and width of an image")
    parser.add_argument("--images", type=int, default=20_000, help="pictures of the training loops, on CUDA")
    parser.add_argument("--steps", type=int, default=200, help="steps of each training loop, on CUDA")
    parser.add_argument("--workers", type=int, default=8, help="of the DataLoader that decodes")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--scratch", type=Path, default=None, help="where files are made; the system's folder for those"
    )
    parser.add_argument("--json", type=Path, default=None, help="device.json of the results; device_cpu.json on a CPU")
    options = parser.parse_args(arguments)
    device = DeviceFeed([], options.device).device
    json = options.json or RESULTS / ("device.json" if device.type == "cuda" else "device_cpu.json")
    settings = {name: getattr(options, name) for name in ("batch", "size", "repeats")}
    if device.type == "cuda":
        settings |= {name: getattr(options, name) for name in ("images", "steps", "workers")}
    with scratch_folder(options.scratch) as scratch:
        result = {
            "benchmark": "device",
            "command": " ".join(
                ["python -m benchmarks.device", *(f"--{name} {one}" for name, one in settings.items())]
            ),
            "machine": machine_facts(scratch),
            "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
            "settings": settings,
            "normalize": normalize_figures(device, timer_of(device), options.batch, options.size, options.repeats),
            "pass_through": pass_through_figures(options.repeats),
        }
        if device.type == "cuda":
            result["pinned_copy_gb_per_s"] = pinned_copy(device, options.repeats)
            result["feed"] = feed_figures(device, options.batch, options.size, options.repeats)
            pictures = (options.images, options.size, options.batch, options.steps, options.workers)
            result["training"] = training_figures(device, scratch, *pictures, NETWORKS)
        write_result(json, result)


def copy_run(device: torch.device, timer: Timer, size: int, copies: int) -> Callable[[], float]:
    """A run of copies of `size` bytes within the device, each from and to memory of its own."""
    pairs = [[torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)] for _ in range(copies)]
    return timer.prepare(enough_calls([partial(to.copy_, source) for source, to in pairs], timer))


def copy_bandwidth(device: torch.device, timer: Timer, repeats: int, size: int = 1 << 30) -> dict[str, float]:
    """GB/s that the device reads and writes when it copies its own memory."""
    run, calls = copy_run(device, timer, size, 1), timer.min_calls
    settle(run)
    return spread([2 * size * calls / run() / 1e9 for _ in range(repeats)])


def normalize_figures(device: torch.device, timer: Timer, batch: int, size: int, repeats: int) -> dict[str, Any]:
    """What `Normalize` reaches, for each precision and augmentation, beside copies on the device."""
    figures: dict[str, Any] = {"copy_gb_per_s": copy_bandwidth(device, timer, repeats), "cases": []}
    for precision, dtype in PRECISIONS.items():
        for name, augmentation in augmentations(size).items():
            normalize = Normalize.imagenet(dtype=dtype, **augmentation)
            case = normalize_case(device, timer, normalize, (batch, size, size, 3), repeats)
            figures["cases"].append({"precision": precision, "augmentation": name, **case})
            parts = ((part, case[f"{part}_microseconds"]) for part in ("pass", "draw", "launch"))
            times = ", ".join(f"{part} {found['median']:.1f}" for part, found in parts if found is not None)
            print(
                f"normalize, {precision}, {name}: {case['microseconds']['median']:.1f} us a batch ({times}), "
                f"{case['of_copy']['median']:.2f} of a copy"
            )
    return figures


def normalize_case(
    device: torch.device, timer: Timer, normalize: Normalize, shape: tuple[int, ...], repeats: int
) -> dict[str, Any]:
    """The figures of one `Normalize`: whole calls between copies of as many bytes; draws and passes apart."""
    # Each value is read once, as a byte, and written once; a resized crop reads fewer of them.
    moved = torch.Size(shape).numel() * (1 + normalize.dtype.itemsize)
    copies = copies_beyond_cache(moved, cache_bytes_of(device))
    images = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(copies)]
    key = BatchKey(torch.arange(shape[0], device=device), 0) if normalize.keyed else None

    def prepared(calls: list[Callable[[], Any]]) -> Callable[[], float]:
        return timer.prepare(enough_calls(calls, timer))

    calls = len(enough_calls(images, timer))
    whole = prepared([partial(normalize, one, key) for one in images])
    found = turns(whole, copy_run(device, timer, moved // 2, copies), repeats)
    draw_times, pass_times = None, [turn.seconds for turn in found]
    if normalize.keyed:
        draws = normalize.draw(images[0], key)
        draw = prepared([partial(normalize.draw, one, key) for one in images])
        only = prepared([partial(normalize, one, key, draws=draws) for one in images])
        settle(only)
        draw_times, pass_times = [draw() for _ in range(repeats)], [only() for _ in range(repeats)]
    launch_times = []
    for _ in range(repeats if device.type == "cuda" else 0):
        # The host does not wait for these calls, so this is its time to launch them.
        wait_for_device(device)
        launch_times.append(HostTimer().run([partial(normalize, one, key) for one in images] * (calls // copies)))
    return {
        "images_per_s": spread([shape[0] * calls / turn.seconds for turn in found]),
        "gb_per_s": spread([moved * calls / turn.seconds / 1e9 for turn in found]),
        "microseconds": microseconds([turn.seconds for turn in found], calls),
        "draw_microseconds": None if draw_times is None else microseconds(draw_times, calls),
        "pass_microseconds": microseconds(pass_times, calls),
        "launch_microseconds": microseconds(launch_times, calls) if launch_times else None,
        "of_copy": spread([turn.of_baseline for turn in found]),
        "largest_drift_of_copy": round(max(turn.drift for turn in found), 4),
    }


def microseconds(seconds: list[float], calls: int) -> dict[str, float]:
    """Microseconds a call, of runs of some calls."""
    return spread([one / calls * 1e6 for one in seconds])


def pass_through_figures(repeats: int, batches: int = 2_000) -> dict[str, Any]:
    """Microseconds that DeviceFeed on the CPU adds to each batch of a loader."""
    loader = [[torch.zeros(4), torch.zeros(4, dtype=torch.int64)]] * batches
    added = []
    for _ in range(repeats + 1):
        times = []
        for one in (loader, DeviceFeed(loader, "cpu")):
            begin = time.perf_counter()
            for _ in one:
                pass
            times.append(time.perf_counter() - begin)
        added.append((times[1] - times[0]) / batches * 1e6)
    return {"batches": batches, "added_microseconds": spread(added[1:])}


def pinned_copy(device: torch.device, repeats: int, size: int = 1 << 28) -> dict[str, float]:
    """GB/s from pinned host memory."""
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)

    def copies() -> None:
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        wait_for_device(device)

    run = HostTimer().prepare([copies])
    settle(run)
    return spread([8 * size / run() / 1e9 for _ in range(repeats)])


def feed_figures(device: torch.device, batch: int, size: int, repeats: int, batches: int = 200) -> dict[str, Any]:
    """Images/s of a feed whose batches no step uses: copies from pinned memory, and `Normalize` to bfloat16.

    Beside it, in turns, copies of the same batches alone: as fast as a feed can be.
    """
    pinned = device.type == "cuda"
    images = [torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8) for _ in range(4)]
    images = [one.pin_memory() for one in images] if pinned else images
    loader = [images[number % len(images)] for number in range(batches)]
    feed = DeviceFeed(loader, device, transform=Normalize.imagenet(dtype=torch.bfloat16))
    targets = [torch.empty_like(one, device=device) for one in images]

    def fed() -> None:
        for _ in feed:
            pass
        wait_for_device(device)

    def copied() -> None:
        for number in range(batches):
            targets[number % len(targets)].copy_(loader[number], non_blocking=True)
        wait_for_device(device)

    found = turns(HostTimer().prepare([fed]), HostTimer().prepare([copied]), repeats)
    figures = {
        "batches": batches,
        "images_per_s": spread([batches * batch / turn.seconds for turn in found]),
        "microseconds": microseconds([turn.seconds for turn in found], batches),
        "of_pinned_copy": spread([turn.of_baseline for turn in found]),
    }
    print(
        f"feed without a step: {figures['images_per_s']['median']:,.0f} images/s, "
        f"{figures['microseconds']['median']:.0f} us a batch, {figures['of_pinned_copy']['median']:.2f} of the copies"
    )
    return figures


if __name__ == "__main__":
    main()
