"""`H5Dataset`: every row once an epoch with its label, in any process, from any HDF5 file."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Generic, TypeVar

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

import h5pack
from h5pack.data.samples import SampleBatch
from h5pack.errors import DamagedRowsError, OptionsError, PackFormatError
from tests.data import packs
from tests.data.packs import all_same, same
from tests.makers import class_folders, hdf5_file, pair_folders, quick, save
from tests.read.files import run_threads

T = TypeVar("T")
FIELDS = ("boxes", "masks", "weight")
WRONG_TYPES = [("fields", 5), ("fields", [5]), ("images", None), ("images", b"images"), ("labels", 5), ("labels", True)]
FORK = {"num_workers": 1, "multiprocessing_context": "fork"}
LABELS: dict[str, npt.NDArray[Any] | None] = {
    "int64": np.arange(packs.ROWS),
    "uint8": np.arange(packs.ROWS, dtype="u1"),
    ">i2": np.arange(packs.ROWS, dtype=">i2"),
    "bool": np.arange(packs.ROWS) % 3 == 0,
    "float32": np.linspace(0, 1, packs.ROWS, dtype="f4"),
    "table": packs.values(packs.ROWS, (40,), "i1"),
    "none": None,
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packs.converted(tmp_path_factory.mktemp("pack"))


def rich(path: Path, labels: npt.NDArray[Any] | None) -> Path:
    """Images with labels of some kind and three fields: float32 boxes, masks, and a float64 number each."""
    given = {} if labels is None else {"labels": labels}
    boxes, masks = packs.values(packs.ROWS, (4,), "f4"), packs.values(packs.ROWS, (16, 12), "?")
    weight = np.linspace(0, 1, packs.ROWS)
    return packs.write(path, images=packs.values(), boxes=boxes, masks=masks, weight=weight, **given)


@pytest.fixture(scope="module")
def rich_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with int64 labels and fields, which no test may change."""
    return rich(tmp_path_factory.mktemp("rich") / "f.h5", LABELS["int64"])


def key(image: Any, label: Any) -> tuple[int, int]:
    return hash(np.asarray(image).tobytes()), int(label)


@pytest.mark.parametrize(
    ("split", "settings"),
    [
        (slice(0, 33), {"num_workers": 0}),
        (slice(0, 33), {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}),
        (slice(33, 45), {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}),
    ],
)
def test_a_dataloader_sees_each_row_once_an_epoch(pack: Path, split: slice, settings: dict[str, Any]) -> None:
    dataset = h5pack.H5Dataset(pack, split="test" if split.start else "train")
    dataset[0]  # The file is open in this process when the workers are made.
    with h5py.File(pack) as file:
        expected = Counter(map(key, file["images"][split], file["labels"][split]))
    loader = DataLoader(dataset, batch_size=8, shuffle=True, **settings)
    orders = []
    for _ in range(3):
        samples = [zip(images, labels, strict=True) for images, labels in loader]
        orders.append(tuple(key(*sample) for batch in samples for sample in batch))
    assert all(Counter(order) == expected for order in orders)
    assert len(set(orders)) == 3, "epochs are shuffled"


def test_items_are_the_stored_rows(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pack.parent)
    dataset = h5pack.H5Dataset("o.h5")
    monkeypatch.chdir("/")
    with h5py.File(pack) as file:
        images, labels = file["images"][()], file["labels"][()]
    assert len(dataset) == 45
    for index in (0, 5, 44, -1, -45, np.int64(3), torch.tensor(4)):
        image, label = dataset[index]
        assert torch.equal(image, torch.from_numpy(images[int(index)]))
        assert (type(label), label) == (int, labels[int(index)])
    for indices in ([], [3], [9, 8, 7, 9, 0, 44, 43], list(range(44, -1, -1)), [-1, 0, -45]):
        for index, (image, label) in zip(indices, dataset.__getitems__(indices), strict=True):
            assert np.array_equal(image, images[index])
            assert label == labels[index]
    assert [label for _, label in dataset[2:9:3]] == labels[2:9:3].tolist()
    for index in (45, -46, 2**64):
        with pytest.raises(IndexError, match=str(index)):
            dataset[index]
        with pytest.raises(IndexError, match=str(index)):
            dataset.__getitems__([0, index])
    # What a DataLoader without batches asks for if a sampler of batches is its `sampler`.
    for unchecked in (dataset, h5pack.ConcatPack([dataset])):
        with pytest.raises(TypeError, match="batch_sampler"):
            unchecked[[3, 4]]  # type: ignore[index]
    assert (dataset.classes, dataset.columns, dataset.mean is None) == (("x", "y"), None, False)
    assert "45 rows of 20 x 14 x 3" in repr(dataset)


