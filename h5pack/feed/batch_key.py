"""By which a batch's random numbers are drawn: the rows of its samples, the epoch, and which showing of a row it is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_MARK = "repeats"


@dataclass(frozen=True)
class BatchKey:
    """By which a batch's random numbers are drawn.

    With a seed it makes them a pure function of (seed, epoch, row, repeat), the same on every device, in every batch
    size, number of ranks and resumed run.

    Attributes
    ----------
    rows : Tensor
        int64, (N,), on the images' device: rows of the file.
    epoch : int
    repeats : int or Tensor
        Which showing of the row this is in this epoch, counted from 0: one for all, or int64, (N,).
    """

    rows: torch.Tensor
    epoch: int
    repeats: int | torch.Tensor = 0


class EchoedBatch(list[Any]):
    """A batch that says which showing of its rows it is.

    Parameters
    ----------
    parts : iterable
        The batch's parts.
    repeats : int or Tensor
        Which showing, counted from 0: one for all rows, or int64, (N,).
    """

    def __init__(self, parts: Iterable[Any] = (), repeats: int | torch.Tensor = 0) -> None:
        super().__init__(parts)
        self.repeats = repeats

    @staticmethod
    def of(batch: Any, repeats: int | torch.Tensor) -> Any:
        """The same batch, over the same memory, with `repeats` to read on it.

        A tensor, tuple, named tuple, list or dict stays one, of a subclass of its own type; another mapping is copied.
        The batch that is given is left as it was. What is none of these comes back as it is.
        """
        if isinstance(batch, torch.Tensor):
            shown: Any = batch.detach()
            setattr(shown, _MARK, repeats)
            return shown
        if type(batch) in (list, EchoedBatch):
            return EchoedBatch(batch, repeats)
        if isinstance(batch, (list, tuple, dict)):
            kind = type(batch)
            return _fill(kind if hasattr(kind, "_echoes") else _echoed_kind(kind), batch, repeats)
        if isinstance(batch, Mapping):
            shown = copy.copy(batch)
            setattr(shown, _MARK, repeats)
            return shown
        return batch

    @staticmethod
    def plain(batch: Any) -> Any:
        """The batch in the type it had before `of`, without a mark; one that has none comes back as it is."""
        if not is_echoed(batch):
            return batch
        if isinstance(batch, torch.Tensor):
            return batch.detach()
        if type(batch) is EchoedBatch:
            return list(batch)
        if hasattr(type(batch), "_echoes"):
            return _fill(type(batch)._echoes, batch, None)
        batch = copy.copy(batch)
        delattr(batch, _MARK)
        return batch


def is_echoed(batch: Any) -> bool:
    """Whether a batch says which showing of its rows it is."""
    return isinstance(batch, (torch.Tensor, list, tuple, Mapping)) and _MARK in getattr(batch, "__dict__", ())


def repeats_of(batch: Any) -> int | torch.Tensor:
    """Which showing of its rows a batch is: what `EchoedBatch` says, and 0 for any other batch."""
    return getattr(batch, _MARK) if is_echoed(batch) else 0


@functools.cache
def _echoed_kind(kind: type) -> type:
    """A subclass of a container whose instances carry `repeats`."""
    return type(f"Echoed{kind.__name__}", (kind,), {"_echoes": kind, "__reduce_ex__": _reduce, "__module__": __name__})


def _reduce(batch: Any, _protocol: Any) -> tuple[Any, ...]:
    # Classes that are made at use cannot be found by a pickle; their maker can.
    return EchoedBatch.of, (EchoedBatch.plain(batch), batch.repeats)


def _fill(kind: type, batch: Any, repeats: int | torch.Tensor | None) -> Any:
    """A container of this kind with the parts of another, and its mark."""
    # Past the constructors: a named tuple's takes its parts one by one, a subclass's may take anything.
    if isinstance(batch, tuple):
        filled: Any = tuple.__new__(kind, batch)
    elif isinstance(batch, list):
        filled = list.__new__(kind)
        list.extend(filled, batch)
    else:
        filled = dict.__new__(kind)
        for key, value in batch.items():
            filled[key] = value
    own = {name: value for name, value in getattr(batch, "__dict__", {}).items() if name != _MARK}
    if own:
        filled.__dict__.update(own)
    if repeats is not None:
        setattr(filled, _MARK, repeats)
    return filled
