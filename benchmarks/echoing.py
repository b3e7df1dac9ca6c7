"""Does showing batches several times save time, while the loader is slower than the training step?

Run ``python -m benchmarks.echoing --images FOLDER``; FOLDER holds train/ and test/ (or val/) with a folder for each
class. Without it, the gratings of `benchmarks.accuracy` are drawn.

A network is trained until it names a given share of the test images rightly, from a loader that is paced to need some
times as long for a batch as the step does: by sleeping, so that it takes no processor time. It works two batches ahead,
as a loader with threads or workers does. The arms show each batch once, twice, three times, or as the automatic factor
decides; one more has the loader as fast as it is. All augment after echoing (`DeviceFeed` around `EchoLoader`). For one
seed they begin with the same weights, and get the same fresh batches in the same order. The learning rate is constant,
because a schedule would have to know how many steps there will be. While the network is tested the clock stands still,
for the loader, too.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import h5pack
from benchmarks.accuracy import accuracy, generated, network
from benchmarks.common import about, benchmark_parser, scratch_folder, spread, write_result
from benchmarks.tables import echoing_table
from h5pack.device.echo import EchoLoader
from h5pack.device.feed import DeviceFeed
from h5pack.device.normalize import Normalize

FACTORS: tuple[float | str, ...] = (1, 2, 3, "auto")
_AHEAD = 2
_MEASURED = ("seconds", "epochs", "steps", "showings", "waiting")


@dataclass(frozen=True)
class Setting:
    """What is the same in all arms."""

    target: float  # Share of the test images to name rightly.
    slowdown: float  # Seconds that the loader needs for a batch, over those of the step.
    batch: int
    rate: float
    max_epochs: int  # Of fresh batches; an arm that needs more has failed.
    tests: int  # How often an epoch the network is tested.


class PacedLoader:
    """A loader that needs at least so long for each batch, and works two batches ahead."""

    def __init__(self, loader: h5pack.H5Loader, seconds: float) -> None:
        self.loader, self.seconds = loader, seconds
        self.dataset = loader.dataset
        self._paused = 0.0

    def pause(self, seconds: float) -> None:
        """Subtract this many seconds that have passed."""
        self._paused += seconds

    def _now(self) -> float:
        return time.perf_counter() - self._paused

    @property
    def epoch(self) -> int:
        """The loader's."""
        return self.loader.epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        done = self._now()
        rooms = deque([done] * _AHEAD)
        for batch in self.loader:
            # It begins a batch when the last is done, and there is room for it.
            done = max(done, rooms.popleft()) + self.seconds
            time.sleep(max(0.0, done - self._now()))
            rooms.append(self._now())
            yield batch


