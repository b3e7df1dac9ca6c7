"""The output file: the report of its conversion, the temporary files beside it, its disk space and its lock."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h5pack.cluster.parts import PartsFolder, finished_by_others
from h5pack.errors import IncompletePackError, NoSpaceError, OutputBusyError, OutputExistsError, SourceError
from h5pack.pack.options import ConvertOptions
from h5pack.system.files import (
    copy_changed,
    copy_permissions,
    is_at,
    link_file,
    lock,
    max_name_bytes,
    open_locked,
    require_replaceable,
    require_writable,
    sync_path,
    wait_until_unlocked,
    write_atomically,
)
from h5pack.system.machine import free_bytes
from h5pack.system.parameters import output_file
from h5pack.system.text import counted, format_bytes, printable

_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0
# Upper bound of the bytes by which the names of temporary files, including a shard's number, exceed the output's name.
_MAX_ENDING_BYTES = 40


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    `seconds` is the time of each stage: survey (including listing the source), encode (only with `keep`), check (rows
    written by an earlier run), write, compress (only with `compression`), and finish (moving rows, writing tables,
    fsync, rename).
    """

    path: str  #: the output
    images: int  #: rows of the output
    rejects: int  #: images that were not packed; ``OUT.rejects.csv`` and the HDF5 group `/rejects` list them
    bytes: int  #: size of the output
    num_workers: int  #: processes that decoded images, or threads of a Dask cluster
    resumed_rows: int = 0  #: planned rows that an earlier, interrupted run had already written or rejected
    moved_rows: int = 0  #: rows that were moved to close gaps left by images that could not be decoded
    seconds: dict[str, float] = field(default_factory=dict)
    already_complete: bool = False  #: whether the output was complete before this run
    part: str | None = None  #: such as "3/16" if only this part was written; `images` and `rejects` count its rows
    shards: int = 0  #: with `shard_bytes`, number of packs that the virtual output refers to; `bytes` includes them
    notes: tuple[str, ...] = ()  #: remarks, such as a list of source datasets that are not packed

    def to_text(self) -> str:
        """Return the report as one or two lines of text."""
        path = printable(self.path)
        if self.already_complete:
            return f"{path}: already complete"
        total = sum(self.seconds.values())
        if self.part is not None:
            return f"part     {self.part} of {path}: {counted(self.images, 'row')}, {total:.1f} s"
        speed = self.images / total if total else 0.0
        size = format_bytes(self.bytes) + (f" in {counted(self.shards, 'shard')}" if self.shards else "")
        text = f"done     {path}: {counted(self.images, 'image')}, {size}, {total:.1f} s ({speed:,.0f} images/s)"
        if self.rejects:
            text += f"\nrejects  {self.rejects:,}, listed with reasons in {path}.rejects.csv"
        return text


