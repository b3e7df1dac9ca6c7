"""LitData."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import litdata

from benchmarks.peer_cases.base import Case, ImageFolder, Opened, OpenedLoader, Reading

_LARGE_ROW_BYTES = 32 * 1024


def _sample(source: ImageFolder, index: int) -> dict[str, Any]:
    image, label = source[index]
    return {"image": image, "label": label}


class LitDataCase(Case):
    """Chunks that ``optimize`` writes."""

    settings = (
        "optimize(chunk_bytes='64MB') of numpy arrays; StreamingDataset(shuffle=True, drop_last=False), which maps "
        "local chunks, in a StreamingDataLoader, all as its README has them; batch_decode=1 for rows of 32 KB and "
        "more, as its documentation has it for images (with 'auto' it decoded each row of 116 KB 67 times)."
    )
    packages = ("litdata", "torch")
    tried = (2, 0)

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """``optimize`` with its workers."""
        litdata.optimize(
            fn=partial(_sample, source),
            inputs=list(range(len(source))),
            output_dir=str(out / "chunks"),
            chunk_bytes="64MB",
            num_workers=workers,
            verbose=False,
        )
        return workers

    def open(self, out: Path, reading: Reading) -> Opened:
        """The streaming dataset over local chunks."""
        chunk = json.loads((out / "chunks" / "index.json").read_text())["chunks"][0]
        large = chunk["chunk_bytes"] / chunk["chunk_size"] >= _LARGE_ROW_BYTES
        dataset = litdata.StreamingDataset(
            str(out / "chunks"),
            shuffle=True,
            drop_last=False,
            seed=reading.seed,
            batch_decode=1 if large else "auto",
        )
        return OpenedLoader(
            litdata.StreamingDataLoader(
                dataset, batch_size=reading.batch, num_workers=reading.workers, persistent_workers=reading.workers > 0
            )
        )


CASES = {"litdata": LitDataCase()}
