"""The walk: which files it finds, in which order, and what it counts as passed over."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import SourceError
from h5pack.sources.walk import NameFilter, child_folders, walk

EVERYTHING = NameFilter()


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def found(root: Path, names: NameFilter = EVERYTHING) -> list[str]:
    return list(walk(str(root), names).below(""))


def torchvision_order(folder: str) -> list[str]:
    """The loop of torchvision's make_dataset, over one folder."""
    listed = []
    for root, _, names in sorted(os.walk(folder, followlinks=True)):
        for name in sorted(names):
            listed.append(os.path.join(root, name))
    return listed


FOLDERS = st.sampled_from(["a", "a-b", "a0", "a b", "A", "b.jpg", "é", "雪", "\U0001f600"])
FILES = st.sampled_from(["x.jpg", "a.jpg", "a-b.png", "a0.jpg", "É.JPG", "雪.webp", "\uffee.png"])
PATHS = st.tuples(st.lists(FOLDERS, max_size=3), FILES).map(lambda parts: "/".join([*parts[0], parts[1]]))


@settings(max_examples=26, deadline=None)
@given(st.sets(PATHS, min_size=1, max_size=14))
def test_order_is_torchvisions(paths: set[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        touch(Path(root), *paths)
        result = walk(root, EVERYTHING)
        assert [os.path.join(root, name) for name in result.below("")] == torchvision_order(root)
        for folder in {path.split("/")[0] for path in paths if "/" in path}:
            listed = [os.path.join(root, name) for name in result.below(folder)]
            assert listed == torchvision_order(os.path.join(root, folder))


def test_a_folder_keeps_apart_from_those_whose_names_begin_like_it(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "a/c/2.jpg", "a-b/3.jpg", "a0/4.jpg", "a/\U0010ffff/5.jpg", "a!/6.jpg")
    assert list(walk(str(tmp_path), EVERYTHING).below("a")) == ["a/1.jpg", "a/c/2.jpg", "a/\U0010ffff/5.jpg"]


def test_a_folder_without_files_of_its_own_leads_to_those_below(tmp_path: Path) -> None:
    touch(tmp_path, "a/b/c/1.jpg")
    result = walk(str(tmp_path), EVERYTHING)
    assert list(result.below("a")) == ["a/b/c/1.jpg"]
    assert list(result.below("b")) == []


def test_only_the_part_below_top_is_walked_and_named_from_the_root(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "a/2.jpg", "a/b/3.jpg", "c/4.jpg", "c/5.txt")
    result = walk(str(tmp_path), NameFilter(exclude=("a/b/*",)), "a")
    assert list(result.below("")) == ["a/2.jpg"]
    assert result.ignored == {"excluded": 1}


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere", "1.jpg", "deep/2.jpg")
    root = touch(tmp_path / "in", "own.jpg")
    (root / "one.jpg").symlink_to(tmp_path / "elsewhere" / "1.jpg")
    (root / "all").symlink_to("../elsewhere")
    (root / "again").symlink_to(tmp_path / "elsewhere")
    assert found(root) == ["one.jpg", "own.jpg", "again/1.jpg", "again/deep/2.jpg", "all/1.jpg", "all/deep/2.jpg"]


def test_broken_links_are_found_so_that_they_become_rejects(tmp_path: Path) -> None:
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "self.jpg").symlink_to("self.jpg")
    (tmp_path / "loop").symlink_to("loop")
    result = walk(str(tmp_path), EVERYTHING)
    assert list(result.below("")) == ["gone.jpg", "self.jpg"]
    assert result.ignored == {"no suffix files": 1}
    assert child_folders(str(tmp_path)) == []


def test_loops_of_links_end_and_are_counted(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "a/2.jpg", "b/3.jpg")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "a" / "self").symlink_to(".")
    (tmp_path / "a" / "beside").symlink_to("../b")
    (tmp_path / "b" / "back").symlink_to("../a")
    result = walk(str(tmp_path), EVERYTHING)
    assert set(result.below("")) == {
        "1.jpg", "a/2.jpg", "a/beside/3.jpg", "b/3.jpg", "b/back/2.jpg",
    }  # fmt: skip
    assert result.ignored["loops of links"] == 6


