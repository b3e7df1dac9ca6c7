"""Filtered chunks are decoded to the same bytes as by HDF5, and damaged ones are named."""

from __future__ import annotations

import itertools
import pickle
import struct
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import hdf5plugin
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h5pack
from h5pack.errors import DamagedRowsError, PackFormatError
from h5pack.format.schema import FilterId
from h5pack.read import codecs
from h5pack.read.codecs import FilterPipeline, MallocBuffer, UnsupportedFilterError, find_pipeline, fletcher32
from h5pack.read.hdf5 import Filter, filters_of, load_filter
from tests.data.packs import require_values
from tests.makers import break_package
from tests.read import files
from tests.read.files import engine_of, require_rows

FILTERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "gzip": (FilterId.GZIP, (4,)),
    "shuffle": (FilterId.SHUFFLE, ()),
    "fletcher32": (FilterId.FLETCHER32, ()),
    "lzf": (FilterId.LZF, ()),
}
for label, plugin in {
    "bitshuffle": hdf5plugin.Bitshuffle(cname="none"),
    "bitshuffle-lz4": hdf5plugin.Bitshuffle(cname="lz4"),
    "bitshuffle-zstd": hdf5plugin.Bitshuffle(cname="zstd"),
    "lz4": hdf5plugin.LZ4(),
    "zstd": hdf5plugin.Zstd(),
    "blosc-lz4": hdf5plugin.Blosc(cname="lz4", shuffle=hdf5plugin.Blosc.SHUFFLE),
    "blosc-zstd": hdf5plugin.Blosc(cname="zstd", shuffle=hdf5plugin.Blosc.BITSHUFFLE),
}.items():
    FILTERS[label] = (plugin["compression"], tuple(plugin["compression_opts"]))
PIPELINES: list[tuple[str, ...]] = [(one,) for one in FILTERS]
# After another filter, Blosc's plugin writes past its buffer of one chunk, and two of them divide by zero.
PIPELINES += [pair for pair in itertools.permutations(FILTERS, 2) if not pair[1].startswith("blosc")]


def write(
    path: Path, values: npt.NDArray[Any], *pipeline: str, chunk_rows: int = 4, libver: str = "v110", grow: bool = False
) -> Path:
    """Write a dataset whose chunks pass through filters."""
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_chunk((chunk_rows, *values.shape[1:]))
    for name in pipeline:
        number, parameters = FILTERS[name]
        create.set_filter(number, h5py.h5z.FLAG_OPTIONAL, parameters)
    with h5py.File(path, "w", libver=libver) as file:
        most = (h5py.h5s.UNLIMITED, *values.shape[1:]) if grow else values.shape
        space = h5py.h5s.create_simple(values.shape, most)
        kind = h5py.h5t.py_create(values.dtype, logical=True)
        h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, space, create))[...] = values
    return path


def smooth(shape: tuple[int, ...], dtype: str, seed: int) -> npt.NDArray[Any]:
    """Numbers that compress a little, as photographs do."""
    noise = np.random.default_rng(seed).normal(0, 2, shape)
    return np.asarray(np.cumsum(noise, 0) % 100).astype(dtype)


def test_every_filter_is_tested() -> None:
    assert {number for number, _ in FILTERS.values()} == {*FilterId} == {*codecs._DECODERS, *codecs._PLUGINS}


