"""The JPEG folder itself, decoded by Pillow in a DataLoader's workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.peer_cases.base import Case, ImageFolder, Opened, Reading, decode, shuffling


class _Decoding(Dataset[Any]):
    def __init__(self, source: ImageFolder) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(decode(self.source.paths[index])), int(self.source.labels[index])


class JPEGCase(Case):
    """Reads the images where they lie; there is nothing to convert."""

    settings = "An image a file, decoded by Pillow in a DataLoader with workers that stay."
    packages = ("pillow", "torch")
    may_be_cut = True

    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """Only link to the folder."""
        (out / "images").symlink_to(source.folder)
        return 0

    def open(self, out: Path, reading: Reading) -> Opened:
        """The folder in a DataLoader."""
        return shuffling(_Decoding(ImageFolder(out / "images")), reading)


CASES = {"jpeg": JPEGCase()}
