"""How fast are HDF5 files made by other tools read, before and after ``h5pack convert``?

Run ``python -m benchmarks.foreign``; it makes its own files, which hold the same images:

- the well-known CelebA recipe: channels first, in chunks that are one line short;
- chunks that h5py guesses (``chunks=True``);
- a virtual dataset over four files;
- JPEG files in rows of variable length.

Every row of each file is first compared, read by H5Dataset, with what h5py (and Pillow) give, and every row of the pack
that convert makes of it with its source. Then these read shuffled batches, in turn, from a warm page cache:

- one index by h5py: the usual dataset, decoding by Pillow where rows are encoded, in a DataLoader with 2 workers;
- H5Dataset in a DataLoader with 2 workers;
- H5Loader on 2 threads.
"""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

import h5pack
from benchmarks.common import (
    OneIndex,
    Reader,
    about,
    benchmark_parser,
    consume,
    data_loader,
    reader,
    repeat_in_turns,
    scratch_folder,
    spread,
    subset_of,
    write_result,
)
from benchmarks.compressed import HEIGHT, WIDTH, image
from benchmarks.tables import foreign_table
from h5pack.system.files import make_hot

_DIFFERENT = 64
_SOURCES = 4
_CHUNK_ROWS = 32
_QUALITY = 90
_BLOCK = 256


class OneEncoded(OneIndex):
    """What most people write for encoded rows."""

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        with Image.open(io.BytesIO(self.file["images"][index].tobytes())) as opened:
            return torch.from_numpy(np.array(opened.convert("RGB"))), int(self.file["labels"][index])


_different = functools.cache(image)


