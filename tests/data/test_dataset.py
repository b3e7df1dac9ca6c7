"""`H5Dataset`: every row once an epoch with its label, in any process, from any HDF5 file."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

import h5pack
from h5pack.data.collate import SampleBatch
from h5pack.errors import (
    DamagedRowsError,
    OptionsError,
    PackChangedError,
    PackFormatError,
)
from tests.data import packs
from tests.data.packs import all_same, same
from tests.makers import class_folders, quick, save, split_folders

COUNTS = {"train": {"x": 31, "y": 26}, "test": {"x": 5, "y": 9}}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", COUNTS)
    h5pack.convert(source, folder / "o.h5", **quick(chunk_rows=7))
    return folder / "o.h5"


def key(image: Any, label: Any) -> tuple[int, int]:
    return hash(np.asarray(image).tobytes()), int(label)


def expected_keys(pack: Path, split: str) -> Counter[tuple[int, int]]:
    with h5py.File(pack) as file:
        names = [name.decode() for name in file["splits/name"]]
        start, stop = file["splits/rows"][names.index(split)]
        return Counter(key(file["images"][row], file["labels"][row]) for row in range(start, stop))


@pytest.mark.parametrize(
    ("split", "settings"),
    [
        ("train", {"num_workers": 0}),
        ("train", {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}),
        ("test", {"num_workers": 2, "multiprocessing_context": "fork"}),
        ("train", {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}),
        ("test", {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True}),
    ],
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
        with pytest.raises(IndexError, match=str(index)):
            dataset[index]
    assert (dataset.classes, dataset.columns) == (("x", "y"), None)
    assert dataset.mean is not None
    assert "71 rows of 20 x 14 x 3" in repr(dataset)


def test_transforms_get_what_torchvision_expects(pack: Path, tmp_path: Path) -> None:
    seen = []

    def transform(image: Any) -> Any:
        seen.append((type(image), tuple(image.shape), image.dtype))
        return image

    _, label = h5pack.H5Dataset(pack, transform=transform, target_transform=lambda label: label + 10)[0]
    assert seen[-1] == (np.ndarray, (20, 14, 3), np.uint8)
    assert label in (10, 11)
    source = class_folders(tmp_path / "in", {"a": 4})
    h5pack.convert(source, tmp_path / "o.h5", **quick(layout="nchw"))
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


def test_tables_of_labels_and_no_labels(tmp_path: Path) -> None:
    for number in range(5):
        save(tmp_path / "in" / f"{number}.jpg", number)
    h5pack.convert(tmp_path / "in", tmp_path / "flat.h5", **quick())
    assert h5pack.H5Dataset(tmp_path / "flat.h5")[2].shape == (20, 14, 3)
    (tmp_path / "m.csv").write_text("path,a,b\n" + "".join(f"in/{n}.jpg,{n % 2},1\n" for n in range(5)))
    h5pack.convert(tmp_path / "m.csv", tmp_path / "t.h5", **quick(label_columns=("a", "b"), order="sorted"))
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


def test_a_truncated_pack_is_refused(tmp_path: Path, pack: Path) -> None:
    (tmp_path / "cut.h5").write_bytes(pack.read_bytes()[:-5000])
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(tmp_path / "cut.h5")
    assert caught.value.path == str(tmp_path / "cut.h5")


# Batches: read on first access, collated without an extra copy.

FIELDS = ("boxes", "masks", "weight")


def rich(path: Path, labels: npt.NDArray[Any] | None) -> Path:
    """Images with labels of some kind and three fields: float32 boxes, masks, and a float64 number each."""
    given = {} if labels is None else {"labels": labels}
    boxes, masks = packs.values(packs.ROWS, (4,), "f4"), packs.values(packs.ROWS, (16, 12), "?")
    weight = np.linspace(0, 1, packs.ROWS)
    return packs.write(path, images=packs.values(), boxes=boxes, masks=masks, weight=weight, **given)


LABELS: dict[str, npt.NDArray[Any] | None] = {
    "int64": np.arange(packs.ROWS),
    "uint8": np.arange(packs.ROWS, dtype="u1"),
    ">i2": np.arange(packs.ROWS, dtype=">i2"),
    "bool": np.arange(packs.ROWS) % 3 == 0,
    "float32": np.linspace(0, 1, packs.ROWS, dtype="f4"),
    "table": packs.values(packs.ROWS, (40,), "i1"),
    "none": None,
}


def in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory may be another process's, too."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode = line.split()[:2]
        low, high = (int(edge, 16) for edge in span.split("-"))
        if low <= tensor.data_ptr() < high:
            return mode[3] == "s"
    raise AssertionError("no memory at all")


class Witness:
    """Collates, and says for each tensor whether it lies in shared memory."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[list[Any], list[bool]]:
        batch = self.collate(samples)
        return batch, [in_shared_memory(part) for part in batch]


