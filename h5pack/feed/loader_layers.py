"""Loaders around loaders: who is inside whom, and what a batch amounts to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader


def layers_of(loader: Any) -> list[Any]:
    """A loader, and those it is wrapped around, by their attribute ``loader``; from the outermost on."""
    layers = [loader]
    while (inner := getattr(layers[-1], "loader", None)) is not None and all(inner is not layer for layer in layers):
        layers.append(inner)
    return layers


def told(layers: list[Any], name: str) -> Any:
    """The first layer's attribute of that name; None where nobody has it."""
    for layer in layers:
        value = getattr(layer, name, None)
        if value is not None:
            return value
    return None


def base_datasets(layers: list[Any]) -> list[Any]:
    """The datasets at the bottom, under torch's subsets and concatenations."""
    waiting, found = [told(layers, "dataset")], []
    while waiting:
        dataset = waiting.pop(0)
        inner = getattr(dataset, "datasets", None) or getattr(dataset, "dataset", None)
        if isinstance(inner, (list, tuple)):
            waiting += inner
        elif inner is not None:
            waiting.append(inner)
        elif dataset is not None:
            found.append(dataset)
    return found


def samplers_of(loader: Any) -> list[Any]:
    """What orders a DataLoader's rows: its batch sampler and its sampler, if it has any."""
    if not isinstance(loader, DataLoader):
        return []
    return [sampler for sampler in (loader.batch_sampler, loader.sampler) if sampler is not None]


def measure(batch: Any) -> tuple[int | None, int]:
    """Images and bytes of a batch: the length of its first tensor with an axis, and of all its tensors."""
    if isinstance(batch, torch.Tensor):
        return (batch.shape[0] if batch.dim() else None), batch.nbytes
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        # A numpy array, or whatever else says how large it is.
        shape, size = getattr(batch, "shape", ()), getattr(batch, "nbytes", 0)
        return (shape[0] if isinstance(shape, tuple) and shape else None), size if isinstance(size, int) else 0
    images, size = None, 0
    for part in batch:
        count, part_bytes = measure(part)
        images = count if images is None else images
        size += part_bytes
    return images, size
