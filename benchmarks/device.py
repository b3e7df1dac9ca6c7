"""Does the device wait for its batches, and how fast are they made ready on it?

Run ``python -m benchmarks.device``; it makes its own files. On a CUDA device:

- the device's copy bandwidth, from memory of its own to memory of its own, bytes read and written: the ceiling of
  whatever reads and writes each value once;
- `Normalize`, plain and with flip and crop, as a fraction of that, counting the bytes that it reads and writes;
- copies out of pinned host memory;
- a ResNet-50 trained in bfloat16, fed by H5Loader and DeviceFeed out of a pack; beside it by a DataLoader with workers
  that decode the same pictures out of a folder of JPEG files; and with one batch that is there already, which is as
  fast as the step can be. The stall fraction is the part of the time by which a loop is slower than that.

Without a CUDA device: `Normalize` by torch's operations, and what DeviceFeed costs where it only passes batches on.
Then ``"device"`` is ``"cpu"``, and nothing is said about a GPU.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import h5pack
from benchmarks.common import RESULTS, scratch_folder, spread, write_result
from h5pack.device.batch import BatchKey
from h5pack.device.feed import DeviceFeed
from h5pack.device.normalize import Normalize
from h5pack.monitor.probes import GpuProbe
from h5pack.system.machine import available_cpus, machine_facts

CLASSES = 10
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AUGMENTATIONS: dict[str, dict[str, Any]] = {"plain": {}, "flip and crop": {"flip": 0.5, "crop": 8}}
_PERIOD_SECONDS = 0.2
_WARM_UP = 3


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
    parser.add_argument("--json", type=Path, default=RESULTS / "device.json")
    options = parser.parse_args(arguments)
    device = DeviceFeed([], options.device).device
    with scratch_folder(options.scratch) as scratch:
        result = {
            "benchmark": "device",
            "command": f"python -m benchmarks.device --batch {options.batch} --size {options.size} "
            f"--repeats {options.repeats}",
            "machine": machine_facts(scratch),
            "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
            "settings": {name: getattr(options, name) for name in ("batch", "size", "repeats")},
            "normalize": normalize_figures(device, options.batch, options.size, options.repeats),
            "pass_through": pass_through_figures(options.repeats),
        }
        if device.type == "cuda":
            pictures = (options.images, options.size, options.batch, options.steps, options.workers)
            result["pinned_copy_gb_per_s"] = pinned_copy(device, options.repeats)
            result["training"] = training_figures(device, scratch, *pictures, partial(resnet50, CLASSES))
        write_result(options.json, result)


# Figures of single stages.


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Seconds that a piece of work takes on the device, for each repeat."""
    work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            # Several in a row, so that launching is hidden, as it is in training.
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(5):
                work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 5000)
        else:
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    return times


def copy_bandwidth(device: torch.device, repeats: int, size: int = 1 << 30) -> dict[str, float]:
    """GB/s that the device reads and writes when it copies its own memory."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return spread([2 * size / one / 1e9 for one in seconds_of(lambda: target.copy_(source), device, repeats)])


def pinned_copy(device: torch.device, repeats: int, size: int = 1 << 28) -> dict[str, float]:
    """GB/s out of pinned host memory."""
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    work = partial(target.copy_, source, non_blocking=True)
    return spread([size / one / 1e9 for one in seconds_of(work, device, repeats)])


def normalize_figures(device: torch.device, batch: int, size: int, repeats: int) -> dict[str, Any]:
    """What `Normalize` reaches, for each precision and augmentation; on CUDA beside the device's copy bandwidth."""
    images = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8, device=device)
    key = BatchKey(torch.arange(batch, device=device), 0)
    copied = copy_bandwidth(device, repeats) if device.type == "cuda" else None
    figures: dict[str, Any] = {"copy_gb_per_s": copied, "cases": []}
    for precision, dtype in PRECISIONS.items():
        for name, augmentation in AUGMENTATIONS.items():
            normalize = Normalize.imagenet(dtype=dtype, **augmentation)
            keys = (key,) if augmentation else ()
            times = seconds_of(partial(normalize, images, *keys), device, repeats)
            # Each value is read once, as a byte, and written once.
            moved = images.numel() * (1 + torch.empty(0, dtype=dtype).element_size())
            rates = spread([moved / one / 1e9 for one in times])
            figures["cases"].append(
                {
                    "precision": precision,
                    "augmentation": name,
                    "images_per_s": spread([batch / one for one in times]),
                    "gb_per_s": rates,
                    "of_copy": None if copied is None else round(rates["median"] / copied["median"], 3),
                }
            )
    return figures


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


