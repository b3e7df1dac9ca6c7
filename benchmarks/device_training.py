"""Training loops of the benchmark of the device: ResNets, fed in several ways.

All but the figures of the GPU itself runs on the CPU, too, which is how it is tested.
"""

from __future__ import annotations

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
from examples.networks import Network
from h5pack.data.draws import BatchKey
from h5pack.device.feed import DeviceFeed
from h5pack.device.normalize import Normalize
from h5pack.monitor.probes import CpuTime, GpuProbe
from h5pack.system.machine import available_cpus

CLASSES = 10
MakeNetwork = Callable[[], nn.Module]
Step = Callable[[torch.Tensor, torch.Tensor], Any]
NETWORKS: dict[str, MakeNetwork] = {
    name: partial(Network, name, 3, CLASSES, small=False) for name in ("resnet50", "resnet18")
}
_PERIOD_SECONDS = 0.2
_WARM_UP = 3
_VALIDATION_BATCHES = 4


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
    """Write some JPEG files: colors that change slowly, and some grain, so that they compress as photographs do."""
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


class Utilization:
    """Asks a GPU how busy it is, again and again; what cannot be had is None."""

    def __init__(self, device: torch.device) -> None:
        self.percents: list[float | None] = []
        self._probe = GpuProbe(device) if device.type == "cuda" else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Utilization:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._probe is not None and not self._over.wait(_PERIOD_SECONDS):
            status = self._probe.sample()
            self.percents.append(None if status is None else status.utilization_percent)

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
    """Seconds and CPU seconds of some steps, after a few to warm up, and how busy the GPU was."""
    train_step = training_step(network, device)
    begin, images_done, cpu = 0.0, 0, CpuTime.now()
    with Utilization(device) as utilization:
        for step, (images, labels) in zip(range(steps + _WARM_UP), batches, strict=False):
            if step == _WARM_UP:
                wait_for_device(device)
                utilization.percents.clear()
                begin, images_done, cpu = time.perf_counter(), 0, CpuTime.now()
            train_step(images, labels)
            images_done += len(images)
        wait_for_device(device)
        seconds = time.perf_counter() - begin
        cpu_seconds = CpuTime.now().since(cpu).total
    return {
        "steps": steps,
        "seconds": round(seconds, 3),
        "images_per_s": round(images_done / seconds, 1),
        "cpu_seconds": None if cpu_seconds is None else round(cpu_seconds, 3),
        "gpu": utilization.report(),
    }


