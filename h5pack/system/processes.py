"""Executors that run tasks in this process, or in worker processes that exit when this process does."""

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

_WAIT_SECONDS = 0.5
_JOIN_SECONDS = 10.0

# Per thread, because each thread may use a SerialExecutor of its own.
_local = threading.local()


def shared() -> Any:
    """Return the object that was passed to `open_executor`. Only tasks may call this."""
    return getattr(_local, "shared", None)


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
def open_executor(
    num_workers: int, start_method: str | None, shared_object: Any
) -> Iterator[concurrent.futures.Executor]:
    """Open an executor of worker processes, or of this process if `num_workers` is 1.

    If `start_method` is None, `choose_start_method` decides. Inside tasks `shared()` returns `shared_object`. Forked
    workers inherit this object; for others it is pickled once per worker.
    """
    if num_workers == 1:
        before, _local.shared = shared(), shared_object
        try:
            yield SerialExecutor()
        finally:
            _local.shared = before
        return
    context = multiprocessing.get_context(start_method or choose_start_method())
    executor = concurrent.futures.ProcessPoolExecutor(num_workers, context, _start_worker, (shared_object,))
    try:
        yield executor
    except BaseException:
        _kill(executor)
        raise
    executor.shutdown()


def choose_start_method() -> str:
    """Return "fork" on Linux if this process has one thread, else "forkserver", or "spawn" if that is not available.

    Fork takes only milliseconds and does not require scripts to have ``if __name__ == "__main__":``. But if the process
    has several threads, the child may inherit a lock that is never released.
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
    """Run `function` for each task, and yield the results as they become available, or in order if `ordered`.

    At most `in_flight` tasks are submitted whose results have not been yielded. A task is taken from the iterable only
    when it can be submitted, so memory does not grow with the number of tasks. `function` must be picklable. If a
    worker process dies, raises a WorkerError whose message has `describe` of some unfinished tasks.
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
                    # Python 3.12 warns when a process with any native thread forks, even NumPy's idle BLAS threads.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pending[executor.submit(function, task)] = task
            if not pending:
                return
            awaited = [next(iter(pending))] if ordered else list(pending)
            # A signal that arrives just before a thread begins to wait is handled only when the wait ends.
            done, _ = concurrent.futures.wait(awaited, _WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED)
            for future in done:
                result = future.result()
                del pending[future]
                yield result
    except BrokenProcessPool as error:
        busy = "; ".join(describe(task) for task in list(pending.values())[:4])
        raise WorkerError(
            f"a worker process died near {busy}: out of memory, or a decoder crashed. See 'dmesg', lower num_workers, "
            'and continue with resume=True (in a script, guard the call with if __name__ == "__main__":)',
            parameters=("num_workers", "resume=True"),
        ) from error


def _start_worker(shared_object: Any) -> None:
    _local.shared = shared_object
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
    """Kill the workers. This is safe because rows that they are still writing have not been journaled.

    Private API: ``_processes``, ``_result_queue`` and ``_executor_manager_thread``, because an executor has no public
    way to kill its workers before Python 3.14.
    """
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
        # Seen with Python 3.11: if that thread ends while the interpreter exits, a traceback may be printed.
        manager.join(_JOIN_SECONDS)
