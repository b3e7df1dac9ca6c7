"""Several files read as one: a list, a pattern, a ConcatPack."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import h5pack
from h5pack.combine.parts import open_part
from h5pack.errors import DamagedRowsError, OptionsError, PackChangedError, PackFormatError
from h5pack.format.checksums import row_checksums
from h5pack.read import hdf5, several
from tests.combine.packs import FIELD_NAMES, KINDS, pack
from tests.makers import flat_folder, hdf5_file, quick
from tests.read.files import replaced


def three(root: Path, kind: str = "pixels", **settings: Any) -> list[Path]:
    counts = {"a": 14, "b": 10, "c": 5}
    return [pack(root, name, count, ["cat", "dog"], **KINDS[kind], **settings) for name, count in counts.items()]


def samples(dataset: Any) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name, sample in zip(dataset.filenames, dataset[:], strict=True):
        values = [value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value for value in sample]
        found[name] = tuple(values)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_files_has_the_samples_of_all(tmp_path: Path, kind: str) -> None:
    packs = three(tmp_path, kind)
    h5pack.join(packs, tmp_path / "o.h5")
    whole = h5pack.H5Dataset(tmp_path / "o.h5", fields=FIELD_NAMES, check=True)
    dataset = h5pack.H5Dataset(packs, fields=FIELD_NAMES, check=True)
    assert samples(dataset) == samples(whole)
    assert (len(dataset), dataset.classes) == (29, ("cat", "dog"))
    assert dataset.mean == pytest.approx(whole.mean, rel=1e-12)
    assert dataset.std == pytest.approx(whole.std, rel=1e-9)
    for split in ("train", "val"):
        part = h5pack.H5Dataset(str(tmp_path / "[abc].h5"), split, fields=FIELD_NAMES)
        assert samples(part) == samples(h5pack.H5Dataset(tmp_path / "o.h5", split, fields=FIELD_NAMES))
    copy = pickle.loads(pickle.dumps(dataset))
    assert samples(copy) == samples(whole)


def batches(loader: Any) -> list[tuple[bytes, list[int], list[int]]]:
    return [(batch.images.numpy().tobytes(), batch.labels.tolist(), batch.rows.tolist()) for batch in loader]


def test_a_loader_reads_each_row_once_and_resumes_in_another_file(tmp_path: Path) -> None:
    packs = three(tmp_path, size=32)
    dataset = h5pack.H5Dataset(packs, with_rows=True)
    loader = h5pack.H5Loader(dataset, 4, seed=3, window=2)
    whole = batches(loader)
    assert sorted(row for _, _, rows in whole for row in rows) == list(range(29))
    for image, labels, rows in whole:
        values = np.frombuffer(image, np.uint8).reshape(len(rows), 32, 32, 3)
        for value, label, row in zip(values, labels, rows, strict=True):
            assert np.array_equal(value, dataset[row].image)
            assert label == dataset[row].label
    for stop in (1, 4, 6):
        first = h5pack.H5Loader(dataset, 4, seed=3, window=2)
        iterator = iter(first)
        begun = [next(iterator) for _ in range(stop)]
        again = h5pack.H5Loader(h5pack.H5Dataset(packs, with_rows=True), 4, seed=3, window=2)
        again.load_state_dict(first.state_dict())
        assert len(begun) + len(rest := batches(again)) == len(whole)
        assert rest == whole[stop:]


@pytest.mark.parametrize("changed", ["a.h5", "c.h5"])
def test_file_names_of_a_replaced_file_are_not_those_of_the_samples(tmp_path: Path, changed: str) -> None:
    dataset = h5pack.H5Dataset(three(tmp_path))
    assert len(dataset.filenames or ()) == 29
    replaced(tmp_path / changed)
    with pytest.raises(PackChangedError) as caught:
        _ = dataset.filenames
    assert caught.value.path == str(tmp_path / changed)


def test_a_loader_and_samplers_take_a_concat_pack(tmp_path: Path) -> None:
    packs = three(tmp_path, size=32)
    parts = [h5pack.H5Dataset(path, "train", with_rows=True) for path in packs]
    concat = h5pack.ConcatPack(parts)
    names = [name for part in parts for name in part.filenames or ()]
    joined = concat.joined()
    assert joined.filenames == names
    assert len(concat) == len(joined)
    assert repr(joined).startswith(f"H5Dataset({joined.path!r} and 2 more, split=None): {len(joined)} rows")
    wanted = sorted(batches(h5pack.H5Loader(h5pack.H5Dataset(packs, "train", with_rows=True), 4, shuffle=False)))
    assert sorted(batches(h5pack.H5Loader(concat, 4, shuffle=False))) == wanted
    some = [5, 1, 12]
    rows = [row for batch in h5pack.H5Loader(Subset(concat, some), 2) for row in batch.rows.tolist()]
    assert sorted(rows) == sorted(int(joined.rows[index]) for index in some)
    sampler = h5pack.ChunkBatchSampler(concat, 4, seed=1)
    images = [image.numpy().tobytes() for batch in DataLoader(concat, batch_sampler=sampler) for image in batch.images]
    assert sorted(images) == sorted(one.image.numpy().tobytes() for part in parts for one in part)
    for part in parts:
        part.transform = np.asarray
    sampler.set_epoch(0)
    again = h5pack.ChunkBatchSampler(concat, 4, seed=1)
    assert list(again) == list(sampler)
    batches_of_arrays = DataLoader(concat, batch_sampler=again, collate_fn=lambda batch: [one.image for one in batch])
    assert sorted(image.tobytes() for batch in batches_of_arrays for image in batch) == sorted(images)
    with pytest.raises(OptionsError):
        h5pack.H5Loader(concat, 4)


def test_file_names_are_read_in_blocks_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = three(tmp_path, size=32)
    dataset = h5pack.H5Dataset(packs)
    alone = [name for path in packs for name in h5pack.H5Dataset(path).filenames or ()]
    rows = np.random.default_rng(0).permutation(len(dataset))
    for block in (1, 3, 1_000):
        monkeypatch.setattr(several, "BLOCK_NAMES", block)
        monkeypatch.setattr(hdf5, "BLOCK_NAMES", block)
        for dataset.rows in (rows, rows[:4]):
            assert dataset.filenames == [alone[row] for row in dataset.rows]
        assert [*open_part(packs[1]).catalog.names] == h5pack.H5Dataset(packs[1]).filenames


def test_all_rows_of_several_packs_are_a_range_with_the_states_of_a_subset(tmp_path: Path) -> None:
    concat = h5pack.ConcatPack([h5pack.H5Dataset(path) for path in three(tmp_path, size=32)])
    joined = concat.joined()
    assert joined.rows == range(len(concat))
    # Saved states of a ConcatPack have the digest of a subset of all rows.
    state = h5pack.ChunkBatchSampler(Subset(joined, range(len(concat))), 4, seed=3).state_dict()
    sampler = h5pack.ChunkBatchSampler(concat, 4, seed=3)
    assert sampler.state_dict() == state
    assert list(sampler) == list(h5pack.ChunkBatchSampler(joined, 4, seed=3))


DAMAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "checksums": ("pixels", "images", {"check": True}),
    "images": ("jpeg", "encoded", {}),
    "crops": ("jpeg", "encoded", {"decode": h5pack.CenterCrop(9)}),
    "masks": ("jpeg", "fields/mask", {"fields": ["mask"]}),
    "texts": ("pixels", "fields/caption", {"fields": ["caption"]}),
    "checksums of texts": ("pixels", "fields/caption", {"fields": ["caption"], "check": True}),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_row_is_named_as_in_its_own_file(tmp_path: Path, kind: str) -> None:
    storage, name, settings = DAMAGES[kind]
    packs = three(tmp_path, storage)
    with h5py.File(packs[1], "r+") as file:
        if name == "images":
            file[name][3] = 7
        else:
            start, stop = file[f"{name}/offsets"][3:5]
            file[f"{name}/data"][start:stop] = 255
    dataset = h5pack.H5Dataset(packs, **settings)
    concat = h5pack.ConcatPack([h5pack.H5Dataset(path, **settings) for path in packs])
    for read in (
        lambda: dataset[14 + 3],
        lambda: dataset.collate(dataset.__getitems__(range(29))),
        lambda: list(h5pack.H5Loader(dataset, 8)),
        lambda: list(h5pack.H5Loader(concat, 8)),
    ):
        with pytest.raises(DamagedRowsError) as caught:
            read()
        assert (caught.value.path, caught.value.dataset, caught.value.rows) == (str(packs[1]), name, (3,))


def test_damaged_rows_of_several_files_are_those_of_one(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.h5" for name in "abc"]
    for path, rows in zip(paths, ([], [4, 1], [0]), strict=True):
        images = np.arange(5 * 12, dtype=np.uint8).reshape(5, 2, 2, 3)
        stored = row_checksums(images)
        images[rows] = 255
        hdf5_file(path, images=images, **{"checksums/images": stored})
    with pytest.raises(DamagedRowsError) as caught:
        h5pack.H5Dataset(paths, check=True)[:]
    assert (caught.value.path, caught.value.rows) == (str(paths[1]), (1, 4))


def test_any_hdf5_files(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (20, 9, 9, 3), np.uint8)
    for number in range(4):
        hdf5_file(tmp_path / f"{number}.h5", x=images[5 * number : 5 * number + 5], y=np.arange(5) + 5 * number)
    dataset = h5pack.H5Dataset(tmp_path / "*.h5", images="x", labels="y")
    for path in (os.fsencode(tmp_path / "*.h5"), [os.fsencode(one) for one in sorted(tmp_path.glob("*.h5"))]):
        assert repr(h5pack.H5Dataset(path, images="x", labels="y")) == repr(dataset)  # type: ignore[arg-type]
    assert (dataset.splits, dataset.filenames, dataset.mean) == ({}, None, None)
    for batch in h5pack.H5Loader(dataset, 6):
        assert np.array_equal(batch.images, images[batch.labels])


@pytest.mark.parametrize(
    ("counts", "width"), [((0, 0), 3), ((0, 5), 3), ((5, 4), 0)], ids=["no rows", "some", "no numbers"]
)
def test_files_without_rows_or_numbers(tmp_path: Path, counts: tuple[int, ...], width: int) -> None:
    images = np.arange(sum(counts) * 12, dtype=np.uint8).reshape(-1, 2, 2, 3)
    paths = []
    for number, part in enumerate(np.split(images, np.cumsum(counts)[:-1])):
        paths.append(tmp_path / f"{number}.h5")
        hdf5_file(paths[-1], images=part, labels=np.arange(len(part)), table=np.zeros((len(part), width), np.float32))
    dataset = h5pack.H5Dataset(paths, fields=["table"])
    again = pickle.loads(pickle.dumps(dataset))
    joined = h5pack.ConcatPack([h5pack.H5Dataset(path, fields=["table"]) for path in paths])
    for found in (list(dataset), dataset[:], [again[row] for row in range(len(images))]):
        assert [one.image.tolist() for one in found] == images.tolist()
        assert [one.table.tolist() for one in found] == [[0.0] * width] * len(images)
    for source in (dataset, joined):
        batches = list(h5pack.H5Loader(source, 2, shuffle=False))
        assert [image.tolist() for batch in batches for image in batch.images] == images.tolist()
        assert all(batch.table.shape == (len(batch.images), width) for batch in batches)


def test_fields_without_entries_in_any_file(tmp_path: Path) -> None:
    paths = [pack(tmp_path, name, 1, ["cat"]) for name in "ab"]
    for path in paths:
        assert h5pack.H5Dataset(path, fields=["boxes"]).ragged["fields/boxes"].data.rows == 0
    dataset = h5pack.H5Dataset(paths, fields=FIELD_NAMES, check=True)
    copy = pickle.loads(pickle.dumps(dataset))
    for found in (*dataset, *copy[:]):
        assert (found.boxes.shape, found.points.shape, found.captions) == ((0, 4), (0, 2), [])
    (batch,) = h5pack.H5Loader(dataset, 2)
    assert [boxes.shape for boxes in batch.boxes] == [(0, 4)] * 2
    assert (batch.captions, len(set(batch.caption))) == ([[], []], 1)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    packs = three(tmp_path)
    other = pack(tmp_path, "d", 4, ["cat", "emu"])
    flat = tmp_path / "flat.h5"
    h5pack.convert(flat_folder(tmp_path / "flat", 3), flat, **quick())
    for wrong in (other, flat):
        with pytest.raises(PackFormatError) as error:
            h5pack.H5Dataset([*packs, wrong])
        assert error.value.path == str(wrong)
    plain = hdf5_file(tmp_path / "plain.h5", images=np.zeros((4, 20, 14, 3), np.uint8))
    both = h5pack.ConcatPack([h5pack.H5Dataset(path) for path in (plain, flat)])
    for read in (lambda: h5pack.H5Loader(both, 2), lambda: h5pack.H5Dataset([flat, plain])):
        with pytest.raises(PackFormatError) as error:
            read()
        assert error.value.path == str(plain)  # the file to pack
    with pytest.raises(PackFormatError):
        h5pack.H5Dataset(tmp_path / "none*.h5")
    with pytest.raises(OptionsError):
        h5pack.H5Dataset([])
    with pytest.raises(OptionsError):
        h5pack.H5Loader(h5pack.ConcatPack([h5pack.H5Dataset(packs[0], transform=lambda image: image)]), 2)


def test_packs_whose_classes_differ_are_not_concatenated(tmp_path: Path) -> None:
    classes = {"first": ["a", "b"], "more": ["a", "b", "c"], "other": ["a", "c"]}
    first, more, other = (pack(tmp_path, name, 6, names) for name, names in classes.items())

    def concat(*paths: Path, **settings: Any) -> h5pack.ConcatPack:
        return h5pack.ConcatPack([h5pack.H5Dataset(path, **settings) for path in paths])

    for paths in ((first, other), (first, more, other)):
        with pytest.raises(OptionsError, match=r"class 1: 'b' and 'c'") as error:
            concat(*paths)
        assert error.value.path == str(other)
    for paths in ((first, more), (more, first)):  # as after `append`, which keeps the numbers of the old classes
        both = concat(*paths)
        assert len(both) == 12
        assert both.joined().classes == ("a", "b", "c")
        mixture = h5pack.MixtureSampler(both, 5, num_samples=10)
        for loader in (h5pack.H5Loader(both, 5), h5pack.H5Loader(both, batch_sampler=mixture)):
            assert {len(batch.labels) for batch in loader} == ({5, 2} if loader.batch_sampler is None else {5})
    for settings in ({"labels": None}, {"target_transform": int}):
        both = concat(first, other, **settings)
        assert sorted(h5pack.ChunkSampler(both)) == [*range(12)]
    paths = tmp_path / "p.h5", tmp_path / "q.h5"
    for path in paths:
        with h5py.File(hdf5_file(path, images=np.zeros((2, 3, 3, 3), np.uint8)), "a") as file:
            file.create_dataset("labels", data=np.zeros((2, 2), np.uint8)).attrs["columns"] = ["a", path.stem]
    with pytest.raises(OptionsError, match="label column 1: 'p' and 'q'"):
        concat(*paths)
    with h5py.File(paths[0], "a") as file:
        del file["labels"].attrs["columns"]
    assert concat(*paths).joined().columns == ("a", "q")


def test_datasets_whose_fields_have_other_classes_are_not_concatenated(tmp_path: Path) -> None:
    datasets = []
    for number, classes in enumerate((["cat", "dog"], ["cat", "dog", "car"], ["dog", "cat"])):
        path = hdf5_file(tmp_path / f"{number}.h5", images=np.zeros((2, 3, 3, 3), np.uint8))
        with h5py.File(path, "a") as file:
            file["tags/data"], file["tags/offsets"] = np.arange(2), np.arange(3)
            file["tags"].attrs["classes"] = classes
        datasets.append(h5pack.H5Dataset(path, fields=["tags"]))
    both = h5pack.ConcatPack(datasets[:2])
    assert [len(batch.tags) for batch in h5pack.H5Loader(both, 3)] == [3, 1]
    assert both.joined().field_classes == {"tags": ("cat", "dog", "car")}
    with pytest.raises(OptionsError) as caught:
        h5pack.ConcatPack(datasets)
    assert (caught.value.path, caught.value.parameters) == (datasets[2].path, ("fields",))


@pytest.mark.parametrize(("kind", "table"), [("pixels", "fields/boxes/offsets"), ("jpeg", "encoded/offsets")])
def test_files_whose_offsets_leave_out_data_are_not_joined(tmp_path: Path, kind: str, table: str) -> None:
    packs = three(tmp_path, kind)
    with h5py.File(packs[1], "r+") as file:
        file[table][...] = np.maximum(file[table][()], 1)
        dataset = table.removesuffix("/offsets")
    assert len(h5pack.H5Dataset(packs[1], fields=["boxes"])) == 10
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(packs, fields=["boxes"])
    assert (caught.value.path, caught.value.dataset) == (str(packs[1]), dataset)