# Training loops.


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet50(classes: int, width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50 (He et al. 2016, arXiv:1512.03385), strides as in torchvision; float (N, 3, H, W) to (N, classes).

    A smaller `width` and fewer `blocks` make a smaller one.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for level, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << level, 2 if level and not block else 1))
            inputs = 4 * (width << level)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class JpegFolder(Dataset[Any]):
    """What most people write: a folder of files, opened and decoded one by one."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        file = self.files[index]
        with Image.open(file) as image:
            pixels = np.array(image.convert("RGB"))
        return torch.from_numpy(pixels), self.classes.index(file.parent.name)


def draw_pictures(folder: Path, size: int, numbers: range) -> None:
    """Write some JPEG files: colours that change slowly, and some grain, so that they compress as photographs do."""
    for number in numbers:
        random = np.random.default_rng(number)
        coarse = Image.fromarray(random.integers(0, 256, (12, 12, 3), np.uint8)).resize((size, size), Image.BICUBIC)
        grain = random.normal(0, 6, (size, size, 1))
        picture = np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(picture).save(folder / str(number % CLASSES) / f"{number:06}.jpg", quality=90)


def make_pictures(folder: Path, count: int, size: int) -> Path:
    """A folder of JPEG files, with a folder for each class."""
    for name in range(CLASSES):
        (folder / str(name)).mkdir(parents=True, exist_ok=True)
    step = 500
    with ProcessPoolExecutor(available_cpus()) as pool:
        numbers = [range(first, min(count, first + step)) for first in range(0, count, step)]
        list(pool.map(partial(draw_pictures, folder, size), numbers))
    return folder


class Utilisation:
    """Asks a GPU how busy it is, again and again; what cannot be had is None."""

    def __init__(self, device: torch.device) -> None:
        self.percents: list[float | None] = []
        self._probe = GpuProbe(device) if device.type == "cuda" else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Utilisation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._probe is not None and not self._over.wait(_PERIOD_SECONDS):
            status = self._probe.sample()
            self.percents.append(None if status is None else status.utilisation_percent)

    def report(self) -> dict[str, Any]:
        """The series, and its mean."""
        known = [percent for percent in self.percents if percent is not None]
        mean = round(sum(known) / len(known), 1) if known else None
        return {"period_seconds": _PERIOD_SECONDS, "percent": self.percents, "mean_percent": mean}


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """One epoch after the other."""
    while True:
        yield from loader


def train(network: nn.Module, batches: Iterator[Any], device: torch.device, steps: int) -> dict[str, Any]:
    """Seconds of some steps, after a few to warm up, and how busy the GPU was."""
    network = network.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    begin, images_done = 0.0, 0
    with Utilisation(device) as utilisation:
        for step, (images, labels) in zip(range(steps + _WARM_UP), batches, strict=False):
            if step == _WARM_UP:
                settle(device)
                utilisation.percents.clear()
                begin, images_done = time.perf_counter(), 0
            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            images_done += len(images)
        settle(device)
        seconds = time.perf_counter() - begin
    return {
        "steps": steps,
        "seconds": round(seconds, 3),
        "images_per_s": round(images_done / seconds, 1),
        "gpu": utilisation.report(),
    }


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given: between measurements, never in one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training_figures(
    device: torch.device,
    scratch: Path,
    images: int,
    size: int,
    batch: int,
    steps: int,
    workers: int,
    make_network: Callable[[], nn.Module],
) -> dict[str, Any]:
    """The same training with a batch that is there already, out of a pack, and out of JPEG files."""
    folder = make_pictures(scratch / "jpeg", images, size)
    h5pack.convert(folder, scratch / "pack.h5")
    dataset = h5pack.H5Dataset(scratch / "pack.h5")
    normalize = Normalize.from_dataset(dataset, dtype=torch.bfloat16)
    pinned = device.type == "cuda"
    pack = DeviceFeed(h5pack.H5Loader(dataset, batch, drop_last=True, pin_memory=pinned), device, transform=normalize)
    files = DataLoader(
        JpegFolder(folder),
        batch,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        pin_memory=pinned,
        persistent_workers=workers > 0,
    )
    decoded = DeviceFeed(files, device, transform=normalize)
    ready = next(iter(pack))
    cases = {"one batch": [ready], "pack": pack, "jpeg folder": decoded}
    figures: dict[str, Any] = {"images": images, "size": size, "batch": batch, "workers": workers, "cases": {}}
    for name, loader in cases.items():
        torch.manual_seed(0)
        figures["cases"][name] = train(make_network(), endless(loader), device, steps)
    least = figures["cases"]["one batch"]["seconds"]
    for case in figures["cases"].values():
        case["stall_fraction"] = round(max(0.0, 1 - least / case["seconds"]), 3)
        print(json.dumps({key: value for key, value in case.items() if key != "gpu"}))
    return figures


if __name__ == "__main__":
    main()
