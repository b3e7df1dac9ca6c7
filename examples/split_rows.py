"""Which rows of a pack the training example trains with, and which it validates with."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

import h5pack

HELD_OUT = ("val", "valid", "validation", "test", "testing")


def open_rows(pack: str, val_pack: str | None, val_split: str | None, seed: int) -> tuple[Any, Any, int]:
    """Rows to train with, rows to validate with, and how many classes they have."""
    whole = h5pack.H5Dataset(pack, with_rows=True)
    train = split_of(pack, "train")
    if val_pack is not None:
        val = h5pack.H5Dataset(val_pack, val_split, with_rows=True)
    elif val_split is not None:
        val = h5pack.H5Dataset(pack, val_split, with_rows=True)
    else:
        val = next(filter(None, (split_of(pack, name) for name in HELD_OUT)), None)
    if train is None:
        # Nothing that somebody set apart is trained with.
        apart = [val, *(split_of(pack, name) for name in HELD_OUT)]
        held = [range(part.first_row, part.first_row + len(part)) for part in apart if part and part.path == whole.path]
        train = Subset(whole, [row for row in range(len(whole)) if not any(row in rows for rows in held)])
        train = train if held else whole
    if not len(train):
        raise SystemExit(f"{pack}: no rows are left to train with; its splits are to validate and test with")
    if val_pack is not None and val.classes and whole.classes and val.classes != whole.classes:
        raise SystemExit(f"{val_pack}: its classes are others than those of {pack}, so their numbers differ, too")
    if val is None:
        # No split to validate with: every tenth row, drawn at random, is kept from training.
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        held_out = max(1, len(train) // 10)
        train, val = Subset(train, sorted(order[held_out:])), Subset(train, sorted(order[:held_out]))
    labels = [labels_of(part) for part in (train, val)]
    classes = 1 + max(int(part.max()) for part in labels)
    return train, val, max(classes, len(whole.classes or ()))


def split_of(pack: str, name: str) -> h5pack.H5Dataset | None:
    """A split, if the pack has it."""
    with contextlib.suppress(h5pack.PackFormatError):
        return h5pack.H5Dataset(pack, name, with_rows=True)
    return None


def labels_of(rows: Any) -> np.ndarray:
    """The class of each row, int64."""
    base = rows.dataset if isinstance(rows, Subset) else rows
    if base.label_name is None:
        raise SystemExit(f"{base.path}: no labels; pack a folder with a folder for each class, or a table of labels")
    labels = base.read_rows(base.label_name, np.arange(base.first_row, base.first_row + len(base)))
    labels = labels[rows.indices] if isinstance(rows, Subset) else labels
    if labels.ndim > 1 or labels.dtype.kind not in "iu" or not len(labels) or labels.min() < 0:
        raise SystemExit(f"{base.path}: {base.label_name!r} does not give each row a class, a number from 0")
    return labels


def share_of(rows: int, rank: int, ranks: int) -> range:
    """A rank's part of the rows: all parts together are all rows, each of them once."""
    return range(rows * rank // ranks, rows * (rank + 1) // ranks)