def test_transforms_get_what_torchvision_expects(pack: Path, tmp_path: Path) -> None:
    """All of them take Pillow images; those of v2 leave an ndarray as it is."""
    image, label = h5pack.H5Dataset(pack, transform=lambda image: image, target_transform=lambda label: label + 10)[0]
    assert (type(image), image.mode) == (Image.Image, "RGB")
    assert np.array_equal(image, h5pack.H5Dataset(pack)[0].image)
    assert label in (10, 11)
    for mode, layout in (("rgb", "nchw"), ("gray", "nchw"), ("gray", "nhwc")):
        settings = quick(layout=layout, mode=mode, overwrite=True)
        h5pack.convert(class_folders(tmp_path / "in", {"a": 4}), tmp_path / "o.h5", **settings)
        image = h5pack.H5Dataset(tmp_path / "o.h5", transform=lambda image: image)[0].image
        stored = h5pack.H5Dataset(tmp_path / "o.h5")[0].image
        assert image.mode == {"rgb": "RGB", "gray": "L"}[mode]
        pixels = stored.permute(1, 2, 0) if layout == "nchw" else stored
        assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)
    for shape, dtype in (((8, 9, 5), "u1"), ((8, 9, 3), "f4"), ((3, 8, 9), "u1")):
        path = packs.write(tmp_path / "f.h5", 3, images=packs.values(4, shape, dtype))
        image = h5pack.H5Dataset(path, transform=lambda image: image)[0].image
        assert torch.equal(image, h5pack.H5Dataset(path)[0].image)
    gray = packs.write(tmp_path / "f.h5", 3, images=packs.values(4, (8, 9)))
    assert h5pack.H5Dataset(gray, transform=lambda image: image.size)[0].image == (9, 8)


