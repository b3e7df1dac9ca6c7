"""Choose the rows of a pack that the training example trains and validates with."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

import h5pack

HELD_OUT = ("val", "valid", "validation", "test", "testing")


def open_rows(pack: str, val_pack: str | None, val_split: str | None, seed: int) -> tuple[Any, Any, int]:
    """The training rows, the validation rows, and the number of classes."""
    whole = h5pack.H5Dataset(pack, with_rows=True)
    train = split_of(pack, "train")
    if val_pack is not None:
        val = h5pack.H5Dataset(val_pack, val_split, with_rows=True)
    elif val_split is not None:
        val = h5pack.H5Dataset(pack, val_split, with_rows=True)
    else:
        val = next(filter(None, (split_of(pack, name) for name in HELD_OUT)), None)
    if train is None:
        # Do not train with rows of a held-out split.
        apart = [val, *(split_of(pack, name) for name in HELD_OUT)]
        held = [np.asarray(part.rows) for part in apart if part and os.path.samefile(part.path, whole.path)]
        train = Subset(whole, np.setdiff1d(whole.rows, np.concatenate(held)).tolist()) if held else whole
    elif val is not None and os.path.samefile(val.path, whole.path) and np.intersect1d(train.rows, val.rows).size:
        raise SystemExit(
            f"{pack}: its split 'train' shares rows with the validation split; give another --val-split or --val"
        )
    if not len(train):
        raise SystemExit(f"{pack}: no rows are left to train with; all are in splits for validation and testing")
    if val_pack is not None and val.classes and whole.classes and val.classes != whole.classes:
        raise SystemExit(f"{val_pack}: its classes are not those of {pack}, so labels would not agree")
    if val is None:
        # Without a split for validation, hold out a tenth of the rows at random.
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        held_out = max(1, len(train) // 10)
        train, val = Subset(train, sorted(order[held_out:])), Subset(train, sorted(order[:held_out]))
    labels = [labels_of(part) for part in (train, val)]
    classes = 1 + max(int(part.max()) for part in labels)
    return train, val, max(classes, len(whole.classes or ()))


def split_of(pack: str, name: str) -> h5pack.H5Dataset | None:
    """A split; None if the pack does not have it."""
    with contextlib.suppress(h5pack.PackFormatError):
        return h5pack.H5Dataset(pack, name, with_rows=True)
    return None


def labels_of(rows: Any) -> np.ndarray:
    """The class of each row, int64."""
    base = rows.dataset if isinstance(rows, Subset) else rows
    if base.label_name is None:
        raise SystemExit(
            f"{base.path}: no labels; convert a folder with a subfolder for each class, or a table of labels"
        )
    labels = base.read_rows(base.label_name, np.asarray(base.rows))
    labels = labels[rows.indices] if isinstance(rows, Subset) else labels
    if labels.ndim > 1 or labels.dtype.kind not in "iu" or not len(labels) or labels.min() < 0:
        raise SystemExit(
            f"{base.path}: {base.label_name!r} does not give each row one class, a number from 0; for several "
            "labels of a row, see 'CelebA: 40 attributes' in docs/recipes.md"
        )
    return labels


def share_of(rows: int, rank: int, ranks: int) -> range:
    """The indices that a rank validates with; the shares of all ranks are disjoint and cover all rows."""
    return range(rows * rank // ranks, rows * (rank + 1) // ranks)
