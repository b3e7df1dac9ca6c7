"""Executors that run tasks in this process, or in worker processes that exit when this process does."""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import copy
import dis
import gc
import io
import multiprocessing
import multiprocessing.context
import os
import pickle
import signal
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from h5pack.errors import WorkerError
from h5pack.system.parameters import whole_number
from h5pack.system.text import error_line

Task = TypeVar("Task")
Result = TypeVar("Result")

_WAIT_SECONDS = 0.5
_JOIN_SECONDS = 10.0
_MAX_DEPTH = 5
MAX_WORKERS = 2**15  # Linux's default limit on process ids; a ProcessPoolExecutor fails with 2**31 workers
_ATOMS = {str, bytes, int, float, complex, bool, type(None)}
_KNOWN_PACKAGES = {"h5pack", "h5py", "numpy", *sys.stdlib_module_names}
ONE_WORKER = "num_workers=1"
_OR_ONE_WORKER = f", or give {ONE_WORKER}, which needs no other process"

# The object that `shared` returns is kept per thread, because several threads may each use a SerialExecutor.
_local = threading.local()


def shared() -> Any:
    """Return the object that was passed to `open_executor`. Only tasks may call this."""
    return getattr(_local, "shared", None)


@contextlib.contextmanager
def using_shared(shared_object: Any) -> Iterator[None]:
    """In a ``with`` block, make `shared` return `shared_object` to the tasks that this thread runs."""
    before, _local.shared = shared(), shared_object
    try:
        yield
    finally:
        _local.shared = before


def _worker_error(problem: str, advice: str = _OR_ONE_WORKER, path: str | None = None) -> WorkerError:
    return WorkerError(f"{problem}{advice}", path=path, parameters=(ONE_WORKER,))


class ElasticExecutor(concurrent.futures.Executor):
    """An executor whose number of workers may change."""

    def in_flight(self) -> int:
        """Return how many tasks may be in flight: submitted, but with results not yet yielded.

        `run` calls this each time before it submits tasks.
        """
        raise NotImplementedError


class LostTaskError(BrokenProcessPool):
    """A task cannot be completed, because every worker that tried to run it died."""