@settings(max_examples=100)
@given(st.data())
def test_decoding_equals_h5pys(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 13), st.integers(1, 40)))
    dtype = draw(st.sampled_from(["u1", "<u2", ">u4", "<i8", "<f4", ">f8", "?"]))
    pipeline, libver = draw(st.sampled_from(PIPELINES)), draw(st.sampled_from(["v110", "v108"]))
    grow, chunk_rows = draw(st.booleans()), draw(st.integers(1, 9))
    chunk_rows = chunk_rows if grow else min(chunk_rows, shape[0])
    values = smooth(shape, dtype, draw(st.integers(0, 9)))
    if dtype == "u1" and draw(st.booleans()):
        values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    with files.drawn_limits(draw) as folder:
        path = write(folder / "f.h5", values, *pipeline, chunk_rows=chunk_rows, libver=libver, grow=grow)
        with h5py.File(path) as file:
            assert np.array_equal(file["x"][()], values)
        engine = engine_of(path)
        index = engine.indexes["x"]
        assert index.library_reason is None
        assert index.codec is not None
        rows = draw(files.row_lists(shape[0]))
        files.require_every_read(engine, rows, values[np.array(rows, np.int64)].astype(index.native_dtype))
        assert pickle.loads(pickle.dumps(engine)).chunks.cache.bytes == 0
        engine.close()


def test_a_chunk_is_decoded_once_for_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = smooth((40, 10, 100), "u1", 1)
    decode = Mock(side_effect=FilterPipeline.decode)
    monkeypatch.setattr(FilterPipeline, "decode", lambda *call, **checked: decode(*call, **checked))
    engine = engine_of(write(tmp_path / "f.h5", values, "gzip", chunk_rows=10))
    for first in range(0, 10, 2):
        rows = np.arange(first, 40, 10)
        assert np.array_equal(engine.read("x", rows), values[rows])
    assert decode.call_count == 4
    assert engine.stats.chunk_misses == 20
    assert engine.stats.bytes_read == engine.indexes["x"].sizes.sum()
    assert engine.chunks.cache.bytes == 40_000
    engine.read("x", range(10, 20))
    assert decode.call_count == 4, "a complete chunk also comes from the cache"
    engine.close()
    assert engine.chunks.cache.bytes == 0
    engine.chunks.cache.capacity = 39_999
    engine.read("x", range(40))
    assert decode.call_count == 8
    assert engine.chunks.cache.bytes == 0, "chunks that are consumed completely are not cached unless all fit"
    # With room for two chunks, the oldest are removed first.
    engine.chunks.cache.capacity = 25_000
    for chunk in (0, 1, 2, 1, 2):
        engine.read("x", [chunk * 10])
    assert decode.call_count == 11
    engine.read("x", [0])
    assert decode.call_count == 12
    engine.chunks.cache.capacity = 9_999
    assert np.array_equal(engine.read("x", [35, 31]), values[[35, 31]])
    assert (engine.path, "x", 3) not in engine.chunks.cache
    assert engine.decoding_bytes(3, keep=False) == 3 * (20_000 + int(engine.indexes["x"].sizes.max()))


def test_an_edge_chunk_that_hdf5_must_read_is_counted(tmp_path: Path) -> None:
    values = smooth((45, 10, 100), "u2", 1)
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        # Shuffling keeps the size, so the size of the last chunk does not say whether it was shuffled.
        file.create_dataset("x", data=values, chunks=(10, 10, 100), shuffle=True)
    engine = engine_of(path)
    assert engine.indexes["x"].sizes.tolist() == [20_000] * 4 + [-1]
    found, positions = engine.rows_in_chunk("x", np.array([44, 41]))
    assert np.array_equal(found[positions], values[[44, 41]])
    assert (engine.stats.bytes_read, engine.stats.reads) == (5 * 2_000, 1)


