"""`EchoedBatch`: batches of any container that say which showing of their rows they are."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, UserDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch

from h5pack.feed.batch_key import BatchKey, EchoedBatch, is_echoed, repeats_of

Pair = namedtuple("Pair", "images rows")


class Typed(NamedTuple):
    """A named tuple of the other kind."""

    images: torch.Tensor
    rows: torch.Tensor


class OwnList(list[Any]):
    """A list with an attribute."""


def batches() -> dict[str, Any]:
    images, rows = torch.arange(12).reshape(3, 4), torch.arange(3)
    own = OwnList([images, rows])
    own.name = "kept"  # type: ignore[attr-defined]
    return {
        "list": [images, rows],
        "own list": own,
        "tuple": (images, rows),
        "namedtuple": Pair(images, rows),
        "typed namedtuple": Typed(images, rows),
        "dict": {"images": images, "rows": rows},
        "ordered": OrderedDict(images=images, rows=rows),
        "mapping": UserDict(images=images, rows=rows),
        "tensor": images,
    }


def parts(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    return list(batch.values() if hasattr(batch, "values") else batch)


@pytest.mark.parametrize("kind", batches())
@pytest.mark.parametrize("repeats", [0, 3, torch.tensor([0, 1, 4])], ids=str)
def test_a_mark_on_any_container(kind: str, repeats: Any) -> None:
    batch = batches()[kind]
    shown = EchoedBatch.of(batch, repeats)
    again = EchoedBatch.of(shown, 9)
    assert repeats_of(again) == 9
    for one in (shown, copy.copy(shown), pickle.loads(pickle.dumps(shown))):
        if kind == "tensor" and one is not shown and not is_echoed(one):
            continue  # torch's copy of a tensor is a plain one.
        assert isinstance(one, type(batch))
        assert is_echoed(one)
        assert torch.equal(torch.as_tensor(repeats_of(one)), torch.as_tensor(repeats))
        assert all(torch.equal(a, b) for a, b in zip(parts(one), parts(batch), strict=True))
    # The same memory, and the one that was given is as it was.
    assert [part.data_ptr() for part in parts(shown)] == [part.data_ptr() for part in parts(batch)]
    assert not is_echoed(batch)
    assert repeats_of(batch) == 0
    plain = EchoedBatch.plain(shown)
    assert type(plain) is type(batch)
    assert not is_echoed(plain)
    assert EchoedBatch.plain(batch) is batch
    if kind == "own list":
        assert plain.name == shown.name == "kept"


def test_fields_of_a_named_tuple_stay() -> None:
    shown = EchoedBatch.of(batches()["namedtuple"], 2)
    assert shown.rows.tolist() == [0, 1, 2]
    assert shown._fields == ("images", "rows")


def test_what_is_no_batch_comes_back() -> None:
    for other in (None, "text", 3, object()):
        assert EchoedBatch.of(other, 5) is other
        assert repeats_of(other) == 0
        assert EchoedBatch.plain(other) is other


def test_an_echoed_list_is_a_list() -> None:
    batch = EchoedBatch([1, 2], 4)
    assert batch == [1, 2]
    assert repeats_of(batch) == 4
    assert EchoedBatch().repeats == 0


def test_a_key_does_not_change() -> None:
    key = BatchKey(torch.arange(2), 3)
    assert key.repeats == 0
    with pytest.raises(AttributeError):
        key.epoch = 4  # type: ignore[misc]
