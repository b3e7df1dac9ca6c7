"""CelebA in the three ways in which it is distributed, whole and damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h5pack.errors import SourceError
from h5pack.sources.catalog import NameFilter
from h5pack.sources.celeba import _read, celeba, is_celeba
from h5pack.sources.detect import SourceOptions, open_source
from tests.sources.files import touch, written

COLUMNS = ("5_o_Clock_Shadow", "Bald", "Young")
ATTRIBUTES = {f"{number:06d}.jpg": (1, -1, 1 if number % 2 else -1) for number in range(1, 7)}
LABELS = (np.array(list(ATTRIBUTES.values())) == 1).astype(np.uint8)
PARTITION = {name: number // 2 for number, name in enumerate(ATTRIBUTES)}
IDENTITY = {name: 2880 + number for number, name in enumerate(ATTRIBUTES)}

EVERYTHING = NameFilter()


def table(path: Path, rows: dict[str, Any], *lead: str, separator: str = "  ") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [separator.join([name, *map(str, np.atleast_1d(values))]) for name, values in rows.items()]
    path.write_text("\n".join([*lead, *lines, ""]))


def spaced(root: Path, images: str = "", anno: str = "", partition: str = "") -> str:
    """CelebA with all tables in the folder itself, or as the university distributes it."""
    folder = f"{images}img_align_celeba"
    touch(root / folder, *ATTRIBUTES)
    table(root / anno / "list_attr_celeba.txt", ATTRIBUTES, "6", " ".join(COLUMNS) + " ")
    table(root / anno / "identity_CelebA.txt", IDENTITY)
    table(root / partition / "list_eval_partition.txt", PARTITION)
    return folder


def from_kaggle(root: Path) -> str:
    touch(root / "img_align_celeba" / "img_align_celeba", *ATTRIBUTES)
    table(root / "list_attr_celeba.csv", ATTRIBUTES, ",".join(("image_id", *COLUMNS)), separator=",")
    table(root / "list_eval_partition.csv", PARTITION, "image_id,partition", separator=",")
    table(root / "identity_CelebA.csv", IDENTITY, "image_id,identity", separator=",")
    return "img_align_celeba/img_align_celeba"


@pytest.mark.parametrize("layout", ["side by side", "university", "kaggle"])
def test_all_distributions_give_the_same_catalog(tmp_path: Path, layout: str) -> None:
    if layout == "kaggle":
        folder = from_kaggle(tmp_path)
    else:
        folder = spaced(tmp_path, *(("Img/", "Anno", "Eval") if layout == "university" else ()))
    touch(tmp_path, "README.txt", "list_bbox_celeba.csv")
    assert is_celeba(tmp_path)
    catalog = celeba(tmp_path, EVERYTHING)
    assert list(catalog.names) == [f"{folder}/{name}" for name in ATTRIBUTES]
    assert all((tmp_path / name).exists() for name in catalog.names)
    assert catalog.label_names == COLUMNS
    np.testing.assert_array_equal(catalog.labels, LABELS, strict=True)
    assert catalog.split_names == ("train", "val", "test")
    assert catalog.split_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert catalog.fields["identity"].tolist() == list(IDENTITY.values())
    assert (catalog.kind, catalog.rejects, catalog.ignored) == ("celeba", (), {})
    assert catalog.reader.read(0, catalog.names[0]) == b""


def test_rows_are_joined_by_name_and_partition_and_identity_may_be_absent(tmp_path: Path) -> None:
    spaced(tmp_path)
    table(tmp_path / "list_attr_celeba.txt", dict(reversed(ATTRIBUTES.items())), "6", " ".join(COLUMNS))
    table(tmp_path / "list_eval_partition.txt", dict(sorted(PARTITION.items(), key=lambda item: item[0][::-1])))
    catalog = celeba(tmp_path, EVERYTHING)
    assert list(catalog.names) == [f"img_align_celeba/{name}" for name in ATTRIBUTES]
    np.testing.assert_array_equal(catalog.labels, LABELS, strict=True)
    assert catalog.split_ids.tolist() == [0, 0, 1, 1, 2, 2]
    (tmp_path / "list_eval_partition.txt").unlink()
    (tmp_path / "identity_CelebA.txt").unlink()
    catalog = celeba(tmp_path, EVERYTHING)
    assert (catalog.split_names, catalog.split_ids.tolist(), catalog.fields) == (("all",), [0] * 6, {})


def test_images_without_rows_and_rows_without_images_are_rejects(tmp_path: Path) -> None:
    spaced(tmp_path)
    (tmp_path / "img_align_celeba" / "000002.jpg").unlink()
    touch(tmp_path / "img_align_celeba", "000999.jpg", "sub/000001.jpg", "notes.txt")
    table(tmp_path / "list_eval_partition.txt", {name: PARTITION[name] for name in PARTITION if name != "000004.jpg"})
    catalog = celeba(tmp_path, EVERYTHING)
    assert [name[-10:] for name in catalog.names] == ["000001.jpg", "000003.jpg", "000005.jpg", "000006.jpg"]
    assert catalog.split_ids.tolist() == [0, 1, 2, 2]
    assert catalog.fields["identity"].tolist() == [2880, 2882, 2884, 2885]
    assert sorted((reject.name[17:], reject.reason) for reject in catalog.rejects) == [
        ("000002.jpg", "named in list_attr_celeba.txt, but there is no such file"),
        ("000004.jpg", "no row in list_eval_partition.txt"),
        ("000999.jpg", "no row in list_attr_celeba.txt"),
        ("sub/000001.jpg", "no row in list_attr_celeba.txt"),
    ]
    assert catalog.ignored == {".txt files": 1}


@pytest.mark.parametrize("pattern", ["00000[12].jpg", "img_align_celeba/00000[12].jpg", "*/00000[12]*"])
def test_filters_apply_to_names_and_to_paths_and_make_no_rejects(tmp_path: Path, pattern: str) -> None:
    spaced(tmp_path)
    included = celeba(tmp_path, NameFilter(include=(pattern,)))
    assert [name[-10:] for name in included.names] == ["000001.jpg", "000002.jpg"]
    assert (included.rejects, included.ignored) == ((), {"not included": 4})
    excluded = celeba(tmp_path, NameFilter(exclude=(pattern,)))
    assert [name[-10:] for name in excluded.names] == [f"00000{number}.jpg" for number in (3, 4, 5, 6)]
    assert (excluded.rejects, excluded.ignored) == ((), {"excluded": 2})
    (tmp_path / "img_align_celeba" / "000002.jpg").unlink()
    assert celeba(tmp_path, NameFilter(exclude=(pattern,))).rejects == ()


@pytest.mark.parametrize("folder", ["", "Img/"])
def test_the_images_alone_are_packed_with_a_note(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spaced(tmp_path, images=folder, anno="Anno")
    catalog = open_source(tmp_path / folder / "img_align_celeba", SourceOptions())
    assert (catalog.kind, catalog.labels, len(catalog.notes)) == ("flat", None, 1)
    assert str(tmp_path) in catalog.notes[0].text
    monkeypatch.chdir(tmp_path / folder / "img_align_celeba")
    assert len(open_source(".", SourceOptions()).notes) == 1
    touch(tmp_path / "other", *ATTRIBUTES)
    assert open_source(tmp_path / "other", SourceOptions()).notes == ()


@pytest.mark.parametrize("lacking", ["img_align_celeba", "list_attr_celeba.txt"])
def test_without_images_or_attributes_it_is_not_celeba(tmp_path: Path, lacking: str) -> None:
    spaced(tmp_path)
    (tmp_path / lacking).rename(tmp_path / "elsewhere")
    assert not is_celeba(tmp_path)
    with pytest.raises(SourceError):
        celeba(tmp_path, EVERYTHING)


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("list_attr_celeba.txt", "1\nA B\n000001.jpg 1\n", 3),
        ("list_attr_celeba.txt", "1\nA\n000001.jpg 1\n000002.jpg x\n", 4), ("list_attr_celeba.txt", "", None),
        ("list_attr_celeba.txt", "0\n\n", None), ("list_eval_partition.txt", "000001.jpg 0\n000002.jpg 3\n", 2),
        ("list_eval_partition.txt", "000001.jpg -1\n", 1),
        ("list_eval_partition.txt", "000001.jpg 0\n\n000002.jpg a\n", 3), ("identity_CelebA.txt", "000001.jpg\n", 1),
        ("identity_CelebA.txt", "000001.jpg 1.5\n", 1), ("identity_CelebA.txt", "000001.jpg 1\n000001.jpg 2\n", 1),
        ("identity_CelebA.csv", "image_id\n000001.jpg\n", None),
    ],
)  # fmt: skip
def test_malformed_tables_name_file_and_line(tmp_path: Path, file: str, content: str, line: int | None) -> None:
    spaced(tmp_path)
    (tmp_path / file).with_suffix(".txt").unlink()
    (tmp_path / file).write_text(content)
    with pytest.raises(SourceError) as caught:
        celeba(tmp_path, EVERYTHING)
    assert caught.value.path == str(tmp_path / file)
    assert line is None or f" line {line}:" in str(caught.value)


def test_tables_delimited_by_spaces(tmp_path: Path) -> None:
    path = written(tmp_path / "t.txt", "2\r\nBald  Young \r\n1.jpg -1  1\r\n2.jpg  1 -1\r\n\r\n")
    result = _read(path, None, skip=1)
    assert result.header == ("image_id", "Bald", "Young")
    assert [result.values(name) for name in result.header] == [["1.jpg", "2.jpg"], ["-1", "1"], ["1", "-1"]]
    assert [result.place(row) for row in range(2)] == [" line 3", " line 4"]
    path = written(tmp_path / "p.txt", "1.jpg 0\n\n2.jpg 2\n")
    result = _read(path, ("image_id", "partition"))
    assert [result.values(name) for name in result.header] == [["1.jpg", "2.jpg"], ["0", "2"]]
    assert [result.place(row) for row in range(2)] == [" line 1", " line 3"]
    with pytest.raises(SourceError):
        _read(written(tmp_path / "t.txt", b"\xff\xff"), None, skip=1)
