"""A pack under Accelerate: ``accelerate launch examples/accelerate_loop.py PACK FOLDER``, or with plain ``python``.

FOLDER receives the checkpoints. Kill it and run it again: it resumes after the step of the last checkpoint. Needs
``pip install accelerate``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from networks import Network
from torch.nn import functional as F

import h5pack

EPOCHS, BATCH, STREAMS, STEPS_BETWEEN_SAVES = 4, 32, 8, 6


class Steps:
    """Counts steps; Accelerate saves every registered object that has a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """The count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the count."""
        self.count = state["count"]


def save(accelerator: Accelerator, folder: Path, count: int) -> None:
    """Save under another name first, so that a kill leaves no incomplete checkpoint under the final name."""
    partial = folder / f"step-{count:06d}.partial"
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial.rename(partial.with_suffix(""))


def validate(accelerator: Accelerator, network: torch.nn.Module, pack: str) -> float:
    """The accuracy on the split "val"; each rank validates its share of the rows."""
    dataset = h5pack.H5Dataset(pack, "val")
    rank, ranks = accelerator.process_index, accelerator.num_processes
    rows = range(len(dataset) * rank // ranks, len(dataset) * (rank + 1) // ranks)
    loader = h5pack.H5Loader(dataset, BATCH, shuffle=False, indices=rows, rank=0, num_replicas=1)
    normalize = h5pack.Normalize.from_dataset(dataset)
    right = torch.zeros((), device=accelerator.device)
    network.eval()
    with torch.no_grad():
        for images, labels in h5pack.DeviceFeed(loader, accelerator.device, transform=normalize):
            right += (network(images).argmax(1) == labels).sum()
    network.train()
    return accelerator.reduce(right).item() / len(dataset)


def main() -> None:
    pack, folder = sys.argv[1], Path(sys.argv[2])
    accelerator = Accelerator()  # First, because a loader asks for its rank.
    set_seed(0)
    dataset = h5pack.H5Dataset(pack, "train", with_rows=True)
    loader = h5pack.H5Loader(dataset, BATCH // accelerator.num_processes, streams=STREAMS, drop_last=True)
    normalize = h5pack.Normalize.from_dataset(dataset, flip=0.5, crop=2)
    feed = h5pack.DeviceFeed(loader, accelerator.device, transform=normalize)
    network = Network("cnn", 3, len(dataset.classes or ()), small=True, norm="group")
    # The feed needs no `prepare`: it has its rank and its device.
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9))
    steps = Steps()
    accelerator.register_for_checkpointing(feed, steps)
    saved = sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")
    if saved:
        accelerator.load_state(str(saved[-1]))
        accelerator.print(f"resumed after step {steps.count}")
    for epoch in range(steps.count // len(loader), EPOCHS):
        feed.set_epoch(epoch)  # Keeps a loaded state of this epoch.
        for images, labels, _ in feed:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.count += 1
            if steps.count % STEPS_BETWEEN_SAVES == 0:
                save(accelerator, folder, steps.count)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accuracy = validate(accelerator, accelerator.unwrap_model(model), pack)
    accelerator.print(f"accuracy {accuracy:.4f} after {steps.count} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
