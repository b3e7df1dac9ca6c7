"""The journal beside an unfinished output: what was planned, and which rows are written.

``OUT.partial.journal/`` holds

- ``plan.json``: what a resume must agree with, and what it keeps (the time of creation); ``prints.bin`` beside it the
  source's fingerprints;
- ``rows-*.log``, one a writer, appended to after the rows are written: records of a magic number, a length, a CRC-32
  and a payload. A kill can cut the last record short; reading stops there, and its rows are written again;
- ``written.bin``: all rows' checksums and rejects, once every row is written or rejected. From then on rows may move.

A record says that a row was handed to the kernel, not that it reached the disk: after a power cut the journal may know
more than the file. So a resume reads every row that the journal claims, and writes again those whose checksum differs.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OutputBusyError, ResumeError
from h5pack.pack.output import sync_path, write_atomically

_MAGIC = 0x4B503548
_PREFIX = struct.Struct("<III")
_HEAD = struct.Struct("<IIIII")
_WAIT_SECONDS = 10.0


@dataclass
class RowRecord:
    """What a writer knows of some rows.

    Attributes
    ----------
    rows : ndarray
        int64, (n,): the planned rows, ascending.
    packed : ndarray
        bool, (n,): False where the image was rejected.
    checksums : ndarray
        uint32, (n,): CRC-32 of each row's bytes.
    sampled : ndarray
        int64, (k,): rows whose channel sums follow.
    sums : ndarray
        uint64, (k, 2, C): sums of values and of squares.
    reasons : dict of int to str
        Why rows were rejected.
    """

    rows: npt.NDArray[np.int64]
    packed: npt.NDArray[np.bool_]
    checksums: npt.NDArray[np.uint32]
    sampled: npt.NDArray[np.int64]
    sums: npt.NDArray[np.uint64]
    reasons: dict[int, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The record's payload."""
        reasons = json.dumps({str(row): reason for row, reason in self.reasons.items()}).encode()
        channels = self.sums.shape[2]
        count = len(self.rows)
        # Of rows that follow each other the first is enough.
        listed = self.rows if not is_consecutive(self.rows) else self.rows[:1]
        head = _HEAD.pack(count, len(listed), len(self.sampled), channels, len(reasons))
        return b"".join(
            [
                head,
                listed.tobytes(),
                self.packed.tobytes(),
                self.checksums.tobytes(),
                self.sampled.tobytes(),
                self.sums.tobytes(),
                reasons,
            ]
        )

    @classmethod
    def decode(cls, payload: bytes) -> RowRecord:
        """The record of a payload."""
        count, listed, sampled, channels, reasons = _HEAD.unpack_from(payload)
        stream = io.BytesIO(payload[_HEAD.size :])
        rows = np.frombuffer(stream.read(8 * listed), np.int64)
        return cls(
            rows if listed == count else rows[0] + np.arange(count),
            np.frombuffer(stream.read(count), np.bool_),
            np.frombuffer(stream.read(4 * count), np.uint32),
            np.frombuffer(stream.read(8 * sampled), np.int64),
            np.frombuffer(stream.read(16 * sampled * channels), np.uint64).reshape(sampled, 2, channels),
            {int(row): reason for row, reason in json.loads(stream.read(reasons)).items()},
        )


def is_consecutive(rows: npt.NDArray[np.int64]) -> bool:
    """Whether ascending rows, int64 (n,), are some, and follow each other without a gap."""
    return bool(len(rows)) and int(rows[-1] - rows[0]) == len(rows) - 1


class JournalWriter:
    """Appends records to a file of its own, which it keeps locked for as long as it lives.

    Parameters
    ----------
    folder : str
        The journal.
    """

    def __init__(self, folder: str) -> None:
        name = f"rows-{os.getpid()}-{secrets.token_hex(4)}.log"
        self._descriptor = os.open(
            os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        _lock(self._descriptor)

    def append(self, record: RowRecord) -> None:
        """Append one record, in a single write."""
        payload = record.encode()
        data = _PREFIX.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload
        if os.write(self._descriptor, data) < len(data):
            # What lies behind a torn record is never read, so this journal ends here.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Journal:
    """The journal of one output.

    Parameters
    ----------
    folder : Path
        ``OUT.partial.journal``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, plan: dict[str, Any], prints: npt.NDArray[np.uint64]) -> None:
        """Begin a new journal; the plan appears last, so a journal without one counts as none."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        write_atomically(self.folder / "prints.bin", prints.tobytes())
        write_atomically(self.folder / "plan.json", json.dumps(plan, indent=1).encode())
        sync_path(self.folder)

    def plan(self) -> dict[str, Any] | None:
        """What `start` was given; None where no conversion got as far.

        Raises
        ------
        ResumeError
            If it cannot be read any more.
        """
        try:
            plan: dict[str, Any] = json.loads((self.folder / "plan.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ResumeError(
                f"{self.folder}: the journal is damaged ({error}); start over with --overwrite instead of --resume"
            ) from error
        return plan

    def prints(self) -> npt.NDArray[np.uint64]:
        """The fingerprints that `start` was given."""
        return np.frombuffer((self.folder / "prints.bin").read_bytes(), np.uint64)

    def records(self) -> Iterator[RowRecord]:
        """All whole records of all writers, after the last of them has died.

        Raises
        ------
        OutputBusyError
            If a writer of an earlier run is still alive.
        """
        for path in sorted(self.folder.glob("rows-*.log")):
            _wait_for_writer(path)
            data = path.read_bytes()
            position = 0
            while position + _PREFIX.size <= len(data):
                magic, length, checksum = _PREFIX.unpack_from(data, position)
                payload = data[position + _PREFIX.size : position + _PREFIX.size + length]
                if magic != _MAGIC or len(payload) < length or zlib.crc32(payload) != checksum:
                    break
                yield RowRecord.decode(payload)
                position += _PREFIX.size + length

    def save_written(self, record: RowRecord) -> None:
        """Note that every row is written or rejected, durably: rows may move from here on."""
        payload = record.encode()
        write_atomically(self.folder / "written.bin", struct.pack("<I", zlib.crc32(payload)) + payload)
        sync_path(self.folder)

    def written(self) -> RowRecord | None:
        """What `save_written` noted; None before."""
        try:
            data = (self.folder / "written.bin").read_bytes()
        except FileNotFoundError:
            return None
        payload = data[4:]
        if len(data) < 4 or struct.unpack_from("<I", data)[0] != zlib.crc32(payload):
            return None
        return RowRecord.decode(payload)


def _lock(descriptor: int) -> None:
    import fcntl

    # Without locks (some network file systems) an earlier run's dying writers cannot be waited for.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _wait_for_writer(path: Path) -> None:
    import fcntl

    deadline = time.monotonic() + _WAIT_SECONDS
    with path.open("rb") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OutputBusyError(
                        f"{path}: a worker of the interrupted conversion is still writing; stop it, then --resume"
                    ) from None
                time.sleep(0.02)
            except OSError:
                return