def wait_for_device(device: torch.device) -> None:
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
    networks: dict[str, MakeNetwork],
) -> dict[str, Any]:
    """Train with a batch that is there already, from a pack, and from JPEG files; memory and losses of the first."""
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
    figures: dict[str, Any] = {"images": images, "size": size, "batch": batch, "workers": workers, "networks": {}}
    for network, make_network in networks.items():
        found: dict[str, Any] = {}
        for name, loader in cases.items():
            torch.manual_seed(0)
            found[name] = train(make_network(), endless(loader), device, steps)
            case, least = found[name], found["one batch"]["seconds"]
            case["stall_fraction"] = round(max(0.0, 1 - least / case["seconds"]), 3)
            print(
                f"training {network}, {name}: {case['images_per_s']:,.0f} images/s, "
                f"stall {case['stall_fraction']:.1%}, {case['cpu_seconds']} s of CPU"
            )
        figures["networks"][network] = found
    make_first = next(iter(networks.values()))
    reserved = partial(torch.cuda.memory_reserved, device) if pinned else lambda: 0
    step = training_step(make_first(), device)
    replayed = CapturedStep(step, *ready) if pinned else step
    figures["replayed_steps"] = replay_figures(pack, replayed, 10 * steps, reserved)
    figures["validations"] = validation_figures(
        lambda: DeviceFeed(pack.loader, device, transform=normalize), max(2, steps // 5), reserved
    )
    figures["losses"] = loss_figures(dataset, device, batch, min(20, steps), make_first)
    return figures


class CapturedStep:
    """A training step as a CUDA graph, which reads batches from memory of its own."""

    def __init__(self, step: Step, images: torch.Tensor, labels: torch.Tensor):
        self._images, self._labels = images.clone(), labels.clone()
        stream = torch.cuda.Stream(images.device)
        stream.wait_stream(torch.cuda.current_stream(images.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                step(self._images, self._labels)
        torch.cuda.current_stream(images.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # A feed's thread may allocate pinned memory meanwhile, which the default mode takes as an error.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            step(self._images, self._labels)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._graph.replay()


def training_step(network: nn.Module, device: torch.device) -> Step:
    """A training step in bfloat16, which returns the loss."""
    network = network.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # A step that is captured must not use weights that were converted, and kept, outside of it.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def replay_figures(feed: Any, step: Step, steps: int, reserved: Callable[[], int]) -> dict[str, Any]:
    """Bytes that torch reserves on the device while a step that the host does not wait for works on a feed's batches.

    The step's host time is short, so a feed that did not bound how far it runs ahead would take ever more memory.
    """
    every, found = max(1, steps // 20), []
    for number, (images, labels) in zip(range(steps), endless(feed), strict=False):
        step(images, labels)
        if number % every == 0:
            found.append(reserved())
    return _memory_figures("replayed steps", steps, found)


def validation_figures(make_feed: Callable[[], Any], count: int, reserved: Callable[[], int]) -> dict[str, Any]:
    """Bytes that torch reserves on the device after each of several validations, which have feeds of their own."""
    found = []
    for _ in range(count):
        feed = make_feed()
        for _ in zip(range(_VALIDATION_BATCHES), feed, strict=False):
            pass
        feed.close()
        found.append(reserved())
    return _memory_figures("validations", count, found)


def _memory_figures(name: str, count: int, reserved: list[int]) -> dict[str, Any]:
    """Figures of a series of memory readings. The first tenth is left out of the growth: memory is being allocated."""
    growth = max(reserved) - reserved[len(reserved) // 10]
    print(f"{count} {name}: memory reserved on the device grew by {growth / 1e6:,.1f} MB")
    return {
        "count": count,
        "reserved_mb": [round(one / 1e6, 1) for one in reserved],
        "growth_mb": round(growth / 1e6, 1),
    }


def loss_figures(
    dataset: h5pack.H5Dataset, device: torch.device, batch: int, steps: int, make_network: MakeNetwork
) -> dict[str, Any]:
    """Whether the losses of steps fed by DeviceFeed equal those of steps that copy and transform their own batches."""
    rows = h5pack.H5Dataset(dataset.path, with_rows=True)
    normalize = Normalize.from_dataset(rows, dtype=torch.bfloat16, flip=0.5, crop=4)

    def fed() -> Iterator[Any]:
        return endless(DeviceFeed(h5pack.H5Loader(rows, batch, drop_last=True), device, transform=normalize))

    def blocking() -> Iterator[Any]:
        loader = h5pack.H5Loader(rows, batch, drop_last=True)
        while True:
            for images, labels, numbers in loader:
                key = BatchKey(numbers.to(device), loader.epoch)
                yield normalize(images.to(device), key), labels.to(device), numbers

    losses = []
    for batches in (fed(), blocking()):
        torch.manual_seed(0)
        step = training_step(make_network(), device)
        # cuDNN's fastest algorithms sum in any order.
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            found = [step(*one[:2]) for _, one in zip(range(steps), batches, strict=False)]
        losses.append(torch.stack(found))
    largest = (losses[0] - losses[1]).abs().max().item()
    print(f"losses of {steps} steps, fed and blocking: the largest difference is {largest:.3g}")
    return {"steps": steps, "largest_difference": largest, "last_loss": losses[0][-1].item()}