def test_decoded_chunks_that_all_stay_in_memory_form_an_array(tmp_path: Path) -> None:
    values = smooth((45, 10, 100), "u1", 1)
    engine = engine_of(write(tmp_path / "f.h5", values, "gzip", chunk_rows=10))
    engine.chunks.cache.capacity = engine.decoded_bytes()
    rows = np.random.default_rng(0).permutation(np.repeat(np.arange(45), 2))
    decoded = engine.decoded("x")
    assert not decoded.ready(rows, rows)
    assert np.array_equal(engine.read_batch("x", rows), values[rows])
    read = engine.stats.bytes_read
    assert read == engine.indexes["x"].sizes.sum()
    # They moved to the array when they were decoded, not when they are read again: the cache holds views of it, and the
    # last chunk has no more bytes than its rows.
    assert np.array_equal(decoded.array.reshape(values.shape), values)
    assert decoded.ready(rows[:3], rows[:3])
    assert decoded.ready(np.array([0]), np.array([44]))
    assert engine.chunks.cache.bytes == values.nbytes
    assert all(np.shares_memory(chunk, decoded.array) for chunk in engine.chunks.cache._own_state().chunks.values())
    assert np.array_equal(engine.read_batch("x", rows), values[rows])
    assert np.array_equal(engine.read("x", range(45)), values)
    assert engine.stats.bytes_read == read
    engine.chunks.cache.capacity = engine.decoded_bytes() - 1
    assert engine.decoded("x") is None
    assert np.array_equal(engine.read_batch("x", rows), values[rows])
    assert engine_of(write(tmp_path / "raw.h5", values, chunk_rows=10)).decoded("x") is None
    assert pickle.loads(pickle.dumps(engine)).decoded("x") is None, "the capacity is kept"


def test_every_filter_is_decoded_in_several_threads(tmp_path: Path) -> None:
    values = smooth((64, 40, 50), "u1", 1)
    for name in FILTERS:
        engine = engine_of(write(tmp_path / f"{name}.h5", values, name, chunk_rows=8))

        def work(number: int, engine: Any = engine) -> None:
            for turn in range(12):
                rows = np.arange(8) + (number + turn) % 8 * 8
                decoded, positions = engine.rows_in_chunk("x", rows)
                assert np.array_equal(decoded[positions], values[rows])

        files.run_threads(4, work)


def test_a_loader_decodes_each_chunk_once_an_epoch(tmp_path: Path) -> None:
    values = smooth((90, 10, 100), "u1", 1)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("images", data=values, chunks=(7, 10, 100), **hdf5plugin.Bitshuffle(cname="lz4"))
        file["labels"] = np.arange(90)
    dataset = h5pack.H5Dataset(tmp_path / "f.h5")
    index = dataset.engine.indexes["images"]
    dataset.engine.chunks.cache.capacity = 0  # All decoded chunks would fit.
    loader = h5pack.H5Loader(dataset, 8, window=4, num_threads=2)
    for epoch in range(1, 3):
        require_values(loader, values)
        assert dataset.stats().chunk_misses == epoch * 13
        labels_bytes = dataset.engine.indexes["labels"].row_bytes * 90
        assert dataset.stats().bytes_read == epoch * index.sizes.sum() + labels_bytes


@settings(max_examples=33)
@given(
    size=st.one_of(st.integers(0, 50), st.sampled_from([8_191, 8_192, 8_193, 16_384, 50_001])),
    bounds=st.sampled_from([(0, 256), (0, 1), (255, 256)]),
)
def test_fletcher32_is_hdf5s(size: int, bounds: tuple[int, int]) -> None:
    content = np.random.default_rng(size).integers(*bounds, size, np.uint8)
    if not size:
        assert fletcher32(content) == (0, 0)
        return
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("x", data=content, chunks=(size,), fletcher32=True)
        _, stored = dataset.id.read_direct_chunk((0,))
    low, high = fletcher32(content)
    assert (high << 16 | low).to_bytes(4, "little") == stored[-4:]


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_damaged_chunks_are_named(tmp_path: Path, name: str) -> None:
    values = smooth((12, 30, 40), "u1", 2)
    path = write(tmp_path / "f.h5", values, *dict.fromkeys((name, "fletcher32")))
    files.flip_in_chunk(path, 1)
    engine = engine_of(path)
    with pytest.raises(DamagedRowsError) as caught:
        engine.read("x", [6])
    assert (caught.value.dataset, caught.value.rows) == ("x", (4, 5, 6, 7))
    assert "\n" not in str(caught.value)
    assert np.array_equal(engine.read("x", [0, 11]), values[[0, 11]])


