"""Samples and batches are named tuples, everywhere."""

from __future__ import annotations

import copy
import pickle
import runpy
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

import h5pack
from h5pack.data.samples import name_fields, new_batch, sample_type
from tests.data import packs
from tests.data.packs import same
from tests.makers import flat_folder, quick, save


@pytest.mark.parametrize(
    ("names", "label", "rows", "expected"),
    [
        (("images",), None, False, ("images",)),
        (("x", "y"), "y", True, ("images", "labels", "rows")),
        (("x", "y", "z"), None, True, ("images", "y", "z", "rows")),
        (("images", "labels", "a/masks", "b/masks"), "labels", False, ("images", "labels", "masks", "masks_")),
        (("images", "labels", "label"), None, False, ("images", "labels_", "label")),
        (("images", "in/rows", "2d", "a-b", "_x", "class"), None, True,
         ("images", "rows_", "field_2d", "a_b", "field__x", "class_", "rows")),
        (("images", "count", "repeats"), None, False, ("images", "count_", "repeats_")),
        (("images", "y", "image", "label", "row", "a\u00b2"), "y", True,
         ("images", "labels", "image_", "label_", "row_", "a_", "rows")),
    ],
)  # fmt: skip
def test_names_of_fields(names: tuple[str, ...], label: str | None, rows: bool, expected: tuple[str, ...]) -> None:
    assert name_fields(names, label, rows) == expected
    assert len(sample_type(expected)._fields) == len(expected)


def test_unlabeled_images_cannot_be_unpacked_as_images_and_labels(tmp_path: Path) -> None:
    """Two images would else be taken for images and labels."""
    dataset = h5pack.H5Dataset(packs.write(tmp_path / "f.h5", 3, images=packs.values(6)))
    for loader in (h5pack.H5Loader(dataset, 2, num_threads=1), DataLoader(dataset, 2), DataLoader(list(dataset), 2)):
        for batch in loader:
            assert batch._fields == ("images",)
            with pytest.raises(ValueError, match="unpack"):
                _, _ = batch
    assert dataset[0]._fields == ("image",)


@pytest.mark.parametrize("entries", [
    [torch.arange(2), torch.tensor(3)],  # a row whose only entry was squeezed
    [torch.zeros(2).to(torch.float8_e4m3fn), torch.ones(1).to(torch.float8_e4m3fn)],
    [torch.zeros(2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)],
    [torch.arange(2), torch.arange(3, 6)],
])  # fmt: skip
def test_a_batch_with_lists_of_any_tensors_can_be_sent(entries: list[torch.Tensor]) -> None:
    batch = new_batch(("images", "marks"), [torch.zeros(2, 3), entries])
    sent = pickle.loads(ForkingPickler.dumps(batch))
    assert [(one.dtype, one.tolist()) for one in map(torch.Tensor.float, sent.marks)] == [
        (torch.float32, one.tolist()) for one in map(torch.Tensor.float, entries)
    ]
    assert [one.dtype for one in sent.marks] == [one.dtype for one in entries]


def halved(image: Image.Image) -> Any:
    return np.array(image) // 2


@pytest.fixture
def dataset(tmp_path: Path) -> h5pack.H5Dataset:
    masks = packs.values(24, (16, 12))
    path = packs.write(tmp_path / "f.h5", 5, images=packs.values(24), labels=np.arange(24) % 3, **{"in/masks": masks})
    return h5pack.H5Dataset(path, fields=["in/masks"], with_rows=True)


def test_samples_and_batches_have_the_same_names_on_every_way(dataset: h5pack.H5Dataset) -> None:
    assert dataset.field_names == ("images", "labels", "masks", "rows")
    sample = dataset[7]
    assert sample._fields == ("image", "label", "masks", "row")
    assert (sample.label, sample.row, sample.masks.shape) == (1, 7, (16, 12))
    assert repr(sample).startswith("Sample(image=")
    half = h5pack.H5Dataset(dataset.path, fields=["in/masks"], with_rows=True, transform=halved)
    concatenated = h5pack.ConcatPack([dataset, dataset])
    loaders: list[Any] = [h5pack.H5Loader(dataset, 4, shuffle=False), h5pack.DeviceFeed(DataLoader(dataset, 4), "cpu")]
    for source in (dataset, half, concatenated, Subset(dataset, range(12)), Subset(half, range(12))):
        loaders += [DataLoader(source, 4, num_workers=workers) for workers in (0, 1)]
    for loader in loaders:
        batch = next(iter(loader))
        assert batch._fields == ("images", "labels", "masks", "rows")
        assert batch.rows.tolist() == [0, 1, 2, 3]
        assert batch.images.shape == (4, 16, 12, 3)
        images, labels, masks, rows = batch
        assert (images is batch.images, labels is batch[1], masks is batch.masks, rows is batch[-1]) == (True,) * 4


def test_copies_and_pickles_have_the_same_type_and_attributes(dataset: h5pack.H5Dataset) -> None:
    for value in (dataset[3], new_batch(("images", "rows"), [torch.ones(2), torch.zeros(2)])):
        for copied in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert type(copied) is type(value)
            assert same(*([torch.as_tensor(part) for part in parts] for parts in (copied, value)))
    echoed = list(h5pack.EchoLoader(DataLoader(dataset, 24), 2))[1]
    assert (echoed.repeats, copy.copy(echoed).repeats, pickle.loads(pickle.dumps(echoed)).repeats) == (1, 1, 1)
    assert echoed.masks.shape == (24, 16, 12)


def test_the_example_reads_images_with_and_without_labels_and_of_several_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples" / "read_pack.py"
    save(flat_folder(tmp_path / "in", 11) / "larger.jpg", size=(30, 30))
    h5pack.convert(tmp_path / "in", tmp_path / "kept.h5", **quick(keep="jpeg"))
    images = packs.values(12)
    labeled = packs.write(tmp_path / "f.h5", 3, images=images, labels=np.arange(12) % 3)
    for path in (labeled, packs.write(tmp_path / "u.h5", 3, images=images), tmp_path / "kept.h5"):
        monkeypatch.setattr(sys, "argv", ["", str(path)])
        runpy.run_path(str(example), run_name="__main__")
        assert capsys.readouterr().out.count(": 12 images in ") == 2
