"""How fast are several packs beside one: loading them as one, joining and appending?

Run ``python -m benchmarks.several``. It makes packs of random images of two sizes: one of all rows, and 8 that have an
eighth of them each, with chunks of as many rows. The cases, with the files in the page cache and batches of about 30 MB
and 1.5 MB, take turns, forwards and backwards; a ratio is that within a turn.

- H5Loader over the one pack, a virtual join of the 8, and a list of the 8;
- copying: ``join`` of the 8 packs, and ``append`` of 100 images to the one, beside copying its file with ``cp``.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5pack
from benchmarks.common import (
    RowSource,
    about,
    benchmark_parser,
    interleaved,
    ratios,
    reader,
    repeat_in_turns,
    scratch_folder,
    spread,
    write_result,
)
from h5pack.benchmark.synthetic import make_folder

SHARDS = 8
ONE = "one pack"
NEW = 100


def make_packs(rows: int, side: int, scratch: Path) -> tuple[Path, list[Path]]:
    """One pack of all rows and the packs of an eighth of them each."""
    own, chunk = rows // SHARDS, max(1, min(rows // SHARDS // 8, (4 << 20) // (side * side * 3)))
    shards = []
    for number in range(SHARDS):
        path = scratch / f"{side}-{number}.h5"
        h5pack.convert(RowSource(own, side, side), path, num_workers=1, chunk_rows=chunk)
        shards.append(path)
    h5pack.convert(RowSource(own * SHARDS, side, side), scratch / f"{side}.h5", num_workers=1, chunk_rows=chunk)
    return scratch / f"{side}.h5", shards


def loading(one: Path, shards: list[Path], batch: int, repeats: int) -> dict[str, Any]:
    """Images/s of H5Loader over the same rows in one file and in several, with 1 and 2 threads."""
    virtual = one.with_name(f"{one.stem}-virtual.h5")
    h5pack.join(shards, virtual, virtual=True)
    found = {}
    for threads in (1, 2):
        sources: dict[str, Any] = {ONE: one, "virtual file": virtual, "list of files": shards}
        loaders = {
            name: h5pack.H5Loader(h5pack.H5Dataset(path), batch, num_threads=threads) for name, path in sources.items()
        }
        cases = {name: reader(loader) for name, loader in loaders.items()}
        speeds = repeat_in_turns(cases, repeats, [one, *shards])
        found[str(threads)] = {
            name: {"images_per_s": spread(values), "of_one": ratios(values, speeds[ONE])}
            for name, values in speeds.items()
        }
    return found


def copying(one: Path, shards: list[Path], images: Path, repeats: int) -> dict[str, Any]:
    """Seconds of commands, and their share of the time that ``cp`` takes for the one pack."""
    target, grown = one.with_name("copy.h5"), one.with_name("grown.h5")

    def copy() -> float:
        return _seconds(lambda: subprocess.run(["cp", "--reflink=never", one, target], check=True))

    def join() -> float:
        return _seconds(lambda: h5pack.join(shards, target))

    def append() -> float:
        shutil.copyfile(one, grown)
        seconds = _seconds(lambda: h5pack.append(grown, images, num_workers=1))
        grown.unlink()
        return seconds

    cases = {"cp": copy, "join": join, "append": append}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for name in interleaved(list(cases), repeats):
        target.unlink(missing_ok=True)
        times[name].append(cases[name]())
    return {name: {"seconds": spread(values), "of_cp": ratios(values, times["cp"])} for name, values in times.items()}


def _seconds(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(large: int, small: int, repeats: int, scratch: Path) -> dict[str, Any]:
    """Everything about packs of `large` rows of 150 KB, and `small` rows of 3 KB."""
    found: dict[str, Any] = {"shards": SHARDS, "sizes": {}}
    for side, rows, batch in ((224, large, 208), (32, small, 512)):
        one, shards = make_packs(rows, side, scratch)
        sizes: dict[str, Any] = {"rows": rows // SHARDS * SHARDS, "row_bytes": side * side * 3, "batch": batch}
        sizes["loading"] = loading(one, shards, batch, repeats)
        if side == 224:
            # The classes of the random rows have no names, so those of the folder must not have any either.
            images = scratch / "new"
            make_folder(images, NEW, (side, side), workers=1)
            bare = scratch / "bare"
            bare.mkdir()
            for number, path in enumerate(sorted(images.rglob("*.jpg"))):
                path.rename(bare / f"new{number:04d}.jpg")
            unlabeled = one.with_name("unlabeled.h5")
            h5pack.convert(one, unlabeled, labels="", chunk_rows=h5pack.H5Dataset(one).group_rows)
            parts = []
            for number, shard in enumerate(shards):
                parts.append(scratch / f"part-{number}.h5")
                h5pack.convert(shard, parts[-1], labels="")
            sizes["copying"] = copying(unlabeled, parts, bare, repeats)
        found["sizes"][str(side)] = sizes
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = benchmark_parser("several", __doc__)
    parser.add_argument("--large", type=int, default=8_000, help="rows of 150 KB")
    parser.add_argument("--small", type=int, default=160_000, help="rows of 3 KB")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args(arguments)
    with scratch_folder(options.scratch) as scratch:
        found = measure(options.large, options.small, options.repeats, scratch)
        write_result(options.json, {**about("several", options, "large small", scratch), **found})


if __name__ == "__main__":
    main()