class Output:
    """Paths of a conversion's output, which exists only when it is complete, and of the temporary files beside it."""

    def __init__(self, final: Path, private: str = "", *, permissions_of: Path | None = None) -> None:
        """`private` is a suffix for temporary files of this process alone, if several processes write the output."""
        self.final = Path(output_file(final))
        self.permissions_of = permissions_of  # a file whose owner, group and mode the output gets, if it exists
        self.partial = self._beside(".partial")  # the file under construction
        self.new = self._beside(f".partial.new{private}")  # becomes `partial` when it is ready
        self.survey = self._beside(".partial.survey")  # results of a long survey; see `SurveyJournal`
        self.journal = self._beside(".partial.journal")  # a folder: the plan and the rows that are written
        self.parts = self._beside(".partial.parts")  # a folder: what the parts of an array job share
        self.shards = self._beside(".partial.shards")  # a folder: shards before they get their final names
        self.owner = self._beside(".partial.owner")  # names the process that may finish; see `OwnerFile`
        # The HDF5 metadata in a sparse file, which is copied into `partial` or, for a virtual file, replaces it.
        self.structure = self._beside(f".partial.structure{private}")
        # The compressed copy of `partial`. It replaces `partial` when the copy is complete.
        self.compressed = self._beside(".partial.compressed")
        self.rejects = self._beside(".rejects.csv")  # the table of images that were not packed

    def old_status(self) -> os.stat_result | None:
        """Return the status of the file `permissions_of`; None if there is none."""
        path = self.permissions_of
        return path.stat() if path is not None and path.exists() else None

    def _beside(self, ending: str) -> Path:
        return self.final.with_name(self.final.name + ending)

    def check(self, options: ConvertOptions, *, resumable: bool = True) -> None:
        """Raise an error if the output's folder, its name or an existing file would keep the conversion from finishing.

        If `resumable` is False, errors recommend starting over instead of resuming.
        """
        require_writable(self.final.parent)
        max_bytes = max_name_bytes(self.final.parent) - _MAX_ENDING_BYTES
        if len(os.fsencode(self.final.name)) > max_bytes:
            problem = f"the name is too long for the files beside it; give a name of at most {max_bytes} bytes"
            raise SourceError.at(self.final, problem)
        temporary = (self.partial, self.new, self.survey, self.journal, self.parts, self.shards, self.owner)
        require_replaceable(*temporary, self.structure, self.compressed)
        require_replaceable(self.rejects, *(self.final,) * options.overwrite, writable=False)
        if options.part is None:  # A part does not lock the file.
            wait_until_unlocked(self.partial, OutputBusyError(_busy(self), path=self.final))
        # Count the parts after looking for files. Otherwise, a part that begins in between would look like another run.
        has_unfinished = self.partial.exists() or self.parts.exists()
        begun_parts = PartsFolder(self.parts).count if options.in_array_job else 0
        is_complete = self.final.exists() and not self.partial.exists()
        if options.finish and not begun_parts and not is_complete:
            problem = "no part of it was written; write all parts, from part='1/N' to part='N/N', first"
            raise IncompletePackError.at(self.final, problem, "part='1/N'", "part='N/N'")
        may_replace = options.overwrite or options.resume or (options.continues and (begun_parts > 0 or is_complete))
        if self.final.is_dir():
            raise OutputExistsError.at(self.final, "is a folder; give the name of a file")
        if self.final.exists() and not may_replace:
            problem = "exists; give another name, or overwrite=True to replace it"
            raise OutputExistsError.at(self.final, problem, "overwrite=True")
        if has_unfinished and not may_replace:
            raise self._unfinished_error(options, resumable)

    def _unfinished_error(self, options: ConvertOptions, resumable: bool) -> OutputExistsError:
        advice, parameters = "start over with overwrite=True", ["overwrite=True"]
        if options.part is not None:
            # A part never discards an unfinished file.
            part = "part='{}/{}'".format(*options.part)
            advice = f"continue it with resume=True instead of {part}, or delete all of {self.partial}*"
            parameters = ["resume=True", part]
        elif resumable:
            advice, parameters = f"continue it with resume=True, or {advice}", ["resume=True", *parameters]
        path = self.partial if self.partial.exists() else self.parts
        return OutputExistsError.at(path, f"belongs to an unfinished run; {advice}", *parameters)

    def require_not_begun(self, lock: OutputLock, options: ConvertOptions, *, resumable: bool = True) -> None:
        """Raise OutputExistsError if another run was interrupted after `check`.

        Do not raise it with `overwrite`, `resume`, `part` or `finish`, which discard or continue that run.
        """
        # `lock` holds `partial`, which is empty if no other run has begun.
        if not options.overwrite and not options.continues and os.fstat(lock.descriptor).st_size:
            raise self._unfinished_error(options, resumable)

    def require_space(self, needed: int, *, resumable: bool = True) -> None:
        """Raise NoSpaceError if the disk has too little room for `needed` bytes.

        Space that the unfinished files of this conversion already occupy counts as free.
        """
        held = 0
        shards = (path for path in self.shards.rglob("*") if path.is_file())
        for path in (self.partial, self.compressed, *self.journal.glob("*.bin"), *shards):
            with contextlib.suppress(FileNotFoundError):
                held += os.stat(path).st_blocks * 512
        free = free_bytes(self.final.parent)
        if needed - held > free:
            problem = (
                f"needs {needed - held:,} more bytes, but {self.final.parent} has only {free:,} free; "
                f"make room and run again{' with resume=True' if resumable else ''}, or choose another output"
            )
            raise NoSpaceError.at(self.final, problem, *("resume=True",) if resumable else ())

    def journal_identity(self) -> tuple[int, int] | None:
        """Return the device and inode numbers of the journal's folder; None if it does not exist."""
        try:
            status = os.stat(self.journal)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def note_replaced(self, shards: Iterable[Path]) -> None:
        """Save which shards belong to the output that `partial` will replace, so that they are removed afterwards."""
        noted = {"inode": self.partial.stat().st_ino, "shards": sorted(path.name for path in shards)}
        write_atomically(self.journal / "replaced.json", json.dumps(noted).encode())

    def remove_leftovers(self, *, keep_survey: bool = False) -> None:
        """Remove the temporary files beside the output except `partial`, `owner` and, with `keep_survey`, `survey`.

        The shards of an output that `partial` has replaced are removed, too (see `note_replaced`).
        """
        with contextlib.suppress(FileNotFoundError, ValueError):
            noted = json.loads((self.journal / "replaced.json").read_bytes())
            if self.final.stat().st_ino == noted["inode"]:
                for name in noted["shards"]:
                    self.final.with_name(name).unlink(missing_ok=True)
        if not keep_survey:
            self.survey.unlink(missing_ok=True)
        # Killed processes may have left private files and folders. With `keep_survey`, a conversion is beginning, and
        # this process still needs its own probe file (see `h5pack.cluster.dask_client`).
        kinds: tuple[str, ...] = () if keep_survey else ("owner", "probe", "parts")
        kinds += ("new", "structure", "journal", "parts") if self.parts.exists() else ()
        private = tuple(f"{self.partial.name}.{kind}-" for kind in kinds)
        for path in self.final.parent.iterdir() if private else ():
            if path.name.startswith(private):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        # Remove `parts` before the journal. If a kill left only `parts`, the next run would conclude that an array job
        # is still surveying images.
        shutil.rmtree(self.parts, ignore_errors=True)
        # Remove the plan first: without a plan, a partly removed journal does not look like that of an unfinished run.
        with contextlib.suppress(OSError):
            (self.journal / "plan.json").unlink()
        shutil.rmtree(self.journal, ignore_errors=True)
        shutil.rmtree(self.shards, ignore_errors=True)
        self.structure.unlink(missing_ok=True)
        self.compressed.unlink(missing_ok=True)
        self.new.unlink(missing_ok=True)

    def remove_emptied(self) -> None:
        """Remove folders that `remove_leftovers` could not remove, because a worker had files open in them.

        NFS and FUSE keep a removed file under another name until it is closed.
        """
        if not self.partial.exists():
            for folder in (*self.shards.glob("*.journal"), self.shards, self.journal):
                # This fails if a folder is not empty, such as that of another conversion that has just begun.
                with contextlib.suppress(OSError):
                    folder.rmdir()


