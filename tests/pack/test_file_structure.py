"""The facts of HDF5 that writing in place rests on: chunk addresses are fixed, aligned, and a prefix for fewer rows."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import H5PackError
from h5pack.format import schema
from h5pack.format.fields import RaggedRows
from h5pack.inspect.info import opening_ranges
from h5pack.pack import file_structure
from h5pack.pack.compression import parse_compression
from h5pack.pack.file_structure import (
    FileStructure,
    PackTables,
    PixelRows,
    plan_metadata,
    write_compressed,
    write_structure,
)
from h5pack.sources.catalog import Reject


def tables(rows: int, classes: int = 3) -> PackTables:
    return PackTables(
        labels=np.arange(rows, dtype=np.int64) % classes,
        label_names=tuple(f"class {number}" for number in range(classes)),
        fields={"weight": np.linspace(0, 1, rows)},
        filenames=[f"{row:08d}.jpg" for row in range(rows)],
        splits=[("train", 0, rows // 2), ("größe", rows // 2, rows)],
        checksums=np.arange(rows, dtype=np.uint32),
        statistics={"mean": [0.5] * 3, "std": [0.1] * 3, "rows": rows, "step": 1, "split": "größe"},
        rejects=[Reject("x.jpg", "truncated")],
    )


@settings(max_examples=26)
@given(
    row=st.sampled_from([(32, 32, 3), (218, 178, 3), (64, 64, 1), (7, 5, 3)]),
    chunk_bytes=st.sampled_from([1, 65_536, 200_000, 4_194_304]),
    planned=st.integers(1, 20_000),
    share=st.floats(0.001, 1),
    compat=st.booleans(),
)
def test_fewer_rows_have_the_same_addresses(
    row: tuple[int, int, int], chunk_bytes: int, planned: int, share: float, compat: bool
) -> None:
    chunk_rows = -(-chunk_bytes // int(np.prod(row)))
    structure = FileStructure(row, chunk_rows, "nhwc", compat, {"h5pack_version": "1"})
    structure = replace(structure, metadata_bytes=plan_metadata(-(-planned // chunk_rows), structure, 100, 2))
    packed = max(1, int(planned * share))
    with tempfile.TemporaryDirectory() as folder:
        (first,) = write_structure(Path(folder) / "a.h5", structure, planned, None)
        (second,) = write_structure(Path(folder) / "b.h5", structure, packed, tables(packed))
        size = (Path(folder) / "a.h5").stat().st_size
    assert len(first) == -(-planned // chunk_rows)
    assert np.array_equal(second, first[: len(second)])
    if structure.all_chunk_bytes[0] >= schema.ALIGNMENT_THRESHOLD_BYTES:
        assert len({*np.diff(first).tolist()}) <= 1, "the distance of chunks does not vary"
        assert first[0] in (2**20, 2**21), "after one block of metadata"
    assert (np.diff(first) >= chunk_rows * np.prod(row)).all()
    assert first[-1] + chunk_rows * np.prod(row) <= size
    if chunk_rows * np.prod(row) >= schema.ALIGNMENT_THRESHOLD_BYTES:
        assert not (first % schema.ALIGNMENT_BYTES).any()


def test_gaps_between_chunks_of_encoded_images_are_an_error() -> None:
    structure, edges = FileStructure((), 2**16, "nhwc", False, {}), np.array([0, 5, 100_000])
    (offsets,) = structure.row_offsets((np.array([4096, 4096 + 2**16]),), edges)
    assert [offsets.offset(0), offsets.offset(1), *offsets.edges(1, 1).tolist()] == [4096, 4101, 0, 99_995]
    with pytest.raises(H5PackError):
        structure.row_offsets((np.array([4096, 4097 + 2**16]),), edges)


def test_the_first_structure_is_sparse_and_says_that_it_is_incomplete(tmp_path: Path) -> None:
    structure = FileStructure((218, 178, 3), 36, "nhwc", False, {})
    write_structure(tmp_path / "a.h5", structure, 1_000_000, None)
    status = (tmp_path / "a.h5").stat()
    assert status.st_size > 116_000_000_000
    assert status.st_blocks * 512 < 10_000_000
    with h5py.File(tmp_path / "a.h5") as file:
        assert int(file.attrs[schema.COMPLETE]) == 0


def test_text_is_utf8_and_says_so(tmp_path: Path) -> None:
    structure = FileStructure((4, 4, 3), 5000, "nhwc", False, {})
    write_structure(tmp_path / "a.h5", structure, 6, tables(6))
    with h5py.File(tmp_path / "a.h5") as file:
        for item in (file["splits/name"], file["filenames"], file["rejects/reasons"]):
            assert h5py.check_string_dtype(item.dtype).encoding == "utf-8"
        attribute = file["statistics"].attrs.get_id("split")
        assert h5py.check_string_dtype(attribute.dtype).encoding == "utf-8"
        assert (file["statistics"].attrs["split"].decode(), file["splits/name"][1].decode()) == ("größe", "größe")


def test_no_object_stores_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Older versions of h5py store times in groups that they create.
    monkeypatch.delattr(h5py.Group, "create_group")
    fields = (PixelRows("mask", schema.MASK, (4, 4), "|u1"), PixelRows("depth", schema.MASK, (4, 4), "<i4"))
    structure = FileStructure((4, 4, 3), 5, "nhwc", False, {}, parse_compression("gzip"), fields=fields)
    texts = {"text": RaggedRows.of_texts(["a", "b", "c", "d", "e", "f"], schema.TEXT)}
    known = replace(tables(6), fields={"weight": np.arange(6), **texts}, pixel_checksums=(np.zeros(6, "u4"),) * 2)
    write_structure(tmp_path / "a.h5", structure, 6, known)
    write_compressed(tmp_path / "b.h5", structure, 6, known, [b"chunk"] * 6)
    for name in ("a.h5", "b.h5"):
        headers = re.findall(b"OHDR\x02(.)", (tmp_path / name).read_bytes(), re.DOTALL)
        assert len(headers) > 15
        assert not [flags for flags in headers if flags[0] & 0x20]


def test_a_full_disk_is_the_systems_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unable to extend file, errno = 28, error message = 'No space'")

    monkeypatch.setattr(file_structure, "_create_datasets", full)
    with pytest.raises(OSError, match="No space") as caught:
        write_compressed(tmp_path / "a.h5", FileStructure((4, 4, 3), 5, "nhwc", False, {}), 6, tables(6), [])
    assert caught.value.errno == 28


@pytest.mark.parametrize(("chunks", "compat"), [(1, False), (20_000, False), (150_000, False), (20_000, True)])
def test_a_program_reads_one_range_to_open_a_pack(tmp_path: Path, chunks: int, compat: bool) -> None:
    path = tmp_path / "a.h5"
    structure = FileStructure((256, 128, 3), 1, "nhwc", compat, {"h5pack_version": "1", "h5pack_options": "{}"})
    structure = replace(structure, metadata_bytes=plan_metadata(chunks, structure, 9_000, 2))
    write_structure(path, structure, chunks, replace(tables(chunks, 1_000), rejects=[]))
    ((start, stop),) = opening_ranges(path)
    assert start == 0
    assert stop <= 2**21
    if not compat:
        with h5py.File(path) as file:
            assert file["images"].id.get_chunk_info(0).byte_offset == stop


def test_a_compressed_pack_opens_with_one_range(tmp_path: Path) -> None:
    chunks, path = 2_000, tmp_path / "a.h5"
    structure = FileStructure((4, 4, 3), 8, "nhwc", False, {}, parse_compression("gzip"))
    structure = replace(structure, metadata_bytes=plan_metadata(chunks, structure, 100, 2))
    stored = (bytes(70_000 + number % 7) for number in range(chunks))
    write_compressed(path, structure, 8 * chunks, tables(8 * chunks), stored)
    ((start, stop),) = opening_ranges(path)
    assert (start, stop <= 2**21) == (0, True)