class SerialExecutor(concurrent.futures.Executor):
    """An executor that runs each task in this process, immediately when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def reporting_start_errors(advice: str = "") -> Iterator[None]:
    """Raise a WorkerError instead of an OSError if processes, or their pipes and locks, cannot be created.

    The message of the WorkerError ends with `advice`.
    """
    try:
        yield
    except ConnectionError:  # The process has started and then ended. `_require_start` reports this.
        raise
    except OSError as error:
        problem = (
            f"worker processes cannot be started ({error.strerror or error}); check that the working directory exists, "
            "that /dev/shm is writable and not full, and the limits on processes and open files ('ulimit -a')"
        )
        raise _worker_error(problem, advice) from error


class _ProcessPool(concurrent.futures.ProcessPoolExecutor):
    """An executor whose `submit`, which starts the processes, reports errors as `reporting_start_errors` does."""

    advice = ""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        with reporting_start_errors(self.advice):
            return super().submit(fn, *args, **kwargs)


@contextlib.contextmanager
def open_executor(
    num_workers: int, start_method: str | None, shared_object: Any, *, isolated: bool = False
) -> Iterator[concurrent.futures.Executor]:
    """Open an executor of worker processes, or of this process if `num_workers` is 1.

    If `start_method` is None, `choose_start_method` decides. Inside tasks, `shared()` returns `shared_object`. Forked
    workers inherit this object; other workers each receive a pickled copy. Tasks must not be functions of the main
    script, because workers import the main script only if unpickling the copy may need a class of that script.

    Raises WorkerError if the object cannot be used in a worker, or if workers cannot start. If `isolated` is false, the
    error recommends ``num_workers=1``. Set `isolated` if the tasks need a separate process.
    """
    whole_number("num_workers", num_workers, 1, MAX_WORKERS)
    if num_workers == 1:
        with using_shared(shared_object):
            yield SerialExecutor()
        return
    advice = "" if isolated else _OR_ONE_WORKER
    if multiprocessing.current_process().daemon:
        problem = (
            "a daemonic process, such as a worker of multiprocessing.Pool, cannot start worker processes; call this in "
            "a worker of concurrent.futures.ProcessPoolExecutor"
        )
        raise _worker_error(problem, advice)
    method = start_method or choose_start_method()
    context: Any = multiprocessing.get_context(method)
    if method == "fork":
        _require_no_open_file(shared_object)
    elif _may_need_main(shared_object):
        _require_importable_main(advice)
    else:
        context = copy.copy(context)
        context.Process = _SpawnProcess if method == "spawn" else _ForkServerProcess
    with reporting_start_errors(advice):
        executor = _ProcessPool(num_workers, context, _start_worker, (_SharedObject(shared_object),))
    executor.advice = advice
    try:
        if method != "fork":
            _require_start(executor, num_workers, advice)
        yield executor
    except BaseException:
        _kill(executor)
        raise
    executor.shutdown()


def choose_start_method() -> str:
    """Return "fork" on Linux if this process has one Python thread, else "forkserver".

    Fork takes only milliseconds and does not require scripts to have ``if __name__ == "__main__":``. But if the process
    has several threads, the child may inherit a lock that is never released.
    """
    return "fork" if sys.platform == "linux" and threading.active_count() == 1 else "forkserver"


def run(
    executor: concurrent.futures.Executor,
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    in_flight: int,
    *,
    ordered: bool = False,
    resumable: bool = True,
) -> Iterator[Result]:
    """Run `function` for each task and yield the results: in the order of the tasks if `ordered`, else as they come.

    At most `in_flight` tasks are in flight: submitted, but with results not yet yielded. An `ElasticExecutor`
    determines this number itself. A task is taken from the iterable only when it can be submitted, so memory does not
    grow with the number of tasks. `function` must be picklable. If a worker process dies, raises a WorkerError that
    names up to four unfinished tasks by their ``str``, and recommends ``resume=True`` if `resumable`.
    """
    pending: dict[concurrent.futures.Future[Result], Task] = {}
    source = iter(tasks)
    exhausted = False
    try:
        while True:
            allowed = executor.in_flight() if isinstance(executor, ElasticExecutor) else in_flight
            while not exhausted and len(pending) < allowed:
                try:
                    task = next(source)
                except StopIteration:
                    exhausted = True
                    break
                with warnings.catch_warnings():
                    # Python 3.12 warns when a process with any native thread forks, even NumPy's idle BLAS threads.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pending[executor.submit(function, task)] = task
            if not pending:
                return
            awaited = [next(iter(pending))] if ordered else list(pending)
            # Wait with a timeout, because a signal that arrives just before the wait is handled only after it.
            done, _ = concurrent.futures.wait(awaited, _WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED)
            for future in done:
                try:
                    result = future.result()
                except LostTaskError:
                    # Name this task first, but not alone: another task may have killed the workers.
                    pending = {future: pending[future], **pending}
                    raise
                del pending[future]
                yield result
    except BrokenProcessPool as error:
        busy = "; ".join(map(str, list(pending.values())[:4]))
        again = "continue with resume=True" if resumable else "try again"
        raise WorkerError(
            f"a worker process died near {busy}: out of memory, or a decoder crashed. See 'dmesg', lower num_workers, "
            f"and {again}",
            parameters=("num_workers", "resume=True") if resumable else ("num_workers",),
        ) from error


class _WithoutMain:
    """A mixin for processes that do not import the main script.

    The script may therefore start such processes outside of ``if __name__ == "__main__":``.
    """

    def start(self) -> None:
        # Private API: multiprocessing has no public way to start a process that does not import the main script.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            super().start()  # type: ignore[misc]
        finally:
            sys.modules["__main__"] = main


class _SpawnProcess(_WithoutMain, multiprocessing.context.SpawnProcess):
    pass


class _ForkServerProcess(_WithoutMain, multiprocessing.context.ForkServerProcess):
    pass


def _may_need_main(value: Any) -> bool:
    """Return whether unpickling `value` may need the main script, because the script may define a class in `value`."""
    for item in _reachable(value):
        named = item if isinstance(item, (type, types.FunctionType)) else type(item)
        # `_reachable` does not find the elements of an array of objects.
        if isinstance(item, np.ndarray) and item.dtype.hasobject:
            return True
        if not _is_known(named):
            return True
    return False


def _reachable(value: Any) -> Iterator[Any]:
    """Yield `value` and all objects that it refers to, directly or not, except for texts and numbers."""
    # Skip the standard streams: loggers refer to them, and it does no harm if workers share them.
    seen = {id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)}
    rest = [value]
    while rest:
        item = rest.pop()
        if type(item) in _ATOMS or id(item) in seen:
            continue
        yield item
        if not gc.is_tracked(item):  # The garbage collector knows no references of this object.
            continue
        seen.add(id(item))
        if isinstance(item, types.FunctionType):
            rest += [vars(item), item.__closure__, item.__defaults__, item.__kwdefaults__, *_globals_of(item)]
        elif isinstance(item, type):
            if not _is_known(item):
                rest += [*vars(item).values(), *item.__bases__]
        elif not isinstance(item, (types.ModuleType, types.FrameType, types.TracebackType, types.GeneratorType)):
            rest += gc.get_referents(item)


def _is_known(item: Any) -> bool:
    """Return whether a class or function is of one of the known packages."""
    return str(item.__module__).partition(".")[0] in _KNOWN_PACKAGES


def _globals_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield the globals that a function refers to by name; none for a function of the known packages."""
    codes = [] if _is_known(function) else [function.__code__]
    while codes:
        code = codes.pop()
        # `co_names` is not used, because it also has the names of attributes.
        names = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        yield from (function.__globals__[name] for name in names if name in function.__globals__)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _require_no_open_file(value: Any) -> None:
    """Raise WorkerError if `value` refers, directly or not, to an open file, which forked workers would inherit.

    Processes share the position of an inherited file: with two workers that called seek and read, up to 10 of 400 rows
    were wrong.
    """
    for item in _reachable(value):
        # Only files that can be read and sought, and have a descriptor, have a position that matters.
        with contextlib.suppress(OSError, ValueError):
            if isinstance(item, io.IOBase) and item.readable() and item.seekable() and item.fileno() >= 0:
                problem = f"the source holds the file {getattr(item, 'name', item)!r} open"
                raise _worker_error(
                    f"{problem}, and worker processes would share its position; open the file again for each read"
                )