def pixels(rows: range) -> npt.NDArray[np.uint8]:
    """Images that differ, uint8 (n, H, W, 3)."""
    return np.stack([np.roll(_different(row % _DIFFERENT), row // _DIFFERENT, axis=1) for row in rows])


def _blocks(rows: int) -> list[range]:
    return [range(start, min(rows, start + _BLOCK)) for start in range(0, rows, _BLOCK)]


def make_array(path: Path, rows: int, chunks: Any, *, channels_first: bool, first: int = 0) -> list[Path]:
    """One ordinary dataset."""
    shape = (rows, 3, HEIGHT, WIDTH) if channels_first else (rows, HEIGHT, WIDTH, 3)
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", shape, np.uint8, chunks=chunks)
        for block in _blocks(rows):
            values = pixels(range(first + block.start, first + block.stop))
            images[block.start : block.stop] = values.transpose(0, 3, 1, 2) if channels_first else values
        file["labels"] = np.arange(first, first + rows) % 10
    return [path]


def make_virtual(path: Path, rows: int) -> list[Path]:
    """A virtual dataset over files of a quarter of the rows each."""
    layout = h5py.VirtualLayout((rows, HEIGHT, WIDTH, 3), np.uint8)
    paths = []
    for number in range(_SOURCES):
        start, stop = rows * number // _SOURCES, rows * (number + 1) // _SOURCES
        part = path.with_name(f"{path.stem}-{number}.h5")
        paths += make_array(
            part, stop - start, (min(_CHUNK_ROWS, stop - start), HEIGHT, WIDTH, 3), channels_first=False, first=start
        )
        layout[start:stop] = h5py.VirtualSource(part.name, "images", (stop - start, HEIGHT, WIDTH, 3))
    with h5py.File(path, "w", libver="latest") as file:
        file.create_virtual_dataset("images", layout)
        file["labels"] = np.arange(rows) % 10
    return [path, *paths]


def make_encoded(path: Path, rows: int) -> list[Path]:
    """JPEG files in rows of variable length."""
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (rows,), h5py.vlen_dtype(np.uint8))
        for block in _blocks(rows):
            for row, values in zip(block, pixels(block), strict=True):
                stream = io.BytesIO()
                Image.fromarray(values).save(stream, "JPEG", quality=_QUALITY)
                images[row] = np.frombuffer(stream.getvalue(), np.uint8)
        file["labels"] = np.arange(rows) % 10
    return [path]


FILES: dict[str, Callable[[Path, int], list[Path]]] = {
    "CelebA recipe": lambda path, rows: make_array(
        path, rows, (min(100, rows), 3, HEIGHT - 1, WIDTH), channels_first=True
    ),
    "chunks by h5py": lambda path, rows: make_array(path, rows, True, channels_first=True),
    "virtual, 4 files": make_virtual,
    "variable-length JPEG": make_encoded,
}


def naive(path: Path, rows: int) -> OneIndex:
    """The dataset that most people write for a file."""
    with h5py.File(path) as file:
        return (OneEncoded if file["images"].dtype.kind == "O" else OneIndex)(path, rows)


def compare(path: Path, pack: Path, rows: int) -> int:
    """Compare all rows of a file, and of the pack made of it, with h5py and Pillow; return how many rows there are."""
    expected, theirs, ours = naive(path, rows), h5pack.H5Dataset(path), h5pack.H5Dataset(pack)
    with h5py.File(pack) as file:
        origin = [int(name.decode().rpartition("/")[2]) for name in file["filenames"]]
    assert sorted(origin) == list(range(rows))
    for start in range(0, rows, _BLOCK):
        numbers = origin[start : start + _BLOCK]
        found = theirs.collate(theirs.__getitems__(numbers))
        packed = ours.collate(ours.__getitems__(list(range(start, start + len(numbers)))))
        for place, row in enumerate(numbers):
            pixels_of, label = expected[row]
            for images, labels in (found, packed):
                assert torch.equal(images[place], pixels_of), row
                assert int(labels[place]) == label
    return rows


def cases_of(path: Path, rows: int, batch: int, slow_rows: int) -> dict[str, Reader]:
    """All cases that read one file, each warmed up."""
    one = data_loader(subset_of(naive(path, rows), rows, slow_rows), batch)
    dataset = h5pack.H5Dataset(path)
    workers = data_loader(dataset, batch, batch_sampler=h5pack.ChunkBatchSampler(dataset, batch))
    loader = h5pack.H5Loader(dataset, batch, num_threads=2)
    return {
        "one index by h5py, DataLoader": reader(one),
        "H5Dataset, DataLoader": reader(workers),
        # The system takes memory away that was idle for a while; the second epoch counts.
        "H5Loader": lambda repeat: (consume(loader), consume(loader))[1],
    }


def measure(folder: Path, name: str, rows: int, batch: int, slow_rows: int, repeats: int) -> dict[str, Any]:
    """One kind of file, before and after it is converted."""
    path, pack = folder / "theirs.h5", folder / "pack.h5"
    files = FILES[name](path, rows)
    with h5py.File(path) as file:
        layout = "nchw" if file["images"].shape[1:2] == (3,) else "nhwc"
    for file_path in files:
        make_hot(file_path)
    begin = time.perf_counter()
    h5pack.convert(path, pack, layout=layout)
    seconds = time.perf_counter() - begin
    right = compare(path, pack, rows)
    cases = {f"{when} | {case}": run for when, found in (("before", path), ("after", pack))
            for case, run in cases_of(found, rows, batch, slow_rows).items()}  # fmt: skip
    speeds = repeat_in_turns(cases, repeats, [*files, pack])
    result = {
        "bytes": sum(file_path.stat().st_size for file_path in files),
        "bytes_of_pack": pack.stat().st_size,
        "rows_compared": right,
        "convert_images_per_s": round(rows / seconds, 1),
        "cases": [
            {"when": case.partition(" | ")[0], "case": case.partition(" | ")[2], "images_per_s": spread(found)}
            for case, found in speeds.items()
        ],
    }
    for file_path in (*files, pack):
        file_path.unlink()
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("foreign", __doc__)
    parser.add_argument("--rows", type=int, default=4_000, help="images of 218x178")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--slow-rows", type=int, default=1_024, help="rows that the usual dataset reads each time")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with scratch_folder(arguments.scratch) as scratch:
        result = {
            **about("foreign", arguments, "rows batch repeats", scratch),
            "rows": arguments.rows,
            "batch": arguments.batch,
            "files": {
                name: measure(scratch, name, arguments.rows, arguments.batch, arguments.slow_rows, arguments.repeats)
                for name in FILES
            },
        }
    write_result(arguments.json, result)
    print(foreign_table(result))
    return result


if __name__ == "__main__":
    main()
