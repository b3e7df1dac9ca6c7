"""Where tasks run: in this process, or in worker processes that never outlive it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from h5pack.errors import WorkerError

Task = TypeVar("Task")
Result = TypeVar("Result")

_shared: Any = None


def shared() -> Any:
    """The object that `open_executor` was given, in whichever process a task runs."""
    return _shared


class SerialExecutor(concurrent.futures.Executor):
    """Runs each task at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def open_executor(workers: int, start_method: str | None, shared_object: Any) -> Iterator[concurrent.futures.Executor]:
    """An executor of `workers` processes, or of this one where `workers` is 1.

    Parameters
    ----------
    workers : int
    start_method : str or None
        Of multiprocessing; None: see `choose_start_method`.
    shared_object : object
        What `shared` returns inside tasks: inherited under fork, else pickled once a worker.
    """
    global _shared
    if workers == 1:
        before, _shared = _shared, shared_object
        try:
            yield SerialExecutor()
        finally:
            _shared = before
        return
    context = multiprocessing.get_context(start_method or choose_start_method())
    executor = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (shared_object,))
    try:
        yield executor
    except BaseException:
        _kill(executor)
        raise
    executor.shutdown()


def choose_start_method() -> str:
    """Fork where this process has one thread, as it costs milliseconds and asks nothing of the caller's script.

    Beside other threads a fork may inherit a lock that nobody will release, so then forkserver (spawn where that is
    missing), for which a script needs ``if __name__ == "__main__":``.
    """
    if sys.platform == "linux" and threading.active_count() == 1:
        return "fork"
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def run(
    executor: concurrent.futures.Executor,
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    in_flight: int,
    describe: Callable[[Task], str],
    *,
    ordered: bool = False,
) -> Iterator[Result]:
    """Run `function` over `tasks`, at most `in_flight` at a time, and give results as they come.

    Tasks are made only when there is room for them, so memory does not grow with their number.

    Parameters
    ----------
    executor : Executor
    function : callable
        Of a module, so that it can be pickled.
    tasks : iterable
    in_flight : int
    describe : callable
        Names a task, for the error message when a worker dies.
    ordered : bool
        Give results in the order of the tasks. Those that wait for an earlier one count as in flight.

    Raises
    ------
    WorkerError
        If a worker process died.
    """
    pending: dict[concurrent.futures.Future[Result], Task] = {}
    source = iter(tasks)
    exhausted = False
    try:
        while True:
            while not exhausted and len(pending) < in_flight:
                try:
                    task = next(source)
                except StopIteration:
                    exhausted = True
                    break
                with warnings.catch_warnings():
                    # Python 3.12 warns of any native thread at a fork, numpy's idle BLAS threads included.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pending[executor.submit(function, task)] = task
            if not pending:
                return
            first = next(iter(pending))
            done, _ = concurrent.futures.wait(
                [first] if ordered else pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                result = future.result()
                del pending[future]
                yield result
    except BrokenProcessPool as error:
        busy = "; ".join(describe(task) for task in list(pending.values())[:4])
        raise WorkerError(
            f"a worker process died, killed for memory or crashed in a decoder, near {busy}; look at 'dmesg', try "
            "fewer --workers, then continue with --resume (in a script, guard the call with "
            'if __name__ == "__main__":)'
        ) from error


def _start_worker(shared_object: Any) -> None:
    global _shared
    _shared = shared_object
    # Ctrl-C reaches the whole group; the parent alone decides what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, name="h5pack-watch-parent", daemon=True).start()


def _die_with_parent() -> None:
    """A killed parent closes nothing, and a worker would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _kill(executor: concurrent.futures.ProcessPoolExecutor) -> None:
    """Stop at once; whatever a worker was writing is journalled only when it is whole."""
    processes = list((getattr(executor, "_processes", None) or {}).values())
    results = getattr(executor, "_result_queue", None)
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    if results is not None:
        # A worker may have died in the middle of a large result. As long as this end is open, too, the executor's
        # thread would wait for the rest, and the interpreter for that thread.
        with contextlib.suppress(OSError):
            results._writer.close()
