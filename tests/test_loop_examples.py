"""The examples for Lightning and Accelerate: they learn, and go on from a checkpoint with the very same batches."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import h5pack
from h5pack.data.samplers import ChunkBatchSampler
from tests.forking import output_of
from tests.makers import color_folders, quick

EXAMPLES = Path(__file__).parents[1] / "examples"
EPOCHS, STEPS, SAVES, BATCH = 4, 4, 6, 32
"""Of the examples: epochs, steps of one here, steps between checkpoints, rows a step."""


def run_example(name: str, pack: Path, runs: list[tuple[str, int]], log: Path) -> None:
    """Run an example several times, each time for a given number of steps; write the loss and labels of each step."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    loop = importlib.import_module(name)
    entropy = functional.cross_entropy
    logs: list[list[Any]] = []

    def noted(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(logs[-1]) == runs[len(logs) - 1][1]:
            raise InterruptedError
        loss = entropy(scores, labels)
        logs[-1].append([loss.item(), labels.tolist()])
        return loss

    functional.cross_entropy = noted
    for folder, _ in runs:
        logs.append([])
        sys.argv[1:] = [str(pack), folder]
        try:
            loop.main()
        except InterruptedError:
            print("stopped")
    log.write_text(json.dumps(logs))


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows to train with are 4 batches and some."""
    folder = tmp_path_factory.mktemp("colors")
    source = color_folders(folder / "in", {"train": STEPS * BATCH + 5, "val": 33}, 80)
    h5pack.convert(source, folder / "colors.h5", **quick(chunk_rows=8))
    return folder / "colors.h5"


def order_of(pack: Path) -> list[list[int]]:
    """The labels of each step, as a sampler of one rank orders the rows."""
    dataset = h5pack.H5Dataset(pack, "train")
    sampler = ChunkBatchSampler(dataset, BATCH, drop_last=True, streams=8)
    return [[dataset[index][1] for index in batch] for _ in range(EPOCHS) for batch in sampler]


@pytest.mark.parametrize(
    ("name", "package"), [("lightning_loop", "lightning"), ("accelerate_loop", "accelerate")], ids=lambda name: name
)
def test_an_example_learns_and_resumes_exactly(name: str, package: str, pack: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"pip install {package}")
    one, other = str(tmp_path / "1"), str(tmp_path / "2")
    last = EPOCHS * STEPS
    # Stopped within an epoch, then after the end of one; steps after a checkpoint are repeated.
    runs = [(one, -1), (other, SAVES + 1), (other, SAVES + 1), (other, -1)]
    # In a process of the fork server, which has imported torch.
    said = output_of(run_example, name, pack, runs, tmp_path / "log.json")
    whole, first, second, third = json.loads((tmp_path / "log.json").read_text())
    assert [labels for _, labels in whole] == order_of(pack)
    assert first == whole[: SAVES + 1]
    assert second == whole[SAVES : 2 * SAVES + 1]
    assert 2 * SAVES % STEPS == 0
    assert third == whole[2 * SAVES :]
    accuracies = [line.split()[1] for line in said.splitlines() if line.endswith(f"after {last} steps")]
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0]) >= 0.9
    assert said.count("stopped\n") == 2
