"""Photo-like images for trials and benchmarks: ``python -m h5pack.benchmark.synthetic FOLDER --count 2000``.

The images are crops of the "dead leaves" model: discs that occlude each other, whose radii follow an inverse cubic law.
This gives the scale invariance, the edges and the 1/f spectrum of natural images (Lee, Mumford and Huang, "Occlusion
models for natural images", International Journal of Computer Vision 41, 2001). Fine grain is added, and the images are
saved as JPEG in class folders. Each class has its own palette, so that a small network can tell the classes apart.
"""

from __future__ import annotations

import argparse
import colorsys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5pack.system.machine import available_cpus

CLASSES = ("amber", "coral", "fern", "heather", "indigo", "lagoon", "moss", "slate")
MAX_SIDE = 1024
"""Maximum height and width of an image."""
_DISCS = 3000


def make_folder(
    folder: Path,
    count: int,
    size: tuple[int, int] = (218, 178),
    *,
    classes: int = 4,
    quality: int = 90,
    seed: int = 0,
    workers: int = 1,
) -> None:
    """Write `count` JPEGs of `size` (height, width; each at most 1,024) into `classes` folders (at most 8).

    The same arguments give the same images, regardless of the number of worker processes.
    """
    jobs = []
    for label, name in enumerate(CLASSES[:classes]):
        (folder / name).mkdir(parents=True, exist_ok=True)
        jobs.append((folder / name, list(range(label, count, classes)), label, size, quality, seed))
    if workers == 1:
        for job in jobs:
            _make_class(*job)
    else:
        with ProcessPoolExecutor(workers) as pool:
            list(pool.map(_make_class, *zip(*jobs, strict=True)))


def dead_leaves(seed: int, label: int, canvas: int = MAX_SIDE) -> npt.NDArray[np.uint8]:
    """Return an image of one class, uint8 (canvas, canvas, 3)."""
    random = np.random.default_rng([seed, label])
    picture, blank = np.zeros((canvas, canvas, 3), np.float32), np.ones((canvas, canvas), np.bool_)
    # Small radii are common and large ones rare, so that discs of every scale cover the same area.
    radii = 1 / np.sqrt(random.uniform(1 / (canvas / 4) ** 2, 1 / 4**2, _DISCS * (canvas // 256)))
    centers = random.uniform(0, canvas, (len(radii), 2))
    colors = np.array([_color(random, label) for _ in radii], np.float32)
    # Each disc covers earlier ones, so start with the last one, and paint only what is still blank.
    for radius, (y, x), color in zip(radii[::-1], centers[::-1], colors[::-1], strict=True):
        top, left = max(0, int(y - radius)), max(0, int(x - radius))
        area = np.s_[top : int(y + radius) + 2, left : int(x + radius) + 2]
        visible = blank[area]
        if not visible.any():
            continue
        rows = np.arange(top, top + visible.shape[0], dtype=np.float32)[:, None] - np.float32(y)
        columns = np.arange(left, left + visible.shape[1], dtype=np.float32)[None] - np.float32(x)
        inside = np.nonzero((rows * rows + columns * columns < radius * radius) & visible)
        shade = 1 + 0.3 * (rows[inside[0]] + columns[0, inside[1], None]) / radius
        picture[area][inside] = color * shade
        visible[inside] = False
    picture += random.normal(0, 0.02, picture.shape).astype(np.float32)
    return (np.clip(picture, 0, 1) * 255).astype(np.uint8)


def _color(random: np.random.Generator, label: int) -> tuple[float, float, float]:
    hue = (label / len(CLASSES) + random.normal(0, 0.06)) % 1
    return colorsys.hsv_to_rgb(hue, float(random.beta(2, 3)), float(random.beta(2.2, 1.8)))


def _make_class(folder: Path, numbers: list[int], label: int, size: tuple[int, int], quality: int, seed: int) -> None:
    height, width = size
    canvas = dead_leaves(seed, label, MAX_SIDE if max(size) > 128 else 256)
    random = np.random.default_rng([seed, label, 1])
    for number in numbers:
        top = int(random.integers(0, canvas.shape[0] - height + 1))
        left = int(random.integers(0, canvas.shape[1] - width + 1))
        crop = canvas[top : top + height, left : left + width]
        if random.integers(2):
            crop = crop[:, ::-1]
        gain = np.float32(random.uniform(0.75, 1.2))
        pixels = np.clip(crop * gain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:06d}.jpg", quality=quality)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of this module, and return the exit status."""
    from h5pack.pack.options import parse_size

    parser = argparse.ArgumentParser(prog="python -m h5pack.benchmark.synthetic", description="Write photo-like JPEGs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--size", type=parse_size, default=(218, 178), metavar="HxW")
    parser.add_argument("--classes", type=int, default=4, choices=range(1, len(CLASSES) + 1))
    parser.add_argument("--quality", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if max(arguments.size) > MAX_SIDE:
        parser.error(f"argument --size: at most {MAX_SIDE}x{MAX_SIDE}")
    make_folder(**vars(arguments), workers=available_cpus())
    print(f"{arguments.folder}: {arguments.count:,} images in {arguments.classes} classes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
