"""Running tasks on the workers of a Dask cluster.

`open_dask_executor` wraps a `distributed.Client` as an executor of `concurrent.futures`. Before its first task, each
worker is checked: it must have the same versions of the packages that decode images, and must see the source and the
output's folder. Tasks are sent as bytes, because the scheduler would otherwise unpickle all tasks, with the names of
all images. A worker plugin sends the object that all tasks share to each worker process once.

If a worker is lost, the scheduler gives the worker's tasks to another worker. A task may therefore run twice, even at
the same time. That is harmless because tasks are idempotent; see `h5pack.pack.journal`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import pickle
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from h5pack.errors import H5PackError, NoSpaceError, OptionsError, WorkerError
from h5pack.images.decode import decoder_versions
from h5pack.system.files import NO_SPACE, absolute_path
from h5pack.system.libc import libc_function
from h5pack.system.parameters import invalid
from h5pack.system.processes import ElasticExecutor, LostTaskError, using_shared

_CONNECT_SECONDS = 10
_POLL_SECONDS = 0.5
_MANY_RESULTS = 256
# Parameters of glibc's mallopt, and the amount of freed memory that a worker process keeps instead of returning it.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 64 * 1024 * 1024
_IDLE_TASKS = 8
_CONNECTED = ("running", "connecting")
_LOCAL = re.compile(r"local:([1-9]\d*)")


@dataclass(frozen=True)
class Expectations:
    """Values that must be the same on all workers; created by the process that submits tasks."""

    token: str  # identifies the executor; the keys of its tasks contain it
    versions: dict[str, str]
    source: str | None  # absolute path; None if the source is a dataset, or a pattern rather than a file or folder
    source_bytes: int | None  # size of a source that is one file, else None
    probe: str  # path of a file beside the output; the file contains the token

    @classmethod
    def here(cls, source: str | None, partial: Path) -> Expectations:
        """Return the versions and the source of this process as expectations, and create the probe file."""
        token = secrets.token_hex(8)
        source = None if source is None or not os.path.exists(source) else absolute_path(source)
        size = os.path.getsize(source) if source is not None and os.path.isfile(source) else None
        probe = partial.with_name(f"{partial.name}.probe-{token}")
        try:
            probe.write_text(token)
        except OSError:
            probe.unlink(missing_ok=True)
            raise
        return cls(token, decoder_versions(), source, size, str(probe))


def problems(expected: Expectations) -> list[str]:
    """Return phrases on how this process differs from `expected`, such as "cannot read the source /data/in".

    To check that this process can write to the output's folder, write a file there, and remove it.
    """
    versions = decoder_versions()
    found = [
        f"has {name} {versions[name]} instead of {version}"
        for name, version in expected.versions.items()
        if versions[name] != version
    ]
    source, folder = expected.source, os.path.dirname(expected.probe)
    if source is not None:
        if not os.access(source, os.R_OK):
            found.append(f"cannot read the source {source}")
        elif expected.source_bytes is not None and os.path.getsize(source) != expected.source_bytes:
            found.append(f"sees another file as the source {source}")
    try:
        if Path(expected.probe).read_text() != expected.token:
            found.append(f"sees other files in the output's folder {folder}")
        own = Path(f"{expected.probe}-{secrets.token_hex(4)}")
        own.write_text(expected.token)
        own.unlink()
    except OSError as error:
        found.append(f"cannot share the output's folder {folder} ({os.strerror(error.errno or errno.EIO)})")
    return found


def _refusal(found: dict[str, list[str]]) -> WorkerError:
    first = list(found.items())[:4]
    text = "; ".join(f"{worker} {', '.join(differences)}" for worker, differences in first)
    more = f"; and {len(found) - len(first):,} more" if len(found) > len(first) else ""
    return WorkerError(
        f"workers of the cluster differ from this process: {text}{more}; give all of them the same packages and mounts"
    )


@contextlib.contextmanager
def open_client(address: str) -> Iterator[Any]:
    """Connect to a Dask scheduler, and yield the client.

    `address` is the address of the scheduler or the path of its scheduler file. With "local:N", start a scheduler and N
    workers on this machine. Raises OptionsError if `address` is none of these. Raises WorkerError if no scheduler
    answers, if the local cluster cannot be started, or if Dask is not installed.
    """
    try:
        import distributed
    except Exception as error:  # A broken package may raise other errors than ImportError.
        problem = f"a Dask cluster needs distributed, whose import fails ({error}); run pip install distributed"
        raise WorkerError(problem) from error
    # Silence Dask, because h5pack raises an error if a connection is lost. Set the level of each of Dask's loggers,
    # because some of them have a level of their own.
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "distributed"]:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    local, is_file = _LOCAL.fullmatch(address), "://" not in address and os.path.isfile(address)
    if local is None and not is_file and (address.startswith("local:") or ":" not in address):
        raise OptionsError(
            f"cluster={address!r} is neither the address of a scheduler, such as tcp://host:8786, nor a scheduler "
            "file, nor local:N",
            parameters=(f"cluster={address!r}",),
        )
    with contextlib.ExitStack() as stack:
        try:
            if local is not None:
                settings = {"dashboard_address": "127.0.0.1:0", "silence_logs": logging.CRITICAL}
                cluster = distributed.LocalCluster(n_workers=int(local[1]), threads_per_worker=1, **settings)
                client = distributed.Client(stack.enter_context(cluster))
            elif is_file:
                client = distributed.Client(scheduler_file=address, timeout=_CONNECT_SECONDS)
            else:
                client = distributed.Client(address, timeout=_CONNECT_SECONDS)
        except Exception as error:  # Dask raises various errors, for example if a scheduler file is incomplete.
            reason = " ".join(str(error).split()) or type(error).__name__
            problem = f"no Dask scheduler answers ({reason}); start it, or check the address"
            if local is not None:
                advice = "start fewer workers, or check the limits of 'ulimit -a'"
                problem = f"the cluster cannot be started ({reason}); {advice}"
            raise WorkerError(f"{address}: {problem}") from error
        yield stack.enter_context(client)


@contextlib.contextmanager
def open_dask_executor(client: Any, shared_object: Any, source: str | None, partial: Path) -> Iterator[DaskExecutor]:
    """Open an executor that runs tasks on the workers of a `distributed.Client`.

    Inside tasks, `h5pack.system.processes.shared` returns `shared_object`. Each thread of a worker has its own copy of
    it. `partial` is the path of ``OUT.partial``. Raises WorkerError if a worker has other versions, or does not see the
    source or the output's folder.
    """
    payload = _pickled(shared_object)
    expected = Expectations.here(source, partial)
    try:
        with _reporting(client):
            replies = client.run(problems, expected, on_error="return")
        found = {
            worker: [f"cannot run h5pack ({reply})"] if isinstance(reply, BaseException) else reply
            for worker, reply in replies.items()
            if reply and not _is_lost(reply)
        }
        if found:
            raise _refusal(found)
        name = f"h5pack-{expected.token}"
        with _reporting(client):
            client.register_plugin(_plugin(expected, payload), name=name)
        try:
            with DaskExecutor(client, expected) as executor:
                yield executor
        finally:
            with contextlib.suppress(Exception):
                client.unregister_worker_plugin(name)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(expected.probe)


@contextlib.contextmanager
def _reporting(client: Any) -> Iterator[None]:
    """Turn an error of a call of `client` into a WorkerError: the scheduler was lost, or a worker failed."""
    from distributed import CancelledError, TimeoutError

    try:
        yield
    except Exception as error:
        if isinstance(error, (OSError, CancelledError, TimeoutError)) or client.status not in _CONNECTED:
            raise _lost_scheduler(error) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        problem = f"a worker of the Dask cluster cannot be prepared ({reason}); see its log, then run again"
        raise WorkerError(problem) from error


def _is_lost(reply: object) -> bool:
    """Return whether a reply says that the worker was lost. The plugin checks a worker that replaces it."""
    from distributed.comm import CommClosedError

    return isinstance(reply, CommClosedError)


def count_threads(client: Any) -> int:
    """Return how many tasks the cluster runs at a time. Raises OptionsError if `client` is not a synchronous client."""
    if getattr(client, "asynchronous", False) or not hasattr(client, "nthreads"):
        raise invalid("client", client, "give a synchronous distributed.Client")
    return sum(client.nthreads().values())


def _pickled(value: Any) -> Any:
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise WorkerError(
            f"{type(value).__name__} cannot be sent to the workers of a cluster ({type(error).__name__}: {error}); "
            "make it picklable"
        ) from error


@dataclass
class _Prepared:
    payload: bytes  # the pickled shared object
    problems: list[str]
    objects: dict[int, Any] = field(default_factory=dict)  # each thread's copy of the shared object, by thread id


_prepared: dict[str, _Prepared] = {}


def prepare(expected: Expectations, payload: bytes) -> None:
    """Check this worker process, and store the pickled shared object in it."""
    # Let the process keep freed memory, so that decoding the next image can use it again. Dask's nanny starts workers
    # with settings that return freed memory above 64 KiB to the system at once. Measured with images of 116 KB, this
    # caused 120 page faults per image, and took a quarter of the time.
    mallopt = libc_function("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)
    _prepared[expected.token] = _Prepared(payload, problems(expected))


def forget(token: str) -> None:
    """Remove the shared object from this worker process."""
    _prepared.pop(token, None)


def _plugin(expected: Expectations, payload: bytes) -> Any:
    from distributed import WorkerPlugin

    class SharedObject(WorkerPlugin):  # type: ignore[misc]
        def setup(self, worker: Any) -> None:
            prepare(expected, payload)

        def teardown(self, worker: Any) -> None:
            forget(expected.token)

    return SharedObject()


def run_pickled(token: str, data: bytes) -> bytes:
    """Run a pickled (function, arguments) in a worker, and return the pickled result."""
    prepared = _prepared.get(token)
    if prepared is None:
        raise WorkerError(f"{socket.gethostname()}: this worker was not prepared for the conversion; restart it")
    if prepared.problems:
        raise _refusal({socket.gethostname(): prepared.problems})
    thread = threading.get_ident()
    if thread not in prepared.objects:
        prepared.objects[thread] = pickle.loads(prepared.payload)
    function, arguments = pickle.loads(data)
    try:
        with using_shared(prepared.objects[thread]):
            return pickle.dumps(function(*arguments))
    except OSError as error:
        if isinstance(error, H5PackError) or error.errno not in NO_SPACE:
            raise
        raise NoSpaceError(
            f"{error.filename or 'the output'}: {os.strerror(error.errno)} on {socket.gethostname()}; make room, or "
            "raise the limit on the size of files ('ulimit -f'), then run again with resume=True",
            parameters=("resume=True",),
        ) from error


class DaskExecutor(ElasticExecutor):
    """An executor that runs tasks on the workers of a Dask cluster; see `open_dask_executor`.

    A thread fetches the results of several tasks at once, because each fetch takes a round trip.
    """

    def __init__(self, client: Any, expected: Expectations) -> None:
        self._client, self._token = client, expected.token
        self._pending: dict[Any, Future[Any]] = {}
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._number = 0
        self._threads, self._counted = 0, 0.0
        self._closed = False
        self._collector = threading.Thread(target=self._collect, name="h5pack-dask", daemon=True)
        self._collector.start()

    def in_flight(self) -> int:
        """Return how many tasks may be in flight: two per thread of the cluster, and a few more.

        The number is never 0, because an adaptive cluster starts its first workers only when tasks wait for them.
        """
        if time.monotonic() - self._counted > 1:
            with contextlib.suppress(Exception):
                self._threads = count_threads(self._client)
            self._counted = time.monotonic()
        return 2 * self._threads + _IDLE_TASKS

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._number += 1
        # The dashboard groups tasks by the part of the key before the token.
        key = f"h5pack-{fn.__name__.strip('_').split('_')[0]}-{self._token}-{self._number}"
        outer: Future[Any] = Future()
        data = pickle.dumps((fn, args))
        with _reporting(self._client):
            inner = self._client.submit(run_pickled, self._token, data, key=key, pure=False, retries=0)
        self._pending[inner] = outer
        inner.add_done_callback(self._done.put)
        return outer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel unfinished tasks, and end the thread that fetches results, regardless of the arguments."""
        self._closed = True
        self._collector.join()
        with contextlib.suppress(Exception):
            self._client.cancel(list(self._pending), force=True)
        self._pending.clear()

    def _collect(self) -> None:
        while not self._closed:
            try:
                finished = [self._done.get(timeout=_POLL_SECONDS)]
            except queue.Empty:
                if self._client.status not in _CONNECTED:
                    for outer in [self._pending.pop(inner) for inner in list(self._pending)]:
                        if outer.set_running_or_notify_cancel():
                            outer.set_exception(_lost_scheduler(None))
                continue
            while len(finished) < _MANY_RESULTS and not self._done.empty():
                finished.append(self._done.get())
            self._deliver(finished)

    def _deliver(self, finished: list[Any]) -> None:
        pairs = [(inner, self._pending.pop(inner)) for inner in finished if inner in self._pending]
        good = [pair for pair in pairs if pair[0].status == "finished"]
        try:
            results = self._client.gather([inner for inner, _ in good])
        except Exception:
            # A result or the scheduler was lost. Fetch the results one by one below: only the lost ones raise an error.
            good, results = [], []
        for (_, outer), result in zip(good, results, strict=True):
            _settle(outer, partial(pickle.loads, result))
        for inner, outer in pairs:
            if not outer.done():
                _settle(outer, partial(_result_of, inner))


def _settle(outer: Future[Any], load: Callable[[], Any]) -> None:
    """Give a future the result or the error of `load`, unless the future was cancelled."""
    if not outer.set_running_or_notify_cancel():
        return
    try:
        outer.set_result(load())
    except Exception as error:
        outer.set_exception(error)


def _result_of(inner: Any) -> Any:
    try:
        return pickle.loads(inner.result())
    except Exception as error:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            error = LostTaskError(str(error))
        raise (error if inner.status == "error" else _lost_scheduler(error)) from None


def _lost_scheduler(error: BaseException | None) -> WorkerError:
    reason = f" ({type(error).__name__})" if error is not None else ""
    return WorkerError(
        f"the connection to the Dask scheduler was lost{reason}; start it again, then continue with resume=True",
        parameters=("resume=True",),
    )
