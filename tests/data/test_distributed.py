"""Real ranks under `torchrun`: together they see each row once an epoch, and go on exactly after one was killed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import pytest

import h5pack
from tests.data import ranks
from tests.makers import quick, split_folders

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo and signals")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split of 152 rows in chunks of 11, the last of which it shares with another."""
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", {"train": {"x": 90, "y": 62}, "val": {"x": 5}}, (6, 5))
    h5pack.convert(source, folder / "o.h5", **quick(chunk_rows=11))
    return folder / "o.h5"


def torchrun(what: str, pack: Path, folder: Path, *arguments: str) -> tuple[int, str]:
    """Two ranks; their return code, and what they said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += [ranks.__file__, what, str(pack), str(folder), *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    # Into a file: a killed rank's workers outlive it by seconds, and would hold a pipe open.
    with open(folder / "said", "w") as said:
        done = subprocess.run(command, stdout=said, stderr=said, env=variables, timeout=300, check=False)
    return done.returncode, (folder / "said").read_text()


def logged(folder: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def expected(pack: Path, rank: int, epoch: int, **order: Any) -> list[list[list[int]]]:
    """The batches of one rank, out of a sampler in this process and the file as h5py reads it."""
    dataset = h5pack.H5Dataset(pack, split="train")
    sampler = h5pack.ChunkBatchSampler(dataset, **{**ranks.ORDER, **order}, rank=rank, num_replicas=2)
    sampler.set_epoch(epoch)
    with h5py.File(pack) as file:
        checksums = [zlib.crc32(image.tobytes()) for image in file["images"][()]]
    return [[[dataset.first_row + index, checksums[dataset.first_row + index]] for index in batch] for batch in sampler]


def test_two_ranks_see_each_row_once_an_epoch(pack: Path, tmp_path: Path) -> None:
    code, said = torchrun("cover", pack, tmp_path)
    assert code == 0, said
    logs = [logged(tmp_path, rank) for rank in range(2)]
    orders = []
    for kind, order in (("dataloader2", {"lanes": 2}), ("dataloader0", {"lanes": 2}), ("h5loader", {})):
        for epoch in range(ranks.EPOCHS):
            batches = [[batch for *which, batch in log if which == [kind, epoch]] for log in logs]
            assert batches == [expected(pack, rank, epoch, **order) for rank in range(2)]
            rows = [row for batch in itertools.chain(*batches) for row, _ in batch]
            assert sorted(rows) == list(range(152))
            orders.append(tuple(rows))
    assert len(set(orders)) == 2 * ranks.EPOCHS, "lanes are another order, workers are not"


def test_after_a_kill_the_ranks_go_on_exactly(pack: Path, tmp_path: Path) -> None:
    code, said = torchrun("train", pack, tmp_path, "--die", "1", "4")
    assert code != 0
    assert "SIGKILL" in said or "-9" in said
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["epoch"], state["sampler"]["batches"], state["h5loader"]["batches"]) == (1, 4, 4)
    killed = [logged(tmp_path, rank) for rank in range(2)]
    code, said = torchrun("train", pack, tmp_path)
    assert code == 0, said
    for rank in range(2):
        epochs = [expected(pack, rank, epoch) for epoch in range(ranks.EPOCHS)]
        uninterrupted = [[epoch, batch, batch] for epoch, batches in enumerate(epochs) for batch in batches]
        # What the first run did up to its last saved state, and all that the second one did.
        done = len(epochs[0]) + 4
        # Without a state, too, one step was done by rank 0, and by the other at most the next.
        assert done < len(killed[rank]) <= done + 1 + rank
        found = killed[rank][:done] + logged(tmp_path, rank)[len(killed[rank]) :]
        assert found == uninterrupted
