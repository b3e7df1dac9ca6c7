"""Map-style datasets: what samples may be, and why others are rejected."""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, StackDataset, Subset

import h5pack
from h5pack.errors import NoImagesError, OptionsError, RejectedImageError, SourceError
from h5pack.pack.conversion import Conversion
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.manifest import ManifestColumns
from h5pack.sources.map_style import MapStyleReader, map_style_catalog, with_labels
from tests.makers import expected, pixels, quick, split_folders

COLOR = pixels(1)
GRAY = pixels(2, channels=1)


def sample(value: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any] | None]:
    """What becomes of one sample of a dataset."""
    pixels, label, *_ = MapStyleReader([value]).sample(0)
    return pixels, label


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (COLOR, COLOR),
        (GRAY, GRAY[:, :, None]),
        (GRAY[:, :, None], GRAY[:, :, None]),
        (torch.from_numpy(COLOR), COLOR),
        (torch.from_numpy(COLOR).permute(2, 0, 1), COLOR),
        (GRAY[None], GRAY[:, :, None]),
        (np.dstack([COLOR, GRAY]), COLOR),
        (np.dstack([COLOR, GRAY]).transpose(2, 0, 1), COLOR),
        (np.dstack([GRAY, GRAY]), GRAY[:, :, None]),
        # Ambiguous: the last axis is preferred.
        (COLOR[:3], COLOR[:3]),
        (COLOR[:, :3].transpose(2, 0, 1), COLOR[:, :3].transpose(2, 0, 1)),
        (COLOR[::-1, ::2], COLOR[::-1, ::2]),
        (Image.fromarray(COLOR), COLOR),
        (Image.fromarray(GRAY), GRAY[:, :, None]),
        (Image.fromarray(COLOR).convert("RGBA"), COLOR),
        (Image.fromarray(GRAY.astype(np.uint16) * 256 + 99), GRAY[:, :, None]),
        *((Image.fromarray(COLOR).convert(mode), None) for mode in ("1", "LA", "P", "PA", "CMYK", "YCbCr", "HSV")),
    ],
)
def test_images_become_uint8_pixels_with_a_channel_axis(image: Any, expected: Any) -> None:
    if expected is None:
        expected = np.asarray(image.convert("RGB"))
    named = collections.namedtuple("named", ["label", "image"])
    unlabeled = collections.namedtuple("unlabeled", ["image", "mask"])
    without = [image, (image, None), (image,), {"image": image}, {"image": image, "label": None}, unlabeled(image, 3)]
    labeled = [(image, 3), [image, 3], (image, 3, "more"), {"label": 3, "id": 7, "image": image}, named(3, image)]
    for value in (*without, *labeled):
        array, label = sample(value)
        assert array.dtype == np.uint8
        assert np.array_equal(array, expected)
        is_labeled = any(value is one for one in labeled)
        assert (None if label is None else label.item()) == (3 if is_labeled else None)
    sent_to_worker = pickle.loads(pickle.dumps(MapStyleReader([(image, 3)])))
    assert np.array_equal(sent_to_worker.read(0, "00000000"), expected)


def test_what_is_left_out_of_samples_is_named() -> None:
    three = collections.namedtuple("three", ["image", "label", "mask"])
    values = [(COLOR, 1), (COLOR, 1, 2, 3), {"image": COLOR, "label": 1, "id": 2, "box": 3}, three(COLOR, 1, 2)]
    parts = [MapStyleReader(values).sample(index).unused for index in range(4)]
    assert parts == [(), ("[2]", "[3]"), ("id", "box"), ("mask",)]


class Made:
    """A dataset of `count` samples, which `get` returns."""

    def __init__(self, count: int, get: Callable[[int], Any], **attributes: Any) -> None:
        self.count, self.get = count, get
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


def failing(error: Exception, count: int = 1) -> Made:
    return Made(count, Mock(side_effect=error))


@pytest.mark.parametrize("image", [None, "given"])
def test_a_sample_that_does_not_fit_into_memory_is_no_reject(tmp_path: Path, image: str | None) -> None:
    class Large:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise MemoryError

    dataset = failing(MemoryError()) if image is None else [{"image": Large()}]
    with pytest.raises(SourceError, match="memory"):
        h5pack.convert(dataset, tmp_path / "o.h5", **quick())
    assert not (tmp_path / "o.h5").exists()


