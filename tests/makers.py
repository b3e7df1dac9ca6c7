"""Images and folders that the tests make for themselves, and the runs of benchmarks."""

from __future__ import annotations

import json
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps


def pixels(seed: int, size: tuple[int, int] = (20, 14), channels: int = 3) -> npt.NDArray[np.uint8]:
    """Smooth color with some noise, so that JPEG has something to do; uint8 (H, W, C) or (H, W)."""
    random = np.random.default_rng(seed)
    height, width = size
    y, x = np.mgrid[:height, :width] / max(size)
    planes = [
        128 + 90 * np.sin(7 * random.random() * x + 5 * random.random() * y + 6 * random.random())
        for _ in range(channels)
    ]
    noisy = np.stack(planes, axis=2) + random.normal(0, 8, (height, width, channels))
    values = np.clip(noisy, 0, 255).astype(np.uint8)
    return values if channels > 1 else values[:, :, 0]


def save(path: Path, seed: int = 0, size: tuple[int, int] = (20, 14), **settings: Any) -> Path:
    """Write one image; its ending says the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, size)).save(path, **settings)
    return path


def break_package(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make importing a package fail as if one of its libraries did not fit, with a module in `folder`."""
    (folder / f"{name}.py").write_text("raise RuntimeError('compiled for another version')")
    monkeypatch.syspath_prepend(folder)
    for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)


def flat_folder(root: Path, count: int, size: tuple[int, int] = (20, 14)) -> Path:
    """`count` JPEGs in one folder."""
    for number in range(count):
        save(root / f"{number:05d}.jpg", number, size)
    return root


def class_folders(root: Path, counts: dict[str, int], size: tuple[int, int] = (20, 14)) -> Path:
    """One folder a class."""
    seed = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            save(root / name / f"{number:05d}.jpg", seed, size)
            seed += 1
    return root


def split_folders(root: Path, counts: dict[str, dict[str, int]], size: tuple[int, int] = (20, 14)) -> Path:
    """One folder a split, in each one a class."""
    for split, classes in counts.items():
        class_folders(root / split, classes, size)
    return root


def color_folders(root: Path, counts: dict[str, int], brightness: int) -> Path:
    """One folder a split, in each one folders of 3 classes: noise whose class is the color that is brightest."""
    for split, count in counts.items():
        for number in range(count):
            noise = np.random.default_rng((split == "val", number)).integers(0, 170, (8, 8, 3))
            noise[:, :, number % 3] += brightness
            path = root / split / f"class-{number % 3}" / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.astype(np.uint8)).save(path)
    return root


def annotated_images(root: Path, count: int, size: tuple[int, int] | None = (24, 20)) -> list[dict[str, Any]]:
    """JPEGs with up to two white boxes on black, and ``list.jsonl``, whose records are returned.

    `size` is (height, width); None: any. For further columns, change the records and call `write_lines`.
    """
    records, random = [], np.random.default_rng(count)
    root.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        height, width = size or random.integers(40, 90, 2).tolist()
        image, boxes = np.zeros((height, width, 3), np.uint8), []
        for _ in range(number % 3):
            left, top = (int(random.integers(1, side - 9)) for side in (width, height))
            image[top : top + 8, left : left + 8] = 255
            boxes.append([left, top, left + 8, top + 8])
        Image.fromarray(image).save(root / f"{number:03d}.jpg", quality=95)
        records.append({
            "path": f"{number:03d}.jpg",
            "boxes": boxes,
            "points": [[left + 4, top + 4, 2] for left, top, _, _ in boxes],
            "caption": f"{number} white\nboxes \u96ea{'!' * number}",
            "captions": [f"caption {other}" for other in range(number % 4)],
            "score": number / 8,
            "sizes": [[8, number]] * len(boxes),
        })  # fmt: skip
    write_lines(root / "list.jsonl", records)
    return records


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write one line of JSON for each record."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


FIELDS = {
    "field_columns": ("score", "sizes"), "text_columns": ("caption", "captions"), "box_columns": "boxes",
    "keypoint_columns": "points",
}  # fmt: skip
"""The keywords of `h5pack.convert` for all columns of `annotated_images`."""


def truncate(path: Path, keep: float = 0.6) -> Path:
    """Cut an image file short."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


def expected(path: Path, size: tuple[int, int] | None = None, mode: str = "RGB", fit: str = "crop") -> Any:
    """An image as a reader who knows only Pillow would decode it; (H, W, 3), or (H, W, 1) for L."""
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image.convert(mode)) if not image.getexif() else ImageOps.exif_transpose(image)
        image = image.convert(mode)
    if size is not None:
        wanted = size[::-1]
        image = {
            "crop": lambda: ImageOps.fit(image, wanted),
            "pad": lambda: ImageOps.pad(image, wanted),
            "stretch": lambda: image.resize(wanted),
        }[fit]()
    array = np.asarray(image)
    return array if array.ndim == 3 else array[:, :, None]


def hdf5_file(path: Path, **datasets: Any) -> Path:
    """An HDF5 file of these datasets."""
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file[name] = values
    return path


def quick(**keywords: Any) -> dict[str, Any]:
    """Keywords of `h5pack.convert` for tests: in this process, unless they say otherwise."""
    return {"num_workers": 1, **keywords}


def tar_file(path: Path, root: Path, mode: str = "w", **settings: Any) -> Path:
    """A tar file of all that is in a folder; `mode` is tarfile's."""
    with tarfile.open(path, mode, **settings) as archive:  # type: ignore[call-overload]
        for name in sorted(root.rglob("*")):
            archive.add(name, name.relative_to(root), recursive=False)
    return path


def zip_file(path: Path, root: Path, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """A zip file of all that is in a folder."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in sorted(root.rglob("*")):
            archive.write(name, name.relative_to(root))
    return path


def numbers(seed: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """A mask of random numbers of classes, 0 to 20."""
    return np.random.default_rng(seed).integers(0, 21, size, np.uint8)


def pair_folders(
    root: Path, count: int, size: tuple[int, int] = (20, 14), images: str = "images", masks: str = "masks"
) -> Path:
    """A folder of JPEGs, and beside it one of their masks, PNG files of the same names; every second has a palette."""
    for number in range(count):
        save(root / images / f"{number:03d}.jpg", number, size)
        path = root / masks / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        mask = Image.fromarray(numbers(number, size))
        if number % 2:
            mask.putpalette([7 * value % 256 for value in range(768)])
        mask.save(path)
    return root


def run_benchmark(tmp_path: Path, benchmark: Any, options: str) -> Any:
    """The result of a run of a benchmark, which leaves only its JSON file."""
    benchmark.main([*options.split(), "--scratch", str(tmp_path), "--json", str(tmp_path / "r.json")])
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"], "scratch is cleaned up"
    return json.loads((tmp_path / "r.json").read_text())
