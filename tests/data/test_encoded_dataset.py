"""Rows that are encoded images, as samples and batches: Pillow's pixels, each row once, by every way of reading."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import h5pack
from h5pack.errors import DamagedRowsError, OptionsError, SizesDifferError
from tests.makers import pixels
from tests.read.encoded_files import SIZE, decoded, encode, jpegs, write_encoded, write_kept

pytestmark = pytest.mark.usefixtures("no_thread_stays")

ROWS = 70
RAGGED = [(20, 14), (31, 9), (12, 25), (20, 14)]
FORK = {"num_workers": 1, "multiprocessing_context": "fork"}


@pytest.fixture(scope="module", params=["variable length", "kept"])
def even(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one size, JPEG and PNG in turn, with labels and a field."""
    rows = jpegs(ROWS)
    rows[1::3] = [encode(pixels(seed, SIZE), "PNG") for seed in range(1, ROWS, 3)]
    path = tmp_path_factory.mktemp("even") / "f.h5"
    write_kept(path, rows) if request.param == "kept" else write_encoded(path, rows, chunks=(16,))
    with h5py.File(path, "r+") as file:
        file["weights"] = np.linspace(0, 1, ROWS, dtype="f4")
    return path


@pytest.fixture(scope="module", params=["variable length", "kept"])
def ragged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of several sizes, with labels."""
    rows = [encode(pixels(seed, RAGGED[seed % 4])) for seed in range(ROWS)]
    path = tmp_path_factory.mktemp("ragged") / "f.h5"
    return write_kept(path, rows) if request.param == "kept" else write_encoded(path, rows)


def stored(path: Path) -> list[npt.NDArray[np.uint8]]:
    """What h5py and Pillow see in a file."""
    with h5py.File(path) as file:
        if "images" in file:
            return [decoded(data.tobytes()) for data in file["images"][()]]
        data, edges = file["encoded/data"][()].tobytes(), file["encoded/offsets"][()].tolist()
        return [decoded(data[first:last]) for first, last in itertools.pairwise(edges)]


def require_rows(batches: list[Any], path: Path) -> list[int]:
    """The labels of all batches, whose images must be those of these rows."""
    images, seen = stored(path), []
    for batch in batches:
        assert (batch[0].dtype, batch[1].dtype) == (torch.uint8, torch.int64)
        for image, label in zip(batch[0], batch[1].tolist(), strict=True):
            assert np.array_equal(image, images[label])
            seen.append(label)
    return seen


def test_samples_and_batches(even: Path) -> None:
    images = np.stack(stored(even))
    dataset = h5pack.H5Dataset(even, fields=["weights"], with_rows=True)
    assert repr(dataset).endswith(f"{ROWS} rows of 20 x 14 x 3, labels 'labels', fields weights")
    for index in (0, 1, 33, -1):
        row = index % ROWS
        image, label, weight, number = dataset[index]
        assert image.dtype == torch.uint8
        assert np.array_equal(image, images[index])
        assert (label, type(label), number) == (row, int, row)
        assert (weight.dtype, weight) == (torch.float32, np.float32(row / (ROWS - 1)))
    assert [label for _, label, _, _ in dataset[5:50:7]] == list(range(5, 50, 7))
    indices = [9, 8, 9, 0, 69, 1]
    for samples in (dataset.__getitems__(indices), [pickle.loads(pickle.dumps(dataset))[index] for index in indices]):
        assert [sample[1] for sample in samples] == indices
        assert np.array_equal(np.stack([sample[0] for sample in samples]), images[indices])
    batch = dataset.collate(dataset.__getitems__(indices))
    assert [part.dtype for part in batch] == [torch.uint8, torch.int64, torch.float32, torch.int64]
    assert np.array_equal(batch[0], images[indices])
    assert batch[1].tolist() == batch[3].tolist() == indices


def test_a_row_asked_for_twice_has_memory_of_its_own(even: Path) -> None:
    dataset = h5pack.H5Dataset(even, transform=lambda image: image)
    one, two = (image for image, _ in dataset.__getitems__([4, 4]))
    one.paste(0, (0, 0, *one.size))
    assert np.asarray(two).any()
    assert not np.asarray(one).any()


def test_counts(even: Path) -> None:
    dataset = h5pack.H5Dataset(even, labels=None)
    with h5py.File(even) as file:
        size = sum(map(len, file["images"][()])) if "images" in file else len(file["encoded/data"])
    loader = h5pack.H5Loader(dataset, 12)
    assert sum(len(batch.images) for batch in loader) == ROWS
    stats, pixel_bytes = loader.stats(), ROWS * 20 * 14 * 3
    assert (stats.rows, stats.bytes_read, stats.bytes_wanted) == (ROWS, size, pixel_bytes)
    assert stats.amplification == size / pixel_bytes
    dataset[7]
    dataset.__getitems__([3, 4]).samples()
    assert dataset.stats().rows == ROWS + 3


def test_check_has_nothing_to_check(tmp_path: Path) -> None:
    path = write_encoded(tmp_path / "f.h5", jpegs(3))
    for _ in range(2):
        with pytest.raises(OptionsError, match="checksums"):
            h5pack.H5Dataset(path, check=True)
        # Checksums of the encoded bytes are none of the pixels.
        with h5py.File(path, "a") as file:
            file.require_dataset("checksums/images", 3, "u4")


def test_fields_may_be_encoded_too(tmp_path: Path) -> None:
    masks = [encode(pixels(seed, (10, 10)), "PNG") for seed in range(9)]
    path = write_encoded(write_encoded(tmp_path / "f.h5", jpegs(9)), masks, "masks")
    with h5py.File(path, "r+") as file:
        file["numbers"] = np.arange(9 * 4).reshape(9, 2, 2).astype("u1")
    dataset = h5pack.H5Dataset(path, fields=["masks"])
    assert np.array_equal(dataset[4][2], decoded(masks[4]))
    ((images, labels, fields),) = h5pack.H5Loader(dataset, 9)
    assert np.array_equal(fields, np.stack([decoded(masks[label]) for label in labels]))
    assert np.array_equal(images, np.stack(stored(path))[labels])
    image, _, mask = h5pack.H5Dataset(path, images="numbers", fields=["masks"])[8]
    assert image.tolist() == [[32, 33], [34, 35]]
    assert np.array_equal(mask, decoded(masks[8]))


def test_a_sample_has_its_own_size(ragged: Path) -> None:
    images = stored(ragged)
    samples = h5pack.H5Dataset(ragged, transform=lambda image: image, with_rows=True).__getitems__([2, 1, 5, 1])
    assert [row for _, _, row in samples] == [2, 1, 5, 1]
    assert all(isinstance(image, Image.Image) for image, _, _ in samples)
    assert all(np.array_equal(image, images[row]) for image, _, row in samples)
    shown, cropped = repr(h5pack.H5Dataset(ragged)), repr(h5pack.H5Dataset(ragged, decode=h5pack.CenterCrop(8)))
    height, width, _ = images[0].shape
    # The sizes of variable-length rows are not stored, so only the size of row 0 is known.
    with h5py.File(ragged) as file:
        expected = f"{height} x {width} x 3" if "images" in file else "several sizes"
    assert f" rows of {expected}, " in shown
    assert "8 x 8 x 3" in cropped


def batches_of(dataset: h5pack.H5Dataset, way: str) -> None:
    """Ask for batches, one way or another."""
    if way == "collate":
        dataset.collate(dataset.__getitems__([0, 3, 1]))
    elif way == "H5Loader":
        list(h5pack.H5Loader(dataset, 8, num_threads=2, shuffle=False))
    elif way == "default_collate":
        list(DataLoader(dataset, 8))
    else:
        list(DataLoader(dataset, 8, num_workers=1, collate_fn=dataset.collate))


@pytest.mark.parametrize("way", ["collate", "H5Loader", "default_collate", "worker"])
def test_several_sizes_make_no_batch(ragged: Path, way: str) -> None:
    with pytest.raises(SizesDifferError, match=r"image [12] of .* is (31x9|12x25)"):
        batches_of(h5pack.H5Dataset(ragged), way)


@pytest.mark.parametrize("settings", [{}, FORK], ids=["none", "fork"])
def test_a_collate_of_ones_own_gets_samples_of_their_own_size(ragged: Path, settings: dict[str, Any]) -> None:
    images, dataset = stored(ragged), h5pack.H5Dataset(ragged)
    loader = DataLoader(dataset, 8, collate_fn=lambda batch: [batch[0], *batch[1:]], **settings)
    found = [sample for samples in loader for sample in samples]
    assert [label for _, label in found] == list(range(ROWS))
    assert all(np.array_equal(image, images[label]) for image, label in found)


def test_samples_that_make_no_batch_are_tried_once(ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the attempt each row is decoded once; the first one twice, as it was read alone."""
    dataset = h5pack.H5Dataset(ragged, labels=None)
    tried, read_batch = [], dataset.read_batch
    monkeypatch.setattr(dataset, "read_batch", lambda rows, key: tried.append(rows) or read_batch(rows))
    samples = dataset.__getitems__([0, 3, 1, 2])
    assert samples[0].image.shape == (20, 14, 3)
    assert [tuple(sample.image.shape[:2]) for sample in samples] == [RAGGED[row] for row in (0, 3, 1, 2)]
    assert (len(tried), dataset.stats().rows) == (1, 1 + 4)