def truncated() -> Image.Image:
    """A lazily opened image."""
    stream = io.BytesIO()
    Image.fromarray(pixels(1, (64, 64))).save(stream, "JPEG")
    return Image.open(io.BytesIO(stream.getvalue()[:-200]))


IMAGES: list[Any] = [
    *(COLOR.astype(np.float32), torch.zeros(3, 9, 9), COLOR.astype(np.int64), GRAY > 99, None, "x.jpg"),
    *(COLOR.astype(dtype) for dtype in ("g", "e", "F", "O", "M8[s]", "m8[s]", "V3", "S3", [("r", "u1")])),
    *(COLOR[:, :9, :1].repeat(5, 2), COLOR[None], COLOR[:0], np.uint8(3), [[1, 2], [3]], {"img": COLOR}, {}),
    *(Image.fromarray(GRAY.astype(np.int32)), Image.fromarray(GRAY.astype(np.float32)), truncated()),
]
LABELS: list[Any] = [
    *("cat", 1.0, np.float32(2), [0, 256], [-1, 1], [], [[1, 2]], [0.5], 2**63, 2**70, {}, [[1], [1, 2]]),
    *(np.eye(30), np.longdouble(1), np.complex64(1), np.datetime64("2020-01-01"), np.zeros(2, "V3")),
]


@pytest.mark.parametrize(
    "dataset",
    [
        *([(image, 3)] for image in IMAGES), *([(COLOR, label)] for label in LABELS), [()], [{}], [{"img": COLOR}],
        failing(KeyError("lost")), failing(ValueError("one\ntwo")),
    ],
)  # fmt: skip
def test_other_samples_are_rejected_with_a_reason(dataset: Any) -> None:
    with pytest.raises(RejectedImageError) as caught:
        MapStyleReader(dataset).sample(0)
    assert str(caught.value).startswith(("the dataset", "I pixels", "F pixels"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("label", "dtype", "stored"),
    [
        *((-1, np.int64, -1), (True, np.int64, 1), (np.uint8(200), np.int64, 200), (torch.tensor(5), np.int64, 5)),
        *((2**63 - 1, np.int64, 2**63 - 1), ([0, 1, 255], np.uint8, [0, 1, 255]), (torch.tensor([7]), np.uint8, [7])),
        (np.array([True, False]), np.uint8, [1, 0]),
    ],
)
def test_labels_are_integers_or_rows_of_small_ones(label: Any, dtype: Any, stored: Any) -> None:
    np.testing.assert_array_equal(sample((COLOR, label))[1], np.array(stored, dtype), strict=True)


def test_the_catalog_reads_no_sample() -> None:
    catalog = map_style_catalog(failing(KeyError("lost"), 1_234))
    assert (catalog.kind, catalog.labels, catalog.split_names) == ("dataset", None, ("all",))
    assert list(catalog.names) == [f"{index:08d}" for index in range(1_234)]
    assert len(map_style_catalog(Made(0, Mock(), samples=()))) == 0


@pytest.mark.parametrize("source", [7, {1, 2}, iter("ab"), np.array(7), torch.tensor(7)])
def test_objects_without_length_or_items_are_refused(source: Any) -> None:
    with pytest.raises(SourceError):
        map_style_catalog(source)


class Folder:
    """A dataset like torchvision's ImageFolder."""

    root = "/data/photos"
    classes: Any = ("ant", "bee", "cat")

    def __init__(self, names: list[str], **attributes: Any) -> None:
        self.samples = [(f"/data/photos/{name}", 0) for name in names]
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return COLOR, index % 3


NAMES = ["ant/1.jpg", "bee/1.jpg", "cat/1.jpg", "cat/2.jpg"]
OTHERS = ["/data/ant/1", "/data/ant/2", "/data/bee/1", "/data/bee/2"]


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({}, NAMES),
        ({"samples": None, "imgs": [(Path(f"/data/photos/{name}"), 0) for name in NAMES]}, NAMES),
        ({"samples": OTHERS}, ["ant/1", "ant/2", "bee/1", "bee/2"]),
        ({"samples": [OTHERS[0]] * 4}, ["1"] * 4),
        ({"samples": [f"/data//img/./{number}" for number in "1234"], "root": None}, ["1", "2", "3", "4"]),
        ({"samples": [f"//data/{number}" for number in "1234"]}, ["1", "2", "3", "4"]),
        ({"samples": [f"/data/{name}" if row else f"//data/{name}" for row, name in enumerate(NAMES)]}, NAMES),
        ({"samples": [f"/data//{name}" for name in NAMES], "root": "/data"}, NAMES),
        ({"samples": [*NAMES[:3], OTHERS[0]]}, [*NAMES[:3], OTHERS[0]]),
        ({"samples": [(f"/data/photos/{name}".encode(), 0) for name in NAMES], "root": b"/data/photos"}, NAMES),
        ({"samples": [b"caf\xe9", "x", b"y", b"z"]}, ["caf\udce9", "x", "y", "z"]),
        ({"samples": [(b"\xff\xd8\xff\xe0\0\x10JFIF", 0)] * 4}, None),
        ({"filenames": ["x", "", "y\0", "y"]}, ["x", "00000001", "y\\x00", "y"]),
        ({"filenames": ["\ud800", "\udcff", "\ud83d\ude00", "y"]}, ["\\ud800", "\udcff", "\\ud83d\\ude00", "y"]),
        *(({"samples": other}, None) for other in (NAMES[:3], [1, 2, 3, 4], "abcd", [(1, "a")] * 4, [()] * 4)),
    ],
)
def test_names_of_files_are_kept(attributes: dict[str, Any], names: list[str] | None) -> None:
    found = list(map_style_catalog(Folder(NAMES, **attributes)).names)
    assert found == (names or [f"{index:08d}" for index in range(4)])


