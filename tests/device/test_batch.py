"""Batches of any container: their images, rows and keys, and how often they were repeated."""

from __future__ import annotations

import collections
import copy
import pickle
from collections import ChainMap, OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import h5pack
from h5pack.device.batch import images_of, is_echoed, mark_echoed, repeats_of, rows_of, unmark_echoed
from h5pack.errors import OptionsError
from tests.data.packs import same
from tests.device.feeds import Keyed, every_feed, h5_loader

Pair = namedtuple("Pair", "images rows")


class OwnList(list[Any]):
    """A list with an attribute."""

    name = "lost"


def batches() -> dict[str, Any]:
    images, rows = torch.arange(12).reshape(3, 4), torch.arange(3)
    own = OwnList([images, rows])
    own.name = "kept"
    return {
        "list": [images, rows],
        "own list": own,
        "tuple": (images, rows),
        "namedtuple": Pair(images, rows),
        "dict": {"images": images, "rows": rows},
        "ordered": OrderedDict(images=images, rows=rows),
        "mapping": UserDict(images=images, rows=rows),
        "tensor": images,
    }


def elements(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    return list(batch.values() if hasattr(batch, "values") else batch)


def test_row_numbers_are_an_element_named_rows_or_the_last_one() -> None:
    images, rows = torch.arange(12).reshape(3, 4), torch.arange(3)
    with_rows = [batch for kind, batch in batches().items() if kind != "tensor"]
    for batch in (*with_rows, [rows, images, rows], (images, None, rows)):
        assert rows_of(batch) is (batch["rows"] if isinstance(batch, Mapping) else batch[-1])
    Labeled = namedtuple("Labeled", "images labels")
    others = (images, [rows], (rows, images), [rows, rows.int()], [rows, [0, 1, 2]], {"images": images, "index": rows})
    for batch in (*others, Labeled(images, rows), {"rows": images}, rows, None, "rows"):
        assert rows_of(batch) is None


@pytest.mark.parametrize("kind", batches())
def test_any_container_can_be_marked(kind: str) -> None:
    batch = batches()[kind]
    shown = mark_echoed(batch, 3)
    assert repeats_of(mark_echoed(shown, 9)) == 9
    for one in (shown, copy.copy(shown), pickle.loads(pickle.dumps(shown))):
        if kind == "tensor" and one is not shown and not is_echoed(one):
            continue  # torch copies no attributes.
        assert isinstance(one, type(batch))
        assert is_echoed(one)
        assert repeats_of(one) == one.repeats == 3
        assert same(elements(one), elements(batch))
    # Over the same memory, and the original is unmarked.
    assert [element.data_ptr() for element in elements(shown)] == [element.data_ptr() for element in elements(batch)]
    plain = unmark_echoed(shown)
    assert type(plain) is type(batch)
    assert (is_echoed(batch), repeats_of(batch), is_echoed(plain)) == (False, 0, False)
    assert unmark_echoed(batch) is batch
    if kind == "own list":
        assert plain.name == shown.name == "kept"
    if kind == "namedtuple":
        assert (shown.rows.tolist(), shown._fields) == ([0, 1, 2], ("images", "rows"))
    assert mark_echoed("text", 5) == unmark_echoed("text") == "text"


def test_types_without_subclasses_are_not_marked_and_a_default_factory_is_kept() -> None:
    for batch in (torch.zeros(2).shape, torch.zeros(2, 3).max(1)):
        assert mark_echoed(batch, 2) is batch
    batch = mark_echoed(collections.defaultdict(list, images=[1]), 2)
    batch["new"].append(3)
    assert repeats_of(batch) == 2
    assert dict(unmark_echoed(batch)) == {"images": [1], "new": [3]}


class SlottedMapping(Mapping[str, Any]):
    """A mapping that can have no further attributes."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class OwnMapping(SlottedMapping, MutableMapping[str, Any]):
    """A mapping that is not made from a dict, and whose shallow copy shares its values."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]


@pytest.mark.parametrize(
    ("make", "echoed", "changed"),
    [
        (lambda values: MappingProxyType(values), dict, MappingProxyType),
        (SlottedMapping, dict, SlottedMapping),
        (lambda values: OwnMapping(**values), OwnMapping, dict),
        (ChainMap, ChainMap, ChainMap),
    ],
)
def test_batches_may_be_any_mapping(make: Any, echoed: type, changed: type) -> None:
    values = {"images": torch.arange(12, dtype=torch.uint8).reshape(3, 4), "labels": torch.arange(3)}
    loader = [make(dict(values)), make(dict(values))]
    found = list(h5pack.EchoLoader(loader, 2))
    assert [repeats_of(batch) for batch in found] == [0, 1, 0, 1]
    for batch in found:
        assert isinstance(batch, echoed if repeats_of(batch) else type(loader[0]))
        assert all(torch.equal(batch[name], values[name]) for name in values)
    for batch in h5pack.DeviceFeed(loader, "cpu", transform=lambda images: images + 1):
        assert isinstance(batch, changed)
        assert torch.equal(batch["images"], values["images"] + 1)
    assert all(torch.equal(batch["images"], values["images"]) for batch in loader)


def test_packed_sequences_keep_their_batch_sizes_on_the_cpu() -> None:
    packed = pack_sequence([torch.zeros(2), torch.ones(3)], enforce_sorted=False)
    for found in h5pack.DeviceFeed(h5pack.EchoLoader([[torch.zeros(2), packed]], 2), "meta"):
        data, sizes, *indices = found[1]
        assert [one.device.type for one in (data, *indices)] == ["meta"] * 3
        assert (sizes.tolist(), type(found[1])) == ([2, 2, 1], type(packed))


def test_a_marked_list_may_have_attributes_and_be_built_again() -> None:
    shown = mark_echoed([1, 2], 3)
    shown.name = "lost"
    assert unmark_echoed(shown) == pickle.loads(pickle.dumps(shown)) == [1, 2]
    # Other libraries move the elements of a batch to a device, and call its type to make a batch of them.
    again = type(shown)([4, 5])
    assert (is_echoed(again), repeats_of(again)) == (False, 0)
    assert type(unmark_echoed(again)) is list
    assert copy.copy(again) == pickle.loads(pickle.dumps(again)) == [4, 5]


# Images and keys, by a DeviceFeed.


@every_feed
def test_a_transform_changes_the_images_and_nothing_else(feed_of: Any) -> None:
    images, rows, thing = torch.ones(2, 3), torch.arange(2), object()
    batches: list[Any] = [
        [images, rows, thing],
        (images, None, "text"),
        Pair(images, rows),
        {"x": thing, "image": images},
        OrderedDict(images=images, more=[rows, (thing, {"deep": rows})]),
        images,
        mark_echoed([images, rows], 2),
        mark_echoed((images, rows), 5),
        mark_echoed({"images": images}, 1),
        mark_echoed(images, 3),
    ]
    found = list(feed_of(batches, transform=lambda part: part * 5))
    for one, two in zip(found, batches, strict=True):
        assert type(one) is type(two)
        assert repeats_of(one) == repeats_of(two)
        assert images_of(one).unique().tolist() == [5]
    assert found[0][2] is thing
    assert found[4]["more"][1][0] is thing
    assert torch.equal(found[4]["more"][1][1]["deep"], rows)
    # The loader may give its batches again.
    assert images.unique().tolist() == [1]
    assert batches[0][0] is images


class AttributeDict(dict[str, Any]):
    """A dict whose items are its attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


@every_feed
@pytest.mark.parametrize("factor", [1, 2])
def test_attributes_that_are_items_change_with_them(feed_of: Any, factor: int) -> None:
    batch: Any = AttributeDict(images=torch.ones(2), labels=torch.zeros(2))
    for found in feed_of(h5pack.EchoLoader([batch], factor), transform=lambda images: images + 1):
        assert found.images is found["images"]
        assert found.labels is found["labels"]
        assert found.images.tolist() == [2, 2]
    assert batch.images.tolist() == [1, 1]


@every_feed
def test_image_key_says_where_the_images_are(feed_of: Any) -> None:
    one, two = torch.ones(2), torch.full((2,), 2)
    sides = {"left": one, "right": two}
    for image_key, batch in ((1, [one, two]), (-1, (one, two)), ("right", sides), ("rows", Pair(one, two))):
        (found,) = feed_of([batch], transform=torch.neg, image_key=image_key)
        parts = list(found.values() if isinstance(found, dict) else found)
        assert [element.unique().tolist() for element in parts] == [[1], [-2]]
    unknown = [(4, [one]), ("x", sides), ("x", Pair(one, two))]
    for image_key, batch in (*unknown, (None, ["text", one]), (None, sides), (None, 7)):
        with pytest.raises(OptionsError) as caught:
            list(feed_of([batch], transform=torch.neg, image_key=image_key))
        assert caught.value.parameters == ("image_key",)


@every_feed
def test_keys_of_other_loaders(feed_of: Any) -> None:
    keyed = Keyed()
    images, rows = torch.zeros(3, 2), torch.tensor([5, 6, 9])
    batches = [
        {"images": images, "rows": rows},
        mark_echoed([images, "x", rows], 4),
        mark_echoed((images, "x", rows), 2),
        Pair(images, rows),
    ]
    feed = feed_of(batches, transform=keyed)
    for epoch in range(2):
        keyed.keys.clear()
        found = list(feed)
        assert [key.epoch for key in keyed.keys] == [epoch] * 4
        assert all(torch.equal(key.rows, rows) for key in keyed.keys)
        assert [key.repeats for key in keyed.keys] == [0, 4, 2, 0]
        assert torch.equal(found[0]["rows"], rows)
        assert torch.equal(found[1][-1], rows)
    feed.set_epoch(7)
    assert len(list(feed)) == 4
    assert (keyed.keys[-1].epoch, feed.epoch) == (7, 7)


@every_feed
def test_keyed_transforms_need_rows(dataset: h5pack.H5Dataset, feed_of: Any) -> None:
    plain = h5pack.H5Dataset(dataset.path)
    for data in (plain, Subset(plain, [1, 2]), h5pack.ConcatPack([plain, plain])):
        with pytest.raises(OptionsError):
            feed_of(DataLoader(data, 2), transform=Keyed())
    images, labels = torch.zeros(3, 2), torch.arange(3)
    others = (labels, "x"), ("x", labels.int()), ("x", torch.arange(4))
    for batch in (*([images, *other] for other in others), {"images": images}, images, labels):
        with pytest.raises(OptionsError):
            list(feed_of([batch], transform=Keyed()))
    # As an ImageFolder's batches: labels must not be used as rows.
    with pytest.raises(OptionsError):
        list(feed_of(DataLoader(TensorDataset(images, labels), 3), transform=Keyed()))
    # So are those of h5pack, where the loader does not tell the dataset.
    plain = h5pack.H5Dataset(dataset.path)
    for loader in (DataLoader(ConcatDataset([plain]), 12), list(h5_loader(plain)), iter(h5_loader(plain))):
        with pytest.raises(OptionsError):
            list(feed_of(loader, transform=Keyed()))
    without = h5pack.H5Dataset(dataset.path, labels=None, with_rows=True)
    assert len(list(feed_of(h5_loader(without), transform=Keyed()))) == 9
