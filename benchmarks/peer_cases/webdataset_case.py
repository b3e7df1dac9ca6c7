"""WebDataset."""

from __future__ import annotations

from pathlib import Path

import webdataset

from benchmarks.peer_cases.base import Case, ImageFolder, Opened, OpenedLoader, Reading

_SHARDS = 8


class WebDatasetCase(Case):
    """Tar shards of .npy arrays and .cls labels."""

    settings = (
        "8 shards of .npy and .cls; shardshuffle=100, shuffle(1000), batched(256) in the workers and "
        "WebLoader(batch_size=None), as its documentation has them."
    )
    packages = ("webdataset", "torch")
    may_be_cut = True
    tried = (2, 0)

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """ShardWriter, which has no workers: 2 processes decode for it."""
        size = -(-len(source) // _SHARDS)
        number = 0
        with webdataset.ShardWriter(str(out / "images-%06d.tar"), maxcount=size, verbose=0) as writer:
            for images, labels in source.decoded(workers):
                for image, label in zip(images, labels, strict=True):
                    writer.write({"__key__": f"{number:08d}", "npy": image, "cls": int(label)})
                    number += 1
        return workers

    def open(self, out: Path, reading: Reading) -> Opened:
        """The pipeline in a WebLoader."""
        shards = sorted(str(path) for path in out.glob("*.tar"))
        dataset = (
            webdataset.WebDataset(shards, shardshuffle=100, seed=reading.seed)
            .shuffle(1000)
            .decode()
            .to_tuple("npy", "cls")
            .batched(reading.batch)
        )
        return OpenedLoader(
            webdataset.WebLoader(
                dataset, batch_size=None, num_workers=reading.workers, persistent_workers=reading.workers > 0
            )
        )


CASES = {"webdataset": WebDatasetCase()}