@pytest.mark.parametrize(
    ("attributes", "classes"),
    [
        ({}, ("ant", "bee", "cat")),
        ({"classes": ["x", ("y", "z")]}, ("x", "y, z")),
        ({"classes": None, "class_to_idx": {"b": 1, "a": 0}}, ("a", "b")),
        ({"classes": None, "features": {"label": Mock(names=["p", "q"])}}, ("p", "q")),
        ({"classes": None, "label_name": "labels", "columns": ("k", "l")}, ("k", "l")),
        *(({"classes": other}, None) for other in (3, [1, 2], [], "abc")),
        ({"classes": None, "class_to_idx": {"b": 2, "a": 0}, "columns": ("k", "l")}, None),
    ],
)
def test_names_of_classes_are_kept(attributes: dict[str, Any], classes: tuple[str, ...] | None) -> None:
    assert map_style_catalog(Folder(NAMES, **attributes)).label_names == classes


def test_a_property_that_fails_is_no_reason_to_refuse_a_dataset() -> None:
    class Failing(Folder):
        @property
        def filenames(self) -> list[str]:
            raise NotImplementedError

    assert list(map_style_catalog(Failing(NAMES)).names) == NAMES


def test_datasets_of_other_types_may_arrange_their_parts_otherwise() -> None:
    parts, whole = [Folder(NAMES), Folder([f"other/{name}" for name in NAMES])], Folder(NAMES)
    alternating = Made(8, lambda index: parts[index % 2][index // 2], datasets=parts)
    reversed_ = Made(4, lambda index: whole[3 - index], dataset=whole, indices=range(4))
    # Subclasses need not have the attributes of their base class.
    owns = [type("Own", (Made, kind), {})(4, whole.__getitem__) for kind in (Subset, ConcatDataset)]
    for dataset in (alternating, reversed_, *owns):
        assert list(map_style_catalog(dataset).names) == [f"{index:08d}" for index in range(len(dataset))]


def test_subsets_and_concatenations_keep_names_and_classes() -> None:
    whole = Folder(NAMES)
    some = map_style_catalog(Subset(Subset(whole, [3, -4, 1]), np.array([0, 1])))
    assert (list(some.names), some.label_names, some.about) == (["cat/2.jpg", "ant/1.jpg"], whole.classes, "Subset")
    joined = map_style_catalog(ConcatDataset([Subset(whole, [2]), Subset([COLOR], [0]), whole]))
    assert list(joined.names) == ["cat/1.jpg", "00000001", *NAMES]
    assert (joined.label_names, len(joined.notes)) == (None, 1)
    alike = ConcatDataset([whole, Subset(whole, [1])])
    assert map_style_catalog(alike).label_names == whole.classes
    unlike = Subset(whole, [4]), Subset(whole, [0.5]), Subset(whole, [[0], [1, 2]])  # type: ignore[list-item]
    for other in (*unlike, StackDataset(whole, whole)):
        assert list(map_style_catalog(other).names) == [f"{index:08d}" for index in range(len(other))]
    assert len(map_style_catalog(Subset(whole, []))) == 0


@pytest.mark.parametrize(
    ("labels", "classes", "kept"),
    [
        (np.array([0, -1, 2]), ("x", "y", "z"), ("x", "y", "z")), (np.array([0, 3]), ("x", "y", "z"), None),
        (np.array([-2, 0]), ("x", "y", "z"), None), (np.zeros((2, 3), np.uint8), ("x", "y", "z"), ("x", "y", "z")),
        (np.zeros((2, 2), np.uint8), ("x", "y", "z"), ("label_0", "label_1")), (None, ("x", "y", "z"), None),
        (np.array([7]), None, None),
    ],
)  # fmt: skip
def test_names_of_classes_must_fit_the_labels(labels: Any, classes: Any, kept: tuple[str, ...] | None) -> None:
    catalog = with_labels(map_style_catalog(Folder(NAMES, classes=classes)), labels, [])
    assert catalog.label_names == kept
    assert len(catalog.notes) == (classes is not None and labels is not None and kept != classes)


def test_packs_keep_names_classes_and_splits_through_wrappers(tmp_path: Path) -> None:
    folders = [
        split_folders(tmp_path / "a", {"val": {"x": 3, "y": 2}, "train": {"x": 4, "y": 4}}),
        split_folders(tmp_path / "b", {"train": {"x": 2, "y": 1}, "test": {"x": 1, "y": 1}}),
    ]
    for folder in folders:
        h5pack.convert(folder, f"{folder}.h5", **quick())
    first, second = (h5pack.H5Dataset(f"{folder}.h5") for folder in folders)
    train, val = (h5pack.H5Dataset(f"{tmp_path}/a.h5", split=split) for split in ("train", "val"))
    for dataset, splits in (
        (first, {"train": 8, "val": 5}),
        (val, {"val": 5}),
        (h5pack.H5Dataset(first.path, ["train", "val"]), {"train": 8, "val": 5}),
        (Subset(first, [12, 11, 0]), {"train": 1, "val": 2}),
        (h5pack.ConcatPack([first, second]), {"train": 11, "val": 5, "test": 2}),
        (ConcatDataset([val, train]), {"train": 8, "val": 5}),
    ):
        catalog = open_source(dataset, SourceOptions())
        assert catalog.label_names == ("x", "y")
        assert dict(zip(catalog.split_names, np.bincount(catalog.split_ids).tolist(), strict=True)) == splits
        for index, name in enumerate(catalog.names):
            split, label, _ = name.split("/")
            assert catalog.split_names[catalog.split_ids[index]] == split
            image, stored, *_ = catalog.reader.sample(catalog.reader.sample_index(index))
            assert catalog.label_names[stored] == label
            # Both packs may have a file of this name.
            sources = [folder / name for folder in folders if (folder / name).exists()]
            assert any(np.array_equal(image, expected(source)) for source in sources)
    h5pack.convert(h5pack.ConcatPack([first, second]), tmp_path / "o.h5", **quick(num_workers=2))
    packed = h5pack.H5Dataset(tmp_path / "o.h5")
    assert packed.classes == ("x", "y")
    assert {name: len(rows) for name, rows in packed.splits.items()} == {"train": 11, "val": 5, "test": 2}


class Described:
    """A dataset of dicts with further values."""

    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise ValueError("damaged")
        return {
            "image": pixels(index, (30, 20)),
            "label": index % 2,
            "box": torch.arange(4.0 * (index % 3)).reshape(-1, 4) / 2,
            "caption": f"number {index}",
            "words": ["word"] * (index % 3),
            "weight": index / 2,
            "vector": np.full(3, index, np.int16),
            "list": [index] * (index % 4),
            "other": object(),
        }


PLAIN = ("caption", "words", "weight", "vector", "list")


@pytest.mark.parametrize("workers", [1, 2])
def test_keys_of_samples_become_fields(tmp_path: Path, workers: int) -> None:
    settings = {"fields": PLAIN, "box_columns": "box", "box_format": "xywh", "num_workers": workers}
    with Conversion(Described(), tmp_path / "o.h5", **settings) as conversion:
        (note,) = conversion.plan().notes()
        assert "'other'" in note.text
        assert conversion.run().rejects == 1
    names = [*PLAIN, "box"]
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=names, check=True)
    assert list(dataset.kinds.values()) == ["text", "texts", "array", "array", "ragged", "boxes"]
    for name, sample in zip(dataset.filenames or (), dataset[:], strict=True):
        wanted = Described()[int(name)]
        assert (sample.caption, sample.words, sample.weight.item()) == tuple(wanted[key] for key in names[:3])
        assert sample.vector.tolist() == wanted["vector"].tolist()
        assert (sample.vector.dtype, sample.list.tolist()) == (torch.int16, wanted["list"])
        corners = wanted["box"].clone()
        corners[:, 2:] += corners[:, :2]
        assert sample.box.tolist() == corners.tolist()
    subset = Subset(dataset, [3, 1, 7])
    h5pack.convert(subset, tmp_path / "p.h5", **quick(fields=PLAIN, box_columns="box", order="sorted"))
    again = h5pack.H5Dataset(tmp_path / "p.h5", fields=names)
    for one, other in zip(again[:], (dataset[index] for index in (3, 1, 7)), strict=True):
        assert (one.caption, one.words, one.box.tolist()) == (other.caption, other.words, other.box.tolist())
    assert again.kinds == dataset.kinds


def test_fields_of_samples_that_do_not_fit_are_errors_or_rejects(tmp_path: Path) -> None:
    with pytest.raises(NoImagesError, match="'nothing'"):
        h5pack.convert(Described(), tmp_path / "o.h5", **quick(fields="nothing"))
    with pytest.raises(NoImagesError, match="a field"):
        h5pack.convert(Described(), tmp_path / "o.h5", **quick(fields="other"))
    for key in ("vector", "weight", "caption"):
        with pytest.raises(SourceError) as caught:
            h5pack.convert(Described(), tmp_path / "o.h5", **quick(box_columns=key))
        assert (caught.value.rows, caught.value.parameters) == ((0,), ("box_columns",))
    for settings in ({"fields": ("a/b",)}, {"fields": ("box",), "box_columns": "box"}, {"text_columns": "caption"}):
        with pytest.raises(OptionsError):
            h5pack.convert(Described(), tmp_path / "o.h5", **quick(**settings))


@pytest.mark.parametrize("dtype", ["g", "F", "O", "M8[s]", "V3", "S3", [("r", "u1")]])
def test_fields_and_masks_that_torch_has_no_numbers_for_are_rejects(dtype: Any) -> None:
    reader = MapStyleReader(
        [{"image": COLOR, "mask": GRAY.astype(dtype), "other": np.zeros((30, 30)).astype(dtype)}],
        fields=ManifestColumns(fields=("other",)),
        masks=("mask",),
    )
    for read in (lambda: reader.sample(0), lambda: reader.read_field(0, 0, "mask")):
        with pytest.raises(RejectedImageError) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_masks_are_found_in_the_first_sample_that_can_be_read(tmp_path: Path) -> None:
    def get(index: int) -> dict[str, Any]:
        if index < 2:
            raise OSError("broken file")
        return {"image": COLOR, "mask": GRAY % 3}

    report = h5pack.convert(Made(6, get), tmp_path / "o.h5", **quick(num_workers=1))
    assert (report.images, report.rejects) == (4, 2)
    assert torch.equal(h5pack.H5Dataset(tmp_path / "o.h5", fields=["mask"])[3].mask, torch.from_numpy(GRAY % 3))
