"""Samples and batches with boxes, texts and other fields whose rows differ in length."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate

import h5pack
from h5pack.data import samples
from h5pack.errors import OptionsError
from tests.makers import FIELDS, annotated_images, quick

COUNT = 26
NAMES = ["caption", "boxes", "score", "captions", "points", "sizes"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ragged")
    annotated_images(root / "in", COUNT)
    h5pack.convert(root / "in" / "list.jsonl", root / "o.h5", **quick(**FIELDS, chunk_rows=4))
    return root


@pytest.fixture(scope="module")
def records(source: Path) -> list[dict[str, Any]]:
    return annotated_images(source / "same", COUNT)


@pytest.fixture
def dataset(source: Path) -> h5pack.H5Dataset:
    return h5pack.H5Dataset(source / "o.h5", fields=NAMES, with_rows=True)


def same(value: Any, record: dict[str, Any]) -> bool:
    """Whether a sample has the fields of a record."""
    lists = {
        "boxes": (value.boxes, torch.float32, (4,)),
        "points": (value.points, torch.float32, (3,)),
        "sizes": (value.sizes, torch.int64, (2,)),
    }
    for name, (found, dtype, shape) in lists.items():
        assert (found.dtype, found.shape[1:]) == (dtype, shape)
        assert found.tolist() == record[name], name
    assert float(value.score) == record["score"]
    return bool((value.caption, value.captions) == (record["caption"], record["captions"]))


def require_batches(batches: Iterable[Any], dataset: h5pack.H5Dataset, records: list[dict[str, Any]]) -> None:
    """All rows of an epoch arrive in batches, with the values of their records."""
    names = [int(name.partition(".")[0]) for name in dataset.filenames or ()]
    seen: list[int] = []
    for batch in batches:
        assert batch._fields == ("images", *NAMES, "rows")
        tensors = [name for name, value in zip(batch._fields, batch, strict=True) if type(value) is torch.Tensor]
        assert tensors == ["images", "score", "rows"]
        assert {type(value) for value in batch} == {torch.Tensor, list}
        for position, row in enumerate(batch.rows.tolist()):
            one = samples.sample_type(batch._fields)(*(value[position] for value in batch))
            assert same(one, records[names[row]])
            assert (one.image[:, :, 0] > 128).sum() <= 80 * len(one.boxes)
            seen.append(row)
    assert sorted(seen) == list(range(COUNT))


def test_samples_have_tensors_texts_and_lists(dataset: h5pack.H5Dataset, records: list[dict[str, Any]]) -> None:
    names = [int(name.partition(".")[0]) for name in dataset.filenames or ()]
    assert dataset.kinds == {
        "caption": "text", "boxes": "boxes", "score": "array", "captions": "texts", "points": "keypoints",
        "sizes": "ragged",
    }  # fmt: skip
    for index in range(COUNT):
        assert dataset[index]._fields == ("image", *NAMES, "row")
        for value in (dataset[index], dataset[index : index + 1][0], dataset.__getitems__([index])[0]):
            assert same(value, records[names[index]])
            again = pickle.loads(pickle.dumps(value))
            assert same(again, records[names[index]])
            assert same(copy.deepcopy(value), records[names[index]])
    transformed = h5pack.H5Dataset(dataset.path, fields=NAMES, transform=lambda image: image.size, check=True)
    assert all(same(value, records[names[index]]) for index, value in enumerate(transformed[:]))


@pytest.mark.parametrize(
    ("workers", "collate", "inline"),
    [*((0, collate, 0) for collate in ("collate", "default", "list")),
     *((2, "collate", 0), (2, "collate", 1 << 20), (2, "default", 1 << 20), (2, "list", 0))],
)  # fmt: skip
def test_batches_of_a_dataloader(
    dataset: h5pack.H5Dataset,
    records: list[dict[str, Any]],
    workers: int,
    collate: str,
    inline: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "_INLINE_BYTES", inline)
    collates: dict[str, Callable[[Any], Any] | None] = {
        "collate": dataset.collate,
        "default": None,
        "list": lambda batch: default_collate(list(batch)),
    }
    # Forked workers have the changed number of bytes and the local function, which others would need pickled.
    settings: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    loader = DataLoader(dataset, 5, shuffle=True, collate_fn=collates[collate], **settings)
    require_batches(loader, dataset, records)


def test_a_batch_that_was_changed_in_a_worker_arrives_changed(dataset: h5pack.H5Dataset) -> None:
    def collate(batch: Any) -> Any:
        made = dataset.collate(batch)
        made.boxes[0] = torch.ones(9)
        made.sizes.append("more")
        made.captions[0] = None
        return made

    settings: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    (batch,) = DataLoader(Subset(dataset, [3, 4]), 2, collate_fn=collate, **settings)
    assert (batch.boxes[0].tolist(), batch.boxes[1].shape[1], batch.sizes[2]) == ([1] * 9, 4, "more")
    assert batch.captions[0] is None


def test_batches_of_a_loader(dataset: h5pack.H5Dataset, records: list[dict[str, Any]]) -> None:
    loader = h5pack.H5Loader(dataset, 5, num_threads=2)
    for _ in range(2):
        require_batches(loader, dataset, records)
    checked = h5pack.H5Dataset(dataset.path, fields=NAMES, check=True)
    plain = list(h5pack.H5Loader(checked, 5, shuffle=False))
    assert plain[0]._fields == ("images", *NAMES)
    assert [text for batch in plain for text in batch.caption] == [sample.caption for sample in dataset[:]]
    require_batches(h5pack.EchoLoader(loader, factor=1), dataset, records)
    require_batches(h5pack.DeviceFeed(loader, device="cpu"), dataset, records)


def test_encoded_images_of_several_sizes_have_fields(tmp_path: Path) -> None:
    records = annotated_images(tmp_path / "in", 9, None)
    settings = quick(**FIELDS, keep="jpeg", order="sorted")
    h5pack.convert(tmp_path / "in" / "list.jsonl", tmp_path / "o.h5", **settings)
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=NAMES)
    assert all(same(sample, record) for sample, record in zip(dataset[:], records, strict=True))
    cropped = h5pack.H5Dataset(tmp_path / "o.h5", fields=NAMES, transform=lambda image: image.size[0])
    (batch,) = DataLoader(cropped, 9)
    assert batch.captions == [record["captions"] for record in records]


def test_packs_are_concatenated_if_their_fields_agree(
    dataset: h5pack.H5Dataset, records: list[dict[str, Any]], source: Path
) -> None:
    both = h5pack.ConcatPack([dataset, h5pack.H5Dataset(dataset.path, fields=NAMES, with_rows=True)])
    names = [int(name.partition(".")[0]) for name in dataset.filenames or ()]
    indices = np.random.default_rng(0).permutation(2 * COUNT).tolist()
    for index, value in zip(indices, both.__getitems__(indices), strict=True):
        assert same(value, records[names[index % COUNT]])
    batch = both.collate(both.__getitems__(indices))
    assert batch.caption == [records[names[index % COUNT]]["caption"] for index in indices]
    assert same(both[COUNT + 3], records[names[3]])
    others = [["caption", "boxes", "score", "captions", "sizes", "points"], NAMES[:-1]]
    for fields in others:
        with pytest.raises(OptionsError):
            h5pack.ConcatPack([dataset, h5pack.H5Dataset(dataset.path, fields=fields, with_rows=True)])
    assert source.exists()


@pytest.mark.parametrize("budget", [0, 700, 1 << 20])
def test_a_loader_holds_lists_that_fit_into_memory(
    dataset: h5pack.H5Dataset, records: list[dict[str, Any]], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h5pack.data.loader._MAX_LIST_BYTES", budget)
    plain = h5pack.H5Loader(h5pack.H5Dataset(dataset.path, fields=["score"], with_rows=True), 5)
    loader = h5pack.H5Loader(dataset, 5)
    held = loader.memory_bytes - plain.memory_bytes
    assert (held == 0, held < 2000) == {0: (True, True), 700: (False, True), 1 << 20: (False, False)}[budget]
    require_batches(loader, dataset, records)
    reads = dataset.stats().reads
    require_batches(loader, dataset, records)
    if budget == 1 << 20:
        assert dataset.stats().reads - reads <= 3 * COUNT
    require_batches(pickle.loads(pickle.dumps(loader)), dataset, records)
    assert len(pickle.dumps(loader)) < 60_000
    loader.close()
    require_batches(loader, dataset, records)
    some = Subset(dataset, [20, 3, 9])
    texts = {text for batch in h5pack.H5Loader(some, 2) for text in batch.caption}
    assert texts == {dataset[index].caption for index in (20, 3, 9)}