class Trainer:
    """A network, and the steps that it takes."""

    def __init__(self, classes: int, seed: int, rate: float) -> None:
        torch.manual_seed(seed)
        self.model = network(classes)
        self._optimizer = torch.optim.SGD(self.model.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """One step of SGD."""
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def test(self, pack: Path, split: str) -> float:
        """Share of a split that the network names rightly."""
        found = accuracy(self.model, pack, split)
        self.model.train()
        return found


def feed_of(pack: Path, factor: float | str, seed: int, setting: Setting, seconds: float) -> DeviceFeed:
    """Augmented batches of a pack from a paced, echoed loader."""
    dataset = h5pack.H5Dataset(pack, split="train", with_rows=True)
    loader = h5pack.H5Loader(dataset, setting.batch, seed=seed, drop_last=True, num_threads=1)
    transform = Normalize.from_dataset(dataset, flip=True, crop=2, seed=seed)
    return DeviceFeed(EchoLoader(PacedLoader(loader, seconds), factor), "cpu", transform=transform)


def step_seconds(pack: Path, setting: Setting) -> float:
    """Median time of a step, with what its batch needs."""
    times: list[float] = []
    classes = len(h5pack.H5Dataset(pack).classes or ())
    trainer = Trainer(classes, 0, setting.rate)
    while len(times) < 40:
        begin = time.perf_counter()
        for images, labels, _ in feed_of(pack, 1, 0, setting, 0.0):
            trainer.step(images, labels)
            now = time.perf_counter()
            times.append(now - begin)
            begin = now
    return statistics.median(times[10:])


def train(
    pack: Path, split: str, factor: float | str, seed: int, setting: Setting, seconds: float
) -> dict[str, float | bool]:
    """Train until the target is reached."""
    feed = feed_of(pack, factor, seed, setting, seconds)
    echo = feed.loader
    trainer = Trainer(len(feed.dataset.classes or ()), seed, setting.rate)
    an_epoch = len(echo.loader)
    every = max(1, an_epoch // setting.tests)
    wall = waited = found = 0.0
    fresh, steps, due = 0, 0, every
    for _ in range(setting.max_epochs):
        before = fresh
        begin = time.perf_counter()
        for images, labels, _ in feed:
            waited += time.perf_counter() - begin
            trainer.step(images, labels)
            steps, fresh = steps + 1, before + echo.fresh
            now = time.perf_counter()
            wall += now - begin
            if fresh >= due:
                due += every
                begin = time.perf_counter()
                found = trainer.test(pack, split)
                echo.loader.pause(time.perf_counter() - begin)
                if found >= setting.target:
                    break
            begin = time.perf_counter()
        if found >= setting.target:
            break
    return {
        "reached": found >= setting.target,
        "seconds": round(wall, 3),
        "epochs": round(fresh / an_epoch, 3),
        "steps": steps,
        "showings": round(steps / fresh, 3),
        "waiting": round(waited / wall, 4),
    }


def measure(pack: Path, split: str, setting: Setting, seeds: int, step: float) -> list[dict[str, Any]]:
    """All arms, seed by seed, so that a run that is stopped early has all arms."""
    arms: dict[tuple[float | str, bool], list[dict[str, Any]]] = {(1, False): [], **{(f, True): [] for f in FACTORS}}
    for seed in range(seeds):
        for (factor, paced), runs in arms.items():
            runs.append(train(pack, split, factor, seed, setting, setting.slowdown * step if paced else 0.0))
            print(f"seed {seed}, factor {factor}{'' if paced else ', not slowed'}: {runs[-1]}", flush=True)
    return [
        {
            "factor": factor,
            "slowed": paced,
            "runs": runs,
            **{name: spread([run[name] for run in runs]) for name in _MEASURED},
        }
        for (factor, paced), runs in arms.items()
    ]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("echoing", __doc__)
    parser.add_argument("--images", type=Path, help="train/ and test/ or val/ with class folders (default: generated)")
    parser.add_argument("--count", type=int, default=2_000, help="training images to generate")
    parser.add_argument("--target", type=float, default=0.8, help="share of the test images to name rightly")
    parser.add_argument("--slowdown", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--tests", type=int, default=4, help="of the network, in an epoch")
    arguments = parser.parse_args(argv)
    setting = Setting(
        arguments.target, arguments.slowdown, arguments.batch, arguments.rate, arguments.max_epochs, arguments.tests
    )
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with scratch_folder(arguments.scratch) as scratch:
        given, options = arguments.images is not None, "target slowdown seeds batch rate max-epochs"
        images = arguments.images or generated(scratch / "images", arguments.count)
        split = "test" if (images / "test").is_dir() else "val"
        pack = scratch / "images.h5"
        h5pack.convert(images, pack, size=32, num_workers=1)
        step = step_seconds(pack, setting)
        dataset = h5pack.H5Dataset(pack, split="train")
        arms = measure(pack, split, setting, arguments.seeds, step)
        result = {
            **about("echoing", arguments, options, scratch, " --images FOLDER" * given),
            "images": "class folders" if given else "generated",
            "train_images": len(dataset),
            "test_images": len(h5pack.H5Dataset(pack, split=split)),
            "classes": len(dataset.classes or ()),
            "setting": asdict(setting),
            "step_seconds": round(step, 5),
            "batches": math.floor(len(dataset) / setting.batch),
            "seeds": arguments.seeds,
            "arms": arms,
        }
    torch.set_num_threads(threads)
    write_result(arguments.json, result)
    print(echoing_table(result))
    return result


if __name__ == "__main__":
    main()
