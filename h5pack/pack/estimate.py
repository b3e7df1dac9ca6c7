"""Estimate of how long a conversion will take, from the time that its workers need to decode a sample of images."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError
from h5pack.format.checksums import crc32
from h5pack.images.decode import PixelOptions, strict_pillow
from h5pack.images.encode import JpegEncoder
from h5pack.pack.compression import Compression, compress_chunk
from h5pack.pack.file_structure import PixelRows
from h5pack.pack.kept import KeptPlan
from h5pack.pack.plan import ConvertPlan
from h5pack.pack.statistics import channel_sums, encoded_sums, sampled_rows, statistics_range
from h5pack.pack.writer import Images, SampleDecoder
from h5pack.sources.reader import SourceReader
from h5pack.system.arrays import equal_runs, shuffled
from h5pack.system.processes import run, shared
from h5pack.system.text import one_of

_SAMPLE_SECONDS = 0.3
_MAX_SAMPLE = 4_096
_SAMPLE_PART = 8
_TASK_BYTES = 512 * 1024  # far above gzip's window of 32 KiB, so that compression is as fast as with whole chunks
_MAX_TASK_IMAGES, _GROUP_BYTES = 256, 16 * 1024 * 1024
_TIMED_IMAGES = 8  # with `keep`, at most this many images are timed
# Errors that concern single images. The estimate ignores them, because they are reported when rows are written.
_ERRORS = (OSError, H5PackError, MemoryError)
# Times of writing and journaling rows, writing the tables, and the final flush; measured with rows of 3 and 116 KB.
_WRITE_SECONDS_PER_ROW, _WRITE_SECONDS_PER_BYTE = 5e-6, 3e-10
_TABLE_SECONDS_PER_ROW, _FLUSH_SECONDS = 5e-6, 0.1
# Time that this process needs to receive compressed chunks from its workers and to store them, per uncompressed byte.
_STORE_SECONDS_PER_BYTE = 3e-9
# A fast disk is assumed, because the real one cannot be measured without writing to it.
_DISK_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True)
class _SampleTask:
    images: Images
    pixels: PixelOptions
    fields: tuple[PixelRows, ...]
    statistics_step: int  # the channel statistics use every n-th row
    compression: Compression | None

    def __str__(self) -> str:
        names = self.images.names
        return f"{one_of(len(names), repr(names[0]))}, while estimating the time"


def estimate_seconds(plan: ConvertPlan, executor: Executor, num_workers: int) -> float:
    """Return an estimate of the seconds that a conversion takes after the survey.

    The workers decode images: first up to two tasks per worker, then further tasks until 0.3 s have passed or an eighth
    of all images is decoded. With `compression`, they also compress the images. With `keep`, this process reads a few
    images instead. It encodes those that cannot be stored unchanged, and decodes the others.
    """
    table_seconds = _TABLE_SECONDS_PER_ROW * plan.rows + _FLUSH_SECONDS
    if isinstance(plan, KeptPlan):
        return _copy_seconds(plan, num_workers) + table_seconds
    used, end = 0, time.perf_counter() + _SAMPLE_SECONDS
    step = plan.rows // max(1, len(sampled_rows(*statistics_range(plan, plan.row_order))))

    def tasks() -> Iterator[_SampleTask]:
        nonlocal used
        for number, indices in enumerate(_samples(plan)):
            if number >= 2 * num_workers and (time.perf_counter() > end or used > plan.rows // _SAMPLE_PART):
                return
            used += len(indices)
            images = Images.of(plan, np.array(indices))
            yield _SampleTask(images, plan.pixels, plan.pixel_rows, step, plan.options.filter)

    samples = list(run(executor, _time_sample, tasks(), 2 * num_workers, resumable=False))
    # Leave out each worker's first task, which includes one-time work such as imports.
    timed = [times for is_first, *times in samples if not is_first] or [times for _, *times in samples]
    busy, waiting = np.array(timed).T
    # Use the mean of the CPU time, because images differ. Use the median of the waiting time, because other programs
    # may delay a single task by far more than the task itself takes.
    decoded = float(np.mean(busy) + np.median(waiting))
    written = _WRITE_SECONDS_PER_ROW + _WRITE_SECONDS_PER_BYTE * plan.row_bytes
    in_workers = (decoded + written) / num_workers
    # Rows that will be compressed are written, read and written again.
    passes = 1 if plan.options.filter is None else 3
    on_disk = passes * plan.row_bytes / _DISK_BYTES_PER_SECOND
    alone = _STORE_SECONDS_PER_BYTE * plan.row_bytes if passes > 1 and num_workers > 1 else 0.0
    return (max(in_workers, on_disk) + alone) * plan.rows + table_seconds


def _copy_seconds(plan: KeptPlan, num_workers: int) -> float:
    """Estimate the seconds for copying and encoding files and for the channel statistics, by timing a few images."""
    origins = plan.row_order.origins[:: -(-plan.rows // _TIMED_IMAGES)].tolist()
    encoder = JpegEncoder(plan.options.max_side, plan.options.quality, plan.options.max_pixels)
    sampled = len(sampled_rows(*statistics_range(plan, plan.row_order), encoded=True))
    seconds = 0.0
    plan.catalog.reader.announce(origins)
    with strict_pillow():
        for index in origins:
            begin = time.perf_counter()
            with contextlib.suppress(*_ERRORS):
                data = plan.catalog.reader.read(index, plan.catalog.names[index])
                # Writing takes about as long as reading.
                seconds += 2 * (time.perf_counter() - begin) * plan.rows
                begin = time.perf_counter()
                if not plan.fits[index]:
                    data, _, _ = encoder.encode(data, int(plan.decode_paths[index]))
                    seconds += (time.perf_counter() - begin) * plan.rows
                elif isinstance(data, bytes):
                    encoded_sums(data)
                    seconds += (time.perf_counter() - begin) * sampled
    return seconds / len(origins) / num_workers


def _samples(plan: ConvertPlan) -> Iterator[list[int]]:
    """Yield one list of catalog indices per task, in random order.

    Images that the source reads together, such as those of a chunk, are in the same task. Of such a group, at most 256
    images are used. If images are arrays, and more than 256 of them fit into 16 MiB, that many are used.
    """
    origins = plan.row_order.origins
    groups = plan.catalog.reader.groups(origins)
    count = max(1, min(_MAX_TASK_IMAGES, _TASK_BYTES // plan.row_bytes))
    is_encoded = plan.catalog.reader.uniform_size() is None
    max_images = max(_MAX_TASK_IMAGES, 0 if is_encoded else _GROUP_BYTES // plan.row_bytes)
    if groups is None:
        origins = origins[np.linspace(0, plan.rows - 1, min(plan.rows, _MAX_SAMPLE)).astype(np.int64)]
        groups = np.arange(len(origins))
    order = np.argsort(groups, kind="stable")
    edges = equal_runs(groups[order])
    joined: list[int] = []
    for number in shuffled(len(edges) - 1, 0).tolist():
        joined += origins[order[edges[number] : edges[number + 1]]][:max_images].tolist()
        if len(joined) >= count:
            yield joined
            joined = []
    if joined:
        yield joined


@functools.lru_cache(maxsize=1)
def _decoder(pixels: PixelOptions, fields: tuple[PixelRows, ...], thread: int) -> SampleDecoder:
    return SampleDecoder(pixels, fields, quiet=True)


def _time_sample(task: _SampleTask) -> tuple[bool, float, float]:
    """Decode images; return whether this is the worker's first task, and CPU and waiting time per image in seconds."""
    reader: SourceReader = shared()
    misses = _decoder.cache_info().misses
    decoder = _decoder(task.pixels, task.fields, threading.get_ident())
    is_first = _decoder.cache_info().misses > misses
    count = len(task.images.indices)
    images: npt.NDArray[np.uint8] = np.zeros((count, *task.pixels.row_shape), np.uint8)
    fields = [np.zeros((count, *one.row_shape), one.dtype) for one in task.fields]
    begin, begin_busy = time.perf_counter(), time.thread_time()
    reader.announce(task.images.indices)
    with strict_pillow():
        for position, image in enumerate(task.images):
            row, others = images[position], [some[position] for some in fields]
            with contextlib.suppress(*_ERRORS):
                decoder.decode(reader, image, reader.read(image[0], image[1]), row, others)
            for part in (row, *others):
                crc32(part)
        channel_sums(list(images[:: task.statistics_step]), task.pixels.layout)
    if task.compression is not None:
        for some in (images, *fields):
            compress_chunk(some, task.compression)
    busy = time.thread_time() - begin_busy
    return is_first, busy / count, (time.perf_counter() - begin - busy) / count