class OwnerFile:
    """``OUT.partial.owner``: names the process that may finish the output, because locks may not reach other machines.

    Only one process can create this file, also on NFS. The owner updates the file's mtime every 5 seconds. Another
    process takes the file over if the owner ran on the same machine, in the same container, and has ended. If the owner
    ran elsewhere, or the system has no /proc, the mtime must be older than a minute, by the clock of the file system.
    Otherwise, OutputBusyError is raised.
    """

    def __init__(self, output: Output) -> None:
        self.path = output.owner
        self._token = secrets.token_hex(8)
        # Whether this process replaced an owner that it could not see, such as one on another machine. That owner may
        # still be running.
        self.took_over = False
        own = self.path.with_name(f"{self.path.name}-{self._token}")
        self._write(own)
        try:
            try:
                link_file(own, self.path)
            except FileExistsError:
                _require_stale(output, own)
                before = _owner_of(self.path)
                # `took_over` is also true if it was true for the replaced owner.
                self.took_over = not _sees_processes_of(before) or bool(before.get("took_over"))
                self._write(own)
                os.replace(own, self.path)
                # Two processes may take the file over at the same time. Wait, so that the first one notices the second.
                threading.Event().wait(0.2)
                self.confirm()
        finally:
            own.unlink(missing_ok=True)
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="h5pack-owner", daemon=True)
        self._beats.start()

    def _write(self, path: Path) -> None:
        owner = {**_process_identity(os.getpid()), "token": self._token, "took_over": self.took_over}
        path.write_text(json.dumps(owner))

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def confirm(self) -> None:
        """Raise OutputBusyError if another process has taken the file over, or has removed it."""
        if _owner_of(self.path).get("token") != self._token:
            problem = "another process has taken over this conversion; wait until it has finished"
            raise OutputBusyError.at(self.path, problem)

    def release(self) -> None:
        """Remove the file, unless another process has taken it over."""
        self._ended.set()
        self._beats.join()
        if _owner_of(self.path).get("token") == self._token:
            self.path.unlink(missing_ok=True)