def test_what_is_passed_over_is_counted_by_kind(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *("1.jpg", "2.JPEG", "3.Png", "a/4.tiff"),
        *(".hidden.jpg", "a/.DS_Store", ".jpg"),
        *("notes.txt", "a/more.TXT", "README", "archive.tar.gz"),
        *(".git/x.jpg", "a/.thumbs/y.jpg", "__MACOSX/z.jpg"),
    )
    result = walk(str(tmp_path), EVERYTHING)
    assert list(result.below("")) == ["1.jpg", "2.JPEG", "3.Png", "a/4.tiff"]
    assert result.ignored == {
        "hidden": 3,
        ".txt files": 2,
        "no suffix files": 1,
        ".gz files": 1,
        "hidden folders": 3,
    }


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        ((), (), ["1.jpg", "2.png", "a/1.jpg", "a/b/3.jpg"]),
        (("*.jpg",), (), ["1.jpg", "a/1.jpg", "a/b/3.jpg"]),
        (("1.jpg",), (), ["1.jpg", "a/1.jpg"]),
        (("a/*",), (), ["a/1.jpg", "a/x.dat", "a/b/3.jpg"]),
        (("*.dat", "2.*"), (), ["2.png", "a/x.dat"]),
        (("[12].*",), ("a/*",), ["1.jpg", "2.png"]),
        ((), ("a/b/*",), ["1.jpg", "2.png", "a/1.jpg"]),
        ((), ("1.jpg",), ["2.png", "a/b/3.jpg"]),
        ((), ("*.PNG",), ["1.jpg", "2.png", "a/1.jpg", "a/b/3.jpg"]),
        (("*.jpg",), ("*",), []),
    ],
)
def test_include_and_exclude(
    tmp_path: Path, include: tuple[str, ...], exclude: tuple[str, ...], kept: list[str]
) -> None:
    touch(tmp_path, "1.jpg", "2.png", "a/1.jpg", "a/b/3.jpg", "a/x.dat")
    result = walk(str(tmp_path), NameFilter(include, exclude))
    assert list(result.below("")) == kept
    assert sum(result.ignored.values()) == 5 - len(kept)


def test_what_filters_pass_over_is_counted(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "2.jpg", "3.jpg", "4.txt")
    result = walk(str(tmp_path), NameFilter(("[123].jpg",), ("2*",)))
    assert result.ignored == {"excluded": 1, "not included": 1}


def test_folders_300_levels_deep(tmp_path: Path) -> None:
    here = str(tmp_path)
    for _ in range(300):
        here = os.path.join(here, "d")
        os.mkdir(here)
    Path(here, "x.jpg").touch()
    assert found(tmp_path) == ["d/" * 300 + "x.jpg"]


@pytest.fixture
def too_deep(tmp_path: Path) -> Path:
    """A folder that cannot be listed by its path, also not by root: the path is too long."""
    touch(tmp_path, "good/1.jpg")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for number in range(20):
        name = "bad" if number == 0 else "x" * 250
        os.mkdir(name, dir_fd=descriptor)
        below = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    return tmp_path


def test_a_folder_that_cannot_be_listed_is_an_error(too_deep: Path) -> None:
    with pytest.raises(SourceError, match=r"bad/x.*: cannot be listed \(File name too long\); .*--exclude"):
        walk(str(too_deep), EVERYTHING)
    with pytest.raises(SourceError, match="cannot be listed"):
        walk(str(too_deep), NameFilter(exclude=("bad", "bad/", "*.png", "good/*")))


@pytest.mark.parametrize("pattern", ["bad/*", "b*", "*/x*", "*"])
def test_a_folder_that_cannot_be_listed_is_left_out_by_exclude(too_deep: Path, pattern: str) -> None:
    result = walk(str(too_deep), NameFilter(exclude=(pattern,)))
    assert list(result.below("")) == ([] if pattern == "*" else ["good/1.jpg"])
    assert result.ignored["excluded folders"] == 1


def test_a_missing_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="missing: cannot be listed"):
        walk(str(tmp_path / "missing"), EVERYTHING)


def test_an_empty_folder(tmp_path: Path) -> None:
    result = walk(str(tmp_path), EVERYTHING)
    assert (list(result.below("")), result.ignored) == ([], {})


def test_undecodable_names_are_found(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg")).touch()
    assert [os.fsencode(name) for name in found(tmp_path)] == [b"\xff.jpg"]


def test_child_folders_are_the_visible_ones(tmp_path: Path) -> None:
    touch(tmp_path, "b/1.jpg", ".git/1.jpg", "__MACOSX/1.jpg", "file.jpg")
    (tmp_path / "A").mkdir()
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "broken").symlink_to("nowhere")
    assert child_folders(str(tmp_path)) == ["A", "b", "link"]


def test_many_files_take_little_time(tmp_path: Path) -> None:
    for number in range(5_000):
        os.close(os.open(tmp_path / f"{number}.jpg", os.O_CREAT))
    started = time.perf_counter()
    assert len(found(tmp_path)) == 5_000
    assert time.perf_counter() - started < 1
