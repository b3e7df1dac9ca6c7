"""Archives as sources: the same images, labels and rules as for folders, and damage of every kind."""

from __future__ import annotations

import contextlib
import errno
import gc
import gzip
import io
import os
import pickle
import struct
import tarfile
import tempfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h5pack
from h5pack.errors import H5PackError, NoSpaceError, RejectedImageError, ResumeError, SourceError
from h5pack.images.decode import MAX_PIXELS
from h5pack.sources import archives, tar_files
from h5pack.sources.archives import ArchiveFile, member_path
from h5pack.sources.catalog import Catalog, NameFilter
from h5pack.sources.detect import SourceOptions, open_source
from tests.crashing import convert_in_child, small_file_system
from tests.makers import class_folders, flat_folder, pixels, quick, save, split_folders, tar_file, truncate, zip_file
from tests.read.encoded_files import encode
from tests.sources.files import touch


def tar_of_tars(path: Path, root: Path, mode: str = "w") -> Path:
    """A tar file that holds a tar file for each folder of files, as ImageNet is distributed."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for folder in sorted({file.parent for file in root.rglob("*") if file.is_file()}):
            data = tar_file(path.with_name("inner"), folder).read_bytes()
            add(archive, f"{folder.relative_to(root)}.tar", data)
    path.with_name("inner").unlink()
    return path


FORMS: dict[str, Callable[[Path, Path], Path]] = {
    "tar": tar_file,
    "tar.gz": lambda path, root: tar_file(path, root, "w:gz"),
    "tar.bz2": lambda path, root: tar_file(path, root, "w:bz2"),
    "tar.xz": lambda path, root: tar_file(path, root, "w:xz"),
    "nested.tar": tar_of_tars,
    "nested.tar.gz": lambda path, root: tar_of_tars(path, root, "w:gz"),
    "zip": zip_file,
    "stored.zip": lambda path, root: zip_file(path, root, zipfile.ZIP_STORED),
}


def opened(path: Path, kind: str | None = None, **names: tuple[str, ...]) -> Catalog:
    return open_source(path, SourceOptions(kind, NameFilter(**names)))


def described(catalog: Catalog) -> tuple[object, ...]:
    labels = None if catalog.labels is None else catalog.labels.tolist()
    splits = (catalog.split_names, catalog.split_ids.tolist())
    return catalog.kind, list(catalog.names), *splits, labels, catalog.label_names, catalog.ignored


def reasons(path: Path) -> dict[str, str]:
    """The reason of each image that is rejected."""
    catalog = opened(path, "flat")
    found = {reject.name: reject.reason for reject in catalog.rejects}
    for index, name in enumerate(catalog.names):
        try:
            catalog.reader.survey(index, name, MAX_PIXELS)
            catalog.reader.read(index, name)
        except RejectedImageError as error:
            found[name] = str(error)
    return found


def jpeg(seed: int = 0) -> bytes:
    return encode(pixels(seed))


def add(archive: tarfile.TarFile, name: str, data: bytes = b"", **attributes: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in attributes.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize(
    ("make", "forms"),
    [
        (lambda root: flat_folder(root, 2), "tar.gz tar.bz2 tar.xz"),
        (lambda root: class_folders(root, {"cat": 2, "dog": 1}), "tar zip nested.tar nested.tar.gz"),
        (
            lambda root: split_folders(root, {"train": {"cat": 3, "dog": 2}, "val": {"dog": 2}}),
            "tar stored.zip nested.tar",
        ),
    ],
    ids=["flat", "classes", "splits"],
)
def test_an_archive_gives_the_same_file_as_the_folder(make: Callable[[Path], Path], forms: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "photos")
    save(folder / next(folder.rglob("*.jpg")).parent.relative_to(folder) / "x.png", 99)
    h5pack.convert(folder, tmp_path / "folder.h5", **quick())
    for form in forms.split():
        h5pack.convert(FORMS[form](tmp_path / f"photos.{form}", folder), tmp_path / f"{form}.h5", **quick())
        assert (tmp_path / f"{form}.h5").read_bytes() == (tmp_path / "folder.h5").read_bytes(), form
    assert {path.name for path in tmp_path.iterdir() if "partial" in path.name} == set()


TREES = [
    ["1.jpg", "notes.txt", "deep/er/2.png"],
    ["cat/1.jpg", "cat/more/2.jpg", "dog/1.jpg", "empty/notes.txt", ".cache/3.jpg", ".git/a/4.jpg", "cat/.hidden.jpg"],
    ["train/cat/1.jpg", "test/cat/1.jpg", "__MACOSX/train/1.jpg", "docs/readme.txt"],
    ["train/x/.thumbs/1.jpg", "train/x/1.jpg", "val/2.jpg", "a-b/x.dat"],
    ["a/1.jpg", "a-b/2.jpg", "a0/3.jpg", "é/雪.JPG", "b/c/d/e/5.jpg"],
    ["images/1.jpg", "images/2.jpg", "masks/1.png", "masks/2.png"],
    ["train/images/1.jpg", "train/masks/1.png", "val/x/2.jpg"],
    ["cat/1.jpg", "stray.jpg"],
    ["train/cat/1.jpg", "cat/1.jpg"],
    ["notes.txt"],
]


@pytest.mark.parametrize("names", TREES, ids=lambda names: names[0])
@pytest.mark.parametrize("kind", [None, "flat", "classes", "splits"])
def test_the_rules_are_those_of_folders(names: list[str], kind: str | None, tmp_path: Path) -> None:
    root = touch(tmp_path / "in", *names)
    paths = [tar_file(tmp_path / "x.tar", root), zip_file(tmp_path / "x.zip", root)]
    for patterns in ({}, {"exclude": ("*2.*", "docs/*")}, {"include": ("*.jpg",)}, {"include": ("cat/.*",)}):
        try:
            expected: object = described(opened(root, kind, **patterns))
        except SourceError as error:
            expected = type(error), error.parameters
        for path in paths:
            try:
                found: object = described(opened(path, kind, **patterns))
            except SourceError as error:
                found = type(error), error.parameters
            assert found == expected


@pytest.mark.parametrize(
    ("names", "kind", "found"),
    [
        (["photos/cat/1.jpg", "photos/dog/1.jpg", "photos/readme.txt"], "classes", "cat/1.jpg"),
        (["./photos/1.jpg", "__MACOSX/photos/._1.jpg", ".DS_Store"], "flat", "1.jpg"),
        (["photos/train/cat/1.jpg", "photos/val/cat/2.jpg"], "splits", "train/cat/1.jpg"),
        (["train/cat/1.jpg", "train/dog/1.jpg"], "splits", "train/cat/1.jpg"),
        (["photos/cat/1.jpg", "readme.txt"], "classes", "photos/cat/1.jpg"),
    ],
)
def test_the_only_folder_of_an_archive_is_its_root(names: list[str], kind: str, found: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in names:
            add(archive, name)
    catalog = opened(tmp_path / "x.tar")
    assert (catalog.kind, catalog.names[0]) == (kind, found)
    assert opened(tmp_path / "x.tar", include=(found,)).names[0] == found


def test_an_only_folder_may_be_a_class(tmp_path: Path) -> None:
    path = tar_file(tmp_path / "x.tar", touch(tmp_path / "in", "cat/1.jpg"))
    assert opened(path).kind == "flat"
    assert opened(path, "classes").label_names == ("cat",)


def test_archives_are_known_by_their_content_too(tmp_path: Path) -> None:
    folder = flat_folder(tmp_path / "in", 2)
    for make in (tar_file, zip_file):
        assert len(opened(make(tmp_path / "photos", folder))) == 2
    tar_file(tmp_path / "photos.tar", folder, "w:gz")
    assert len(opened(tmp_path / "photos.tar")) == 2
    for kind in ("hdf5", "manifest"):
        with pytest.raises(H5PackError):
            opened(tmp_path / "photos.tar", kind)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_every_tar_format(form: int, tmp_path: Path) -> None:
    long = "/".join(["d" * 60] * 3 + ["x.jpg"])
    names = ["a/1.jpg", long, "b/é雪.jpg", os.fsdecode(b"b/\xff.jpg")]
    with tarfile.open(tmp_path / "x.tar", "w", format=form, pax_headers={"comment": "all"}) as archive:
        for name in names:
            add(archive, name, name.encode("utf-8", "surrogateescape"))
    catalog = opened(tmp_path / "x.tar", "flat")
    assert sorted(catalog.names) == sorted(names)
    for index, name in enumerate(catalog.names):
        assert catalog.reader.read(index, name) == name.encode("utf-8", "surrogateescape")


def test_every_header_is_read_alike_by_the_fast_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tar_file(tmp_path / "x.tar", class_folders(tmp_path / "in", {"a": 3, "b": 2}))
    fast = opened(path)
    monkeypatch.setattr(tar_files, "_plain_header", lambda block: None)
    slow = opened(path)
    assert described(fast) == described(slow)
    assert fast.reader.members.tolist() == slow.reader.members.tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_a_truncated_jpeg_is_a_reject(form: str, tmp_path: Path) -> None:
    folder = flat_folder(tmp_path / "in", 3)
    truncate(folder / "00001.jpg")
    (folder / "empty.jpg").touch()
    report = h5pack.convert(FORMS[form](tmp_path / f"x.{form}", folder), tmp_path / "o.h5", **quick())
    h5pack.convert(folder, tmp_path / "folder.h5", **quick())
    assert (report.images, report.rejects) == (2, 2)
    assert (tmp_path / "o.h5.rejects.csv").read_text() == (tmp_path / "folder.h5.rejects.csv").read_text()


def test_a_tar_file_that_was_cut_or_damaged_anywhere_is_an_error(tmp_path: Path) -> None:
    path = tar_file(tmp_path / "x.tar", flat_folder(tmp_path / "in", 3))
    data = path.read_bytes()
    with tarfile.open(path) as archive:
        _, middle, last = archive.getmembers()
    end = last.offset_data + -(-last.size // 512) * 512
    for whole, notes in ((data[: end + 512], 0), (data + data, 1)):
        path.write_bytes(whole)
        assert (len(opened(path)), len(opened(path).notes)) == (3, notes)
    cuts = (0, 100, 511, 512, 700, middle.offset_data + 10, last.offset, last.offset_data, end, end + 511)
    header = data[: middle.offset + 7] + b"?" + data[middle.offset + 8 :]
    for damaged in (*(data[:cut] for cut in cuts), header, gzip.compress(data)[:-9]):
        path.write_bytes(damaged)
        with pytest.raises(SourceError) as caught:
            opened(path)
        assert caught.value.path == str(path)


def test_hidden_members_of_a_tar_file_of_tar_files_are_not_opened(tmp_path: Path) -> None:
    save(tmp_path / "in" / "cat" / "1.jpg")
    save(tmp_path / "in" / "dog" / "2.jpg")
    path = tar_of_tars(tmp_path / "x.tar", tmp_path / "in")
    with tarfile.open(path, "a") as archive:
        add(archive, "._cat.tar", b"\0\5\x16\7\0\2\0\0Mac OS X")
    catalog = opened(path)
    assert (list(catalog.names), catalog.label_names) == (["cat/1.jpg", "dog/2.jpg"], ("cat", "dog"))
    assert catalog.ignored == {"hidden": 1}


def test_a_tar_file_in_a_tar_file_is_read_up_to_its_end_only(tmp_path: Path) -> None:
    path, inner = tmp_path / "x.tar", tar_file(tmp_path / "in.tar", flat_folder(tmp_path / "in", 2)).read_bytes()
    with tarfile.open(tmp_path / "in.tar") as archive:
        last = archive.getmembers()[-1]
    end = last.offset_data + last.size
    unmarked = inner[: -(-end // 512) * 512]
    for data in (inner[: last.offset_data + 99], unmarked, b"", b"no tar file", b"no tar" * 999, bytes(512) + inner):
        with tarfile.open(path, "w") as archive:
            add(archive, "a.tar", data)
            add(archive, "b/c.tar", inner)
        if data.startswith(bytes(512)):
            assert list(opened(path).names) == ["b/c/00000.jpg", "b/c/00001.jpg"]
            assert len(opened(path).notes) == 1
        else:
            with pytest.raises(SourceError, match=r"x\.tar: 'a\.tar' in it") as caught:
                opened(path)
            assert caught.value.path == str(path)
    with tarfile.open(path, "w") as archive:
        add(archive, "a.tar", inner)
        add(archive, "../b.tar", inner)
    assert list(opened(path).names) == ["00000.jpg", "00001.jpg"]


def test_of_members_of_one_name_the_last_is_packed(tmp_path: Path) -> None:
    first, last = jpeg(1), jpeg(2)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for data in (first, last):
            add(archive, "1.jpg", data)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as zipped:
        zipped.writestr("1.jpg", first)
        with pytest.warns(UserWarning, match="Duplicate"):
            zipped.writestr("1.jpg", last)
    for path in (tmp_path / "x.tar", tmp_path / "x.zip"):
        catalog = opened(path)
        assert list(catalog.names) == ["1.jpg"]
        assert catalog.reader.read(0, "1.jpg") == last
        assert [reject.name for reject in catalog.rejects] == ["1.jpg"]


OUTSIDE = ["../out.jpg", "a/../../out.jpg", "/tmp/out.jpg", "..", "a/../b.jpg"]


def test_members_that_leave_the_archive_are_rejected_and_written_nowhere(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with tarfile.open(tmp_path / "work" / "x.tar", "w") as archive:
        for name in ("1.jpg", *OUTSIDE):
            add(archive, name, jpeg())
        add(archive, "d" * 5_000 + ".jpg", jpeg())
    with zipfile.ZipFile(tmp_path / "work" / "x.zip", "w") as zipped:
        for name in ("1.jpg", *OUTSIDE):
            zipped.writestr(zipfile.ZipInfo(name), jpeg())
    for form in ("tar", "zip"):
        found = reasons(tmp_path / "work" / f"x.{form}")
        assert set(found) - {("d" * 5_000)[:4_096]} == set(OUTSIDE) - {".."}
        pack = tmp_path / "work" / f"{form}.h5"
        assert h5pack.convert(tmp_path / "work" / f"x.{form}", pack, **quick()).images == 1
        h5pack.export(pack, tmp_path / "work" / form, num_workers=1)
    assert {path.name for path in tmp_path.iterdir()} == {"work"}
    assert not Path("/tmp/out.jpg").exists()
    assert [member_path(name) for name in ("./a//b", "a/./b", "a\0b", ".", "")] == ["a/b", "a/b", None, None, None]


def test_links_are_followed_inside_the_archive_only(tmp_path: Path) -> None:
    links = {"chain.jpg": "sym.jpg", "sym.jpg": "d/../d/1.jpg", "out.jpg": "../../1.jpg", "abs.jpg": "/etc/passwd"}
    links |= {"gone.jpg": "nowhere.jpg", "loop.jpg": "loop.jpg"}
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, target in links.items():
            add(archive, name, type=tarfile.SYMTYPE, linkname=target)
        add(archive, "d/1.jpg", jpeg())
        add(archive, "hard.jpg", type=tarfile.LNKTYPE, linkname="./d/1.jpg")
        add(archive, "hard_to_sym.jpg", type=tarfile.LNKTYPE, linkname="sym.jpg")
        add(archive, "early.jpg", type=tarfile.LNKTYPE, linkname="later.jpg")
        add(archive, "later.jpg", jpeg(1))
        add(archive, "pipe.jpg", type=tarfile.FIFOTYPE)
        add(archive, "folder", type=tarfile.SYMTYPE, linkname="d")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as zipped:
        entry = zipfile.ZipInfo("link.jpg")
        entry.external_attr = 0o120777 << 16
        zipped.writestr(entry, "1.jpg")
        zipped.writestr("1.jpg", jpeg())
    assert set(reasons(tmp_path / "x.tar")) == {"out.jpg", "abs.jpg", "gone.jpg", "loop.jpg", "early.jpg", "pipe.jpg"}
    catalog = opened(tmp_path / "x.tar", "flat", include=("hard*.jpg", "chain.jpg"))
    assert [catalog.reader.read(index, "") for index in range(len(catalog))] == [jpeg()] * 3
    assert set(reasons(tmp_path / "x.zip")) == {"link.jpg"}


def test_sparse_members_are_rejected(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "1.jpg", jpeg(), pax_headers={"GNU.sparse.map": "0,9", "GNU.sparse.size": "99"})
        add(archive, "2.jpg", jpeg())
    assert set(reasons(tmp_path / "x.tar")) == {"1.jpg"}


@pytest.mark.parametrize(
    ("kind", "data"), [(tarfile.GNUTYPE_LONGNAME, bytes(4_000_000)), (tarfile.XHDTYPE, b"9" * 5_000)]
)
def test_an_extended_header_that_is_long_or_has_a_long_number_is_refused(
    tmp_path: Path, kind: bytes, data: bytes
) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        add(archive, "header", data, type=kind)
        add(archive, "1.jpg", jpeg())
    with pytest.raises(SourceError) as caught:
        opened(tmp_path / "x.tar")
    assert type(caught.value.__cause__) is tarfile.HeaderError


def zipped(path: Path, *contents: bytes, compression: int = zipfile.ZIP_DEFLATED) -> bytearray:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for number, data in enumerate(contents):
            archive.writestr(f"{number}.jpg", data)
    return bytearray(path.read_bytes())


def patched(data: bytearray, number: int, offset: int, form: str, value: int) -> bytearray:
    """Change a number in the central header of a member."""
    start = -1
    for _ in range(number + 1):
        start = data.index(b"PK\1\2", start + 1)
    struct.pack_into(form, data, start + offset, value)
    return data


FLAGS, METHOD, CRC, STORED, SIZE, HEADER = (8, "<H"), (10, "<H"), (16, "<I"), (20, "<I"), (24, "<I"), (42, "<I")


@pytest.mark.parametrize("missing", [slice(0, 100), slice(500, 600)])
def test_a_zip_file_that_lacks_bytes_has_damaged_members(missing: slice, tmp_path: Path) -> None:
    """Offsets count from the end of the file, so they become negative."""
    data = zipped(tmp_path / "x.zip", jpeg(), jpeg(1), jpeg(2), compression=zipfile.ZIP_STORED)
    del data[missing]
    (tmp_path / "x.zip").write_bytes(data)
    assert set(reasons(tmp_path / "x.zip")) == {"0.jpg"}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (FLAGS, 1), (METHOD, 99), (CRC, 7), (SIZE, 0xFFFF_0000), (SIZE, 5), (STORED, 0xFFFF_0000), (STORED, 9),
        (HEADER, 1), (HEADER, 0x7FFF_0000),
    ],
)  # fmt: skip
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damaged_zip_members_are_rejects(where: tuple[int, str], value: int, compression: int, tmp_path: Path) -> None:
    data = zipped(tmp_path / "x.zip", jpeg(), jpeg(1), jpeg(2), compression=compression)
    (tmp_path / "x.zip").write_bytes(patched(data, 1, *where, value))
    tracemalloc.start()
    try:
        assert set(reasons(tmp_path / "x.zip")) == {"1.jpg"}
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()


def test_zip_bombs_are_rejected_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_BOMB_BYTES", 4_000_000)
    bomb = jpeg() + bytes(20_000_000)
    data = zipped(tmp_path / "x.zip", bomb, jpeg(), bomb)
    # This one declares less than it expands to.
    (tmp_path / "x.zip").write_bytes(patched(data, 2, *SIZE, 100_000))
    del bomb
    tracemalloc.start()
    try:
        assert set(reasons(tmp_path / "x.zip")) == {"0.jpg", "2.jpg"}
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_members_that_share_bytes_are_refused(tmp_path: Path) -> None:
    data = zipped(tmp_path / "x.zip", bytes(20_000), *[b""] * 20, compression=zipfile.ZIP_STORED)
    for number in range(21):
        patched(patched(data, number, *STORED, 20_000), number, *HEADER, 0)
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(SourceError):
        opened(tmp_path / "x.zip")


def test_compressed_tar_files_that_expand_too_far_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tar_file(tmp_path / "x.tar", touch(tmp_path / "in", "1.jpg")).read_bytes() + bytes(4_000_000)
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(data))
    assert len(opened(tmp_path / "x.tar.gz")) == 1
    monkeypatch.setattr(archives, "_FILE_BOMB_BYTES", 2_000_000)
    with pytest.raises(SourceError):
        opened(tmp_path / "x.tar.gz")


def test_backslashes_separate_folders_in_zip_files_of_windows_only(tmp_path: Path) -> None:
    for system, kind, names in ((0, "classes", ["cat/1.jpg", "dog/2.jpg"]), (3, "flat", ["cat\\1.jpg", "dog\\2.jpg"])):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            for name in ("cat\\1.jpg", "dog\\2.jpg"):
                entry = zipfile.ZipInfo(name)
                entry.create_system = system
                archive.writestr(entry, jpeg())
        catalog = opened(tmp_path / "x.zip")
        assert (catalog.kind, sorted(catalog.names)) == (kind, names)


def test_names_of_zip_files_are_unicode_however_they_are_stored(tmp_path: Path) -> None:
    def unicode_path(name: str, legacy: bytes) -> bytes:
        return struct.pack("<HHBL", 0x7075, 5 + len(name.encode()), 1, zlib.crc32(legacy)) + name.encode()

    lossy = b"bk__/a.png"
    entries = {
        "b\u043a/a.png": (lossy, struct.pack("<HHB", 0x5455, 1, 3) + unicode_path("b\u043a/a.png", lossy), 0),
        "b\u0443/a.png": (lossy, unicode_path("b\u0443/a.png", lossy), 0),
        "bk__/a.png": (lossy, unicode_path("other/a.png", b"another name"), 0),
        "caf\u00e9/a.png": ("caf\u00e9/a.png".encode(), b"", 0),
        "\u732b/a.png": ("\u732b/a.png".encode(), b"", 0x800),
        "caf\u2310/a.png": (b"caf\xa9/a.png", b"", 0),
    }
    data, directory = b"", b""
    for stored, extra, flags in entries.values():
        fixed = struct.pack("<HHHHLLLHH", flags, 0, 0, 0, zlib.crc32(b"x"), 1, 1, len(stored), len(extra))
        directory += b"PK\1\2" + struct.pack("<BBH", 20, 3, 20) + fixed + struct.pack("<HHHLL", 0, 0, 0, 0, len(data))
        directory += stored + extra
        data += b"PK\3\4" + struct.pack("<H", 20) + fixed + stored + extra + b"x"
    end = struct.pack("<HHHHLLH", 0, 0, len(entries), len(entries), len(directory), len(data), 0)
    (tmp_path / "x.zip").write_bytes(data + directory + b"PK\5\6" + end)
    _, members = archives.open_zip(tmp_path / "x.zip")
    assert [*members.found] == [*entries]


def test_a_zip_file_without_its_directory_is_an_error(tmp_path: Path) -> None:
    data = zipped(tmp_path / "x.zip", jpeg(), jpeg(1))
    directory = data.index(b"PK\1\2")
    for damaged in (data[:directory], data[:-10], data[:directory] + b"xxxx" + data[directory + 4 :], b"PK\3\4", b""):
        (tmp_path / "x.zip").write_bytes(damaged)
        with pytest.raises(SourceError) as caught:
            opened(tmp_path / "x.zip")
        assert caught.value.path == str(tmp_path / "x.zip")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["tar", "zip"]), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_any_damage_is_an_error_or_a_reject(form: str, changes: list[tuple[float, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x.{form}"
        if form == "zip":
            zipped(path, *map(jpeg, range(3)))
        else:
            with tarfile.open(path, "w") as archive:
                for number in range(3):
                    add(archive, f"a/{number}.jpg", jpeg(number), pax_headers={"comment": "x" * number})
        data = bytearray(path.read_bytes())
        for share, value in changes:
            data[int(share * (len(data) - 1))] = value
        path.write_bytes(data)
        with contextlib.suppress(H5PackError):
            reasons(path)


def test_a_replaced_archive_is_an_error(tmp_path: Path) -> None:
    path = tar_file(tmp_path / "x.tar", flat_folder(tmp_path / "in", 3))
    catalog = opened(path)
    reader = pickle.loads(pickle.dumps(catalog.reader))
    assert reader.read(0, "") == catalog.reader.read(0, "")
    os.replace(tar_file(tmp_path / "y.tar", tmp_path / "in"), path)
    for each in (catalog.reader, reader, pickle.loads(pickle.dumps(reader))):
        with pytest.raises(SourceError):
            each.read(1, "")
        with pytest.raises(SourceError):
            each.survey(1, "", MAX_PIXELS)
    path.unlink()
    with pytest.raises(SourceError):
        reader.survey(2, "", MAX_PIXELS)


@pytest.mark.parametrize("form", ["tar", "tar.gz"])
def test_an_interrupted_conversion_of_an_archive_resumes(form: str, tmp_path: Path) -> None:
    source = FORMS[form](tmp_path / f"x.{form}", class_folders(tmp_path / "in", {"a": 12, "b": 9}))
    settings = quick(chunk_rows=4)
    h5pack.convert(source, tmp_path / "whole.h5", **settings)
    changes = convert_in_child(source, tmp_path / "o.h5", {**settings, "overwrite": True}, None)
    writes = [number for number, change in enumerate(changes) if "rows.log" in change]
    (tmp_path / "o.h5").unlink()
    convert_in_child(source, tmp_path / "o.h5", settings, writes[len(writes) // 2])
    before = source.stat()
    os.utime(source, ns=(0, 7))
    with pytest.raises(ResumeError):
        h5pack.convert(source, tmp_path / "o.h5", resume=True, **settings)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert h5pack.convert(source, tmp_path / "o.h5", resume=True, **settings).resumed_rows > 0
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_workers_read_a_compressed_tar_file_without_unpacking_it(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "in", {"a": 20, "b": 20})
    source = tar_file(tmp_path / "x.tgz", folder, "w:gz")
    descriptors = len(os.listdir("/proc/self/fd"))
    h5pack.convert(source, tmp_path / "o.h5", num_workers=2, start_method="fork")
    h5pack.convert(folder, tmp_path / "folder.h5", **quick())
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "folder.h5").read_bytes()
    catalog = open_source(source, SourceOptions(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "x.tgz", "o.h5", "folder.h5"}
    # Workers that are not forked get a pickled reader.
    reader = pickle.loads(pickle.dumps(catalog.reader))
    assert reader.read(3, "") == catalog.reader.read(3, "") == (folder / catalog.names[3]).read_bytes()
    del catalog, reader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_workers_read_a_compressed_tar_file_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, whose workers are not forked from this process either."""
    folder = flat_folder(tmp_path / "in", 20)
    source = tar_file(tmp_path / "x.tgz", folder, "w:gz")
    decompress = ArchiveFile.decompress

    def decompress_without_proc(file: ArchiveFile, stream: BinaryIO, folder: Path) -> None:
        decompress(file, stream, folder)
        file.copy_path = str(tmp_path / "proc/1/fd/3")

    monkeypatch.setattr(ArchiveFile, "decompress", decompress_without_proc)
    h5pack.convert(source, tmp_path / "o.h5", num_workers=2, start_method="forkserver")
    h5pack.convert(folder, tmp_path / "folder.h5", **quick())
    assert (tmp_path / "o.h5").read_bytes() == (tmp_path / "folder.h5").read_bytes()


