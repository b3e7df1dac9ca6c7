"""A pack under Lightning: ``python examples/lightning_loop.py PACK FOLDER``.

FOLDER gets the checkpoints. Kill it and run it again: it goes on behind the step of the last one, since Lightning saves
the state of a loader that has one. Needs ``pip install lightning``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from networks import Network
from torch.nn import functional as F

import h5pack

EPOCHS, BATCH, STREAMS, STEPS_BETWEEN_SAVES = 4, 32, 8, 6


class TrainFeed(h5pack.DeviceFeed):
    """A feed that asks in which epoch the trainer is: Lightning begins some iterations only to see whether it can.

    Within an epoch whose state was loaded it keeps the place. Steps tell the epoch, since Lightning counts one as over
    only after it has begun the iteration of the next.
    """

    trainer: lightning.Trainer

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.trainer.global_step // len(self))
        return super().__iter__()


class Classifier(lightning.LightningModule):
    """A small CNN, and the rows it learns from."""

    def __init__(self, pack: str) -> None:
        super().__init__()
        self.pack = pack
        dataset = h5pack.H5Dataset(pack, "train")
        self.network = Network("cnn", 3, len(dataset.classes or ()), small=True, norm="group")

    def train_dataloader(self) -> TrainFeed:
        """Batches on this rank's device; Lightning asks when the ranks have found each other."""
        dataset = h5pack.H5Dataset(self.pack, "train", with_rows=True)
        # As in train.py, BATCH is that of all ranks together.
        loader = h5pack.H5Loader(dataset, BATCH // self.trainer.world_size, streams=STREAMS, drop_last=True)
        normalise = h5pack.Normalize.from_dataset(dataset, flip=0.5, crop=2)
        feed = TrainFeed(loader, self.trainer.strategy.root_device, transform=normalise)
        feed.trainer = self.trainer
        return feed

    def val_dataloader(self) -> h5pack.DeviceFeed:
        """On several ranks a few rows are counted twice; train.py shows how to count each of them once."""
        dataset = h5pack.H5Dataset(self.pack, "val")
        loader = h5pack.H5Loader(dataset, BATCH, shuffle=False)
        normalise = h5pack.Normalize.from_dataset(dataset)
        return h5pack.DeviceFeed(loader, self.trainer.strategy.root_device, transform=normalise)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """The loss of a batch."""
        images, labels, _ = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        """Count what the network names rightly."""
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, batch_size=len(labels), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    pack, folder = sys.argv[1], Path(sys.argv[2])
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=STEPS_BETWEEN_SAVES)],
        logger=False,
        enable_progress_bar=sys.stderr.isatty(),
        num_sanity_val_steps=0,
    )
    last = folder / "last.ckpt"
    trainer.fit(Classifier(pack), ckpt_path=last if last.exists() else None)
    print(f"accuracy {trainer.callback_metrics['accuracy']:.4f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
