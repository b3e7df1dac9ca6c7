"""Compressed packs: the same rows in every compression, the same bytes whatever happened on the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

import h5pack
from h5pack import cli
from h5pack.errors import (
    DamagedRowsError,
    H5PackError,
    NoSpaceError,
    OptionsError,
    OutputBusyError,
    OutputExistsError,
    ResumeError,
)
from h5pack.format import schema
from h5pack.format.checksums import row_checksums
from h5pack.format.plans import plan_cache
from h5pack.format.schema import FilterId
from h5pack.pack import compression, file_structure, finish
from h5pack.pack.compression import (
    CompressTask,
    compress_chunk,
    compress_rows,
    max_compressed_bytes,
    parse_compression,
    require_filter,
)
from h5pack.pack.conversion import Conversion
from h5pack.pack.finish import is_complete
from h5pack.pack.options import ConvertOptions
from h5pack.system.processes import run
from tests.crashing import (
    convert_in_child,
    convert_until,
    distinct_steps,
    files_of,
    kill_while_held,
    leftovers,
    lose_pages,
)
from tests.makers import flat_folder, hdf5_file, quick
from tests.read.files import flip_in_chunk, index_of

# The filter and its parameters (the plugin puts its version and the size of an element in front), and h5py's arguments.
METHODS: dict[str, tuple[FilterId, tuple[int, ...], Any]] = {
    "gzip": (FilterId.GZIP, (4,), {"compression": "gzip"}),
    "gzip:1": (FilterId.GZIP, (1,), {"compression": "gzip", "compression_opts": 1}),
    "zstd": (FilterId.ZSTD, (3,), hdf5plugin.Zstd()),
    "zstd:9": (FilterId.ZSTD, (9,), hdf5plugin.Zstd(clevel=9)),
    "bitshuffle-lz4": (FilterId.BITSHUFFLE, (0, 2), hdf5plugin.Bitshuffle(cname="lz4")),
}
TABLES = ("labels", "filenames", "splits/name", "splits/rows", "checksums/images", "checksums/labels")
ROWS = 76
CHUNK_ROWS = 7
DONE = {"o.h5", "o.h5.rejects.csv"}


@pytest.fixture(scope="module")
def packs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pack of the source in each compression, and one without."""
    folder = tmp_path_factory.mktemp("packs")
    found = {name: folder / f"{number}.h5" for number, name in enumerate(["none", *METHODS])}
    for name, path in found.items():
        h5pack.convert(source, path, **options(name))
    return found


def options(compression: str, **settings: Any) -> dict[str, Any]:
    return quick(**{"compression": compression, "chunk_rows": CHUNK_ROWS, **settings})


@pytest.mark.parametrize("name", METHODS)
def test_rows_and_tables_are_those_of_the_uncompressed_pack(packs: dict[str, Path], name: str) -> None:
    with h5py.File(packs["none"]) as raw, h5py.File(packs[name]) as file:
        assert file["images"].shape == (ROWS, 60, 50, 3)
        assert list(file) == list(raw)
        for table in ("images", *TABLES, "statistics/mean", "statistics/std", "rejects/filenames", "rejects/reasons"):
            assert np.array_equal(file[table][()], raw[table][()]), table
        for item in ("images", "labels", "statistics", "/"):
            ours, theirs = dict(file[item].attrs), dict(raw[item].attrs)
            changed = {key for key in {**ours, **theirs} if not np.array_equal(ours.get(key), theirs.get(key))}
            assert changed == {"images": {"h5pack_rdcc_nbytes"}, "/": {"h5pack_options"}}.get(item, set())
        assert json.loads(file.attrs["h5pack_options"])["compression"] == parse_compression(name).name
        assert "compression" not in json.loads(raw.attrs["h5pack_options"])
    report = h5pack.verify(packs[name])
    assert (report.ok, report.rows) == (True, ROWS)
    (described,) = (item for item in h5pack.info(packs[name]).datasets if item.name == "images")
    assert described.filters == (METHODS[name][0].name.lower(),)
    one, other = h5pack.H5Dataset(packs[name]), h5pack.H5Dataset(packs["none"])
    assert all(np.array_equal(one[row][0], other[row][0]) for row in (0, 6, 7, 49, 75))


