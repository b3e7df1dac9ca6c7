"""CelebA in the three ways in which it is distributed, whole and damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from h5pack.errors import SourceError
from h5pack.sources.catalog import NameFilter, Reject
from h5pack.sources.celeba import celeba, is_celeba
from tests.sources.test_folders import touch

COLUMNS = ("5_o_Clock_Shadow", "Bald", "Young")
ATTRIBUTES = {f"{number:06d}.jpg": (1, -1, 1 if number % 2 else -1) for number in range(1, 7)}
LABELS = (np.array(list(ATTRIBUTES.values())) == 1).astype(np.uint8)
PARTITION = {name: number // 2 for number, name in enumerate(ATTRIBUTES)}
IDENTITY = {name: 2880 + number for number, name in enumerate(ATTRIBUTES)}

EVERYTHING = NameFilter()


def spaced(path: Path, table: dict[str, object], *lead: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}  {' '.join(map(str, np.atleast_1d(values)))}" for name, values in table.items()]  # type: ignore[arg-type]
    path.write_text("\n".join([*lead, *lines, ""]))


def with_commas(path: Path, table: dict[str, object], *columns: str) -> None:
    lines = [f"{name},{','.join(map(str, np.atleast_1d(values)))}" for name, values in table.items()]  # type: ignore[arg-type]
    path.write_text("\n".join([",".join(("image_id", *columns)), *lines, ""]))


def attributes(path: Path) -> None:
    spaced(path, dict(ATTRIBUTES), str(len(ATTRIBUTES)), " ".join(COLUMNS) + " ")


def side_by_side(root: Path) -> str:
    touch(root / "img_align_celeba", *ATTRIBUTES)
    attributes(root / "list_attr_celeba.txt")
    spaced(root / "list_eval_partition.txt", dict(PARTITION))
    spaced(root / "identity_CelebA.txt", dict(IDENTITY))
    return "img_align_celeba"


def from_the_university(root: Path) -> str:
    touch(root / "Img" / "img_align_celeba", *ATTRIBUTES)
    attributes(root / "Anno" / "list_attr_celeba.txt")
    spaced(root / "Anno" / "identity_CelebA.txt", dict(IDENTITY))
    spaced(root / "Eval" / "list_eval_partition.txt", dict(PARTITION))
    touch(root, "README.txt")
    return "Img/img_align_celeba"


def from_kaggle(root: Path) -> str:
    touch(root / "img_align_celeba" / "img_align_celeba", *ATTRIBUTES)
    with_commas(root / "list_attr_celeba.csv", dict(ATTRIBUTES), *COLUMNS)
    with_commas(root / "list_eval_partition.csv", dict(PARTITION), "partition")
    with_commas(root / "identity_CelebA.csv", dict(IDENTITY), "identity")
    touch(root, "list_bbox_celeba.csv")
    return "img_align_celeba/img_align_celeba"


@pytest.mark.parametrize("layout", [side_by_side, from_the_university, from_kaggle])
def test_all_distributions_give_the_same_catalog(tmp_path: Path, layout: object) -> None:
    folder = layout(tmp_path)  # type: ignore[operator]
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
    side_by_side(tmp_path)
    spaced(tmp_path / "list_attr_celeba.txt", dict(reversed(ATTRIBUTES.items())), "6", " ".join(COLUMNS))
    spaced(tmp_path / "list_eval_partition.txt", dict(sorted(PARTITION.items(), key=lambda item: item[0][::-1])))
    catalog = celeba(tmp_path, EVERYTHING)
    assert list(catalog.names) == [f"img_align_celeba/{name}" for name in ATTRIBUTES]
    np.testing.assert_array_equal(catalog.labels, LABELS, strict=True)
    assert catalog.split_ids.tolist() == [0, 0, 1, 1, 2, 2]
    (tmp_path / "list_eval_partition.txt").unlink()
    (tmp_path / "identity_CelebA.txt").unlink()
    catalog = celeba(tmp_path, EVERYTHING)
    assert (catalog.split_names, catalog.split_ids.tolist(), catalog.fields) == (("all",), [0] * 6, {})


def test_images_without_rows_and_rows_without_images_are_rejects(tmp_path: Path) -> None:
    side_by_side(tmp_path)
    (tmp_path / "img_align_celeba" / "000002.jpg").unlink()
    touch(tmp_path / "img_align_celeba", "000999.jpg", "sub/000001.jpg", "notes.txt")
    spaced(
        tmp_path / "list_eval_partition.txt", {name: part for name, part in PARTITION.items() if name != "000004.jpg"}
    )
    catalog = celeba(tmp_path, EVERYTHING)
    assert [name[-10:] for name in catalog.names] == ["000001.jpg", "000003.jpg", "000005.jpg", "000006.jpg"]
    assert catalog.split_ids.tolist() == [0, 1, 2, 2]
    assert catalog.fields["identity"].tolist() == [2880, 2882, 2884, 2885]
    assert set(catalog.rejects) == {
        Reject("img_align_celeba/000002.jpg", "named in list_attr_celeba.txt, but there is no such file"),
        Reject("img_align_celeba/000004.jpg", "no row in list_eval_partition.txt"),
        Reject("img_align_celeba/000999.jpg", "no row in list_attr_celeba.txt"),
        Reject("img_align_celeba/sub/000001.jpg", "no row in list_attr_celeba.txt"),
    }
    assert len(catalog.rejects) == 4
    assert catalog.ignored == {".txt files": 1}


@pytest.mark.parametrize("pattern", ["00000[12].jpg", "img_align_celeba/00000[12].jpg", "*/00000[12]*"])
def test_filters_apply_to_names_and_to_paths_and_make_no_rejects(tmp_path: Path, pattern: str) -> None:
    side_by_side(tmp_path)
    included = celeba(tmp_path, NameFilter(include=(pattern,)))
    assert [name[-10:] for name in included.names] == ["000001.jpg", "000002.jpg"]
    assert (included.rejects, included.ignored) == ((), {"not included": 4})
    excluded = celeba(tmp_path, NameFilter(exclude=(pattern,)))
    assert [name[-10:] for name in excluded.names] == [f"00000{number}.jpg" for number in (3, 4, 5, 6)]
    assert (excluded.rejects, excluded.ignored) == ((), {"excluded": 2})


@pytest.mark.parametrize("lacking", ["img_align_celeba", "list_attr_celeba.txt"])
def test_without_images_or_attributes_it_is_not_celeba(tmp_path: Path, lacking: str) -> None:
    side_by_side(tmp_path)
    (tmp_path / lacking).rename(tmp_path / "elsewhere")
    assert not is_celeba(tmp_path)
    with pytest.raises(SourceError):
        celeba(tmp_path, EVERYTHING)


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("list_attr_celeba.txt", "1\nA B\n000001.jpg 1\n", 3),
        ("list_attr_celeba.txt", "1\nA\n000001.jpg 1\n000002.jpg x\n", 4),
        ("list_attr_celeba.txt", "", None),
        ("list_attr_celeba.txt", "0\n\n", None),
        ("list_eval_partition.txt", "000001.jpg 0\n000002.jpg 3\n", 2),
        ("list_eval_partition.txt", "000001.jpg -1\n", 1),
        ("list_eval_partition.txt", "000001.jpg 0\n\n000002.jpg a\n", 3),
        ("identity_CelebA.txt", "000001.jpg\n", 1),
        ("identity_CelebA.txt", "000001.jpg 1.5\n", 1),
        ("identity_CelebA.txt", "000001.jpg 1\n000001.jpg 2\n", 1),
        ("identity_CelebA.csv", "image_id\n000001.jpg\n", None),
    ],
)
def test_malformed_tables_name_file_and_line(tmp_path: Path, file: str, content: str, line: int | None) -> None:
    side_by_side(tmp_path)
    (tmp_path / file).with_suffix(".txt").unlink()
    (tmp_path / file).write_text(content)
    with pytest.raises(SourceError) as caught:
        celeba(tmp_path, EVERYTHING)
    assert caught.value.path == str(tmp_path / file)
    assert line is None or f" line {line}:" in str(caught.value)
