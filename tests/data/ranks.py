"""What `torchrun` runs in test_distributed.py: feeds some epochs, and writes down what each step was given."""

from __future__ import annotations

import argparse
import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader

import h5pack

EPOCHS = 3
ORDER = {"batch_size": 8, "window": 2, "seed": 4}


def samples(batch: Any) -> list[list[int]]:
    """Row number and checksum of the pixels of each sample."""
    images, _, rows = batch
    return [[row, zlib.crc32(image.numpy().tobytes())] for row, image in zip(rows.tolist(), images, strict=True)]


def dataloader(dataset: Any, workers: int, **order: Any) -> tuple[Any, Any]:
    """A DataLoader, and its sampler."""
    sampler = h5pack.ChunkBatchSampler(dataset, **{**ORDER, **order})
    # Workers that are kept are forked once, while no loader's threads run.
    settings = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": dataset.collate}
    return DataLoader(dataset, batch_sampler=sampler, **settings), sampler


def write(folder: Path, rank: int, line: Any) -> None:
    """Append to this rank's log, at once."""
    with open(folder / f"rank{rank}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def cover(dataset: Any, folder: Path, rank: int) -> None:
    """All epochs, from each kind of loader in turn."""
    for workers in (2, 0):
        loader, _ = dataloader(dataset, workers, lanes=2)
        for epoch in range(EPOCHS):
            for batch in loader:
                write(folder, rank, [f"dataloader{workers}", epoch, samples(batch)])
    h5loader = h5pack.H5Loader(dataset, **ORDER)
    for epoch in range(EPOCHS):
        for batch in h5loader:
            write(folder, rank, ["h5loader", epoch, samples(batch)])


def train(dataset: Any, folder: Path, rank: int, die: list[int]) -> None:
    """From where the last run saved its state: epochs from two loaders at once; the state is saved after each step.

    At epoch and step `die`, rank 0 is killed after it has worked on the step and before it has saved its state.
    """
    saved = folder / "state.json"
    states = json.loads(saved.read_text()) if saved.exists() else {"epoch": 0}
    loader, sampler = dataloader(dataset, 2)
    h5loader = h5pack.H5Loader(dataset, **ORDER)
    if "sampler" in states:
        sampler.load_state_dict(states["sampler"])
        h5loader.load_state_dict(states["h5loader"])
    for epoch in range(states["epoch"], EPOCHS):
        sampler.set_epoch(epoch)
        h5loader.set_epoch(epoch)
        for step, batches in enumerate(zip(loader, h5loader, strict=True)):
            write(folder, rank, [epoch, *map(samples, batches)])
            torch.distributed.all_reduce(torch.ones(1))
            if rank == 0:
                if [epoch, step] == die:
                    os.kill(os.getpid(), signal.SIGKILL)
                state = {
                    "epoch": epoch,
                    "sampler": sampler.state_dict(batches_consumed=step + 1),
                    "h5loader": h5loader.state_dict(),
                }
                (folder / "state.tmp").write_text(json.dumps(state))
                os.replace(folder / "state.tmp", saved)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["cover", "train"])
    parser.add_argument("pack")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die", type=int, nargs=2, default=[])
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    dataset = h5pack.H5Dataset(options.pack, split="train", with_rows=True)
    if options.what == "cover":
        cover(dataset, options.folder, rank)
    else:
        train(dataset, options.folder, rank, options.die)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