def test_tables_of_labels_and_no_labels(tmp_path: Path) -> None:
    for number in range(5):
        save(tmp_path / "in" / f"{number}.jpg", number)
    h5pack.convert(tmp_path / "in", tmp_path / "flat.h5", **quick())
    (image,) = h5pack.H5Dataset(tmp_path / "flat.h5")[2]
    assert image.shape == (20, 14, 3)
    (tmp_path / "m.csv").write_text("path,a,b\n" + "".join(f"in/{n}.jpg,{n % 2},1\n" for n in range(5)))
    h5pack.convert(tmp_path / "m.csv", tmp_path / "t.h5", **quick(label_columns=("a", "b"), order="sorted"))
    dataset = h5pack.H5Dataset(tmp_path / "t.h5")
    assert dataset.columns == ("a", "b")
    _, labels = next(iter(DataLoader(dataset, batch_size=5)))
    assert torch.equal(labels, torch.tensor([[n % 2, 1] for n in range(5)], dtype=torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *(("u1", (5, 4)), (">u2", (5, 4)), ("<f4", (5, 4)), (">f8", (3,)), ("i8", (5, 4)), (">i8", ()), ("?", (5, 4))),
        *(("u1", (3,)), ("u2", (200,)), (">u4", (200,)), ("f2", (5, 0)), ("?", (200,))),
    ],
)
@pytest.mark.parametrize("chunks", [None, "cut", True])
def test_any_hdf5_file_of_numbers(tmp_path: Path, dtype: str, shape: tuple[int, ...], chunks: Any) -> None:
    values = packs.values(11, shape, dtype)
    # Chunks of some rows' upper parts; a row of nothing cannot be cut.
    cut = (3, *((size + 1) // 2 for size in shape)) if chunks == "cut" else chunks
    settings = {"chunks": cut, "compression": "gzip"} if chunks and values.size else {}
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("data/x", data=values, **settings)
        file["y"] = np.arange(11) * 2
    dataset = h5pack.H5Dataset(tmp_path / "f.h5", images="data/x", labels="y")
    order = [4, 10, 0, 1, 2, 7, 7, -1]
    samples = [dataset[index] for index in order]
    for index, (image, label) in zip(order, dataset.__getitems__(order), strict=True):
        assert np.array_equal(image.numpy(), values[index])
        assert label == 2 * (index % 11)
    assert samples[-1][0].numpy().dtype == values.dtype.newbyteorder("=")
    batch = dataset.collate(dataset.__getitems__(order))
    assert same(batch, default_collate(samples))
    assert np.array_equal(batch[0].numpy(), values[order])


@pytest.mark.parametrize("name", ["images", "labels", "field"])
def test_numbers_that_torch_does_not_have_are_refused_at_once(tmp_path: Path, name: str) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        for one in ("images", "labels", "field"):
            file[one] = np.zeros((6, 9, 9), "g" if one == name else "f4")
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(tmp_path / "f.h5", fields=["field"])
    assert caught.value.dataset == name


def test_samples_end_with_fields_and_rows(rich_file: Path) -> None:
    fields = ["boxes", "/masks"]
    dataset = h5pack.H5Dataset(rich_file, fields=fields, with_rows=True, transform=lambda image: image.size)
    assert dataset.names == ("images", "labels", "boxes", "masks")
    with h5py.File(rich_file) as file:
        boxes, masks = torch.from_numpy(file["boxes"][()]), torch.from_numpy(file["masks"][()])
    for (*sample, box, mask, row), expected in zip(dataset[-3:], (100, 101, 102), strict=True):
        assert (sample, type(row), row) == ([packs.SHAPE[1::-1], expected], int, expected)
        assert same([box, mask], [boxes[row], masks[row]])
    image, weight = h5pack.H5Dataset(rich_file, labels=None, fields="weight")[51]
    assert (image.shape, weight.shape, weight.dtype, float(weight)) == (packs.SHAPE, (), torch.float64, 0.5)


def test_splits_classes_targets_and_filenames(pack: Path, tmp_path: Path) -> None:
    with h5pack.H5Dataset(pack, split="test", with_rows=True) as dataset:
        assert dataset.splits == {"train": range(33), "test": range(33, 45)}
        assert dataset.class_to_idx == {"x": 0, "y": 1}
        assert torch.equal(dataset[0][0], h5pack.H5Dataset(pack)[33][0])
        assert [row for _, _, row in dataset[:]] == list(range(33, 45))
        assert dataset.collate(dataset.__getitems__([0, -1]))[2].tolist() == [33, 44]
        labels = [label for _, label, _ in dataset]
        assert torch.equal(dataset.targets, torch.tensor(labels))
        assert [name.split("/")[1] for name in dataset.filenames] == ["xy"[label] for label in labels]
        assert repr(dataset).startswith(f"H5Dataset({pack.as_posix()!r}, split='test')")
    assert len(dataset[0]) == 3, "a closed dataset opens its file again"
    other = h5pack.H5Dataset(packs.write(tmp_path / "f.h5", 3, images=packs.values(9)))
    assert (other.splits, other.class_to_idx, other.targets, other.filenames) == ({}, None, None, None)


@pytest.mark.parametrize("names", [["a"], ["a"] * 46, "a"], ids=["fewer", "more", "one text"])
def test_file_names_must_be_as_many_as_rows(pack: Path, tmp_path: Path, names: Any) -> None:
    path = shutil.copy(pack, tmp_path / "o.h5")
    with h5py.File(path, "r+") as file:
        del file["filenames"]
        file["filenames"] = names
    with h5pack.H5Dataset(path, split="train") as dataset, pytest.raises(h5pack.PackFormatError) as caught:
        _ = dataset.filenames
    assert caught.value.dataset == "filenames"


@pytest.mark.parametrize("splits", [("b", "a"), ("a", "b", "c"), ["c", "a"], ("b",)], ids=repr)
def test_several_splits_follow_each_other(tmp_path: Path, splits: Any) -> None:
    ranges = {"a": (0, 33), "b": (33, 45), "c": (45, packs.ROWS)}
    images, labels = packs.values(), np.arange(packs.ROWS)
    path = packs.write(tmp_path / "f.h5", images=images, labels=labels, filenames=labels.astype("S"))
    with h5py.File(path, "a") as file:
        file.attrs.update({"h5pack_format": 1, "h5pack_complete": 1})
        file["splits/name"] = np.array([*ranges], "S")
        file["splits/rows"] = np.array([*ranges.values()])
    rows = [row for name in splits for row in range(*ranges[name])]
    with h5pack.H5Dataset(path, splits, with_rows=True) as dataset:
        assert (dataset.split, [*dataset.rows]) == (tuple(splits), rows)
        assert isinstance(dataset.rows, range) == (splits != ("b", "a") and splits != ["c", "a"])
        assert dataset.targets.tolist() == rows == [int(name) for name in dataset.filenames]
        assert [dataset[index].row for index in (0, -1, 5)] == [rows[0], rows[-1], rows[5]]
        assert [sample.row for sample in dataset[::4]] == rows[::4]
        both = h5pack.ConcatPack([dataset, dataset])
        assert both[len(rows) + 3].row == rows[3]
        for feed in (h5pack.H5Loader(dataset, 8, seed=3), DataLoader(dataset, 8, shuffle=True), DataLoader(both, 8)):
            found = Counter[int]()
            for batch in feed:
                assert np.array_equal(batch.images, images[batch.rows])
                assert batch.labels.tolist() == batch.rows.tolist()
                found.update(batch.rows.tolist())
            assert found == Counter(rows * (2 if feed.dataset is both else 1))
        mixture = h5pack.MixtureSampler(h5pack.ConcatPack([dataset, dataset]), 4, num_samples=40)
        assert sum(len(batch.rows) for batch in DataLoader(both, batch_sampler=mixture)) == 40
        assert [sample.row for sample in pickle.loads(pickle.dumps(dataset))[:7]] == rows[:7]


@pytest.mark.parametrize(
    ("settings", "error", "parameters"),
    [
        ({"split": "val"}, PackFormatError, ("split='val'",)),
        ({"fields": "depth"}, PackFormatError, ("fields=[NAME]",)),
        *(({name: value}, OptionsError, (f"{name}={value!r}",)) for name, value in WRONG_TYPES),
        *(({"fields": ["depth"]}, PackFormatError, ("fields=[NAME]",)), ({"check": True}, OptionsError, ("check",))),
        *(({"split": wrong}, OptionsError, (f"split={wrong!r}",)) for wrong in ([], ["a", "a"], ["a", 1], 1, b"a")),
        ({"split": ["val"]}, PackFormatError, ("split='val'",)),
        ({"transform": "flip"}, OptionsError, ("transform='flip'",)),
        ({"path": "cut.h5"}, PackFormatError, ()),
    ],
    ids=str,
)
def test_error_names_the_parameter_or_the_file_at_fault(
    rich_file: Path, settings: dict[str, Any], error: type[h5pack.H5PackError], parameters: tuple[str, ...]
) -> None:
    cut = rich_file.with_name("cut.h5")
    cut.write_bytes(rich_file.read_bytes()[:-5000])
    with pytest.raises(error) as caught:
        h5pack.H5Dataset(**{"path": rich_file, **settings, **({"path": cut} if "path" in settings else {})})
    assert caught.value.parameters == parameters
    assert caught.value.path == str(cut) or "path" not in settings


def in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory may be another process's, too."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode = line.split()[:2]
        low, high = (int(edge, 16) for edge in span.split("-"))
        if low <= tensor.data_ptr() < high:
            return mode[3] == "s"
    raise AssertionError("no memory at all")


def collate_and_look(collate: Callable[[Any], Any], samples: Any) -> tuple[list[Any], list[bool]]:
    """A batch, and for each of its tensors whether it lies in shared memory."""
    batch = collate(samples)
    return batch, [in_shared_memory(part) for part in batch]


def test_a_batch_is_read_once_on_first_access(pack: Path) -> None:
    dataset, other = h5pack.H5Dataset(pack), h5pack.H5Dataset(pack)
    batch = dataset.__getitems__([5, 3, 4])
    assert isinstance(batch, SampleBatch)
    assert (len(batch), dataset.stats().rows) == (3, 0)
    first = batch[0]
    assert dataset.stats().rows == 3
    assert [key(*sample) for sample in batch] == [key(*other[index]) for index in (5, 3, 4)]
    assert batch[0] is first
    assert type(next(iter(batch))) is type(first) is type(other[0])
    assert [label for _, label in batch[1:]] == [other[3][1], other[4][1]]
    assert dataset.stats().rows == 3
    for rows, collate_samples in ((5, dataset.collate), (7, default_collate)):
        collate_samples(dataset.__getitems__([1, 2]))
        assert dataset.stats().rows == rows, "it reads the rows, and not the samples besides"


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(("with_rows", "fields"), [(False, ()), (True, ()), (True, FIELDS)])
def test_collate_is_default_collate(tmp_path: Path, labels: str, with_rows: bool, fields: tuple[str, ...]) -> None:
    path = rich(tmp_path / "f.h5", LABELS[labels])
    dataset = h5pack.H5Dataset(path, fields=fields, with_rows=with_rows)
    for indices in ([7], [102, 0, 3, 3, 50, 11], list(range(103))):
        samples = [dataset[index] for index in indices]
        plain = default_collate(samples)
        fast = dataset.collate(dataset.__getitems__(indices))
        for batch in (fast, default_collate(dataset.__getitems__(indices)), dataset.collate(samples)):
            assert type(batch) is type(plain)
            assert same(batch, plain)
    if with_rows:
        assert fast[-1].tolist() == list(range(103))
    with h5py.File(path) as file:
        for name, part in zip(dataset.names, fast, strict=False):
            assert np.array_equal(part.numpy(), file[name][()])


@pytest.mark.parametrize(("context", "own"), [(None, True), ("fork", True), ("fork", False), ("forkserver", True)])
def test_collate_in_workers_goes_to_shared_memory(rich_file: Path, context: str | None, own: bool) -> None:
    dataset = h5pack.H5Dataset(rich_file, fields=FIELDS, with_rows=True)
    part = Subset(dataset, list(range(90, 10, -3)))
    expected = [default_collate([dataset[index] for index in part.indices[at : at + 8]]) for at in range(0, 27, 8)]
    workers = {} if context is None else {"num_workers": 2, "multiprocessing_context": context}
    witness = partial(collate_and_look, dataset.collate if own else default_collate)
    batches = list(DataLoader(part, batch_size=8, collate_fn=witness, **workers))
    assert all_same([batch for batch, _ in batches], expected)
    for batch, shared in batches:
        assert shared[:5] == [context is not None] * 5, "the worker's rows go straight there"
        assert [in_shared_memory(part) for part in batch[:5]] == shared[:5], "and are not copied from there"


@pytest.mark.parametrize("labels", [None, "labels"])
def test_a_first_sample_is_a_sample(rich_file: Path, labels: str | None) -> None:
    """Its type matters to torch's collate only; whatever else is done with it gives what any sample gives."""
    dataset = h5pack.H5Dataset(rich_file, labels=labels)
    plain = [dataset[index] for index in (4, 5, 6)]
    batch = dataset.__getitems__([4, 5, 6])
    first = batch[0]
    image, expected = first.image, plain[0].image
    assert isinstance(first, type(plain[0]))
    assert torch.equal(image, expected)
    assert type(image.float() / 255) is torch.Tensor
    copies = copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    assert {type(copied) for copied in copies} == {type(plain[0])}
    for samples in ([copies[2]], [first, *batch[1:]], [first], batch):
        assert same(default_collate(samples), default_collate(plain[: len(samples)]))
    copy.deepcopy(image).zero_()
    assert image.any()
    halved = pytree.tree_map(lambda part: part / 2, first)
    assert torch.equal(halved.image, expected / 2), "torch's trees go into it"


def test_a_changed_sample_stays_changed(rich_file: Path) -> None:
    dataset = h5pack.H5Dataset(rich_file)

    def changed(sample: int) -> SampleBatch:
        batch = dataset.__getitems__([4, 5, 6])
        batch[sample][0].zero_()
        return batch

    assert not default_collate(changed(0))[0][0].any()
    assert not changed(0)[:1][0][0].any(), "the first sample is the same by any name"
    batch = changed(1)
    images = default_collate(batch)[0]
    assert images[0].any()
    assert not images[1].any()
    images.zero_()
    assert batch[0][0].any(), "the batch has memory of its own"


def test_a_users_way_to_collate_tensors_is_kept(rich_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = h5pack.H5Dataset(rich_file)

    def lengths(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> int:
        return len(batch)

    own = {**default_collate_fn_map, torch.Tensor: lengths}
    assert collate(dataset.__getitems__([4, 5, 6]), collate_fn_map=own)[0] == 3
    assert collate([dataset.__getitems__([4, 5, 6])[0]], collate_fn_map={torch.Tensor: lengths, int: lengths})[0] == 1
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lengths)
    assert default_collate(dataset.__getitems__([4, 5, 6]))[0] == 3


@pytest.mark.parametrize(("labels", "workers"), [(None, FORK), ("labels", {}), ("labels", FORK)])
def test_a_dataloader_without_collate_fn(rich_file: Path, labels: str | None, workers: dict[str, Any]) -> None:
    for transform in (None, np.array, lambda image: np.asarray(image, "f4")):
        dataset = h5pack.H5Dataset(rich_file, labels=labels, transform=transform)
        expected = [default_collate([dataset[i] for i in range(at, min(at + 8, 45))]) for at in range(3, 45, 8)]
        assert all_same(list(DataLoader(Subset(dataset, range(3, 45)), batch_size=8, **workers)), expected)


def test_single_samples_of_a_worker_take_no_shared_memory(rich_file: Path) -> None:
    """A dataset around ours may ask for a batch's samples one by one, and hold them all."""
    dataset = h5pack.H5Dataset(rich_file)

    class Wrapped(Dataset[Any]):
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, index: int) -> Any:
            return dataset[index][0], len(dataset._shared._segments)

    for _, segments in DataLoader(Wrapped(), batch_size=50, **FORK):
        assert not segments.any()


def test_collate_leaves_transforms_to_the_samples(rich_file: Path) -> None:
    def collated(**transforms: Any) -> Any:
        dataset = h5pack.H5Dataset(rich_file, **transforms)
        return dataset.collate(dataset.__getitems__([3, 9]))

    images, labels = collated()
    both = collated(transform=lambda image: torch.tensor(np.array(image)) + 1, target_transform=lambda label: -label)
    assert same(both, [images + 1, -labels])
    assert same(collated(target_transform=float), [images, labels.double()])


def test_collate_of_another_dataset_gives_the_samples_own_rows(rich_file: Path, tmp_path: Path) -> None:
    one = h5pack.H5Dataset(rich_file)
    packs.write(tmp_path / "b.h5", images=packs.values()[::-1], labels=np.arange(103) + 500)
    other = h5pack.H5Dataset(tmp_path / "b.h5")
    assert same(one.collate(other.__getitems__([1, 2])), default_collate([other[1], other[2]]))
    halved = h5pack.H5Dataset(rich_file, transform=lambda image: np.asarray(image) // 2)
    assert torch.equal(one.collate(halved.__getitems__([4]))[0][0], one[4][0] // 2)


@pytest.mark.parametrize("repeats", [1, 40])
def test_a_worker_reads_a_batch_that_is_not_collated(rich_file: Path, repeats: int) -> None:
    dataset, indices = h5pack.H5Dataset(rich_file, fields=FIELDS), [5, 3, 5] * repeats
    (samples,) = DataLoader(dataset, batch_sampler=[indices], collate_fn=lambda batch: batch, **FORK)
    assert type(samples) is list
    for index, sample in zip(indices, samples, strict=True):
        assert sample._fields == dataset[index]._fields
        assert same(*([torch.as_tensor(part) for part in one] for one in (sample, dataset[index])))


def test_a_large_batch_that_is_not_collated_is_sent_without_descriptors(rich_file: Path) -> None:
    batch = h5pack.H5Dataset(rich_file, fields=FIELDS).__getitems__([5, 3] * 40)
    batch.samples()
    opened = os.listdir("/proc/self/fd")
    ForkingPickler.dumps(batch)
    assert len(os.listdir("/proc/self/fd")) == len(opened)


def test_an_error_of_a_batch_that_is_not_collated_reaches_the_loop(tmp_path: Path) -> None:
    path = packs.converted(tmp_path)
    packs.flip(path, 4)
    dataset = h5pack.H5Dataset(path, check=True)
    order: Any = [[3], [4]]
    loader = iter(DataLoader(dataset, batch_sampler=order, collate_fn=lambda batch: batch, timeout=30, **FORK))
    assert len(next(loader)) == 1
    with pytest.raises(DamagedRowsError):
        list(next(loader))


class Counting(h5pack.H5Dataset):
    batches = 0

    def __getitems__(self, indices: Any) -> Any:
        self.batches += 1
        return super().__getitems__(indices)


def test_a_subclass_that_extends_getitems_still_reads_into_the_batch(rich_file: Path) -> None:
    dataset = Counting(rich_file)
    assert type(dataset.__getitems__([5, 3])) is SampleBatch
    (batch,) = DataLoader(dataset, batch_sampler=[[5, 3]])
    assert torch.equal(batch.images[1], dataset[3].image)
    assert dataset.batches == 2


class Halved(h5pack.H5Dataset, Generic[T]):
    def __getitem__(self, index: Any) -> Any:
        image, label = super().__getitem__(index)
        return {"image": image // 2, "label": -label}


class Negative:
    def __getitem__(self, index: Any) -> Any:
        return -super().__getitem__(index)[1]  # type: ignore[misc]


class Negated(Negative, h5pack.ConcatPack):
    pass


class Transformed(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return -super().__getitem__(index)[1]

    def __getitems__(self, indices: list[int]) -> list[Any]:  # torch requires it.
        return [self[index] for index in indices]


class Fetched(Subset[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [-sample[1] for sample in super().__getitems__(indices)]


def test_a_dataloader_calls_the_method_of_a_subclass(rich_file: Path) -> None:
    one, halved = h5pack.H5Dataset(rich_file), Halved[int](rich_file)
    indices = [5, 3, 3]
    for dataset in (halved, Subset(halved, range(len(halved))), h5pack.ConcatPack([one, halved])):
        offset = len(dataset) - len(halved)
        (batch,) = DataLoader(dataset, batch_sampler=[[offset + index for index in indices]])
        assert torch.equal(batch["image"], torch.stack([one[index].image // 2 for index in indices]))
        assert batch["label"].tolist() == [-one[index].label for index in indices]
    (labels,) = DataLoader(Negated([one]), batch_sampler=[indices])
    assert labels.tolist() == [-one[index].label for index in indices]
    changing = (
        halved,
        h5pack.ConcatPack([one, halved]),
        Negated([one]),
        Transformed(one, indices),
        Fetched(one, indices),
    )
    for dataset in changing:
        for source in (dataset, Subset(dataset, range(3))):
            with pytest.raises(OptionsError):
                h5pack.H5Loader(source, 4)


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    path = packs.converted(tmp_path)
    assert len(list(h5pack.H5Dataset(path, check=True)[:])) == 45, "nothing is wrong yet"
    for row, name in ((12, "images"), (40, "images"), (7, "labels")):
        packs.flip(path, row, name)
    dataset = h5pack.H5Dataset(path, check=True)
    assert dataset[11] is not None
    for read, rows in (
        (lambda: dataset[12], (12,)),
        (lambda: dataset[7], (7,)),
        (lambda: dataset.collate(dataset.__getitems__([40, 3, 12, 40])), (12, 40)),
    ):
        with pytest.raises(DamagedRowsError) as caught:
            read()
        assert caught.value.rows == rows
    batches = iter(DataLoader(dataset, batch_size=15, collate_fn=dataset.collate, **FORK))
    with pytest.raises(DamagedRowsError, match="row 12"):
        next(batches)
    assert next(batches)[1].tolist() == [dataset[row][1] for row in range(15, 30)]
    with pytest.raises(DamagedRowsError, match="row 40"):
        next(batches)
    assert list(batches) == []
    assert len(list(h5pack.H5Dataset(path)[:])) == 45, "check was not requested"


def test_stats_count_rows_chunks_and_bytes(rich_file: Path) -> None:
    dataset = h5pack.H5Dataset(rich_file, labels=None)
    for indices, counts in ((range(0), (0, 0, 0)), (range(20, 40), (20, 2, 18)), ([95, 1, 3, 91], (24, 4, 20))):
        dataset.collate(dataset.__getitems__(indices))
        stats = dataset.stats()
        assert (stats.rows, stats.chunk_misses, stats.chunk_hits) == counts
        assert (stats.bytes_wanted, stats.bytes_read, stats.amplification) == (*[counts[0] * 576] * 2, 1.0)
    assert pickle.loads(pickle.dumps(dataset)).stats().rows == 0, "another process counts for itself"


def test_damaged_masks_are_named(tmp_path: Path) -> None:
    h5pack.convert(pair_folders(tmp_path / "in", 9), tmp_path / "o.h5", **quick(source_kind="pairs", chunk_rows=4))
    packs.flip(tmp_path / "o.h5", 7, "fields/masks")
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["masks"], check=True)
    assert dataset[6].masks.shape == (20, 14)
    with pytest.raises(DamagedRowsError) as caught:
        dataset[7]
    assert (caught.value.dataset, caught.value.rows) == ("fields/masks", (7,))


@pytest.mark.parametrize("storage", [{}, {"compression": "gzip"}, {"scaleoffset": 0}])
def test_labels_of_one_column_are_those_that_convert_makes(tmp_path: Path, storage: dict[str, Any]) -> None:
    path, labels = tmp_path / "f.h5", np.arange(30, dtype=np.int32)[:, None] % 3
    with h5py.File(path, "w") as file:
        file["images"] = np.zeros((30, 8, 8, 3), np.uint8)
        file.create_dataset("labels", data=labels, **storage, chunks=(7, 1))
    h5pack.convert(path, tmp_path / "p.h5", order="sorted", num_workers=1)
    plain, packed = h5pack.H5Dataset(path), h5pack.H5Dataset(tmp_path / "p.h5")
    assert isinstance(plain[4].label, int)
    assert [plain[row].label for row in range(30)] == labels[:, 0].tolist()
    for dataset in (plain, packed):
        assert (dataset.targets.dtype, dataset.targets.tolist()) == (torch.int64, labels[:, 0].tolist())
        batches = list(h5pack.H5Loader(dataset, 30, shuffle=False))
        assert (batches[0].labels.dtype, batches[0].labels.tolist()) == (torch.int64, labels[:, 0].tolist())
        balanced = h5pack.H5Loader(dataset, 30, indices=range(29), weights="balanced", num_samples=30)
        assert torch.bincount(torch.cat([batch.labels for batch in balanced])).tolist() == [10, 10, 10]
        counts = (h5pack.info(dataset.path, stats=True).stats or {})["labels"]
        assert counts == {"0": 10, "1": 10, "2": 10}


@pytest.mark.parametrize("shape", [(70_000,), (70_000, 1)])
def test_labels_that_exceed_int64_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    labels = np.full(shape, 2**63 - 1, np.uint64)
    path = hdf5_file(tmp_path / "f.h5", images=np.zeros((70_000, 1), np.uint8), labels=labels)
    assert torch.equal(h5pack.H5Dataset(path).targets.unique(), torch.tensor([2**63 - 1]))  # type: ignore[union-attr]
    with h5py.File(path, "r+") as file:
        file["labels"][-1] = 2**64 - 1
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(path)
    assert (caught.value.path, caught.value.dataset) == (str(path), "labels")
    assert h5pack.H5Dataset(path, labels=None, fields="labels")[-1][1].numpy() == np.uint64(2**64 - 1)


def test_a_field_that_a_pack_does_not_have_is_answered_with_those_that_it_has(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["images"], file["train/camera"] = np.zeros((30, 8, 8, 3), np.uint8), np.arange(30)
    h5pack.convert(tmp_path / "f.h5", tmp_path / "p.h5", fields=["train/camera"], num_workers=1)
    assert h5pack.H5Dataset(tmp_path / "p.h5", fields=["camera"])[3].camera >= 0
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(tmp_path / "p.h5", fields=["train/camera"])
    assert (caught.value.dataset, caught.value.parameters) == ("train/camera", ())
    assert "its fields are 'camera'" in str(caught.value)


@pytest.mark.parametrize("read", [h5pack.H5Dataset, h5pack.info, h5pack.verify, h5pack.diagnose])
@pytest.mark.parametrize("path", [5, None])
def test_what_is_no_path_is_refused_by_name(read: Callable[[Any], object], path: object) -> None:
    with pytest.raises(OptionsError) as caught:
        read(path)
    assert caught.value.parameters == (f"path={path}",)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_threads_share_a_dataset(tmp_path: Path, compression: str | None) -> None:
    data = packs.values()
    dataset = h5pack.H5Dataset(packs.labeled(tmp_path / "f.h5", compression=compression), with_rows=True)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for turn in range(60):
            indices = random.integers(0, packs.ROWS, int(random.integers(1, 40)))
            batch = dataset.__getitems__(indices)
            images, labels, rows = dataset.collate(batch) if turn % 2 else default_collate(list(batch))
            assert np.array_equal(images.numpy(), data[indices])
            assert labels.tolist() == rows.tolist() == indices.tolist()
            if turn % 16 == seed:
                pickle.dumps(dataset)

    run_threads(8, work)