def _process_identity(pid: int) -> dict[str, Any]:
    """Return what identifies a process: its id, the namespace of this id, and its start time.

    The start time is None if it is unknown, or if the process has ended. The host name, which may not be unique, is
    only for messages.
    """
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # In state Z (zombie), the process has ended, but its parent has not waited for it.
        start = None if state == "Z" else others[18]
    except (OSError, ValueError, IndexError):
        start = None
    return {"host": socket.gethostname(), "pid": pid, "start": start, "namespace": _process_namespace()}


def _process_namespace() -> str | None:
    """Return what identifies the running kernel and the container's namespace of process ids; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _sees_processes_of(owner: dict[str, Any]) -> bool:
    """Return whether this process sees the owner's process in /proc if the owner is still running."""
    return owner.get("namespace") is not None and owner["namespace"] == _process_namespace()


def _owner_of(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _require_stale(output: Output, probe: Path) -> None:
    """Raise OutputBusyError if the owner is still running.

    If this process cannot see the owner's process, the owner counts as running if its file was updated within the last
    minute. `probe` is a file that was just created, so its mtime is the present time of the file system.
    """
    owner = _owner_of(output.owner)
    try:
        silent_seconds = probe.stat().st_mtime - output.owner.stat().st_mtime
    except FileNotFoundError:
        return
    if _sees_processes_of(owner) and owner.get("start"):
        is_stale = _process_identity(owner["pid"])["start"] != owner["start"]
    else:
        is_stale = silent_seconds > _SILENT_SECONDS
    if not is_stale:
        problem = (
            f"process {owner.get('pid', '?')} on {owner.get('host', '?')} is writing this file (last "
            f"sign of life {max(0, silent_seconds):.0f} s ago); wait until that process has finished; if it was "
            f"killed, wait {_SILENT_SECONDS:.0f} s, or delete {output.owner}"
        )
        raise OutputBusyError.at(output.final, problem)


class OutputLock:
    """An flock on ``OUT.partial``, held from the file's creation until it is renamed to the output.

    With `distributed`, or if an `OwnerFile` exists already, the process also becomes the owner. Raises OutputBusyError
    if another process holds the lock, or is the owner and may still be running.
    """

    def __init__(self, output: Output, distributed: bool = False) -> None:
        self._path, self._new, self._old_status = output.partial, output.new, output.old_status
        self._owner: OwnerFile | None = None
        if distributed or output.owner.exists():
            self._owner = OwnerFile(output)
        try:
            self.descriptor = open_locked(output.partial, _busy(output))
        except BaseException:
            if self._owner is not None:
                self._owner.release()
            raise

    def renew(self) -> None:
        """Replace the file by an empty, locked one, into which no hanging worker of an earlier conversion can write."""
        # The new file is locked before it gets the name, so another conversion cannot lock it first.
        self.create(self._new)
        self.replace(self._new)

    def create(self, path: Path) -> None:
        """Create an empty file, which will replace ``OUT.partial``, with the permissions that the output will have."""
        path.unlink(missing_ok=True)
        os.close(_create(path, self._old_status()))

    def replace(self, path: Path) -> None:
        """Rename the file at `path` to ``OUT.partial``, and lock it instead of the old one."""
        fresh = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            lock(fresh)
            os.replace(path, self._path)
        except BaseException:
            os.close(fresh)
            raise
        os.close(self.descriptor)
        self.descriptor = fresh

    @property
    def took_over(self) -> bool:
        """Whether an owner that may still have the file open was replaced; see `OwnerFile.took_over`."""
        return self._owner is not None and self._owner.took_over

    def isolate(self) -> None:
        """Replace the file by a copy with a new inode, which no late writer can reach.

        A writer on another machine that was given up may be suspended. If it continues, it writes rows at their
        planned offsets. Another writer has written the same bytes there, so this does no harm until rows are moved to
        close gaps. So the file is copied before rows move, and late writes go to the old inode, which no longer has a
        name. The same holds for an owner that was silent, and then continues to move rows.
        """
        self.confirm()
        self.create(self._new)
        with self._new.open("r+b") as copy:
            size = os.fstat(self.descriptor).st_size
            os.ftruncate(copy.fileno(), size)
            copy_changed(self.descriptor, copy.fileno(), 0, size)
            os.fsync(copy.fileno())
        self.replace(self._new)

    def confirm(self) -> None:
        """Raise OutputBusyError if another process has taken over the conversion."""
        if self._owner is not None:
            self._owner.confirm()

    def share(self) -> None:
        """Downgrade to a shared lock: readers can open the complete file, but no other conversion can lock it."""
        self.confirm()
        lock(self.descriptor, shared=True, wait=True)

    def close(self) -> None:
        """Release the lock, and remove the file if it is empty."""
        with contextlib.suppress(OSError):
            if os.fstat(self.descriptor).st_size == 0 and is_at(self.descriptor, self._path):
                os.unlink(self._path)
        os.close(self.descriptor)
        if self._owner is not None:
            self._owner.release()


class PartFile:
    """``OUT.partial`` for a part of an array job: without a lock, because all parts write to it."""

    def __init__(self, output: Output) -> None:
        self._output, self.descriptor = output, -1

    def place(self, fill: Callable[[int], None], overwrite: bool) -> None:
        """Open the file. If it does not exist, create it atomically: `fill` writes the content, given a descriptor.

        Without `overwrite`, raise IncompletePackError if another run has finished the output meanwhile.
        """
        output = self._output
        if not output.partial.exists():
            new = _create(output.new, output.old_status())
            try:
                fill(new)
                os.fsync(new)
                # Linking is atomic. Unlike renaming, it fails if another part has already created the file.
                with contextlib.suppress(FileExistsError):
                    link_file(output.new, output.partial)
                if output.final.exists() and not overwrite:
                    self.require_current(new)  # The file may be that of another array job that replaces the output.
                    output.partial.unlink(missing_ok=True)
                    raise finished_by_others(output.partial)
            finally:
                os.close(new)
                output.new.unlink()
            sync_path(output.partial.parent)
        self.descriptor = os.open(output.partial, os.O_RDWR | os.O_CLOEXEC)

    def require_current(self, descriptor: int | None = None) -> None:
        """Raise IncompletePackError if the file was replaced or removed since it was opened (as `descriptor`)."""
        opened = self.descriptor if descriptor is None else descriptor
        if not is_at(opened, self._output.partial):
            raise finished_by_others(self._output.partial)

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _create(path: Path, status: os.stat_result | None) -> int:
    """Create an empty file with the permissions in `status` (None: the default ones), and return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if status is None else 0o600)
    if status is not None:
        # Allow the owner to read and write the file, because a resumed run must be able to open it.
        copy_permissions(status, descriptor, writable=True)
    return descriptor


def _busy(output: Output) -> str:
    return f"{output.final}: another conversion is writing this file; wait until it has finished, or give another name"
