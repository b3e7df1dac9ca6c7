"""Two processes of torch.distributed: each gets its rank's batches, and they go on exactly after one was killed."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import h5py
import torch
import torch.distributed
from torch.utils.data import DataLoader

import h5pack
from tests.makers import quick, split_folders

EPOCHS, RANKS, ROWS = 2, 2, 152
ORDER: dict[str, Any] = {"batch_size": 8, "window": 2, "seed": 4}


def samples(batch: Any) -> list[list[int]]:
    """Row number and checksum of the pixels of each sample."""
    images, _, rows = batch
    return [[row, zlib.crc32(image.numpy().tobytes())] for row, image in zip(rows.tolist(), images, strict=True)]


def train(rank: int, run: str, pack: Path, folder: Path, die: list[int]) -> None:
    """One rank: epochs from two loaders at once, from the saved state on; rank 0 saves the state after each step.

    At epoch and step `die`, rank 0 is killed after it has worked on the step and before it has saved its state.
    """
    torch.distributed.init_process_group("gloo", f"file://{folder}/{run}", rank=rank, world_size=RANKS)
    dataset = h5pack.H5Dataset(pack, split="train", with_rows=True)
    sampler = h5pack.ChunkBatchSampler(dataset, **ORDER, lanes=2)
    # Kept workers are forked once, while no loader's threads run. They must be children of this rank: a worker of the
    # fork server, which is the default here, would not notice that its rank was killed, and would stay forever.
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate, **workers)
    h5loader = h5pack.H5Loader(dataset, **ORDER)
    saved = folder / "state.json"
    states = json.loads(saved.read_text()) if saved.exists() else {"epoch": 0}
    # Kept until the end. PyTorch 2.4 may hang in `destroy_process_group` if gloo's thread is the last to drop a tensor.
    token = torch.ones(1)
    if "sampler" in states:
        sampler.load_state_dict(states["sampler"])
        h5loader.load_state_dict(states["h5loader"])
    for epoch in range(states["epoch"], EPOCHS):
        sampler.set_epoch(epoch)
        h5loader.set_epoch(epoch)
        for step, batches in enumerate(zip(loader, h5loader, strict=True)):
            with open(folder / f"rank{rank}.jsonl", "a") as log:
                log.write(json.dumps([epoch, *map(samples, batches)]) + "\n")
            torch.distributed.all_reduce(token)
            if rank == 0:
                if [epoch, step] == die:
                    os.kill(os.getpid(), signal.SIGKILL)
                state = {"sampler": sampler.state_dict(batches_consumed=step + 1), "h5loader": h5loader.state_dict()}
                (folder / "state.tmp").write_text(json.dumps({"epoch": epoch, **state}))
                os.replace(folder / "state.tmp", saved)
    torch.distributed.destroy_process_group()


def run_ranks(run: str, pack: Path, folder: Path, die: list[int]) -> list[int | None]:
    """Run all ranks, and return their exit codes."""
    # Processes of the fork server have torch imported already.
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=train, args=(rank, run, pack, folder, die)) for rank in range(RANKS)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(300)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def logged(folder: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def expected(pack: Path, rank: int, epoch: int, **order: Any) -> list[list[list[int]]]:
    """The batches of one rank, from a sampler in this process and the file as h5py reads it."""
    dataset = h5pack.H5Dataset(pack, split="train")
    sampler = h5pack.ChunkBatchSampler(dataset, **ORDER, **order, rank=rank, num_replicas=RANKS)
    sampler.set_epoch(epoch)
    with h5py.File(pack) as file:
        checksums = [zlib.crc32(image.tobytes()) for image in file["images"][()]]
    return [[[dataset.rows[index], checksums[dataset.rows[index]]] for index in batch] for batch in sampler]


def test_ranks_resume_exactly_after_a_kill(tmp_path: Path) -> None:
    source = split_folders(tmp_path / "in", {"train": {"x": 90, "y": 62}, "val": {"x": 5}}, (6, 5))
    pack = tmp_path / "o.h5"
    # The last chunk of the split has rows of another one.
    h5pack.convert(source, pack, **quick(chunk_rows=11))
    codes = run_ranks("first", pack, tmp_path, die=[1, 4])
    assert codes[0] == -signal.SIGKILL
    assert codes[1] not in (0, None), "it cannot go on alone"
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["epoch"], state["sampler"]["batches"], state["h5loader"]["batches"]) == (1, 4, 4)
    killed = [len(logged(tmp_path, rank)) for rank in range(RANKS)]
    assert run_ranks("second", pack, tmp_path, die=[]) == [0, 0]
    for rank in range(RANKS):
        uninterrupted = [
            [epoch, *pair]
            for epoch in range(EPOCHS)
            for pair in zip(expected(pack, rank, epoch, lanes=2), expected(pack, rank, epoch), strict=True)
        ]
        # The batches of the first run up to its last saved state, and all of the second run.
        done = len(uninterrupted) // EPOCHS + 4
        # Rank 0 worked on one step without saving its state; the other may have begun the next one.
        assert done < killed[rank] <= done + 1 + rank
        log = logged(tmp_path, rank)
        assert log[:done] + log[killed[rank] :] == uninterrupted
    for order, epoch in itertools.product(({"lanes": 2}, {}), range(EPOCHS)):
        batches = itertools.chain(*(expected(pack, rank, epoch, **order) for rank in range(RANKS)))
        assert sorted(row for batch in batches for row, _ in batch) == list(range(ROWS))
