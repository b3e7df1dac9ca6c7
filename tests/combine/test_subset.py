"""`subset`: chosen rows with all that belongs to them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.errors import NoImagesError, OptionsError, OutputExistsError, PackFormatError
from h5pack.format.checksums import row_checksums
from tests.combine.packs import KINDS, contents, pack
from tests.crashing import changes_in_child, leftovers
from tests.makers import flat_folder, quick

SUBSETS: list[tuple[dict[str, Any], Any]] = [
    ({"splits": "val"}, lambda row, one: one[0] == "val"),
    ({"classes": ["fox", "cat", "fox"]}, lambda row, one: one[1] in ("cat", "fox")),
    ({"rows": "0:5,9,17:19"}, lambda row, one: row in (0, 1, 2, 3, 4, 9, 17, 18)),
    ({"rows": [3, 19, 4], "splits": ["train", "val"]}, lambda row, one: row in (3, 4, 19)),
    ({"splits": "train", "classes": "dog"}, lambda row, one: one[:2] == ("train", "dog")),
]


# Each kind of pack with two selections, and each selection with two kinds.
@pytest.mark.parametrize(
    ("kind", "number"), [(kind, (place + more) % 5) for place, kind in enumerate(KINDS) for more in (0, 2)]
)
def test_a_subset_has_the_chosen_rows(tmp_path: Path, kind: str, number: int) -> None:
    settings, wanted = SUBSETS[number]
    path, out = pack(tmp_path, "a", 20, ["cat", "dog", "fox"], **KINDS[kind]), tmp_path / "o.h5"
    whole = contents(path)
    report = h5pack.subset(path, out, **settings)
    expected = {name: one for row, (name, one) in enumerate(whole.items()) if wanted(row, one)}
    assert (report.images, list(contents(out))) == (len(expected), list(expected))
    assert contents(out) == expected
    assert h5pack.verify(out, num_workers=1).ok
    dataset = h5pack.H5Dataset(out)
    if "classes" in settings:
        assert dataset.classes == (("dog",) if settings["classes"] == "dog" else ("fox", "cat"))
    assert set(dataset.splits) == {one[0] for one in expected.values()}
    if kind != "jpeg":
        images = np.stack([one.image for one in h5pack.H5Dataset(out, next(iter(dataset.splits)))])
        axes = (0, 2, 3) if kind == "nchw" else (0, 1, 2)
        np.testing.assert_allclose(dataset.mean, images.mean(axes) / 255, rtol=1e-12)


def test_a_sample_depends_on_its_seed_only(tmp_path: Path) -> None:
    path = pack(tmp_path, "a", 20, ["cat", "dog"])
    names = []
    for number, (sample, seed) in enumerate([(6, 0), (6, 0), (6, 1), (99, 3)]):
        h5pack.subset(path, tmp_path / f"{number}.h5", sample=sample, seed=seed)
        names.append([*contents(tmp_path / f"{number}.h5")])
    assert names[0] == names[1] != names[2]
    assert [len(one) for one in names] == [6, 6, 6, 20]
    assert (tmp_path / "0.h5").read_bytes() == (tmp_path / "1.h5").read_bytes()


def test_statistics_of_kept_images_do_not_depend_on_their_stored_sizes(tmp_path: Path) -> None:
    h5pack.convert(flat_folder(tmp_path / "in", 6), tmp_path / "a.h5", **quick(keep="jpeg"))
    h5pack.subset(tmp_path / "a.h5", tmp_path / "0.h5", rows="0:4")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["encoded/size"][1:] = 2
    h5pack.subset(tmp_path / "a.h5", tmp_path / "1.h5", rows="0:4")
    found = []
    for name in ("0.h5", "1.h5"):
        with h5py.File(tmp_path / name) as file:
            found.append([file[f"statistics/{one}"][()].tolist() for one in ("mean", "std")])
    assert found[0] == found[1]


def test_a_damaged_root_group_is_an_error(tmp_path: Path) -> None:
    path = pack(tmp_path, "a", 14, ["cat", "dog"])
    data = bytearray(path.read_bytes())
    data[data.index(b"OHDR") + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackFormatError) as caught:
        h5pack.subset(path, tmp_path / "o.h5")
    assert caught.value.path == str(path)


def test_a_subset_is_resumed(tmp_path: Path) -> None:
    path, out = pack(tmp_path, "a", 20, ["cat", "dog"]), tmp_path / "o.h5"
    changes = changes_in_child(lambda: h5pack.subset(path, out, sample=9), None)
    whole = out.read_bytes()
    out.unlink()
    changes_in_child(lambda: h5pack.subset(path, out, sample=9), changes.index("fsync o.h5.partial"))
    h5pack.subset(path, out, sample=9, resume=True)
    assert (out.read_bytes() == whole, leftovers(tmp_path)) == (True, {"a", "a.h5", "o.h5"})


def test_wrong_calls(tmp_path: Path) -> None:
    path = pack(tmp_path, "a", 6, ["cat", "dog"])
    h5pack.convert(flat_folder(tmp_path / "flat", 3), tmp_path / "flat.h5", **quick())
    for settings, kind in (
        ({"splits": "trian"}, OptionsError), ({"classes": ["cat", "cow"]}, OptionsError),
        ({"rows": [6]}, OptionsError), ({"rows": [-1]}, OptionsError), ({"rows": "1-5"}, OptionsError),
        ({"rows": "5:"}, OptionsError), ({"rows": "0:-1"}, OptionsError), ({"rows": 1.5}, OptionsError),
        ({"rows": [[0], [1, 2]]}, OptionsError), ({"rows": "0:2:4"}, OptionsError),
        ({"sample": 0}, OptionsError), ({"sample": 3, "seed": -1}, OptionsError), ({"rows": "2:2"}, NoImagesError),
        ({"splits": "val", "rows": [0]}, NoImagesError), ({"rows": []}, NoImagesError),
        ({"seed": -1}, OptionsError), ({"seed": "1"}, OptionsError),
    ):  # fmt: skip
        with pytest.raises(kind):
            h5pack.subset(path, tmp_path / "o.h5", **settings)  # type: ignore[arg-type]
    with pytest.raises(OptionsError):
        h5pack.subset(tmp_path / "flat.h5", tmp_path / "o.h5", classes="cat")
    with pytest.raises(OptionsError):
        h5pack.subset(path, path, overwrite=True)
    h5pack.join([path, path], tmp_path / "v.h5", virtual=True)
    with pytest.raises(OptionsError):
        h5pack.subset(tmp_path / "v.h5", path, rows="0:3", overwrite=True)
    assert leftovers(tmp_path) == {"a", "a.h5", "flat", "flat.h5", "v.h5"}


def test_paths_and_rows_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    made, url = pack(tmp_path, "a", 4, ["x"]), "s3://bucket/o.h5"
    for given, out in ((made, url), (url, "o.h5"), (made, f"{tmp_path}/o/"), (made, None), (None, "o.h5"), (3, "o.h5")):
        with pytest.raises(OptionsError):
            h5pack.subset(given, out)  # type: ignore[arg-type]
        with pytest.raises(OptionsError):
            h5pack.join([made, given], out)  # type: ignore[list-item, arg-type]
    for packs in (None, 3, iter([made, made]), {made, tmp_path}):
        with pytest.raises(OptionsError):
            h5pack.join(packs, tmp_path / "o.h5")  # type: ignore[arg-type]
    for given in (None, url):
        with pytest.raises(OptionsError):
            h5pack.append(given, tmp_path / "a")  # type: ignore[arg-type]
    with pytest.raises(OptionsError):
        h5pack.convert(tmp_path / "a" / "list.jsonl", None, **quick())  # type: ignore[arg-type]
    for rows in ("0:1000000000000", "5", "99999999999999999999"):
        with pytest.raises(OptionsError):
            h5pack.subset(made, tmp_path / "o.h5", rows=rows)
    assert leftovers(tmp_path) == {"a", "a.h5"}
    assert h5pack.subset(str(made).encode(), bytes(tmp_path / "o.h5"), rows="0:2,2:4").images == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["pixels", "jpeg", "gzip"])
def test_a_finished_subset_is_complete_only_for_the_same_rows(tmp_path: Path, kind: str) -> None:
    path, out = pack(tmp_path, "a", 20, ["cat", "dog"], **KINDS[kind]), tmp_path / "o.h5"
    h5pack.subset(path, out, sample=9)
    before = out.read_bytes()
    assert h5pack.subset(path, out, sample=9, resume=True).already_complete
    for other in ({"sample": 9, "seed": 1}, {"sample": 8}, {"rows": range(9)}):
        with pytest.raises(OutputExistsError):
            h5pack.subset(path, out, resume=True, **other)
    # Other packs of the same images.
    for name, change in {
        "labels": lambda file: file.pop("labels"),
        "classes": lambda file: file["labels"].attrs.update(classes=[b"cat", b"dig"]),
        "field": lambda file: file["fields"].pop("caption"),
        "mask": lambda file: file["fields"].pop("mask"),
        "pixels": lambda file: file["checksums/fields/mask"].__setitem__(0, 1),
        "more": lambda file: file["fields"].__setitem__("more", np.arange(20)),
    }.items():
        other = Path(shutil.copy(path, tmp_path / f"{name}.h5"))
        with h5py.File(other, "r+") as file:
            change(file)
            for lost in ("labels", "fields/caption", "fields/mask"):
                if lost not in file:
                    del file[f"checksums/{lost}"]
            if name == "more":
                file["fields/more"].attrs["kind"] = "array"
                file["checksums/fields/more"] = row_checksums(np.arange(20))
        with pytest.raises(OutputExistsError):
            h5pack.subset(other, out, sample=9, resume=True)
    assert out.read_bytes() == before
