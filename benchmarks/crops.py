"""How fast are random crops of JPEGs, beside decoding alone and beside FFCV?

Run ``python -m benchmarks.crops [FOLDER]``: JPEGs of any sizes, or 1,000 that it makes. They are packed with
``--keep jpeg --max-side 512 --quality 90`` (``--max-side`` chooses another side), FFCV writes the packed images with
``write_mode="jpg"``, and each case gives shuffled batches of 64 crops, uint8 (224, 224, 3), by RandomResizedCrop(224),
with 1 and 2 threads:

- h5pack with nvImageCodec's decoder of regions, without it, and with ``exact=False``;
- FFCV's RandomResizedCropRGBImageDecoder, if it is installed (``scripts/install-peers``);
- the ceiling: simplejpeg decodes the whole images from memory, in as many threads, and nothing else.

The files are in the page cache, and the cases take turns, forwards and backwards; a ratio is that within a turn. Before
anything is timed, all crops of one epoch of h5pack are compared with a full decode by Pillow, the same window and the
same resize. The mean difference of ``exact=False`` is measured, too.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from PIL import Image

import h5pack
from benchmarks.common import (
    Reader,
    about,
    benchmark_parser,
    consume,
    ratios,
    reader,
    repeat_in_turns,
    scratch_folder,
    spread,
    write_result,
)
from h5pack.benchmark.synthetic import make_folder
from h5pack.data import decoding
from h5pack.data.draws import BatchKey, crop_windows
from h5pack.system.machine import available_cpus

BATCH, SIZE = 64, 224
CEILING = "simplejpeg alone"


def packed(folder: Path, scratch: Path, max_side: int) -> Path:
    """Pack JPEGs."""
    path = scratch / "kept.h5"
    h5pack.convert(folder, path, keep="jpeg", max_side=max_side, quality=90)
    return path


def bytes_of(path: Path) -> list[bytes]:
    """The images of a pack as they are stored."""
    dataset = h5pack.H5Dataset(path)
    return dataset.engine.read_bytes(dataset.names[0], np.arange(len(dataset)))


def h5pack_case(path: Path, threads: int, regions: bool = True, exact: bool = True) -> Reader:
    """H5Loader with ``decode=``."""
    loader = h5pack.H5Loader(
        h5pack.H5Dataset(path), BATCH, decode=h5pack.RandomResizedCrop(SIZE), exact=exact, num_threads=threads
    )

    def read(repeat: int) -> float:
        usual = decoding.region_decoder
        if not regions:
            decoding.region_decoder = lambda _: None
        try:
            return consume(loader)
        finally:
            decoding.region_decoder = usual

    return read


def decode_case(images: Sequence[bytes], threads: int) -> Reader:
    """Decode whole images, and nothing else."""

    def work(part: Sequence[bytes]) -> None:
        for data in part:
            simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False)

    def read(repeat: int) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, [images[first::threads] for first in range(threads)]))
        return len(images) / (time.perf_counter() - begin)

    return read


class _Decoded:
    """The images of a pack for FFCV's writer."""

    def __init__(self, images: Sequence[bytes]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image]:
        with Image.open(io.BytesIO(self.images[index])) as image:
            return (image.convert("RGB"),)


def ffcv_case(images: Sequence[bytes], scratch: Path, max_side: int) -> Callable[[int], Reader]:
    """FFCV's loader, whose pipeline is compiled by a first epoch."""
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

    path = scratch / "images.beton"
    field = RGBImageField(write_mode="jpg", max_resolution=max_side, jpeg_quality=90)
    DatasetWriter(str(path), {"image": field}, num_workers=available_cpus()).from_indexed_dataset(_Decoded(images))

    def make(threads: int) -> Reader:
        pipeline = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), ToTensor()]
        settings = {"num_workers": threads, "os_cache": True, "order": OrderOption.RANDOM}
        loader = Loader(str(path), BATCH, pipelines={"image": pipeline}, **settings)
        return reader(loader)

    return make


def twin(data: bytes, row: int, crop: h5pack.RandomResizedCrop) -> torch.Tensor:
    """The crop of epoch 0 and seed 0: whole image by Pillow, window, resize; uint8 (height, width, 3)."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB")))
    window = crop_windows(BatchKey(torch.tensor([row]), 0), 0, crop, *pixels.shape[:2])
    top, left, height, width = (int(part) for part in window)
    part = pixels[top : top + height, left : left + width].permute(2, 0, 1)[None]
    return F.interpolate(part, crop.output_size, mode="bilinear", antialias=True)[0].permute(1, 2, 0)


def check(path: Path, images: Sequence[bytes]) -> dict[str, Any]:
    """Compare an epoch with the slow twin: how many crops are equal, and the mean difference of inexact ones."""
    crop, equal, difference = h5pack.RandomResizedCrop(SIZE), 0, 0.0
    dataset = h5pack.H5Dataset(path, with_rows=True)
    for exact in (True, False):
        for batch in h5pack.H5Loader(dataset, BATCH, decode=crop, exact=exact):
            for image, row in zip(batch.images, batch.rows.tolist(), strict=True):
                expected = twin(images[row], row, crop)
                if exact:
                    equal += torch.equal(image, expected)
                else:
                    difference += float((image.float() - expected.float()).abs().mean())
    return {"crops": len(images), "equal": equal, "inexact_mean_difference": round(difference / len(images), 4)}


def measure(folder: Path, scratch: Path, repeats: int, max_side: int) -> dict[str, Any]:
    """Everything about the images in a folder."""
    path = packed(folder, scratch, max_side)
    images = bytes_of(path)
    skipped: dict[str, str] = {}
    try:
        ffcv = ffcv_case(images, scratch, max_side)
    except ImportError as error:
        skipped["ffcv"] = f"not installed: {error}"
    found: dict[str, Any] = {
        "images": len(images),
        "max_side": max_side,
        "image_bytes": round(sum(map(len, images)) / len(images)),
        "checked": check(path, images),
        "skipped": skipped,
        "threads": {},
    }
    for threads in (1, 2):
        cases: dict[str, Reader] = {
            CEILING: decode_case(images, threads),
            "h5pack": h5pack_case(path, threads),
            "h5pack without regions": h5pack_case(path, threads, regions=False),
            "h5pack, exact=False": h5pack_case(path, threads, exact=False),
        }
        if "ffcv" not in skipped:
            cases["FFCV"] = ffcv(threads)
        speeds = repeat_in_turns(cases, repeats, [path])
        found["threads"][str(threads)] = {
            name: {
                "images_per_s": spread(values),
                "of_ceiling": ratios(values, speeds[CEILING]),
                "of_ffcv": None if "ffcv" in skipped else ratios(values, speeds["FFCV"]),
            }
            for name, values in speeds.items()
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = benchmark_parser("crops", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="JPEGs; default: some that are made")
    parser.add_argument("--count", type=int, default=1_000, help="how many to make")
    parser.add_argument("--max-side", type=int, default=512, help="of the packed images, in pixels")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    with scratch_folder(options.scratch) as scratch:
        folder = options.folder
        if folder is None:
            folder = scratch / "images"
            make_folder(folder, options.count, (375, 500), workers=available_cpus())
        found = measure(folder, scratch, options.repeats, options.max_side)
        result = {**about("crops", options, "max-side", scratch, " FOLDER"), **found}
    for name in ("nvidia-nvimgcodec-cu12", "ffcv"):
        with contextlib.suppress(PackageNotFoundError):
            result["machine"]["packages"][name] = version(name)
    write_result(options.json, result)


if __name__ == "__main__":
    main()
