"""How fast are rows read out of compressed chunks, beside the decoders themselves?

Run ``python -m benchmarks.compressed``; it makes its own files, of smooth images with noise, which compress about as
photographs do. Every case reads shuffled batches, and the consumer touches every page of each. The cases take turns; a
ratio is taken within each turn.

- the ceiling: the decoder alone, over all chunks as they are stored, in memory, on 1 and 2 threads;
- H5Loader: directly, and through h5py with its tuned cache;
- H5Dataset in a DataLoader with 2 workers.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import numpy.typing as npt
import torch

import h5pack
from benchmarks.common import (
    WORKERS,
    Reader,
    about,
    benchmark_parser,
    consume,
    data_loader,
    loader_cases,
    ratios,
    reader,
    repeat_in_turns,
    scratch_folder,
    spread,
    write_result,
)
from benchmarks.tables import compressed_table
from h5pack.read.codecs import MallocBuffer

COMPRESSIONS: dict[str, dict[str, Any]] = {
    "bitshuffle-lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "gzip": {"compression": "gzip", "compression_opts": 4},
    "zstd": dict(hdf5plugin.Zstd(clevel=3)),
}
HEIGHT, WIDTH, CHUNK_ROWS = 218, 178, 36
_NOISE = 1.5


def image(row: int) -> npt.NDArray[np.uint8]:
    """A smooth image with noise, uint8 (H, W, 3)."""
    random = np.random.default_rng(row)
    down, right = np.mgrid[0:HEIGHT, 0:WIDTH]
    waves = [np.sin(down / random.uniform(8, 60) + random.uniform(0, 6)) for _ in range(3)]
    waves = [wave + np.cos(right / random.uniform(8, 60) + random.uniform(0, 6)) for wave in waves]
    pixels = np.stack(waves, axis=-1) * 50 + 128 + random.normal(0, _NOISE, (HEIGHT, WIDTH, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def make_file(path: Path, rows: int, settings: dict[str, Any]) -> Path:
    """A file of compressed chunks."""
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        shape = (rows, HEIGHT, WIDTH, 3)
        images = file.create_dataset("images", shape, np.uint8, chunks=(min(rows, CHUNK_ROWS), *shape[1:]), **settings)
        different = [image(row) for row in range(CHUNK_ROWS)]
        for start in range(0, rows, CHUNK_ROWS):
            stop = min(rows, start + CHUNK_ROWS)
            images[start:stop] = np.stack(
                [np.roll(different[row - start], start, axis=1) for row in range(start, stop)]
            )
        file["labels"] = np.arange(rows) % 10
    return path


class Decoding:
    """The ceiling: a file's chunks in memory as they are stored, decoded one after the other."""

    def __init__(self, path: Path) -> None:
        dataset = h5pack.H5Dataset(path)
        index = dataset.engine.indexes["images"]
        assert index.codec is not None
        self.codec, self.filter_masks, self.rows = index.codec, index.filter_masks.tolist(), index.rows
        with path.open("rb") as file:
            self.chunks = []
            for address, size in zip(index.addresses.tolist(), index.sizes.tolist(), strict=True):
                file.seek(address)
                self.chunks.append(np.frombuffer(file.read(size), np.uint8))

    def __call__(self, threads: int, turn: int) -> float:
        def decode(chunk: npt.NDArray[np.uint8], filter_mask: int) -> None:
            block = MallocBuffer(len(chunk))
            np.asarray(block)[...] = chunk
            self.codec.decode(block, filter_mask)

        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(decode, self.chunks, self.filter_masks))
        return self.rows / (time.perf_counter() - begin)


def cases_of(path: Path, batch: int) -> dict[str, Reader]:
    """All cases that read one file, each warmed up."""
    decoding, dataset = Decoding(path), h5pack.H5Dataset(path)
    workers = data_loader(dataset, batch, batch_sampler=h5pack.ChunkBatchSampler(dataset, batch))
    return {
        **{f"decoder alone | {threads}": partial(decoding, threads) for threads in (1, 2)},
        # Decode the file in every epoch, as one that is too large to be kept decoded.
        **loader_cases(path, batch, decodes_again=True),
        f"H5Dataset, DataLoader | {WORKERS}": reader(workers),
    }


def measure(path: Path, rows: int, settings: dict[str, Any], batch: int, repeats: int) -> dict[str, Any]:
    """One compression."""
    make_file(path, rows, settings)
    cases = cases_of(path, batch)
    speeds = repeat_in_turns(cases, repeats, [path])
    dataset = h5pack.H5Dataset(path)
    consume(h5pack.H5Loader(dataset, batch))
    stats = dataset.stats()
    result = {
        "bytes_stored": path.stat().st_size,
        "bytes_raw": rows * HEIGHT * WIDTH * 3,
        "chunks": len(dataset.engine.indexes["images"].addresses),
        "chunk_misses": stats.chunk_misses,
        "cases": [
            {
                "case": case.partition(" | ")[0],
                "threads": int(case.partition(" | ")[2]),
                "images_per_s": spread(found),
                "of_decoder": ratios(found, speeds[f"decoder alone | {case.partition(' | ')[2]}"]),
            }
            for case, found in speeds.items()
        ],
    }
    path.unlink()
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = benchmark_parser("compressed", __doc__)
    parser.add_argument("--rows", type=int, default=4_000, help="images of 218x178")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with scratch_folder(arguments.scratch) as scratch:
        result = {
            **about("compressed", arguments, "rows batch repeats", scratch),
            "rows": arguments.rows,
            "batch": arguments.batch,
            "compressions": {
                name: measure(scratch / f"{name}.h5", arguments.rows, settings, arguments.batch, arguments.repeats)
                for name, settings in COMPRESSIONS.items()
            },
        }
    write_result(arguments.json, result)
    print(compressed_table(result))
    return result


if __name__ == "__main__":
    main()
