"""How does h5pack compare with its peers? The same images, the same work, in one run.

Run ``python -m benchmarks.peers``; it makes its own images. The peers live best in a virtual environment of their own:
``scripts/install-peers`` makes one, and ``--python .venv-peers/bin/python`` uses it. A peer that is missing there is
left out, with the reason.

Every way, h5pack's and the peers', gets the same JPEG folder and gives shuffled batches of 256 raw images, uint8, with
labels, on 2 threads or worker processes; how each is used, and why so, is in ``benchmarks/peer_ways/`` and in the
result. Before anything is timed, two epochs of each are compared with the images as Pillow decodes them: each image
exactly once, with its label, in an order that changes. The consumer looks at every page of each batch.

Each measurement has a process of its own. The ways take turns, forwards and backwards:

- first batch: of a dataset opened anew, its files dropped from the page cache (mincore says whether pages stay); torch
  is imported, the peer's own import counts;
- cold: the whole of that epoch, timed from the opening to the last batch, without the import. FFCV compiles at its
  first batch: its cold epoch is the second one, the files dropped again;
- hot: the files are read into the page cache, and epochs are timed after one that is not;
- peak memory, once: anonymous and shared memory of the process and its children during the two compared epochs, less
  what the interpreter has with torch; pages of mapped files are the page cache's and not counted;
- conversion, once: from the JPEG folder until all is on the disk (fsync); 2 processes decode, all with one decoder.

Epochs of the slow ways are cut short after ``--seconds``; the result says how many batches were read. WebDataset,
MosaicML Streaming and LitData leave the number of workers to their users: 2 and none are tried, the faster is taken.
The ceilings, in the same turns: np.take of random rows into batches that are used again, and a sequential read.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, write_result
from benchmarks.peer_process import PeerProcess
from benchmarks.peer_size import BATCH, WORKERS, Comparison, SizeComparison
from benchmarks.peer_ways.listing import LISTING, chosen
from h5pack.measure.machine_facts import machine_facts
from h5pack.tools.synth import make_folder

_SIZES = {"116 KB": (218, 178), "3 KB": (32, 32)}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=8_000, help="images of 178x218, 116 KB a row; 0: none")
    parser.add_argument("--small", type=int, default=40_000, help="images of 32x32, 3 KB a row; 0: none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="epochs of slow ways are cut short after this")
    parser.add_argument("--only", help=f"these ways, by commas: {', '.join(listed.key for listed in LISTING)}")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the peers, and h5pack")
    parser.add_argument("--scratch", type=Path, help="a folder for the files (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=RESULTS / "peers.json")
    arguments = parser.parse_args(argv)
    try:
        arguments.ways = chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _command(arguments: argparse.Namespace) -> str:
    """The command that gives this result again; paths are the user's own and left out."""
    parts = ["python -m benchmarks.peers"]
    parts += [f"--{name} {getattr(arguments, name)}" for name in ("count", "small", "repeats", "seconds")]
    parts += [f"--only {arguments.only}"] if arguments.only else []
    parts += ["--python .venv-peers/bin/python"] if arguments.python != sys.executable else []
    return " ".join(parts)


def _space_needed(arguments: argparse.Namespace) -> int:
    """Bytes on the disk for the larger of the sizes, whose files go before the next ones come."""
    raw = max(
        count * height * width * 3
        for (height, width), count in zip(_SIZES.values(), (arguments.count, arguments.small), strict=True)
    )
    # Every store, the one that is twice as large, and the rows for the sequential read.
    return int(raw) * (len({listed.store for listed in arguments.ways}) + 2)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = _arguments(argv)
    scratch = Path(tempfile.mkdtemp(prefix="h5pack-bench-", dir=arguments.scratch))
    needed, free = _space_needed(arguments), shutil.disk_usage(scratch).free
    if free < needed:
        scratch.rmdir()
        raise SystemExit(
            f"{scratch.parent}: {free / 1e9:.1f} GB are free and {needed / 1e9:.1f} GB are needed; give --scratch a "
            "folder with more, or a smaller --count"
        )
    # Sockets of the peers' workers lie in their temporary folder, and such a path may have 108 bytes only.
    temporary = Path(tempfile.mkdtemp(prefix="h5pack-"))
    try:
        process = PeerProcess(arguments.python, temporary)
        comparison = Comparison(process, scratch, arguments.repeats, arguments.seconds)
        there = process.run({"task": "versions"})
        if "error" in there:
            raise SystemExit(f"{arguments.python}: {there['error']}")
        sizes = {}
        for (name, size), count in zip(_SIZES.items(), (arguments.count, arguments.small), strict=True):
            if count:
                folder = scratch / name.replace(" ", "")
                make_folder(folder, count, size, workers=WORKERS)
                sizes[name] = SizeComparison(comparison, folder, arguments.ways).result()
                for path in scratch.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        facts = machine_facts(scratch)
        names = facts["packages"]
        result = {
            "benchmark": "peers",
            "command": _command(arguments),
            "machine": {
                **facts,
                "python": there["python"],
                "packages": {name: there["packages"].get(name) for name in names},
            },
            "packages": there["packages"],
            "batch": BATCH,
            "workers": WORKERS,
            "sizes": sizes,
        }
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
    write_result(arguments.json, result)
    return result


if __name__ == "__main__":
    # A run that is ended leaves no files and no process behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
