"""The journal beside an unfinished output, which records the plan and the rows that are written.

The folder ``OUT.partial.journal/`` contains

- ``plan.json``: the options and properties that must be equal in a resumed run (see `h5pack.pack.resume`), and whether
  the run has `overwrite`;
- ``prints.bin``: fingerprints of the source's images, by which a resumed run notices changes;
- ``rows-*.log``, one file per worker. The worker appends a record after it has written rows. A record consists of a
  magic number, a length, a CRC-32 and a payload. A kill can truncate the last record; a resumed run ignores that record
  and writes its rows again;
- ``encoded-*.bin`` and ``encoded-*.log``, if images are encoded before rows are written (see `h5pack.pack.encode`);
- ``written.bin``: the checksums and rejects of all rows, saved once every row is written or rejected. From then on,
  rows may be moved.

A record means that rows were passed to the kernel, not that they reached the disk. So a resumed run reads every row
that a record lists, and writes rows with a wrong checksum again. It reads them from the disk: after a failed fsync, the
page cache may still hold rows that did not reach the disk, even if the next fsync succeeds.

Before there is a plan, `SurveyJournal` keeps the results of a long survey in the file ``OUT.partial.survey``.

**On several machines**, writers are durable: rows are flushed before their record is written, and the record is flushed
before a task ends. Locks may not reach other machines, so a writer marks the beginning and the end of each task in its
file (see `Journal.has_late_writers`). If the last mark of a writer is a beginning, the writer may still write, even
long after it was given up. Until rows move, such late writes do no harm, because another writer has written the same
bytes at the same offsets. With `finish`, rows are read again only if a run on one machine (with `resume`) has written
some of them: the rows of durable writers were flushed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
import shutil
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError, H5PackError, OutputBusyError, ResumeError
from h5pack.read.hdf5 import VERIFY_ADVICE
from h5pack.system.files import (
    is_at,
    is_locked,
    lock,
    open_locked,
    read_all,
    sync_path,
    wait_until_unlocked,
    write_atomically,
)

# Magic number of a record. Give it another value if the layout of payloads changes: records of the earlier layout are
# then ignored.
_MAGIC = 0x4B503552
# Magic number of a record that marks the beginning or the end of a task; its payload is `_BEGUN` or `_ENDED`.
_MARK = 0x4B50354D
_BEGUN, _ENDED = b"begun", b"ended"
_PREFIX = struct.Struct("<III")
_WRITTEN = struct.Struct("<II")
_HEAD = struct.Struct("<IIIIII")
_WAIT_SECONDS = 10.0
_SURVEY_SECONDS = 10.0
_ROWS = "rows"
WRITTEN = "written.bin"


@dataclass
class RowRecord:
    """The results of writing some rows. The rows of rejected images are zeros.

    Planned rows are row numbers before the gaps that rejected images leave are closed.
    """

    rows: npt.NDArray[np.int64]  # (n,): the planned rows, ascending
    packed: npt.NDArray[np.bool_]  # (n,): False if the image was rejected
    checksums: npt.NDArray[np.uint32]  # (n,): CRC-32 of each row's bytes
    sampled: npt.NDArray[np.int64]  # (k,): the planned rows that `sums` describes
    sums: npt.NDArray[np.uint64]  # (k, 2, C): per channel, the sums of a row's values and of their squares
    reasons: dict[int, str] = field(default_factory=dict)  # why images were rejected, by planned row
    # (F, n): CRC-32 of each row's bytes in the fields that are chunked like the images
    field_checksums: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros((0, 0), np.uint32))

    @classmethod
    def of(
        cls, rows: npt.NDArray[np.int64], packed: npt.NDArray[np.bool_], checksums: npt.NDArray[np.uint32],
        sums: Mapping[int, npt.NDArray[np.uint64]], channels: int, **others: Any,
    ) -> RowRecord:  # fmt: skip
        """Create a record from the `sums` of each sampled row, uint64 (2, C)."""
        sampled = sorted(sums)
        joined = np.array([sums[row] for row in sampled], np.uint64).reshape(-1, 2, channels)
        return cls(rows, packed, checksums, np.array(sampled, np.int64), joined, **others)

    @property
    def all_checksums(self) -> tuple[npt.NDArray[np.uint32], ...]:
        """Checksums of the rows of the images, and of each field that is chunked like them."""
        return self.checksums, *self.field_checksums

    def encode(self) -> bytes:
        """Return the record as bytes, the payload of a journal record."""
        reasons = json.dumps({str(row): reason for row, reason in self.reasons.items()}).encode()
        channels = self.sums.shape[2]
        count = len(self.rows)
        # If the rows are consecutive, only the first one is stored.
        consecutive = count > 0 and int(self.rows[-1] - self.rows[0]) == count - 1
        listed = self.rows[:1] if consecutive else self.rows
        head = _HEAD.pack(count, len(listed), len(self.sampled), channels, len(reasons), len(self.field_checksums))
        arrays = (listed, self.packed, self.checksums, self.sampled, self.sums, self.field_checksums)
        return b"".join([head, *(array.tobytes() for array in arrays), reasons])

    @classmethod
    def decode(cls, payload: bytes) -> RowRecord:
        """Create a record from the bytes that `encode` returned."""
        count, listed, sampled, channels, reasons, fields = _HEAD.unpack_from(payload)
        stream = io.BytesIO(payload[_HEAD.size :])
        rows = np.frombuffer(stream.read(8 * listed), np.int64)
        return cls(
            rows=rows if listed == count else rows[0] + np.arange(count),
            packed=np.frombuffer(stream.read(count), np.bool_),
            checksums=np.frombuffer(stream.read(4 * count), np.uint32),
            sampled=np.frombuffer(stream.read(8 * sampled), np.int64),
            sums=np.frombuffer(stream.read(16 * sampled * channels), np.uint64).reshape(sampled, 2, channels),
            field_checksums=np.frombuffer(stream.read(4 * fields * count), np.uint32).reshape(fields, count),
            reasons={int(row): reason for row, reason in json.loads(stream.read(reasons)).items()},
        )


class EncodedFile(NamedTuple):
    """Location of an encoded image or mask: in a temporary file of `h5pack.pack.encode`, or in a pack to combine."""

    path: str
    offset: int  # in bytes
    checksum: int  # CRC-32
    dataset: str | None = None  # path in the pack; None for a temporary file
    row: int = 0  # row of that dataset


def read_encoded(encoded: EncodedFile, size: int) -> bytes:
    """Return the `size` bytes of an encoded image or mask.

    If they do not match the checksum, raises DamagedRowsError for a pack, and ResumeError for a temporary file.
    """
    path, dataset, row = encoded.path, encoded.dataset, encoded.row
    with open(path, "rb") as stream:
        found = read_all(stream.fileno(), size, encoded.offset)
    if len(found) == size and zlib.crc32(found) == encoded.checksum:
        return found
    if dataset is not None:
        problem = f"{dataset!r} row {row} differs from the stored checksum; {VERIFY_ADVICE}"
        raise DamagedRowsError.at(path, problem, dataset=dataset, rows=[row])
    problem = (
        "does not contain what was written to it; check the disk, then run again with resume=True (in an array job, "
        "instead of part or finish)"
    )
    raise ResumeError.at(path, problem, "resume=True", "part", "finish")


class RowResults:
    """The results of all planned rows, collected from the records of this run and of interrupted runs."""

    def __init__(self, rows: int, channels: int, fields: int = 0) -> None:
        self.packed: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.settled: npt.NDArray[np.bool_] = np.zeros(rows, np.bool_)  # true once a row is packed or rejected
        self.checksums: npt.NDArray[np.uint32] = np.zeros(rows, np.uint32)
        self._field_checksums: npt.NDArray[np.uint32] = np.zeros((fields, rows), np.uint32)
        self._reasons: dict[int, str] = {}
        self._sums: dict[int, npt.NDArray[np.uint64]] = {}
        self._channels = channels

    def add(self, record: RowRecord) -> None:
        """Add a record, which replaces earlier results of the same rows."""
        rows = record.rows
        self.packed[rows] = record.packed
        self.settled[rows] = True
        self.checksums[rows] = record.checksums
        if len(self._field_checksums):
            self._field_checksums[:, rows] = record.field_checksums
        self._reasons.update(record.reasons)
        self._sums.update(zip(record.sampled.tolist(), record.sums, strict=True))

    def discard(self, rows: list[int]) -> None:
        """Discard the results of rows whose bytes do not match their record, so that they are written again."""
        self.packed[rows] = False
        self.settled[rows] = False

    def record(self) -> RowRecord:
        """Return all results as one record."""
        rows = np.arange(len(self.packed))
        # An earlier run may have rejected an image that was packed later.
        reasons = {row: reason for row, reason in self._reasons.items() if not self.packed[row]}
        return RowRecord.of(
            rows, self.packed, self.checksums, self._sums, self._channels,
            reasons=reasons, field_checksums=self._field_checksums,
        )  # fmt: skip


class JournalWriter:
    """A writer that appends records to a new file ``prefix-*.log`` in `folder`. The file is locked until it is closed.

    A `durable` writer, for several machines, marks tasks with `begin` and `end` instead of locking its file. If `path`
    is given, the writer creates no file, but appends to the file at `path`, which an earlier task created.
    """

    def __init__(self, folder: str, prefix: str = _ROWS, *, durable: bool = False, path: str | None = None) -> None:
        # Include the host name, because two machines may use the same process id.
        name = f"{prefix}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.log"
        self.path = path or os.path.join(folder, name)
        create = 0 if path else os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(self.path, os.O_WRONLY | create | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if not durable:
            lock(self._descriptor)

    def append(self, payload: bytes) -> None:
        """Append one record with a single write; raises OSError (ENOSPC) if it was written only in part."""
        self._append(_MAGIC, payload)

    def begin(self) -> None:
        """Record durably that rows will be written from now on."""
        self._append(_MARK, _BEGUN)
        os.fsync(self._descriptor)

    def end(self) -> None:
        """Record durably that no rows will be written until the next `begin`; this flushes all earlier records."""
        self._append(_MARK, _ENDED)
        os.fsync(self._descriptor)

    def _append(self, magic: int, payload: bytes) -> None:
        data = _framed(magic, payload)
        if os.write(self._descriptor, data) < len(data):
            # Reading stops at an incomplete record, so records that follow it in this file would be lost.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Journal:
    """The journal in the folder ``OUT.partial.journal``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, plan: dict[str, Any], fingerprints: npt.NDArray[np.uint64]) -> None:
        """Create a new journal. The plan is written last, and a journal without a plan is treated as missing."""
        # Remove the plan first, so that a journal that is removed only in part is treated as missing.
        (self.folder / "plan.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        write_atomically(self.folder / "prints.bin", fingerprints.tobytes())
        write_atomically(self.folder / "plan.json", json.dumps(plan, indent=1).encode())
        sync_path(self.folder)

    def start_together(self, plan: dict[str, Any], fingerprints: npt.NDArray[np.uint64], temporary: Path) -> None:
        """Create a new journal at `temporary`, and rename it, unless another process has created the journal first."""
        Journal(temporary).start(plan, fingerprints)
        self._empty_without_plan()
        try:
            # Renaming is atomic, and fails if the journal exists, because that folder is not empty.
            temporary.rename(self.folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if not self.folder.exists():
                raise
        sync_path(self.folder.parent)

    def _empty_without_plan(self) -> None:
        """Remove the files of a journal without a plan: a run was killed while it removed this journal."""
        try:
            # Another process may put its own journal in this place meanwhile. So use the descriptor of this folder.
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            names = os.listdir(folder)
            for name in names if "plan.json" not in names else ():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    def plan(self) -> dict[str, Any] | None:
        """Return the plan that `start` saved, None if there is none; raises ResumeError if it is damaged."""
        try:
            plan: dict[str, Any] = json.loads((self.folder / "plan.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        return plan

    def fingerprints(self) -> npt.NDArray[np.uint64]:
        """Return the fingerprints that `start` saved, uint64 (M,); raises ResumeError if they cannot be read."""
        try:
            return np.frombuffer((self.folder / "prints.bin").read_bytes(), np.uint64)
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> ResumeError:
        problem = (
            f"the journal is damaged ({error}); start over with overwrite=True and without resume=True "
            f"(in an array job, delete all of {self.folder.with_suffix('')}* instead)"
        )
        return ResumeError.at(self.folder, problem, "overwrite=True", "resume=True")

    def records(self) -> Iterator[RowRecord]:
        """Yield the intact records of rows; raises OutputBusyError if a worker of an earlier run is still writing."""
        return (RowRecord.decode(payload) for _, payload in self.payloads(_ROWS))

    def payloads(self, prefix: str) -> Iterator[tuple[Path, bytes]]:
        """Yield the path and the payload of each intact record in the files ``prefix-*.log``; marks are skipped."""
        for path in sorted(self.folder.glob(f"{prefix}-*.log")):
            problem = "a worker of the interrupted run is still writing to this file; stop this worker, then run again"
            busy = OutputBusyError.at(path, f"{problem} with resume=True", "resume=True")
            wait_until_unlocked(path, busy, _WAIT_SECONDS)
            for magic, payload in _intact(path):
                if magic == _MAGIC:
                    yield path, payload

    def has_late_writers(self) -> bool:
        """Return whether durable writers may still write rows, because their last task has not ended."""
        marks = ([payload for magic, payload in records if magic == _MARK] for records in self._records_by_file())
        return any(found[-1:] == [_BEGUN] for found in marks)

    def has_unflushed_rows(self) -> bool:
        """Return whether a writer that is not durable has written rows, which a power cut may have lost."""
        return any({magic for magic, _ in records} == {_MAGIC} for records in self._records_by_file())

    def _records_by_file(self) -> Iterator[Iterator[tuple[int, bytes]]]:
        """Return, for each writer of rows, the magic number and the payload of its intact records and marks."""
        return map(_intact, self.folder.glob(f"{_ROWS}-*.log"))

    def save_written(self, record: RowRecord) -> None:
        """Save durably that every row is written or rejected. From then on, rows may be moved."""
        payload = record.encode()
        write_atomically(self.folder / WRITTEN, _written_head(payload) + payload)
        sync_path(self.folder)

    def discard_written(self) -> None:
        """Remove a damaged record, because writers stop if there is one."""
        (self.folder / WRITTEN).unlink(missing_ok=True)

    def written(self) -> RowRecord | None:
        """Return the record that `save_written` saved, None if it was not saved or is damaged."""
        try:
            data = (self.folder / WRITTEN).read_bytes()
        except FileNotFoundError:
            return None
        payload = data[_WRITTEN.size :]
        return RowRecord.decode(payload) if data.startswith(_written_head(payload)) else None


class SurveyJournal:
    """The file ``OUT.partial.survey``, from which a resumed run continues an interrupted survey. A context manager.

    The first record is `identity`: the source, options and software to which the results belong. The file is created
    once the survey has taken 10 seconds, with all results so far. It is removed when the journal of rows begins, and at
    the end of the run. But it remains if the run is interrupted, or ends with an error that recommends resuming.
    Without `resume`, an earlier file is removed at the start.

    The file only saves time. Records after a damaged one, and records of another survey, are ignored. If the file
    cannot be written, or another conversion is writing it, the survey continues without it.
    """

    def __init__(self, path: Path, identity: dict[str, Any], *, resume: bool) -> None:
        self._path, self._resume = path, resume
        self._identity = json.dumps(identity, sort_keys=True).encode()
        self._waiting = [_framed(_MAGIC, self._identity)]  # records that are not in the file yet
        self._descriptor, self._given_up = -1, False
        self._begin = time.monotonic()

    def __enter__(self) -> SurveyJournal:
        with contextlib.suppress(OSError):
            if not self._resume and not is_locked(self._path):
                self._path.unlink()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._descriptor < 0:
            return
        keeps = error is not None and not isinstance(error, Exception)
        keeps = keeps or "resume=True" in getattr(error, "parameters", ())
        # Another conversion may have created a new file of this name meanwhile.
        if not keeps and is_at(self._descriptor, self._path):
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor, self._given_up = -1, True

    def payloads(self) -> Iterator[bytes]:
        """Yield the results of an interrupted run. Call this once, before `append`, and exhaust the iterator."""
        if not self._resume or not self._path.exists() or not self._open():
            return
        end = 0
        for number, (_, payload) in enumerate(_intact(self._path)):
            if not number and payload != self._identity:
                break
            if number:
                yield payload
            end += _PREFIX.size + len(payload)
        # Cut off a damaged end, so that new records follow the last intact one.
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)
        if end:
            self._waiting.clear()

    def append(self, payload: bytes) -> None:
        """Append one result; until the file is created, results are only kept in memory."""
        if self._given_up:
            return
        self._waiting.append(_framed(_MAGIC, payload))
        if self._descriptor < 0:
            if time.monotonic() - self._begin < _SURVEY_SECONDS or not self._open():
                return
            os.ftruncate(self._descriptor, 0)
        data = b"".join(self._waiting)
        with contextlib.suppress(OSError):
            if os.write(self._descriptor, data) == len(data):
                self._waiting.clear()
                return
        # Reading stops at an incomplete record, so records that follow it would be lost.
        self._given_up = True

    def _open(self) -> bool:
        """Open and lock the file; return whether that was possible."""
        try:
            self._descriptor = open_locked(self._path, "")
        except (OSError, H5PackError):
            self._given_up = True
        return not self._given_up


def _written_head(payload: bytes) -> bytes:
    # Unlike `_PREFIX`, this has no length: with hundreds of millions of rows, it may not fit into 32 bits.
    return _WRITTEN.pack(_MAGIC, zlib.crc32(payload))


def _framed(magic: int, payload: bytes) -> bytes:
    return _PREFIX.pack(magic, len(payload), zlib.crc32(payload)) + payload


def _intact(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the magic number and the payload of a file's records up to the first that is incomplete or damaged."""
    with path.open("rb") as stream:
        size, position = os.fstat(stream.fileno()).st_size, 0
        while position + _PREFIX.size <= size:
            magic, length, checksum = _PREFIX.unpack(stream.read(_PREFIX.size))
            position += _PREFIX.size + length
            if magic not in (_MAGIC, _MARK) or position > size:
                break
            payload = stream.read(length)
            if zlib.crc32(payload) != checksum:
                break
            yield magic, payload