def test_every_method_is_tested() -> None:
    assert {name.partition(":")[0] for name in METHODS} == set(schema.COMPRESSION_METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_rows_are_read_directly_with_checksums_of_chunks(packs: dict[str, Path], name: str) -> None:
    index = index_of(packs[name], "images")
    assert (index.library_reason, index.codec is None, index.stored_checksums is None) == (None, False, False)


@pytest.mark.parametrize("name", METHODS)
def test_chunks_are_what_h5py_stores_in_order_of_the_rows(packs: dict[str, Path], name: str, tmp_path: Path) -> None:
    number, parameters, asked = METHODS[name]
    with h5py.File(packs[name]) as file, h5py.File(tmp_path / "h5py.h5", "w") as other:
        images = file["images"]
        create = images.id.get_create_plist()
        found, flags, values, _ = create.get_filter(0)
        wanted = (1, number, h5py.h5z.FLAG_MANDATORY, parameters)
        assert (create.get_nfilters(), found, flags, values[len(values) - len(parameters) :]) == wanted
        assert (images.maxshape, images.chunks) == ((None, 60, 50, 3), (CHUNK_ROWS, 60, 50, 3))
        cache = plan_cache(images.shape, images.chunks, 1, filtered=True)
        assert images.attrs["h5pack_rdcc_nbytes"] == cache.nbytes > 0
        chunks = [images.id.get_chunk_info(place) for place in range(images.id.get_num_chunks())]
        assert [(chunk.chunk_offset[0], chunk.filter_mask) for chunk in chunks] == [(7 * n, 0) for n in range(11)]
        assert (np.diff([chunk.byte_offset for chunk in chunks]) > 0).all()
        shape = {"chunks": images.chunks, "maxshape": images.maxshape}
        theirs = other.create_dataset("images", data=images[()], **shape, **asked)
        other.flush()
        for chunk in chunks:
            ours = images.id.read_direct_chunk(chunk.chunk_offset)
            assert ours == theirs.id.read_direct_chunk(chunk.chunk_offset)
    if name.startswith("gzip"):
        # The last chunk holds 6 rows and one of zeros, which shows when the dataset grows.
        assert zlib.decompress(ours[1])[54_000:] == bytes(9000)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gzip", {"num_workers": 3}),
        ("zstd", {"num_workers": 2, "start_method": "spawn", "io": "buffered"}),
        ("bitshuffle-lz4", {"num_workers": 2, "io": "direct"}),
    ],
)
def test_the_bytes_do_not_depend_on_workers(
    packs: dict[str, Path], source: Path, name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    h5pack.convert(source, tmp_path / "o.h5", **options(name, **settings))
    assert (tmp_path / "o.h5").read_bytes() == packs[name].read_bytes()
    assert leftovers(tmp_path) == DONE


@pytest.mark.parametrize(
    ("name", "settings", "min_long"),
    [
        ("gzip:9", {"layout": "nchw", "compat": True}, 0),
        ("bitshuffle-lz4", {"mode": "gray", "chunk_rows": 36, "compat": True}, 0),
        ("bitshuffle-lz4", {"chunk_rows": 12}, 6),
        ("zstd", {"layout": "nchw", "order": "sorted", "mode": "gray"}, 0),
        ("zstd", {"chunk_rows": 100, "num_workers": 2}, 0),
    ],
)
def test_beside_other_options(source: Path, tmp_path: Path, name: str, settings: dict[str, Any], min_long: int) -> None:
    h5pack.convert(source, tmp_path / "a.h5", **options(name, **settings))
    h5pack.convert(source, tmp_path / "raw.h5", **options("none", **settings))
    assert h5pack.verify(tmp_path / "a.h5").ok
    with h5py.File(tmp_path / "a.h5") as file, h5py.File(tmp_path / "raw.h5") as raw:
        images, count = file["images"], -(-ROWS // settings.get("chunk_rows", CHUNK_ROWS))
        assert np.array_equal(images[()], raw["images"][()])
        assert file.id.get_create_plist().get_version() == raw.id.get_create_plist().get_version()
        assert images.id.get_num_chunks() == count
        chunks = [images.id.get_chunk_info(place) for place in range(count)]
    # Long chunks start on pages.
    long = [chunk for chunk in chunks if chunk.size >= 65_536]
    assert all(chunk.byte_offset % 4096 == 0 for chunk in long)
    assert len(long) >= min_long


@pytest.mark.parametrize("name", METHODS)
def test_damage_is_found_in_the_chunk_that_has_it(packs: dict[str, Path], tmp_path: Path, name: str) -> None:
    flip_in_chunk(shutil.copy(packs[name], tmp_path / "o.h5"), 3, "images")
    assert h5pack.verify(tmp_path / "o.h5").damaged["images"] == [*range(21, 28)]


def test_chunks_are_checked_before_decoding_although_the_options_are_damaged(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    flip_in_chunk(shutil.copy(packs["gzip"], tmp_path / "o.h5"), 3, "images")
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        file.attrs[schema.OPTIONS] = b"{"
    with pytest.raises(DamagedRowsError, match="the chunk does not match its checksum"):
        h5pack.H5Dataset(tmp_path / "o.h5")[21]


def test_chunks_compressed_again_at_another_level_to_the_same_size_are_read(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 64, 64, 3), np.uint8)
    hdf5_file(tmp_path / "noise.h5", images=images)
    h5pack.convert(tmp_path / "noise.h5", tmp_path / "o.h5", **options("gzip:1", chunk_rows=2, order="sorted"))
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        attributes = dict(file["images"].attrs)
        del file["images"]
        again = file.create_dataset("images", data=images, chunks=(2, 64, 64, 3), compression=9)
        again.attrs.update(attributes)
        stored = [again.id.read_direct_chunk((row, 0, 0, 0))[1] for row in (0, 2, 4)]
        checksums = file["checksums/chunks/images"]
        assert sum(map(len, stored)) == checksums.attrs["stored_bytes"]
        assert [zlib.crc32(chunk) for chunk in stored] != checksums[()].tolist()
    assert h5pack.verify(tmp_path / "o.h5").ok
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", check=True)
    assert all(np.array_equal(dataset[row].image, images[row]) for row in range(6))


@pytest.mark.parametrize("name", [*METHODS, "gzip:9"])
def test_incompressible_data_stays_below_the_bound_and_is_filtered(name: str) -> None:
    compression = parse_compression(name)
    require_filter(compression)
    for count in (1, 24, 8191, 70_001, 1_000_003):
        values = np.random.default_rng(count).integers(0, 256, count, np.uint8)
        assert count < len(compress_chunk(values, compression)) <= max_compressed_bytes(count)
        assert len(compress_chunk(np.zeros(count, np.uint8), compression)) <= max_compressed_bytes(count)


def test_rows_that_changed_on_the_disk_are_not_compressed(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (5, 4, 3, 3), np.uint8)
    path, compression, data = tmp_path / "o.partial", parse_compression("gzip"), bytes(100) + rows.tobytes()
    task = CompressTask(str(path), 20, 100, (8, 4, 3, 3), row_checksums(rows), compression)
    path.write_bytes(data)
    whole = np.concatenate([rows, np.zeros((3, 4, 3, 3), np.uint8)])
    assert compress_rows(task) == (5, compress_chunk(whole, compression))
    for broken in (data[:100] + b"\0" + data[101:], data[:-7]):
        path.write_bytes(broken)
        with pytest.raises(H5PackError) as caught:
            compress_rows(task)
        assert caught.value.rows == (20, 21, 22, 23, 24)


def test_a_chunk_that_was_not_stored_is_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = file_structure.store_chunk
    monkeypatch.setattr(
        file_structure, "store_chunk", lambda images, number, chunk: number == 1 or store(images, number, chunk)
    )
    with pytest.raises(H5PackError):
        h5pack.convert(source, tmp_path / "o.h5", **options("gzip"))
    assert not (tmp_path / "o.h5").exists()


def test_chunks_come_in_order_and_few_wait() -> None:
    made, given = [], []

    def tasks() -> Iterator[int]:
        for number in range(20):
            assert len(made) - len(given) < 5
            made.append(number)
            yield number

    def slow(number: int) -> int:
        time.sleep(0.0 if number % 4 else 0.02)
        return number

    with ThreadPoolExecutor(4) as pool:
        given += run(pool, slow, tasks(), 5, ordered=True)
    assert given == list(range(20))


@pytest.fixture
def _counted_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the storing of a chunk one of the calls that `convert_in_child` counts, and kills in."""
    store, nothing = file_structure.store_chunk, os.open(os.devnull, os.O_WRONLY)
    monkeypatch.setattr(file_structure, "store_chunk", lambda *chunk: (os.write(nothing, b"now"), store(*chunk)))


@pytest.mark.usefixtures("_counted_chunks")
@pytest.mark.parametrize("replaced", [False, True])
def test_killed_at_every_step(packs: dict[str, Path], source: Path, tmp_path: Path, replaced: bool) -> None:
    """SIGKILL at, or in the middle of, every kind of change, each chunk's storing among them.

    In turns, there is no output, or one that is replaced, which survives every kill.
    """
    whole, out, stages = packs["zstd"].read_bytes(), tmp_path / "o.h5", set()
    if replaced:
        out.write_bytes(b"precious")
    changes = convert_in_child(source, out, options("zstd", overwrite=replaced), kill_at=None)
    rejects = (tmp_path / "o.h5.rejects.csv").read_bytes()
    assert out.read_bytes() == whole
    for step in distinct_steps(changes, first=not replaced):
        changes[step].leave_files(files_of(out))
        left = out.read_bytes() if out.exists() else None
        assert left in (whole, b"precious" if replaced else None)
        copied = (tmp_path / "o.h5.partial.compressed").exists()
        stages.add((left == whole, copied, is_complete(tmp_path / "o.h5.partial")))
        # That it may be replaced was agreed when it was begun; before that, it has to be said again.
        agreed = left == whole or (tmp_path / "o.h5.partial.journal" / "plan.json").exists()
        report = h5pack.convert(source, out, **options("zstd", resume=True, overwrite=replaced and not agreed))
        assert (report.images, report.rejects, report.bytes) == (ROWS, 4, len(whole))
        assert out.read_bytes() == whole, f"killed at step {step}: {changes[step]}"
        assert leftovers(tmp_path) == DONE
        assert (tmp_path / "o.h5.rejects.csv").read_bytes() == rejects
    # Rows; the compressed copy; the copy in the rows' place; the finished file.
    assert stages == {(False, False, False), (False, True, False), (False, False, True), (True, False, False)}


@pytest.mark.usefixtures("_counted_chunks")
def test_starting_over_drops_what_was_compressed(packs: dict[str, Path], source: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    changes = convert_in_child(source, out, options("zstd", overwrite=True), kill_at=None)
    step = changes.index("create o.h5.partial.compressed") + 3
    convert_in_child(source, out, options("zstd", overwrite=True), kill_at=step)
    assert (tmp_path / "o.h5.partial.compressed").exists()
    h5pack.convert(source, out, **options("none", overwrite=True))
    assert out.read_bytes() == packs["none"].read_bytes()
    assert leftovers(tmp_path) == DONE


@pytest.mark.usefixtures("_counted_chunks")
def test_killed_again_and_again_while_resuming(packs: dict[str, Path], source: Path, tmp_path: Path) -> None:
    out, rounds = tmp_path / "o.h5", 0
    while not out.exists():
        convert_in_child(source, out, options("zstd", resume=True), kill_at=3 + 2 * rounds)
        rounds += 1
    h5pack.convert(source, out, **options("zstd", resume=True))
    assert 5 < rounds < 60
    assert out.read_bytes() == packs["zstd"].read_bytes()


def test_lost_pages_of_the_rows_are_decoded_again(packs: dict[str, Path], source: Path, tmp_path: Path) -> None:
    """A power cut before the compression: the journal knows more than the disk."""
    out = tmp_path / "o.h5"
    convert_until("h5pack.pack.finish.compress", source, out, options("zstd"))
    lose_pages(tmp_path / "o.h5.partial")
    h5pack.convert(source, out, **options("zstd", resume=True))
    assert out.read_bytes() == packs["zstd"].read_bytes()


def test_no_other_conversion_runs_until_the_end(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock goes along when the compressed copy takes the name of the file that was locked."""
    monkeypatch.setattr("h5pack.system.files._LOCK_WAIT_SECONDS", 0.1)
    out = tmp_path / "o.h5"
    compress, refused = finish.compress, []

    def meanwhile(*arguments: Any, **keywords: Any) -> None:
        compress(*arguments, **keywords)
        for settings in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(OutputBusyError):
                h5pack.convert(source, out, **options("zstd", **settings))
            refused.append(settings)

    with monkeypatch.context() as patch:
        patch.setattr(finish, "compress", meanwhile)
        h5pack.convert(source, out, **options("zstd"))
    assert len(refused) == 3
    assert h5pack.verify(out).ok


@pytest.mark.parametrize("chunks", [0, 2])
def test_killed_while_workers_compress(packs: dict[str, Path], source: Path, tmp_path: Path, chunks: int) -> None:
    out = tmp_path / "o.h5"
    kill_while_held(source, out, options("zstd"), (compression, "compress_chunk"), chunks)
    assert leftovers(tmp_path) >= {"o.h5.partial", "o.h5.partial.journal", "o.h5.partial.compressed"}
    h5pack.convert(source, out, **options("zstd", resume=True, num_workers=2))
    assert out.read_bytes() == packs["zstd"].read_bytes()
    assert leftovers(tmp_path) == DONE


def test_a_full_disk_while_compressing(packs: dict[str, Path], source: Path, tmp_path: Path) -> None:
    store, out = file_structure.store_chunk, tmp_path / "o.h5"

    def full(images: h5py.Dataset, number: int, chunk: bytes) -> None:
        if number == 4:
            raise OSError("Can't write data (file write failed: errno = 28, error message = 'No space left on device')")
        store(images, number, chunk)

    for resume in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_structure, "store_chunk", full)
            with pytest.raises(NoSpaceError):
                h5pack.convert(source, out, **options("zstd", resume=resume))
        assert leftovers(tmp_path) == {"o.h5.partial", "o.h5.partial.journal"}
    assert h5pack.convert(source, out, **options("zstd", resume=True)).resumed_rows == 79
    assert out.read_bytes() == packs["zstd"].read_bytes()


def test_a_disk_that_fills_up_while_compressing(small_disk: Path, tmp_path: Path) -> None:
    source, out = flat_folder(tmp_path / "in", 330, (60, 60)), small_disk / "o.h5"
    settings = {"compression": "bitshuffle-lz4", "chunk_rows": 9}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h5pack.pack.output.Output.require_space", lambda *_, **__: None)
        with pytest.raises(NoSpaceError) as caught:
            h5pack.convert(source, out, **quick(num_workers=2, **settings))
    assert caught.value.path == f"{out}.partial"
    assert leftovers(small_disk) == {"o.h5.partial", "o.h5.partial.journal"}
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert h5pack.convert(source, out, **quick(resume=True, **settings)).resumed_rows == 330
    h5pack.convert(source, tmp_path / "whole.h5", **quick(**settings))
    assert out.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_the_plan_bounds_what_both_copies_take(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, replace = [0], os.replace

    def measuring(*arguments: Any) -> None:
        held.append(sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*")))
        replace(*arguments)

    monkeypatch.setattr(os, "replace", measuring)
    with Conversion(source, tmp_path / "o.h5", **options("none")) as conversion:
        raw = conversion.plan()
    with Conversion(source, tmp_path / "o.h5", **options("bitshuffle-lz4")) as conversion:
        plan = conversion.plan()
        assert conversion.estimate_seconds() > 0
        conversion.run()
    assert plan.file_bytes > raw.file_bytes
    assert plan.needed_bytes > 2 * ROWS * 9000 > raw.needed_bytes
    assert ROWS * 9000 < max(held) <= plan.needed_bytes


# zstd and zstd:3 are two names of one compression.
@pytest.mark.parametrize(("begun", "same", "other"), [("zstd", "zstd:3", "none"), ("none", "none", "gzip")])
def test_another_compression_is_not_resumed(source: Path, tmp_path: Path, begun: str, same: str, other: str) -> None:
    out = tmp_path / "o.h5"
    convert_in_child(source, out, options(begun), kill_at=30)
    with pytest.raises(ResumeError) as caught:
        h5pack.convert(source, out, **options(other, resume=True))
    assert f"compression={same!r}" in caught.value.parameters
    assert h5pack.convert(source, out, **options(same, resume=True)).images == ROWS
    assert h5pack.convert(source, out, **options(begun, resume=True)).already_complete
    with pytest.raises(OutputExistsError):
        h5pack.convert(source, out, **options(other, resume=True))


@pytest.mark.parametrize(
    "text",
    [
        *("", "lzma", "gzip:0", "gzip:10", "gzip:", "gzip:04", "gzip:-1", "zstd:23", "zstd:x", "GZIP"),
        *("lz4", "bitshuffle", "bitshuffle-lz4:1", "none:1", "zstd:3 ", "gzip=4"),
    ],
)
def test_an_unknown_compression_is_refused(text: str) -> None:
    with pytest.raises(OptionsError) as caught:
        ConvertOptions(compression=text)
    assert caught.value.parameters == (f"compression={text!r}",)


def test_compressions() -> None:
    assert ConvertOptions().filter is None
    for text, name in {"gzip": "gzip:4", "zstd": "zstd:3", "zstd:22": "zstd:22", "gzip:9": "gzip:9"}.items():
        found = parse_compression(text)
        assert found == parse_compression(name) == ConvertOptions(compression=text).filter
        assert (found.name, found.method.parameters) == (name, (int(name.split(":")[1]),))


WITHOUT_PLUGIN = """
import contextlib, io, json, sys
sys.modules["hdf5plugin"] = None
import h5pack.cli
results = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = h5pack.cli.main(command)
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def test_a_missing_plugin_is_reported(packs: dict[str, Path], source: Path, tmp_path: Path) -> None:
    plugins = {name: str(int(one.filter)) for name, one in schema.COMPRESSION_METHODS.items() if name != "gzip"}
    names = (*plugins, "gzip")
    converting = [["convert", str(source), str(tmp_path / f"{name}.h5"), "--compression", name] for name in names]
    verifying = [["verify", "--json", str(packs[name])] for name in names]
    command = [sys.executable, "-c", WITHOUT_PLUGIN, json.dumps([*converting, *verifying])]
    results = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    advice = "pip install hdf5plugin"
    converted = dict(zip(names, results[: len(names)], strict=True))
    verified = dict(zip(names, results[len(names) :], strict=True))
    assert converted.pop("gzip")[0] == 0
    for name, (code, out, err) in converted.items():
        assert (code, out, plugins[name] in err, advice in err) == (2, "", True, True)
    assert leftovers(tmp_path) == {"gzip.h5", "gzip.h5.rejects.csv"}
    for name, (_, out, _) in verified.items():
        report = json.loads(out)
        assert report["ok"] == (name == "gzip")
        assert report["damaged"] == {}, "rows that cannot be read here are not damaged"
        assert report["ok"] or advice in report["problems"][0]


def test_command_line(packs: dict[str, Path], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.h5"
    command = ["convert", str(source), str(out), "--chunk-rows", str(CHUNK_ROWS), "--workers", "2", "--compression"]
    assert cli.main([*command, "gzip:12"]) == 2
    assert "--compression gzip:12" in capsys.readouterr().err
    assert cli.main([*command, "gzip:1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["seconds"]) == {"survey", "write", "compress", "finish"}
    assert report["bytes"] == out.stat().st_size
    assert out.read_bytes() == packs["gzip:1"].read_bytes()
