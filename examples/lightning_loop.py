"""A pack under Lightning: ``python examples/lightning_loop.py PACK FOLDER``.

FOLDER receives the checkpoints. Kill it and run it again: it resumes after the step of the last checkpoint, because
Lightning saves the state of loaders that have one. Needs Lightning 2.6, ``pip install lightning``.
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
    """A feed that takes its epoch from the trainer, because Lightning begins some iterations only to test the loader.

    It keeps a loaded state of that epoch. The epoch is counted by steps, because Lightning begins the iteration of the
    next epoch before it counts the last.
    """

    trainer: lightning.Trainer

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.trainer.global_step // len(self))
        return super().__iter__()


class Classifier(lightning.LightningModule):
    """A small CNN and its data."""

    def __init__(self, pack: str) -> None:
        super().__init__()
        self.pack = pack
        dataset = h5pack.H5Dataset(pack, "train")
        self.network = Network("cnn", 3, len(dataset.classes or ()), small=True, norm="group")

    def train_dataloader(self) -> TrainFeed:
        """Batches on this rank's device; Lightning calls this once the ranks are connected."""
        dataset = h5pack.H5Dataset(self.pack, "train", with_rows=True)
        # As in train.py, BATCH is that of all ranks together.
        loader = h5pack.H5Loader(dataset, BATCH // self.trainer.world_size, streams=STREAMS, drop_last=True)
        normalize = h5pack.Normalize.from_dataset(dataset, flip=0.5, crop=2)
        feed = TrainFeed(loader, self.trainer.strategy.root_device, transform=normalize)
        feed.trainer = self.trainer
        return feed

    def val_dataloader(self) -> h5pack.DeviceFeed:
        """With several ranks a few rows are counted twice; train.py counts each once."""
        dataset = h5pack.H5Dataset(self.pack, "val")
        loader = h5pack.H5Loader(dataset, BATCH, shuffle=False)
        normalize = h5pack.Normalize.from_dataset(dataset)
        return h5pack.DeviceFeed(loader, self.trainer.strategy.root_device, transform=normalize)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """The loss of a batch."""
        images, labels, _ = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        """Log the accuracy of a batch."""
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
