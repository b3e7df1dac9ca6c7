"""Does a window shuffle cost accuracy? The same training with a full shuffle and with a window shuffle.

Run ``python -m benchmarks.accuracy --images FOLDER``; FOLDER holds train/ and test/ (or val/) with a folder for each
class. Without it, gratings are drawn that a network can tell apart, though not at once.

The images are packed twice: in the default shuffled order, and sorted by class. Each pack is read in both orders, which
makes four arms. For one seed they begin with the same weights, take the same number of steps of the same schedule, and
flip at random by the same numbers; only the order of the rows differs. The two arms with a full shuffle differ by
nothing but luck, so their difference shows how large luck is. Chunks are small, so that the window is a small part of
the pack, as it is in a large one.
"""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import h5pack
from benchmarks.common import about, benchmark_parser, scratch_folder, write_result
from benchmarks.tables import accuracy_table
from h5pack.benchmark.mixing import mixing_report
from h5pack.order.window import DEFAULT_WINDOW

ORDERS = ("shuffled", "sorted")
SHUFFLES = ("full", "window")


@dataclass(frozen=True)
class Training:
    """What is the same in all arms."""

    epochs: int
    batch: int
    window: int
    rate: float  # Peak of the one-cycle schedule.


def generated(folder: Path, count: int, classes: int = 4, size: int = 32) -> Path:
    """Gratings in noise, whose class is their direction; train/ and test/ with a folder a class."""
    y, x = np.mgrid[:size, :size] / size
    for split, images in (("train", count), ("test", count // 2)):
        for number in range(images):
            random = np.random.default_rng((split == "test", number))
            kind = number % classes
            angle = np.pi * (kind + random.uniform(-0.25, 0.25)) / classes
            wave = np.sin(random.uniform(12, 25) * (x * np.cos(angle) + y * np.sin(angle)) + random.uniform(0, 6))
            pixels = 128 + 40 * wave[:, :, None] * random.uniform(0.3, 1, 3) + random.normal(0, 40, (size, size, 3))
            path = folder / split / f"class-{kind}" / f"{number:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)
    return folder


def network(classes: int) -> nn.Module:
    """Three convolutions, each with batch normalization, and a linear layer; 75,000 parameters and a few."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 96)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, classes)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def normalized(images: torch.Tensor, dataset: h5pack.H5Dataset) -> torch.Tensor:
    """Rows as stored, (n, H, W, C), as float32 (n, C, H, W) in channels_last."""
    assert dataset.mean is not None
    assert dataset.std is not None
    mean, std = (torch.from_numpy(255 * values).float() for values in (dataset.mean, dataset.std))
    return ((images.float() - mean) / std).permute(0, 3, 1, 2)


def train(pack: Path, shuffle: str, seed: int, training: Training) -> nn.Module:
    """A network, trained on the pack's images in an order."""
    dataset = h5pack.H5Dataset(pack, split="train")
    loader = h5pack.H5Loader(
        dataset, training.batch, shuffle=shuffle, window=training.window, seed=seed, drop_last=True, num_threads=1
    )
    torch.manual_seed(seed)
    model = network(len(dataset.classes or ()))
    optimizer = torch.optim.SGD(model.parameters(), training.rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training.rate, total_steps=training.epochs * len(loader) + 1
    )
    flips = torch.Generator().manual_seed(seed)
    for _ in range(training.epochs):
        for images, labels in loader:
            which = torch.rand(len(images), generator=flips) < 0.5
            images[which] = images[which].flip(2)
            loss = nn.functional.cross_entropy(model(normalized(images, dataset)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    loader.close()
    return model


def accuracy(model: nn.Module, pack: Path, split: str) -> float:
    """Share of a split's images that a network names rightly."""
    dataset = h5pack.H5Dataset(pack, split=split)
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in h5pack.H5Loader(dataset, 250, shuffle=False, num_threads=1):
            right += int((model(normalized(images, dataset)).argmax(1) == labels).sum())
    return right / len(dataset)


def measure(packs: dict[str, Path], split: str, training: Training, seeds: int) -> list[dict[str, Any]]:
    """The four arms, seed by seed, so that a run that is stopped early has all arms."""
    found: dict[tuple[str, str], list[float]] = {(order, shuffle): [] for order in ORDERS for shuffle in SHUFFLES}
    for seed in range(seeds):
        for (order, shuffle), scores in found.items():
            begin = time.perf_counter()
            scores.append(round(accuracy(train(packs[order], shuffle, seed, training), packs[order], split), 6))
            seconds = time.perf_counter() - begin
            print(f"seed {seed}, {order} pack, {shuffle}: {scores[-1]:.4f} ({seconds:.0f} s)", flush=True)
    return [
        {
            "pack": order,
            "shuffle": shuffle,
            "accuracy": scores,
            "mean": round(statistics.mean(scores), 6),
            "deviation": round(statistics.stdev(scores), 6),
        }
        for (order, shuffle), scores in found.items()
    ]


def difference(arms: list[dict[str, Any]], one: tuple[str, str], other: tuple[str, str]) -> dict[str, Any]:
    """Mean over the seeds of one arm's accuracy less another's, and its standard error."""
    left, right = (
        next(arm["accuracy"] for arm in arms if (arm["pack"], arm["shuffle"]) == name) for name in (one, other)
    )
    gaps = [a - b for a, b in zip(left, right, strict=True)]
    return {
        "of": " ".join(one),
        "less": " ".join(other),
        "mean": round(statistics.mean(gaps), 6),
        "standard_error": round(statistics.stdev(gaps) / len(gaps) ** 0.5, 6),
    }


def packed(images: Path, scratch: Path, chunk_rows: int) -> dict[str, Path]:
    """The images in both orders."""
    packs = {}
    for order in ORDERS:
        packs[order] = scratch / f"{order}.h5"
        h5pack.convert(images, packs[order], order=order, chunk_rows=chunk_rows, size=32, num_workers=1)
    return packs


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("accuracy", __doc__)
    parser.add_argument("--images", type=Path, help="train/ and test/ or val/ with class folders (default: generated)")
    parser.add_argument("--count", type=int, default=2_000, help="training images to generate")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--chunk-rows", type=int, default=64)
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    torch.set_num_threads(1)
    training = Training(arguments.epochs, arguments.batch, DEFAULT_WINDOW, 0.1)
    with scratch_folder(arguments.scratch) as scratch:
        given = arguments.images is not None
        images = arguments.images or generated(scratch / "images", arguments.count)
        split = "test" if (images / "test").is_dir() else "val"
        packs = packed(images, scratch, arguments.chunk_rows)
        datasets = {order: h5pack.H5Dataset(pack, split="train") for order, pack in packs.items()}
        reports = {order: mixing_report(dataset, training.batch) for order, dataset in datasets.items()}
        arms = measure(packs, split, training, arguments.seeds)
        tested = len(h5pack.H5Dataset(packs["sorted"], split=split))
        classes = len(datasets["sorted"].classes or ())
        result = {
            **about("accuracy", arguments, "seeds epochs batch chunk-rows", scratch, " --images FOLDER" * given),
            "images": "class folders" if given else "generated",
            "train_images": len(datasets["sorted"]),
            "test_images": tested,
            "classes": classes,
            "chunk_rows": arguments.chunk_rows,
            "chunks": reports["sorted"].chunks,
            "parameters": sum(part.numel() for part in network(classes).parameters()),
            "training": asdict(training),
            "steps": training.epochs * (len(datasets["sorted"]) // training.batch),
            "seeds": arguments.seeds,
            "arms": arms,
            "differences": [
                difference(arms, ("shuffled", "window"), ("shuffled", "full")),
                difference(arms, ("sorted", "window"), ("sorted", "full")),
                difference(arms, ("sorted", "full"), ("shuffled", "full")),
            ],
            "mixing": {order: report.to_json() for order, report in reports.items()},
        }
    write_result(arguments.json, result)
    print(accuracy_table(result))
    return result


if __name__ == "__main__":
    main()