@pytest.mark.parametrize("name", ["zstd", "gzip", "lzf", "bitshuffle-lz4", "lz4"])
def test_damage_without_a_checksum_is_an_error_or_other_pixels(tmp_path: Path, name: str) -> None:
    values = smooth((8, 30, 40), "u1", 2)
    path = write(tmp_path / "f.h5", values, name)
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(1)
    refused = 0
    for place in (*range(16), *range(16, chunk.size, 47)):
        files.flip(path, chunk.byte_offset + place, 0x5A)
        try:
            assert engine_of(path).read("x", [6]).shape == (1, 30, 40)
        except DamagedRowsError as error:
            refused += error.rows == (4, 5, 6, 7)
        files.flip(path, chunk.byte_offset + place, 0x5A)
    assert refused > 3


def decode_damaged_chunks(paths: list[Path]) -> bool:
    for path in paths:
        print(path.stem, flush=True)
        with h5py.File(path) as file:
            codec = find_pipeline(filters_of(file["x"]), file["x"].nbytes)
            mask, stored = file["x"].id.read_direct_chunk((0, 0, 0))
        refused = 0
        for bit in range(160):
            damaged = bytearray(stored if bit % 5 else stored[: 20 + len(stored) * bit // 200])
            damaged[bit // 8] ^= 1 << bit % 8
            try:
                codec.decode(codecs._to_malloc(np.frombuffer(damaged, np.uint8)), mask)
            except ValueError:
                refused += 1
        assert refused > 30, refused
    return True


def test_damaged_chunks_crash_no_plugin(tmp_path: Path) -> None:
    plugins = ("bitshuffle-lz4", "bitshuffle-zstd", "lz4", "zstd")
    pipelines = [(one,) for one in (*plugins, "blosc-lz4")] + [("shuffle", one) for one in plugins]
    paths = [
        write(tmp_path / f"{dtype} {names}.h5", smooth((4, 37, 29), "u1", 2).astype(dtype), *names)
        for names in pipelines
        for dtype in ("u1", "f4")
    ]
    assert files.in_child(lambda: decode_damaged_chunks(paths))


@pytest.mark.parametrize("name", sorted(name for name, (number, _) in FILTERS.items() if number in codecs._PLUGINS))
def test_a_chunk_that_was_cut_short_is_refused(tmp_path: Path, name: str) -> None:
    """Blosc's plugin does not know where the chunk ends, and would decode the bytes behind it."""
    values = smooth((4, 300, 300), "u1", 2)
    with h5py.File(write(tmp_path / "f.h5", values, name)) as file:
        codec = find_pipeline(filters_of(file["x"]), values.nbytes)
        mask, stored = file["x"].id.read_direct_chunk((0, 0, 0))
    assert mask == 0
    for length in (*range(1, 17), *range(17, len(stored), len(stored) // 60)):
        with pytest.raises(ValueError, match="chunk"):
            codec.decode(codecs._to_malloc(np.frombuffer(stored[:length], np.uint8)), mask)
    assert np.array_equal(codec.decode(codecs._to_malloc(np.frombuffer(stored, np.uint8)), mask), values.reshape(-1))


@pytest.mark.parametrize("before", [(), ("shuffle",), ("gzip",)], ids=str)
@pytest.mark.parametrize(
    "blocks",
    [
        [(4096, 4096, 2000)], [(4096, 1 << 20, 2000)], [(1024, 1024, 1024)] * 3, [(1024, 1024, 1024)] * 5,
        [(1024, 1024, 1024), (1024, 3000, 1024)], [(4096, 2**32 - 1, 4096)],
    ],
)  # fmt: skip
def test_sizes_of_blocks_that_do_not_fit_a_chunk_of_lz4_are_refused(
    before: tuple[str, ...], blocks: list[tuple[int, int, int]]
) -> None:
    """The plugin copies a block that is stored uncompressed without looking where the chunk ends."""
    steps = tuple(Filter(*FILTERS[name], name) for name in (*before, "lz4"))
    chunk = struct.pack(">QI", 4096, blocks[0][0]) + b"".join(
        struct.pack(">I", promised) + bytes([7]) * stored for _, promised, stored in blocks
    )
    with pytest.raises(ValueError, match="sizes of the chunk's blocks"):
        FilterPipeline(steps, 4096).decode(codecs._to_malloc(np.frombuffer(chunk, np.uint8)), 0)


def test_few_rows_of_chunks_that_cut_rows_are_read_alone(tmp_path: Path) -> None:
    values = smooth((100, 10, 60), ">u2", 1)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(50, 10, 40))
    engine = engine_of(tmp_path / "f.h5")
    assert engine.indexes["x"].library_reason is None
    few, both_chunks = 4 * 10 * 60 * 2, 2 * 50 * 10 * 40 * 2
    # Both chunks are read whole for many rows, and kept.
    for rows, read in (([3, 99, 7, 52], few), (list(range(40)), few + both_chunks), ([3], few + both_chunks)):
        assert np.array_equal(engine.read("x", rows), values[rows])
        assert engine.stats.bytes_read == read


def test_a_chunk_of_another_size_is_refused() -> None:
    codec = FilterPipeline((Filter(FilterId.GZIP, (4,), "deflate"),), 100)
    for size in (99, 101):
        block = codecs._to_malloc(np.frombuffer(zlib.compress(bytes(size)), np.uint8))
        with pytest.raises(ValueError, match=f"{size} bytes instead of 100"):
            codec.decode(block, 0)
    block = codecs._to_malloc(np.full(100, 7, np.uint8))
    assert (codec.decode(block, 1) == 7).all(), "the filter was left out"


def test_too_little_memory_is_not_a_damaged_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_imagecodecs", lambda: Mock(lzf_decode=Mock(side_effect=MemoryError)))
    with pytest.raises(MemoryError):
        FilterPipeline((Filter(FilterId.LZF, (), "lzf"),), 10).decode(MallocBuffer(4), 0)


def test_gzip_without_isal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = smooth((12, 30, 40), "u1", 2)
    write(tmp_path / "f.h5", values, "gzip")
    monkeypatch.setattr(codecs, "fastest_zlib", zlib)
    require_rows(engine_of(tmp_path / "f.h5"), values)


def test_a_missing_decoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_imagecodecs", lambda: None)
    with pytest.raises(UnsupportedFilterError, match="pip install"):
        find_pipeline((Filter(FilterId.LZF, (), "lzf"),), 10)
    with pytest.raises(UnsupportedFilterError, match="32026"):
        find_pipeline((Filter(32_026, (), "blosc2"),), 10)
    # Metadata of the earliest version has no checksum, so that the number of the filter can be replaced.
    path = write(tmp_path / "f.h5", smooth((12, 30, 40), "u1", 2), "zstd", libver="earliest")
    number, unknown = FilterId.ZSTD.to_bytes(2, "little"), (33_333).to_bytes(2, "little")
    path.write_bytes(path.read_bytes().replace(number, unknown, 1))
    with pytest.raises(PackFormatError, match="33333"):
        files.index_of(path)
    codecs._plugin_function.cache_clear()
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    assert not codecs.is_plugin(FilterId.ZSTD)
    codecs._plugin_function.cache_clear()


def test_broken_packages_are_like_missing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hdf5plugin", "imagecodecs"):
        break_package(name, tmp_path, monkeypatch)
    for cached in (codecs._imagecodecs, codecs._plugin_function):
        monkeypatch.setattr(codecs, cached.__name__, cached.__wrapped__)
    assert codecs._imagecodecs() is None
    assert not codecs.is_plugin(FilterId.ZSTD)
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: False)
    assert not load_filter(FilterId.ZSTD)


def test_a_malloc_buffer_lives_as_long_as_its_arrays() -> None:
    block = MallocBuffer(1_000)
    array = np.asarray(block)
    array[...] = 3
    view = array[10:20]
    del block, array
    assert (view == 3).all()
    with pytest.raises(MemoryError, match="cannot allocate"):
        MallocBuffer(1 << 60)