def test_nothing_is_read_before_somebody_looks(pack: Path) -> None:
    dataset = h5pack.H5Dataset(pack)
    batch = dataset.__getitems__([5, 3, 4])
    assert isinstance(batch, SampleBatch)
    assert len(batch) == 3
    assert dataset.stats().rows == 0
    first = batch[0]
    assert batch[0] is first
    assert key(*first) == key(*dataset[5])
    assert dataset.stats().rows == 4
    for sample, index in zip(batch, (5, 3, 4), strict=True):
        assert key(*sample) == key(*dataset[index])
    assert batch[0] is first
    assert type(next(iter(batch))) is tuple
    assert [label for _, label in batch[1:]] == [dataset[3][1], dataset[4][1]]
    assert dataset.stats().rows == 9, "the batch was read once"
    other = dataset.__getitems__([1, 2])
    dataset.collate(other)
    assert dataset.stats().rows == 11, "collate reads the rows, and not the samples besides"
    default_collate(dataset.__getitems__([1, 2]))
    assert dataset.stats().rows == 13, "and so does torch's"


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(("with_rows", "fields"), [(False, ()), (True, ()), (True, FIELDS)])
def test_collate_is_default_collate(tmp_path: Path, labels: str, with_rows: bool, fields: tuple[str, ...]) -> None:
    path = rich(tmp_path / "f.h5", LABELS[labels])
    dataset = h5pack.H5Dataset(path, fields=fields, with_rows=with_rows)
    for indices in ([7], [102, 0, 3, 3, 50, 11], list(range(103))):
        fast = dataset.collate(dataset.__getitems__(indices))
        plain = default_collate([dataset[index] for index in indices])
        assert isinstance(fast, torch.Tensor) == isinstance(plain, torch.Tensor)
        assert type(fast) is type(plain)
        assert same(fast, plain)
        torchs = default_collate(dataset.__getitems__(indices))
        assert type(torchs) is type(plain)
        assert same(torchs, plain)
        assert same(dataset.collate([dataset[index] for index in indices]), plain)
    if with_rows:
        assert fast[-1].tolist() == list(range(103))
    with h5py.File(path) as file:
        for name, part in zip(dataset.names, [fast] if isinstance(fast, torch.Tensor) else fast, strict=False):
            assert np.array_equal(part.numpy(), file[name][()])


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("u1", (3,)), ("u2", (200,)), (">u4", (200,)), (">i8", ()), ("f2", (5, 0)), (">f8", (3,)), ("?", (200,))],
)
def test_collate_keeps_the_dtype_of_images(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    data = packs.values(11, shape, dtype)
    packs.write(tmp_path / "f.h5", None, images=data)
    dataset = h5pack.H5Dataset(tmp_path / "f.h5")
    batch = dataset.collate(dataset.__getitems__([4, 10, 0]))
    assert same(batch, default_collate([dataset[4], dataset[10], dataset[0]]))
    assert np.array_equal(batch.numpy(), data[[4, 10, 0]])


@pytest.mark.parametrize(("context", "own"), [(None, True), ("fork", True), ("fork", False), ("forkserver", True)])
def test_collate_in_workers_goes_to_shared_memory(tmp_path: Path, context: str | None, own: bool) -> None:
    dataset = h5pack.H5Dataset(rich(tmp_path / "f.h5", LABELS["int64"]), fields=FIELDS, with_rows=True)
    part = Subset(dataset, list(range(90, 10, -3)))
    expected = [default_collate([dataset[index] for index in part.indices[at : at + 8]]) for at in range(0, 27, 8)]
    workers = {} if context is None else {"num_workers": 2, "multiprocessing_context": context}
    loader = DataLoader(part, batch_size=8, collate_fn=Witness(dataset.collate if own else default_collate), **workers)
    batches = list(loader)
    assert all_same([batch for batch, _ in batches], expected)
    for batch, shared in batches:
        assert shared[:5] == [context is not None] * 5, "the worker's rows go straight there"
        assert [in_shared_memory(part) for part in batch[:5]] == shared[:5], "and are not copied from there"


@pytest.mark.parametrize("labels", [None, "labels"])
def test_a_first_sample_is_a_sample(tmp_path: Path, labels: str | None) -> None:
    """Its type speaks to torch's collate only; whatever else is done with it gives what any sample gives."""
    dataset = h5pack.H5Dataset(rich(tmp_path / "f.h5", LABELS["int64"]), labels=labels)
    plain = [dataset[index] for index in (4, 5, 6)]
    batch = dataset.__getitems__([4, 5, 6])
    first = batch[0]
    image, expected = (first, plain[0]) if labels is None else (first[0], plain[0][0])
    assert isinstance(first, type(plain[0]))
    assert torch.equal(image, expected)
    assert type(image.float() / 255) is torch.Tensor
    assert same(default_collate([pickle.loads(pickle.dumps(first))]), default_collate(plain[:1]))
    assert same(default_collate([first, *batch[1:]]), default_collate(plain)), "in a list of one's own"
    assert same(default_collate([first]), default_collate(plain[:1]))
    assert same(default_collate(batch), default_collate(plain)), "and when samples were accessed before"
    for copied in (copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert type(copied) is type(plain[0])
    copy.deepcopy(image).zero_()
    assert image.any()
    halved = pytree.tree_map(lambda part: part / 2, first)
    assert torch.equal(halved if labels is None else halved[0], expected / 2), "torch's trees go into it"


def test_a_changed_sample_stays_changed(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(rich(tmp_path / "f.h5", LABELS["int64"]))
    batch = dataset.__getitems__([4, 5, 6])
    batch[0][0].zero_()
    assert not default_collate(batch)[0][0].any()
    batch = dataset.__getitems__([4, 5, 6])
    assert not batch[0][0].zero_().any()
    assert not batch[:1][0][0].any(), "the first sample is the same by any name"
    batch = dataset.__getitems__([4, 5, 6])
    batch[1][0].zero_()
    images = default_collate(batch)[0]
    assert images[0].any()
    assert not images[1].any()
    images.zero_()
    assert batch[0][0].any(), "the batch has memory of its own"


def test_a_users_way_to_collate_tensors_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = h5pack.H5Dataset(rich(tmp_path / "f.h5", LABELS["int64"]))

    def lengths(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> int:
        return len(batch)

    own = {**default_collate_fn_map, torch.Tensor: lengths}
    assert collate(dataset.__getitems__([4, 5, 6]), collate_fn_map=own)[0] == 3
    assert collate([dataset.__getitems__([4, 5, 6])[0]], collate_fn_map={torch.Tensor: lengths, int: lengths})[0] == 1
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lengths)
    assert default_collate(dataset.__getitems__([4, 5, 6]))[0] == 3


@pytest.mark.parametrize("labels", [None, "labels"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_says_nothing_about_collating(tmp_path: Path, labels: str | None, workers: int) -> None:
    path = rich(tmp_path / "f.h5", LABELS["int64"])
    for transform in (None, torch.from_numpy, lambda image: image.astype("f4")):
        dataset = h5pack.H5Dataset(path, labels=labels, transform=transform)
        context = {"multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(Subset(dataset, range(3, 45)), batch_size=8, num_workers=workers, **context)
        expected = [default_collate([dataset[i] for i in range(at, min(at + 8, 45))]) for at in range(3, 45, 8)]
        assert all_same(list(loader), expected)


def test_single_samples_of_a_worker_take_no_shared_memory(tmp_path: Path) -> None:
    """A dataset around ours may ask for a batch's samples one by one, and hold them all."""
    dataset = h5pack.H5Dataset(rich(tmp_path / "f.h5", LABELS["int64"]))
    loader = DataLoader(Wrapped(dataset), batch_size=50, num_workers=1)
    for batch in loader:
        assert batch[1].tolist() == [0] * len(batch[1])


class Wrapped(Dataset[Any]):
    """Samples, and how many segments their worker has."""

    def __init__(self, dataset: h5pack.H5Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index][0], len(self.dataset._shared._segments)


def test_collate_leaves_transforms_to_the_samples(tmp_path: Path) -> None:
    path = rich(tmp_path / "f.h5", LABELS["int64"])
    plain = h5pack.H5Dataset(path)
    both = h5pack.H5Dataset(path, transform=lambda image: torch.from_numpy(image) + 1, target_transform=lambda y: -y)
    images, labels = plain.collate(plain.__getitems__([3, 9]))
    assert same(both.collate(both.__getitems__([3, 9])), [images + 1, -labels])
    only = h5pack.H5Dataset(path, target_transform=float)
    assert same(only.collate(only.__getitems__([3, 9])), [images, torch.tensor([3.0, 9.0], dtype=torch.float64)])


def test_collate_of_another_dataset_gives_the_samples_own_rows(tmp_path: Path) -> None:
    one = h5pack.H5Dataset(packs.labelled(tmp_path / "a.h5"))
    packs.write(tmp_path / "b.h5", images=packs.values()[::-1], labels=np.arange(103) + 500)
    other = h5pack.H5Dataset(tmp_path / "b.h5")
    images, labels = one.collate(other.__getitems__([1, 2]))
    assert labels.tolist() == [501, 502]
    assert torch.equal(images[0], other[1][0])
    halved = h5pack.H5Dataset(tmp_path / "a.h5", transform=lambda image: image // 2)
    assert torch.equal(one.collate(halved.__getitems__([4]))[0][0], one[4][0] // 2)


def test_samples_end_with_fields_and_rows(tmp_path: Path) -> None:
    path = rich(tmp_path / "f.h5", LABELS["uint8"])
    dataset = h5pack.H5Dataset(path, fields=["boxes", "/masks"], with_rows=True, transform=lambda image: image.shape)
    assert dataset.names == ("images", "labels", "boxes", "masks")
    with h5py.File(path) as file:
        boxes, masks = file["boxes"][()], file["masks"][()]
    for sample, row in zip(dataset[-3:], (100, 101, 102), strict=True):
        assert sample[:2] == (packs.SHAPE, row)
        assert sample[2].dtype == torch.float32
        assert np.array_equal(sample[2], boxes[row])
        assert sample[3].dtype == torch.bool
        assert np.array_equal(sample[3], masks[row])
        assert sample[4] == row
        assert type(sample[4]) is int
    bare = h5pack.H5Dataset(path, labels=None, fields=["weight"])
    image, weight = bare[51]
    assert (image.shape, weight.shape, weight.dtype) == (packs.SHAPE, (), torch.float64)
    assert float(weight) == 0.5
    with pytest.raises(OptionsError, match="fields"):
        h5pack.H5Dataset(path, fields="boxes")
    with pytest.raises(PackFormatError, match="depth"):
        h5pack.H5Dataset(path, fields=["depth"])


def test_splits(pack: Path) -> None:
    dataset = h5pack.H5Dataset(pack, split="test", with_rows=True)
    assert (len(dataset), len(h5pack.H5Dataset(pack, split="train"))) == (14, 57)
    assert torch.equal(dataset[0][0], h5pack.H5Dataset(pack)[57][0])
    assert [sample[2] for sample in dataset[:]] == list(range(57, 71))
    assert dataset.collate(dataset.__getitems__([0, -1]))[2].tolist() == [57, 70]
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(pack, split="val")
    assert caught.value.parameters == ("split",)


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    path = packs.converted(tmp_path)
    assert len(list(h5pack.H5Dataset(path, check=True)[:])) == 45, "nothing is wrong yet"
    packs.flip(path, 12)
    packs.flip(path, 40)
    packs.flip(path, 7, "labels")
    dataset = h5pack.H5Dataset(path, check=True)
    assert dataset[11] is not None
    for row in (12, 7):
        with pytest.raises(DamagedRowsError) as caught:
            dataset[row]
        assert caught.value.rows == (row,)
    with pytest.raises(DamagedRowsError) as caught:
        dataset.collate(dataset.__getitems__([40, 3, 12, 40]))
    assert caught.value.rows == (12, 40)
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    batches = iter(DataLoader(dataset, batch_size=15, collate_fn=dataset.collate, **workers))
    with pytest.raises(DamagedRowsError, match="row 12"):
        next(batches)
    assert next(batches)[1].tolist() == [dataset[row][1] for row in range(15, 30)]
    with pytest.raises(DamagedRowsError, match="row 40"):
        next(batches)
    assert list(batches) == []
    assert len(list(h5pack.H5Dataset(path)[:])) == 45, "check was not requested"
    with pytest.raises(OptionsError) as caught_options:
        h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"), check=True)
    assert caught_options.value.parameters == ("check",)


def test_stats_count_rows_chunks_and_bytes(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"), labels=None)
    before = dataset.stats()
    assert (before.rows, before.reads, before.amplification) == (0, 0, 1.0)
    dataset.collate(dataset.__getitems__(range(20, 40)))
    stats = dataset.stats()
    assert before.rows == 0, "it is what was read until then"
    assert (stats.rows, stats.chunk_misses, stats.chunk_hits) == (20, 2, 18)
    assert (stats.bytes_wanted, stats.bytes_read) == (20 * 576, 20 * 576)
    dataset.collate(dataset.__getitems__([95, 1, 3, 91]))
    stats = dataset.stats()
    assert (stats.rows, stats.chunk_misses, stats.chunk_hits) == (24, 4, 20)
    assert stats.amplification == 1.0
    assert pickle.loads(pickle.dumps(dataset)).stats().rows == 0, "another process counts for itself"


# The file under it.


@pytest.mark.parametrize("how", ["renamed", "rewritten", "grown", "removed"])
def test_a_file_that_changes_under_a_dataset_is_noticed(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packs.labelled(tmp_path / "f.h5")
    dataset = h5pack.H5Dataset(path)
    assert dataset[3][1] == 3
    monkeypatch.setattr("h5pack.read.storage.CHECK_SECONDS", 0)
    assert dataset[4][1] == 4
    if how == "renamed":
        os.replace(packs.labelled(tmp_path / "g.h5", 104), path)
    elif how == "rewritten":
        time.sleep(0.01)  # A file system's clock has ticks.
        path.write_bytes(path.read_bytes())
    elif how == "grown":
        with path.open("ab") as file:
            file.write(b"more")
    else:
        path.unlink()
    with pytest.raises(PackChangedError, match="replaced"):
        dataset[5]


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_threads_share_a_dataset(tmp_path: Path, compression: str | None) -> None:
    data = packs.values()
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5", compression=compression), with_rows=True)
    start = threading.Barrier(8)

    def look(seed: int) -> int:
        random = np.random.default_rng(seed)
        start.wait()
        for turn in range(60):
            indices = random.integers(0, packs.ROWS, int(random.integers(1, 40)))
            batch = dataset.__getitems__(indices)
            if turn % 2:
                images, labels, rows = dataset.collate(batch)
            else:
                images, labels, rows = default_collate(list(batch))
            assert np.array_equal(images.numpy(), data[indices])
            assert labels.tolist() == rows.tolist() == indices.tolist()
            if turn % 16 == seed:
                pickle.dumps(dataset)
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(look, range(8))) == 8


# What torchvision's datasets have.


def test_a_pack_has_splits_classes_targets_and_filenames(tmp_path: Path) -> None:
    path = packs.converted(tmp_path)
    with h5pack.H5Dataset(path, split="test") as dataset:
        assert dataset.splits == {"train": range(33), "test": range(33, 45)}
        assert dataset.class_to_idx == {"x": 0, "y": 1}
        assert dataset.targets is not None
        assert dataset.targets.dtype == torch.int64
        assert dataset.targets.tolist() == [label for _, label in dataset]
        assert dataset.filenames is not None
        assert [name.split("/")[1] for name in dataset.filenames] == [
            dataset.classes[label]
            for label in dataset.targets.tolist()  # type: ignore[index]
        ]
        assert repr(dataset).startswith(f"H5Dataset({path.as_posix()!r}, split='test')")
    assert len(dataset[0]) == 2, "a closed dataset opens its file again"


def test_other_files_have_no_splits_classes_or_filenames(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(packs.write(tmp_path / "f.h5", 3, images=packs.values(9)))
    assert (dataset.splits, dataset.class_to_idx, dataset.targets, dataset.filenames) == ({}, None, None, None)