def test_no_space_for_the_decompressed_copy_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        add(archive, "1.jpg", jpeg() + bytes(2_000_000))
    with small_file_system(tmp_path / "small", "320k") as small, pytest.raises(NoSpaceError):
        h5pack.convert(tmp_path / "x.tar.gz", small / "o.h5", **quick())


def test_zstd_is_refused_where_python_cannot_read_it(tmp_path: Path) -> None:
    (tmp_path / "x.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(SourceError):
        opened(tmp_path / "x.tar.zst")


def test_many_archives_do_not_exhaust_file_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MAX_OPEN_FILES", 2)
    folders = [flat_folder(tmp_path / f"{number}", 2) for number in range(5)]
    indexed = [tar_files.open_tar(tar_file(one.with_suffix(".tar"), one), tmp_path) for one in folders]
    for file, _ in indexed:
        file.close()
    reader = archives.ArchiveReader.of([file for file, _ in indexed], [some.values(some.found) for _, some in indexed])
    before = len(os.listdir("/proc/self/fd"))
    whole = [reader.read(index, "") for index in range(10)]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert [reader.read(index, "") for index in range(10)] == whole


def test_a_storage_fault_in_a_mask_is_no_rejected_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tar_file(tmp_path / "x.tar", touch(tmp_path / "in", "images/1.jpg", "masks/1.png"))
    reader = opened(path, "pairs").reader
    monkeypatch.setattr(archives.ArchiveFile, "read", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(SourceError):
        reader.survey_mask(0, 0, "masks/1.png", MAX_PIXELS)