def _require_importable_main(advice: str) -> None:
    """Raise WorkerError if workers that are not forked cannot import the main script.

    Also raise it if importing the script would run the current call again.
    """
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", "")
    path = getattr(main, "__file__", None)
    # Workers do not import a package's __main__.py, nor a program that has no file, such as a notebook.
    if path is None or name.rpartition(".")[2] == "__main__":
        return
    if not os.path.exists(path):
        problem = "worker processes cannot import the main program, which is not in a file; save it to disk"
        raise _worker_error(f"{path}: {problem}", advice, path)
    if (line := _unguarded_line(main, path)) is not None:
        problem = f"{path} line {line}: each worker process would run this line, too; put it under "
        raise _worker_error(f'{problem}if __name__ == "__main__":', advice, path)


def _unguarded_line(main: types.ModuleType, path: str) -> int | None:
    """Return the line of the main script that its thread executes; None if it is under an ``if``, or unknown."""
    stack = traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    frames = [frame for frame, _ in stack if frame.f_globals is vars(main)]
    if not frames or frames[-1].f_code.co_name != "<module>":
        return None
    line = frames[-1].f_lineno
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    conditions = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    return None if any(one.lineno <= line <= (one.end_lineno or 0) for one in conditions) else line


class _SharedObject:
    """The shared object on its way to a worker, or the reason why the worker could not unpickle it."""

    def __init__(self, value: Any, failure: str = "") -> None:
        self.value, self.failure = value, failure

    def __reduce__(self) -> Any:
        stream = io.BytesIO()
        try:
            ForkingPickler(stream).dump(self.value)
        except Exception as error:
            problem = f"{_unpicklable(self.value)} cannot be sent to worker processes ({error_line(error)})"
            raise _worker_error(f"{problem}; make it picklable") from error
        return _unpickled, (stream.getvalue(),)


def _unpickled(data: bytes) -> _SharedObject:
    try:
        return _SharedObject(pickle.loads(data))
    except Exception as error:
        return _SharedObject(None, error_line(error))


def _unpicklable(value: Any, name: str = "") -> str:
    """Return the name of the innermost attribute of `value` that cannot be pickled."""
    members = {} if isinstance(value, (type, types.FunctionType)) else getattr(value, "__dict__", {})
    for key, item in members.items() if name.count(".") < _MAX_DEPTH else ():
        try:
            pickle.dumps(item)
        except Exception:
            return _unpicklable(item, f"{name}.{key}".lstrip("."))
    return name or type(value).__name__


def _require_start(executor: concurrent.futures.Executor, num_workers: int, advice: str) -> None:
    """Start all workers; wait for the first one. Raise WorkerError if it ends or cannot unpickle the shared object."""
    try:
        started = [executor.submit(_raise_failure) for _ in range(num_workers)]
        while not (done := concurrent.futures.wait(started, _WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED).done):
            pass
        done.pop().result()
    except (BrokenProcessPool, ConnectionError, EOFError) as error:
        problem = (
            "a worker process ended while it started; see standard error for the reason. If workers could not import "
            'the main script, put its code under if __name__ == "__main__":'
        )
        raise _worker_error(problem, advice) from error


def _raise_failure() -> None:
    if _local.failure:
        raise _worker_error(
            f"worker processes cannot load the source ({_local.failure}); make its classes picklable, and define them "
            "in modules that can be imported (not in a notebook)"
        )


def _start_worker(received: _SharedObject) -> None:
    _local.shared, _local.failure = received.value, received.failure
    # Ctrl-C sends SIGINT to the whole process group. Only the parent should handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, name="h5pack-watch-parent", daemon=True).start()


def _die_with_parent() -> None:
    """Exit when the parent process ends, because the workers of a killed parent would wait for a task forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _kill(executor: concurrent.futures.ProcessPoolExecutor) -> None:
    """Kill the workers. A conversion records rows only after writing them, so no half-written row counts as written."""
    # Private API: ProcessPoolExecutor has no public way to kill its workers before Python 3.14.
    manager = getattr(executor, "_executor_manager_thread", None)
    processes = list((getattr(executor, "_processes", None) or {}).values())
    results = getattr(executor, "_result_queue", None)
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    if results is not None:
        # A worker may have died while sending a large result. While this end of the pipe is open, the executor's thread
        # waits for the rest, and the interpreter waits for that thread at exit.
        with contextlib.suppress(OSError):
            results._writer.close()
    if manager is not None:
        # Wait for the executor's thread: if it ends while the interpreter exits, Python 3.11 may print a traceback.
        manager.join(_JOIN_SECONDS)
