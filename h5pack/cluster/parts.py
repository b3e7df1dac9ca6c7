"""The files through which the parts of an array job share results.

The parts are independent processes on several machines, connected only by these files. Each part makes the same plan,
so it needs the results of the whole survey (the pass over all image headers) and, with `keep`, of encoding. No part
waits for a particular other part, because the other part may be killed or never start. Instead, all parts submit the
same tasks: with `SharedResults`, the part that first creates the file ``N.claim`` runs task N, and saves the result as
``N.result``. If a part has no other work and no result arrives for a while, it also runs tasks that other parts have
claimed. At worst, a task runs several times, each time with the same result.
"""

from __future__ import annotations

import json
import pickle
import random
import secrets
import shutil
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from h5pack.errors import IncompletePackError, ResumeError
from h5pack.images.decode import decoder_versions
from h5pack.sources.catalog import Catalog
from h5pack.system.files import write_atomically
from h5pack.system.processes import ElasticExecutor
from h5pack.system.text import stored_option_text

_IDLE_SECONDS = 1.0
_MISSING = object()
_COUNT = "number of parts"
# Parts of a source's identity (see `Catalog.identity`) that are checksums, which say nothing to a user.
_HASHED = {"names": "the names or the order of the images", "tables": "labels, splits, fields or rejected images"}


class PartsFolder:
    """The folder ``OUT.partial.parts`` of an array job.

    It holds a record of what all parts must have in common, such as the options, and the results that the parts share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def agreed(self) -> dict[str, Any] | None:
        """Return the record that the first part made with `agree`; None if no part has started."""
        try:
            agreed: dict[str, Any] = json.loads((self.folder / "job.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        return agreed

    def agree(self, count: int, options: dict[str, Any], catalog: Catalog) -> bool:
        """Record the number of parts, the options, the package versions and the source; return True.

        If another part has made the record before, compare with it instead, raise ResumeError if anything differs, and
        return False.
        """
        job = {_COUNT: count, "packages": decoder_versions(), "options": options, "source": catalog.identity()}
        job = json.loads(json.dumps(job))
        temporary = self.folder.with_name(f"{self.folder.name}-{secrets.token_hex(6)}")
        before, begins = self.agreed(), False
        if before is None:
            try:
                temporary.mkdir()
                write_atomically(temporary / "job.json", json.dumps(job, indent=1).encode())
                # Renaming is atomic. It fails if another part has made the folder, which then contains job.json.
                temporary.rename(self.folder)
                before, begins = job, True
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)
                before = self.agreed()
                if before is None:
                    raise
        for name in {**job, **before}:
            old, new = before.get(name), job.get(name)
            if old != new:
                difference, *parameters = _difference(name, old, new)
                problem = (
                    f"this part and earlier ones differ in the {name} ({difference}); give "
                    f"all parts the same {name}, or start over: delete all of "
                    f"{self.folder.with_suffix('')}*"
                )
                raise ResumeError.at(self.folder, problem, *parameters)
        return begins

    @property
    def count(self) -> int:
        """Number of parts; 0 if no part has started."""
        agreed = self.agreed()
        return 0 if agreed is None else int(agreed[_COUNT])

    def shared_results(self, stage: str, inner: Executor, num_workers: int) -> Executor:
        """Return an executor that shares a stage's results with all parts. If no part has started, return `inner`."""
        if not self.count:
            return inner
        folder = self.folder / stage
        folder.mkdir(exist_ok=True)
        return SharedResults(folder, inner, num_workers, self.count)


def finished_by_others(partial: Path) -> IncompletePackError:
    """Return the error of a part whose files are gone, because another run has finished or discarded them."""
    problem = "was removed, replaced or finished by another run; run this part again if the output is not complete"
    return IncompletePackError.at(partial, problem)


def _difference(name: str, old: Any, new: Any) -> tuple[str, ...]:
    """Return how the records of two parts differ in `name`, and the fragments that name parameters."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return (f"{old!r} before, {new!r} now",)
    key = next(key for key in {**old, **new} if (key in old, old.get(key)) != (key in new, new.get(key)))
    if name == "source" and key in _HASHED:
        return (_HASHED[key],)
    if name != "options":
        return (f"{key}: {old.get(key)!r} before, {new.get(key)!r} now",)
    (before, *first), (now, *second) = stored_option_text(key, old.get(key)), stored_option_text(key, new.get(key))
    return f"{before} before, {now} now", *first, *second


class SharedResults(ElasticExecutor):
    """An executor of tasks whose results all parts need.

    All parts must submit the same tasks in the same order. `inner` runs the tasks that this part claims.
    """

    def __init__(self, folder: Path, inner: Executor, num_workers: int, parts: int) -> None:
        self._folder, self._inner = folder, inner
        self._num_workers, self._parts = num_workers, parts
        self._number = 0
        # Tasks that other parts have claimed: (future, function, task) by number.
        self._awaited: dict[int, tuple[Future[Any], Callable[..., Any], Any]] = {}
        self._running: list[Future[Any]] = []
        self._longest_seconds, self._changed = 0.0, time.monotonic()

    def in_flight(self) -> int:
        """Return how many tasks may be in flight: two per worker of all parts.

        The workers of all parts count, because other parts run most of the tasks that are in flight here. Also collect
        the results that other parts have saved. After a while without results, run some of the other parts' tasks.
        """
        for number, (outer, _, _) in list(self._awaited.items()):
            result = self._load(number)
            if result is not _MISSING:
                del self._awaited[number]
                self._changed = time.monotonic()
                outer.set_result(result)
        self._running = [one for one in self._running if not one.done()]
        idle_seconds = time.monotonic() - self._changed
        if self._awaited and not self._running and idle_seconds > max(_IDLE_SECONDS, 2 * self._longest_seconds):
            # Select tasks at random, so that several idle parts run different ones.
            for number in random.sample(sorted(self._awaited), min(len(self._awaited), self._num_workers)):
                self._run(number, *self._awaited.pop(number))
        return 2 * self._num_workers * self._parts

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        (task,) = args
        outer: Future[Any] = Future()
        number, self._number = self._number, self._number + 1
        result = self._load(number)
        if result is not _MISSING:
            outer.set_result(result)
            return outer
        try:
            (self._folder / f"{number}.claim").touch(exist_ok=False)
        except FileExistsError:
            self._awaited[number] = (outer, fn, task)
        else:
            self._run(number, outer, fn, task)
        return outer

    def _load(self, number: int) -> Any:
        try:
            data = (self._folder / f"{number}.result").read_bytes()
        except FileNotFoundError:
            return _MISSING
        # Compare the CRC-32, because after a power cut, a file may lack some of its bytes.
        return pickle.loads(data[4:]) if data[:4] == zlib.crc32(data[4:]).to_bytes(4, "little") else _MISSING

    def _save(self, number: int, result: Any) -> None:
        data = pickle.dumps(result)
        temporary = self._folder / f"{number}.{secrets.token_hex(6)}"
        temporary.write_bytes(zlib.crc32(data).to_bytes(4, "little") + data)
        temporary.rename(self._folder / f"{number}.result")

    def _run(self, number: int, outer: Future[Any], function: Callable[..., Any], task: Any) -> None:
        begin = time.monotonic()

        def finish(inner: Future[Any]) -> None:
            try:
                result = inner.result()
                self._save(number, result)
            except BaseException as error:
                outer.set_exception(error)
            else:
                outer.set_result(result)
            self._changed = time.monotonic()
            self._longest_seconds = max(self._longest_seconds, self._changed - begin)

        inner = self._inner.submit(function, task)
        self._running.append(inner)
        inner.add_done_callback(finish)