class RandomCrop:
    """A random part of an image, resized; what torchvision's RandomResizedCrop does."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        wide, high = (int(torch.randint(0, size // 2, ())) for size in image.size)
        part = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None, :, high:, wide:].float()
        return torch.nn.functional.interpolate(part, (8, 8))[0].to(torch.uint8)


@pytest.mark.parametrize("settings", [{}, FORK], ids=["none", "fork"])
def test_a_transform_makes_batches_of_several_sizes(ragged: Path, settings: dict[str, Any]) -> None:
    dataset = h5pack.H5Dataset(ragged, transform=RandomCrop())
    batches = list(DataLoader(dataset, 8, shuffle=True, collate_fn=dataset.collate, **settings))
    assert all(images.shape[1:] == (3, 8, 8) for images, _ in batches)
    assert Counter(torch.cat([labels for _, labels in batches]).tolist()) == Counter(range(ROWS))


@pytest.mark.parametrize("way", ["collate", "H5Loader", "default_collate", "worker", "single"])
def test_a_truncated_row_is_named(tmp_path: Path, way: str) -> None:
    rows = jpegs(8)
    dataset = h5pack.H5Dataset(write_encoded(tmp_path / "f.h5", [rows[0], rows[1][:300], *rows[2:6], b"", rows[7]]))
    with pytest.raises(DamagedRowsError, match="row 1") as caught:
        dataset[1] if way == "single" else batches_of(dataset, way)
    assert caught.value.rows == (() if way == "worker" else (1,))
    with pytest.raises(DamagedRowsError, match="row 6"):
        dataset[6]
    good = [0, 2, 3, 4, 5, 7]
    whole = write_encoded(tmp_path / "good.h5", rows)
    assert Counter(require_rows(list(h5pack.H5Loader(dataset, 4, indices=good)), whole)) == Counter(good)


def test_a_pack_without_any_byte_of_its_images_is_damaged(tmp_path: Path) -> None:
    path = write_kept(tmp_path / "f.h5", [encode(pixels(seed, (8, 8))) for seed in range(3)])
    with h5py.File(path, "r+") as file:
        file["encoded/offsets"][...] = 0
        del file["encoded/data"]
        file.create_dataset("encoded/data", (0,), "u1", maxshape=(None,), chunks=(1000,))
    for way in (lambda dataset: dataset[0], lambda dataset: [*h5pack.H5Loader(dataset, 3)]):
        with pytest.raises(DamagedRowsError):
            way(h5pack.H5Dataset(path))


def test_concatenated_packs_whose_first_images_differ_in_size(tmp_path: Path) -> None:
    paths = [write_kept(tmp_path / f"{side}.h5", [encode(pixels(1, (side, 12)))] * 3) for side in (20, 31)]
    both = h5pack.ConcatPack([h5pack.H5Dataset(path, transform=RandomCrop()) for path in paths])
    assert [len(batch.images) for batch in DataLoader(both, 4, collate_fn=both.collate)] == [4, 2]
    with pytest.raises(OptionsError, match="give both the same decode") as info:
        h5pack.ConcatPack([h5pack.H5Dataset(path) for path in paths])
    assert info.value.parameters == ("decode",)
    crop = h5pack.CenterCrop(8)
    assert len(h5pack.ConcatPack([h5pack.H5Dataset(path, decode=crop) for path in paths])[0].image) == 8
