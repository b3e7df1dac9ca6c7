"""`H5Dataset`: every row once an epoch with its label, in any process, from any HDF5 file."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import h5pack
from h5pack.errors import IncompletePackError, PackChangedError, PackFormatError
from tests.makers import class_folders, quick, save, split_folders

COUNTS = {"train": {"x": 31, "y": 26}, "test": {"x": 5, "y": 9}}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", COUNTS)
    h5pack.convert(source, folder / "o.h5", quick(chunk_rows=7))
    return folder / "o.h5"


def key(image: Any, label: Any) -> tuple[int, int]:
    return hash(np.asarray(image).tobytes()), int(label)


def expected_keys(pack: Path, split: str) -> Counter[tuple[int, int]]:
    with h5py.File(pack) as file:
        names = [name.decode() for name in file["splits/name"]]
        start, stop = file["splits/rows"][names.index(split)]
        return Counter(key(file["images"][row], file["labels"][row]) for row in range(start, stop))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 0},
        {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
        {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
        {"num_workers": 2, "multiprocessing_context": "forkserver"},
    ],
    ids=["none", "fork", "spawn", "forkserver"],
)
def test_a_dataloader_sees_each_row_once_an_epoch(pack: Path, split: str, settings: dict[str, Any]) -> None:
    dataset = h5pack.H5Dataset(pack, split=split)
    dataset[0]  # The file is open in this process when the workers are made.
    loader = DataLoader(dataset, batch_size=8, shuffle=True, **settings)
    orders = []
    for _ in range(3):
        seen = []
        for images, labels in loader:
            assert images.dtype == torch.uint8
            seen += [key(image, label) for image, label in zip(images, labels, strict=True)]
        assert Counter(seen) == expected_keys(pack, split)
        orders.append(tuple(seen))
    assert len(set(orders)) == 3, "epochs are shuffled"


def test_items_are_the_stored_rows(pack: Path) -> None:
    dataset = h5pack.H5Dataset(pack)
    with h5py.File(pack) as file:
        images, labels = file["images"][()], file["labels"][()]
    assert len(dataset) == 71
    for index in (0, 5, 70, -1, -71, np.int64(3), torch.tensor(4)):
        image, label = dataset[index]
        assert torch.equal(image, torch.from_numpy(images[int(index)]))
        assert label == labels[int(index)]
        assert type(label) is int
    for indices in ([], [3], [9, 8, 7, 9, 0, 70, 69], list(range(70, -1, -1)), [-1, 0, -71]):
        batch = dataset.__getitems__(indices)
        assert len(batch) == len(indices)
        for index, (image, label) in zip(indices, batch, strict=True):
            assert np.array_equal(image, images[index])
            assert label == labels[index]
    assert [label for _, label in dataset[2:9:3]] == labels[2:9:3].tolist()
    for index in (71, -72):
        with pytest.raises(IndexError, match=f"index {index} of 71 rows"):
            dataset[index]
    assert (dataset.classes, dataset.columns) == (("x", "y"), None)
    assert dataset.mean is not None
    assert "71 rows of 20 x 14 x 3" in repr(dataset)


def test_splits(pack: Path) -> None:
    train, test = h5pack.H5Dataset(pack, split="train"), h5pack.H5Dataset(pack, split="test")
    assert (len(train), len(test)) == (57, 14)
    assert torch.equal(test[0][0], h5pack.H5Dataset(pack)[57][0])
    with pytest.raises(PackFormatError, match="no split 'val'; its splits are 'train', 'test'"):
        h5pack.H5Dataset(pack, split="val")


def test_transforms_get_what_torchvision_expects(pack: Path, tmp_path: Path) -> None:
    seen = []

    def transform(image: Any) -> Any:
        seen.append((type(image), tuple(image.shape), image.dtype))
        return image

    _, label = h5pack.H5Dataset(pack, transform=transform, target_transform=lambda label: label + 10)[0]
    assert seen[-1] == (np.ndarray, (20, 14, 3), np.uint8)
    assert label in (10, 11)
    source = class_folders(tmp_path / "in", {"a": 4})
    h5pack.convert(source, tmp_path / "o.h5", quick(layout="nchw"))
    h5pack.H5Dataset(tmp_path / "o.h5", transform=transform)[0]
    assert seen[-1] == (torch.Tensor, (3, 20, 14), torch.uint8)
    assert h5pack.H5Dataset(tmp_path / "o.h5")[0][0].shape == (3, 20, 14)


def test_pickled_and_forked_while_open(pack: Path) -> None:
    dataset = h5pack.H5Dataset(pack, split="test")
    image, label = dataset[3]
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[3][0], image)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(dataset[3][0], image) and dataset[3][1] == label else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(dataset[3][0], image)


def test_a_relative_path_survives_a_change_of_folder(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pack.parent)
    dataset = h5pack.H5Dataset("o.h5")
    monkeypatch.chdir("/")
    assert len(dataset[0]) == 2


def test_a_replaced_file_is_noticed_when_it_is_opened_again(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "in", {"a": 4})
    h5pack.convert(source, tmp_path / "o.h5", quick())
    dataset = h5pack.H5Dataset(tmp_path / "o.h5")
    dataset[0]
    copy = pickle.dumps(dataset)
    h5pack.convert(source, tmp_path / "o.h5", quick(seed=5, overwrite=True))
    with pytest.raises(PackChangedError, match="replaced or rewritten"):
        pickle.loads(copy)[0]
    (tmp_path / "o.h5").unlink()
    with pytest.raises(PackChangedError):
        pickle.loads(copy)[0]


def test_tables_of_labels_and_no_labels(tmp_path: Path) -> None:
    for number in range(5):
        save(tmp_path / "in" / f"{number}.jpg", number)
    h5pack.convert(tmp_path / "in", tmp_path / "flat.h5", quick())
    assert h5pack.H5Dataset(tmp_path / "flat.h5")[2].shape == (20, 14, 3)
    (tmp_path / "m.csv").write_text("path,a,b\n" + "".join(f"in/{n}.jpg,{n % 2},1\n" for n in range(5)))
    h5pack.convert(tmp_path / "m.csv", tmp_path / "t.h5", quick(label_columns=("a", "b"), order="sorted"))
    dataset = h5pack.H5Dataset(tmp_path / "t.h5")
    assert dataset.columns == ("a", "b")
    assert dataset[1][1].tolist() == [1, 1]
    _, labels = next(iter(DataLoader(dataset, batch_size=5)))
    assert labels.dtype == torch.uint8
    assert labels.tolist() == [[n % 2, 1] for n in range(5)]


@pytest.mark.parametrize("dtype", ["u1", ">u2", "<f4", ">f8", "i8", "?"])
@pytest.mark.parametrize("chunks", [None, (3, 2, 4), True])
def test_any_hdf5_file_of_numbers(tmp_path: Path, dtype: str, chunks: Any) -> None:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 200, (11, 5, 4)).astype(dtype)
    settings = {"chunks": chunks, "compression": "gzip"} if chunks else {}
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("data/x", data=values, **settings)
        file["y"] = np.arange(11) * 2
    dataset = h5pack.H5Dataset(tmp_path / "f.h5", images="data/x", labels="y")
    order = [4, 10, 0, 1, 2, 7, 7]
    for index, (image, label) in zip(order, dataset.__getitems__(order), strict=True):
        assert np.array_equal(image.numpy(), values[index])
        assert label == 2 * index
    assert torch.equal(dataset[-1][0], torch.from_numpy(values[-1].astype(values.dtype.newbyteorder("="))))


def test_what_cannot_be_read_says_so(tmp_path: Path, pack: Path) -> None:
    with pytest.raises(PackFormatError, match="no such file"):
        h5pack.H5Dataset(tmp_path / "missing.h5")
    (tmp_path / "text.h5").write_text("hello")
    with pytest.raises(PackFormatError, match="not an HDF5 file"):
        h5pack.H5Dataset(tmp_path / "text.h5")
    (tmp_path / "cut.h5").write_bytes(pack.read_bytes()[:-5000])
    with pytest.raises(PackFormatError, match="cut short"):
        h5pack.H5Dataset(tmp_path / "cut.h5")
    with pytest.raises(PackFormatError, match="a folder, not an HDF5 file"):
        h5pack.H5Dataset(tmp_path)
    with pytest.raises(PackFormatError, match=r"no dataset 'pixels'; it holds 'checksums/images', .*'images'"):
        h5pack.H5Dataset(pack, images="pixels")
    with pytest.raises(PackFormatError, match="not numbers"):
        h5pack.H5Dataset(pack, labels="filenames")
    with pytest.raises(PackFormatError, match="'splits/rows' has 2 rows and 'images' has 71"):
        h5pack.H5Dataset(pack, labels="splits/rows")
    with h5py.File(tmp_path / "scalar.h5", "w") as file:
        file["images"] = 3
    with pytest.raises(PackFormatError, match="no axis 0"):
        h5pack.H5Dataset(tmp_path / "scalar.h5")


def test_an_unfinished_pack_and_a_newer_format_are_refused(pack: Path, tmp_path: Path) -> None:
    copy = tmp_path / "o.h5"
    copy.write_bytes(pack.read_bytes())
    with h5py.File(copy, "r+") as file:
        file.attrs["h5pack_complete"] = 0
    with pytest.raises(IncompletePackError, match="--resume"):
        h5pack.H5Dataset(copy)
    with h5py.File(copy, "r+") as file:
        file.attrs["h5pack_complete"] = 1
        file.attrs["h5pack_format"] = 2
    with pytest.raises(PackFormatError, match="pack format 2, and this h5pack reads up to 1"):
        h5pack.H5Dataset(copy)


def test_rows_that_are_single_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["images"] = np.arange(6, dtype="f4")
    assert [float(value) for value in h5pack.H5Dataset(tmp_path / "f.h5")[1:4]] == [1.0, 2.0, 3.0]
