"""A conversion whose file is laid out: where its rows go, and what an earlier run left of it."""

from __future__ import annotations

import datetime
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError, OutputExistsError, ResumeError
from h5pack.pack.journal import Journal
from h5pack.pack.options import ConvertOptions
from h5pack.pack.output import Output, OutputLock
from h5pack.pack.plan import ConvertPlan
from h5pack.pack.skeleton import Skeleton, build, root_attributes
from h5pack.pack.statistics import sampled_rows
from h5pack.pack.tables import statistics_range
from h5pack.pack.writer import WriteJob, WriteRun, WriteTask
from h5pack.rows import RowPlaces
from h5pack.version import __version__

_TASKS_A_WORKER = 16
_TASK_BYTES = 32 * 1024 * 1024
# Rows that lie apart are written so many bytes at a time, while the next ones are decoded.
_RUN_BYTES = 1024 * 1024


class Session:
    """Lays the file out, or takes up an unfinished conversion where `resume` asks for it.

    Parameters
    ----------
    plan : ConvertPlan
    output : Output
    lock : OutputLock
        On the output.
    created : str
        The time to write into a file that is begun now; see `creation_time`.

    Attributes
    ----------
    journal : Journal
    skeleton : Skeleton
    places : RowPlaces
    overwrite : bool
        Whether it was agreed, now or when it was begun, to replace an output.

    Raises
    ------
    ResumeError
        If the unfinished conversion had other options, another source or another version of h5pack.
    OutputExistsError
        If an output has appeared that nobody agreed to replace.
    """

    def __init__(self, plan: ConvertPlan, output: Output, lock: OutputLock, created: str) -> None:
        self.plan = plan
        self.output = output
        self.journal = Journal(output.journal)
        before = self.journal.plan() if plan.options.resume else None
        self.overwrite = plan.options.overwrite or (before is not None and bool(before["overwrite"]))
        if output.final.exists() and not self.overwrite:
            raise OutputExistsError(f"{output.final}: exists by now; add --overwrite to replace it")
        if before is None:
            self.skeleton = _skeleton(plan, created)
            output.remove_leftovers()
            lock.renew()
            addresses = build(output.partial, self.skeleton, plan.rows, None)
            self.journal.start({**_identity(plan), "created": created, "overwrite": self.overwrite}, plan.prints)
        else:
            self._require_same(before)
            self.skeleton = _skeleton(plan, before["created"])
            # The layout is a pure function of the plan; a kill may have left anything in the metadata of `partial`.
            addresses = build(output.finish, self.skeleton, plan.rows, None)
        self.inode = lock.inode
        self.places = RowPlaces(addresses, plan.chunks.rows, plan.row_bytes)

    def tasks(self, missing: npt.NDArray[np.int64], workers: int) -> Iterator[WriteTask]:
        """Runs of missing rows within a chunk, short enough that all workers have some.

        Parameters
        ----------
        missing : ndarray
            int64, ascending.
        workers : int
        """
        plan = self.plan
        job = WriteJob(
            str(self.output.partial),
            str(self.output.journal),
            plan.row_shape,
            plan.options.layout,
            plan.pixels,
            plan.options.io,
            self.inode,
        )
        sampled = np.zeros(plan.rows, np.bool_)
        sampled[sampled_rows(*statistics_range(plan, plan.placement))] = True
        # Some tasks for each worker to the end, but no larger than needed to make a task's own cost vanish.
        most = max(1, -(-len(missing) // (workers * _TASKS_A_WORKER)))
        most = min(most, max(1, _TASK_BYTES // plan.row_bytes))
        groups = plan.catalog.reader.groups(plan.placement.order[missing])
        shares = (missing,) if groups is None else grouped(missing, groups, most)
        for share in shares:
            runs: list[WriteRun] = []
            count = 0
            for rows in self._runs(share, min(plan.chunks.rows, most), scattered=groups is not None):
                if groups is None and runs and count + len(rows) > most:
                    yield WriteTask(job, runs)
                    runs, count = [], 0
                runs.append(self._run(rows, sampled))
                count += len(rows)
            if runs:
                yield WriteTask(job, runs)

    def _runs(self, rows: npt.NDArray[np.int64], most: int, *, scattered: bool) -> Iterator[npt.NDArray[np.int64]]:
        """Cut ascending rows into what is written together; where they are scattered, rows that lie apart, too."""
        apart: list[npt.NDArray[np.int64]] = []
        for start, count in self.places.runs(rows, most):
            found = np.arange(start, start + count)
            if scattered and count * self.plan.row_bytes < _RUN_BYTES:
                apart.append(found)
            else:
                yield found
        if apart:
            joined = np.concatenate(apart)
            step = max(1, _RUN_BYTES // self.plan.row_bytes)
            yield from (joined[first : first + step] for first in range(0, len(joined), step))

    def _run(self, rows: npt.NDArray[np.int64], sampled: npt.NDArray[np.bool_]) -> WriteRun:
        plan = self.plan
        indices = plan.placement.order[rows]
        return WriteRun(
            rows=rows,
            offsets=self.places.offsets(rows),
            indices=indices.tolist(),
            names=[plan.catalog.names[index] for index in indices.tolist()],
            kinds=plan.kinds[indices].tolist(),
            sampled=np.flatnonzero(sampled[rows]).tolist(),
        )

    def _require_same(self, before: dict[str, Any]) -> None:
        partial, source = self.output.partial, self.plan.source
        remedy = "resume with the same, or start over with --overwrite instead of --resume"
        now = _identity(self.plan)
        if before["h5pack"] != now["h5pack"]:
            raise ResumeError(f"{partial}: begun by h5pack {before['h5pack']}, this is {now['h5pack']}; {remedy}")
        for name in {**before["options"], **now["options"]}:
            # One that is missing stands for its default.
            default = getattr(ConvertOptions, name, None)
            old, value = (options.get(name, default) for options in (before["options"], now["options"]))
            if old != value:
                raise ResumeError(f"{partial}: begun with {name} {old!r}, resumed with {value!r}; {remedy}")
        prints, old_prints = self.plan.prints, self.journal.prints()
        if len(prints) != len(old_prints):
            raise ResumeError(
                f"{partial}: begun with {len(old_prints):,} files, and {source} now has {len(prints):,}; {remedy}"
            )
        changed = np.flatnonzero(prints != old_prints)
        if len(changed) or before["tables"] != now["tables"] or before["shape"] != now["shape"]:
            name = self.plan.catalog.names[int(changed[0])] if len(changed) else "a label or a split"
            raise ResumeError(f"{partial}: {source} has changed since it was begun ({name} first); {remedy}")


def grouped(rows: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], most: int) -> Iterator[npt.NDArray[np.int64]]:
    """Shares of rows, each ascending: whole groups, as many as make `most` rows, or one that has more.

    Parameters
    ----------
    rows : ndarray
        int64, (n,), ascending.
    groups : ndarray
        int64, (n,): of each row.
    most : int
    """
    by_group = rows[np.argsort(groups, kind="stable")]
    edges = [0, *(np.flatnonzero(np.diff(np.sort(groups))) + 1).tolist(), len(rows)]
    start = 0
    for edge, after in itertools.pairwise(edges):
        if edge > start and after - start > most:
            yield np.sort(by_group[start:edge])
            start = edge
    if start < len(rows):
        yield np.sort(by_group[start:])


def _identity(plan: ConvertPlan) -> dict[str, Any]:
    """What two runs of one conversion agree on."""
    return {
        "h5pack": __version__,
        "options": plan.options.content(),
        "shape": [plan.rows, *plan.row_shape],
        "tables": plan.catalog.tables_checksum(),
    }


def _skeleton(plan: ConvertPlan, created: str) -> Skeleton:
    options = plan.options
    return Skeleton(
        plan.row_shape,
        plan.chunks.rows,
        options.layout,
        options.compat,
        root_attributes(__version__, created, options.content()),
        options.filter,
    )


def creation_time() -> str:
    """Now, or what SOURCE_DATE_EPOCH says, in ISO 8601, UTC.

    Raises
    ------
    OptionsError
        If SOURCE_DATE_EPOCH is no number of seconds.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is not None and not epoch.isdigit():
        raise OptionsError(f"SOURCE_DATE_EPOCH is {epoch!r}; it must be whole seconds since 1970")
    seconds = int(epoch) if epoch is not None else int(time.time())
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
