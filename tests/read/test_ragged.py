"""Fields whose rows differ in length: reading them, and files in which they are damaged or were rewritten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.errors import DamagedRowsError, H5PackError, PackChangedError, PackFormatError
from h5pack.format.fields import RaggedRows
from h5pack.read import ragged, read_plan
from h5pack.read.description import describe_file
from h5pack.read.engine import Engine
from h5pack.read.ragged import is_ragged, read_ragged
from h5pack.read.read_plan import MAX_GAP_BYTES
from tests.makers import FIELDS, annotated_images, flat_folder, quick

NAMES = ["boxes", "points", "caption", "captions", "sizes", "score"]
COUNT = 30


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ragged")
    annotated_images(root / "in", COUNT)
    h5pack.convert(root / "in" / "list.jsonl", root / "o.h5", **quick(**FIELDS))
    return root / "o.h5"


@pytest.fixture
def pack(original: Path, tmp_path: Path) -> Path:
    (tmp_path / "o.h5").write_bytes(original.read_bytes())
    return tmp_path / "o.h5"


def stored(path: Path, name: str) -> RaggedRows:
    """A field as a reader that knows only h5py would read it."""
    with h5py.File(path) as file:
        group = file[f"fields/{name}"]
        return RaggedRows(group.attrs["kind"].decode(), group["data"][()], group["offsets"][()])


def engine_of(path: Path, name: str) -> tuple[Engine, ragged.RaggedIndex]:
    found = describe_file(path, fields=[name])
    return Engine(found.path, found.identity, found.indexes), found.ragged[f"fields/{name}"]


def rewrite(path: Path, name: str, part: str, **settings: Any) -> None:
    """Replace a dataset of a field by a copy that is stored in another way."""
    with h5py.File(path, "r+") as file:
        group = file[f"fields/{name}"]
        values = group[part][()]
        del group[part]
        group.create_dataset(part, data=values, **settings)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "score"])
@pytest.mark.parametrize("gap", [0, MAX_GAP_BYTES])
@pytest.mark.parametrize("most", [64, 1 << 20])
def test_rows_in_any_order_equal_those_of_h5py(
    original: Path, name: str, gap: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_plan, "MAX_GAP_BYTES", gap)
    monkeypatch.setattr(read_plan, "MAX_MERGED_BYTES", most)
    expected = stored(original, name)
    engine, index = engine_of(original, name)
    random = np.random.default_rng(0)
    for rows in (np.arange(COUNT), random.permutation(COUNT), random.integers(0, COUNT, 50), np.zeros(0, np.int64)):
        found = read_ragged(engine, index, rows, check=True)
        wanted = expected[rows]
        np.testing.assert_array_equal(found.data, wanted.data, strict=True)
        assert (found.kind, found.offsets.tolist()) == (wanted.kind, wanted.offsets.tolist())


def test_neighboring_rows_are_read_at_once(original: Path) -> None:
    engine, index = engine_of(original, "caption")
    read_ragged(engine, index, np.arange(COUNT)[::-1])
    assert engine.snapshot().reads == 1
    assert engine.snapshot().bytes_read == index.offsets[-1]


@pytest.mark.parametrize(
    "settings", [{"chunks": (7,)}, {"chunks": (9,), "compression": "gzip"}, {"chunks": (5,), "shuffle": True}]
)
def test_fields_that_another_program_rewrote_are_read(pack: Path, settings: dict[str, Any]) -> None:
    expected = h5pack.H5Dataset(pack, fields=NAMES, check=True)[:]
    for name in NAMES[:-1]:
        chunks = (*settings["chunks"], *stored(pack, name).data.shape[1:])
        rewrite(pack, name, "data", **{**settings, "chunks": chunks})
        rewrite(pack, name, "offsets", chunks=(4,), compression="gzip")
    assert h5pack.verify(pack).ok
    rewrite(pack, "sizes", "data", dtype=">i8")
    for one, other in zip(h5pack.H5Dataset(pack, fields=NAMES)[:], expected, strict=True):
        assert (one.caption, one.captions) == (other.caption, other.captions)
        for name in ("boxes", "points", "sizes"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


def offsets(change: Callable[[Any], Any]) -> Callable[[h5py.Group], None]:
    def apply(group: h5py.Group) -> None:
        values = change(group["offsets"][()])
        del group["offsets"]
        group["offsets"] = values

    return apply


# `tests/read/test_kept.py` tests damage to offsets in the same function.
DAMAGE: dict[str, Callable[[h5py.Group], None]] = {
    "descending": offsets(lambda values: values[::-1]),
    "too few": offsets(lambda values: values[:-1]),
    "none": offsets(lambda values: values[:0]),
    "a number": offsets(lambda values: np.int64(3)),
    "floats": offsets(lambda values: values.astype(np.float64)),
    "text": offsets(lambda values: np.array([b"x"] * len(values))),
    "an unknown kind": lambda group: group.attrs.__setitem__("kind", np.bytes_(b"song")),
    "an unknown box format": lambda group: group.attrs.__setitem__("box_format", np.bytes_(b"xywh")),
    "a kind that does not fit": lambda group: group.attrs.__setitem__("kind", np.bytes_(b"text")),
    "boxes of other numbers": lambda group: group.attrs.__setitem__("kind", np.bytes_(b"boxes")),
    "data of names": lambda group: (group.pop("data"), group.__setitem__("data", np.array([b"x"] * 40)))[0],
    "entries without numbers": lambda group: (group.pop("data"), group.__setitem__("data", np.zeros((90, 0))))[0],
    "data that is a number": lambda group: (group.pop("data"), group.__setitem__("data", 3.0))[0],
    "data that is a group": lambda group: (group.pop("data"), group.create_group("data"))[0],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_field_that_is_damaged_is_an_error_and_a_problem(pack: Path, damage: str) -> None:
    with h5py.File(pack, "r+") as file:
        DAMAGE[damage](file["fields/sizes"])
    with pytest.raises(PackFormatError):
        h5pack.H5Dataset(pack, fields=["sizes"])
    assert len(h5pack.H5Dataset(pack, fields=["boxes"])[:]) == COUNT
    assert not h5pack.verify(pack, num_workers=1).ok
    with pytest.raises(H5PackError):
        h5pack.convert(pack, pack.with_name("p.h5"), **quick())


@pytest.mark.parametrize("name", ["sizes", "score"])
def test_a_pack_with_a_field_of_an_unknown_kind_is_described(pack: Path, name: str) -> None:
    fields = dict((h5pack.info(pack).pack or {})["fields"])
    with h5py.File(pack, "r+") as file:
        file[f"fields/{name}"].attrs["kind"] = np.bytes_(b"song")
    report = h5pack.info(pack)
    found = (report.pack or {})["fields"]
    assert found == {**fields, name: {**found[name], "kind": "song"}}
    assert "song" in report.to_text()


def test_an_array_of_an_unknown_kind_is_refused_if_it_is_asked_for(pack: Path) -> None:
    with h5py.File(pack, "r+") as file:
        file["fields/score"].attrs["kind"] = np.bytes_(b"song")
    with pytest.raises(PackFormatError) as caught:
        h5pack.H5Dataset(pack, fields=["score"])
    assert caught.value.dataset == "fields/score"
    assert len(h5pack.H5Dataset(pack, fields=["boxes"])[:]) == COUNT
    assert not h5pack.verify(pack, num_workers=1).ok
    # A copy would call the field an array.
    with pytest.raises(PackFormatError):
        h5pack.subset(pack, pack.with_name("p.h5"), rows="0:2")
    with h5py.File(pack, "r+") as file:
        del file.attrs["h5pack_format"]
    assert len(h5pack.H5Dataset(pack, fields=["fields/score"])[:]) == COUNT  # Other files may use the attribute.


def test_entries_of_no_row_are_a_problem(pack: Path) -> None:
    with h5py.File(pack, "r+") as file:
        offsets(lambda values: np.minimum(values, values[-1] - 1))(file["fields/boxes"])
    assert len(h5pack.H5Dataset(pack, fields=["boxes"])) == COUNT
    (problem,) = h5pack.verify(pack, num_workers=1).problems
    assert "fields/boxes" in problem


def test_damaged_rows_are_found(pack: Path) -> None:
    with h5py.File(pack, "r+") as file:
        row = int(np.flatnonzero(np.diff(file["fields/boxes/offsets"][()]))[3])
        file["fields/boxes/data"][int(file["fields/boxes/offsets"][row]), 2] += 1
        place = int(file["fields/caption/offsets"][7])
        file["fields/caption/data"][place] = 0xFF
        file["fields/score"][5] = 99
        file["fields/more"] = np.arange(COUNT)
    report = h5pack.verify(pack, num_workers=1)
    assert report.damaged == {"fields/boxes": [row], "fields/caption": [7], "fields/score": [5]}
    assert len(report.problems) == 1, "a field without checksums"
    for name, wrong in (("boxes", row), ("score", 5), ("caption", 7)):
        with pytest.raises(DamagedRowsError) as caught:
            h5pack.H5Dataset(pack, fields=[name], check=True)[:]
        assert (caught.value.dataset, caught.value.rows) == (f"fields/{name}", (wrong,))
    with pytest.raises(DamagedRowsError) as caught:
        h5pack.H5Dataset(pack, fields=["caption"])[:]
    assert caught.value.rows == (7,), "no UTF-8"
    assert h5pack.H5Dataset(pack, fields=["caption"])[6].caption
    with h5py.File(pack, "r+") as file:
        ends = file["fields/captions/offsets"][()]
        row = int(np.flatnonzero(np.diff(ends))[2])
        file["fields/captions/data"][int(ends[row + 1]) - 1] = 65
    with pytest.raises(DamagedRowsError) as caught:
        h5pack.H5Dataset(pack, fields=["captions"])[:]
    assert caught.value.rows == (row,), "a text without its NUL"


@pytest.mark.parametrize("how", ["link", "virtual"])
def test_entries_in_another_file_are_read_unless_it_is_missing_or_changed(pack: Path, how: str) -> None:
    wanted, other = stored(pack, "boxes"), pack.with_name("other.h5")
    with h5py.File(other, "w") as file:
        file["x"] = wanted.data
    with h5py.File(pack, "r+") as file:
        del file["fields/boxes/data"]
        if how == "link":
            file["fields/boxes/data"] = h5py.ExternalLink("other.h5", "x")
        else:
            layout = h5py.VirtualLayout(wanted.data.shape, wanted.data.dtype)
            layout[:] = h5py.VirtualSource("other.h5", "x", wanted.data.shape)
            file.create_virtual_dataset("fields/boxes/data", layout)
    engine, index = engine_of(pack, "boxes")
    with contextlib.closing(engine):
        found = read_ragged(engine, index, np.arange(COUNT), check=True)
        assert found.data.tobytes() == wanted.data.tobytes()
        other.write_bytes(other.read_bytes())
        with pytest.raises(PackChangedError):
            engine.check_unchanged()
    other.unlink()
    with pytest.raises(PackFormatError):
        engine_of(pack, "boxes")


def test_a_path_of_a_foreign_file_may_be_a_group_of_data_and_offsets(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["images"] = np.zeros((3, 8, 8, 3), np.uint8)
        file["a/points/data"], file["a/points/offsets"] = np.arange(5.0), np.array([0, 2, 2, 5], np.int32)
        file["fields/x"] = np.arange(3)
    dataset = h5pack.H5Dataset(tmp_path / "f.h5", fields=["/a/points/", "fields/x"])
    assert [sample.points.tolist() for sample in dataset[:]] == [[0, 1], [], [2, 3, 4]]
    assert dataset.kinds == {"points": "ragged", "x": "array"}
    with pytest.raises(PackFormatError):
        h5pack.H5Dataset(tmp_path / "f.h5", fields=["x"])
    h5pack.convert(tmp_path / "f.h5", tmp_path / "o.h5", **quick(fields=("a/points", "fields/x"), order="sorted"))
    packed = h5pack.H5Dataset(tmp_path / "o.h5", fields=["points", "fields/x"])
    assert [(sample.points.tolist(), sample.x.item()) for sample in packed[:]] == [([0, 1], 0), ([], 1), ([2, 3, 4], 2)]


def test_labels_are_no_ragged_field(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["images"] = np.zeros((3, 8, 8, 3), np.uint8)
        file["labels/data"], file["labels/offsets"] = np.arange(5.0), np.array([0, 2, 2, 5])
    with pytest.raises(PackFormatError):
        h5pack.H5Dataset(tmp_path / "f.h5")
    assert h5pack.H5Dataset(tmp_path / "f.h5", labels=None, fields=["labels"])[2].labels_.tolist() == [2, 3, 4]
    with pytest.raises(PackFormatError):
        h5pack.H5Dataset(tmp_path / "f.h5", images="labels", labels=None)


def test_kept_files_are_no_ragged_field(tmp_path: Path) -> None:
    h5pack.convert(flat_folder(tmp_path / "in", 3), tmp_path / "k.h5", **quick(keep="jpeg"))
    with h5py.File(tmp_path / "k.h5") as file:
        assert not is_ragged(file, "encoded")
    with pytest.raises(H5PackError):
        h5pack.convert(tmp_path / "k.h5", tmp_path / "o.h5", **quick(size=8, fields="encoded"))
