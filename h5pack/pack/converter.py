"""The conversion from end to end: survey, plan, write, close up, finish; interrupted anywhere, continued there."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from h5pack.decode.images import Decoder, strict_pillow
from h5pack.errors import (
    NoImagesError,
    NoSpaceError,
    OptionsError,
    RejectedImageError,
)
from h5pack.machine import available_cpus
from h5pack.pack import finisher, writer
from h5pack.pack.executors import open_executor, run
from h5pack.pack.finished import require_finished
from h5pack.pack.journal import RowRecord
from h5pack.pack.options import ConvertOptions
from h5pack.pack.output import Output, OutputLock
from h5pack.pack.placement import Placement, close_up
from h5pack.pack.plan import ConvertPlan, make_plan
from h5pack.pack.report import ConvertReport as ConvertReport
from h5pack.pack.session import Session, creation_time
from h5pack.pack.skeleton import filtered_chunk, require_filter
from h5pack.pack.survey import survey
from h5pack.pack.tables import list_rejects, make_tables
from h5pack.pack.written import Written
from h5pack.rows import RowPlaces, check_counted, check_tasks, describe_check
from h5pack.sources.catalog import Catalog
from h5pack.sources.detect import open_source
from h5pack.sources.mapped import MapStyle

_CHECK_BYTES = 8 * 1024 * 1024
_TIMED_IMAGES = 8
_TIMED_TOGETHER = 256


def convert(
    source: str | os.PathLike[str] | MapStyle,
    out: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    progress: bool = False,
) -> ConvertReport:
    """Pack a folder of images, the images of another HDF5 file, or a map-style dataset, into an HDF5 file.

    Nothing appears under the name `out` before it is whole. A call that is interrupted, even by SIGKILL, is continued
    with ``ConvertOptions(resume=True)``, and ends in the same bytes.

    Parameters
    ----------
    source : path or map-style dataset
        A folder (of images, of class folders, of split folders, CelebA), a CSV or TSV manifest, any HDF5 file with a
        dataset of images, or a dataset of (uint8 image, label).
    out : path
        The file to make.
    options : ConvertOptions, optional
    progress : bool
        Show progress bars on standard error, where that is a terminal.

    Returns
    -------
    ConvertReport

    Raises
    ------
    H5PackError
        See `h5pack.errors`; one line that says what, where and what next.
    """
    with Conversion(source, out, options, progress=progress) as conversion:
        return conversion.run()


class Conversion:
    """One conversion, for callers that want its plan before it starts; a context manager.

    Parameters
    ----------
    source, out, options, progress
        As for `convert`.

    Raises
    ------
    OutputExistsError
        If the output is in the way.
    OptionsError
        If a compression was asked for whose plugin is not installed.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | MapStyle,
        out: str | os.PathLike[str],
        options: ConvertOptions | None = None,
        *,
        progress: bool = False,
    ) -> None:
        self.options = options or ConvertOptions()
        if self.options.filter is not None:
            require_filter(self.options.filter)
        self.output = Output(Path(os.path.abspath(out)))
        if isinstance(source, (str, os.PathLike)) and _is_same_file(source, out):
            raise OptionsError(f"{os.fspath(out)}: the source itself; give the output another name")
        self.output.check(self.options.overwrite, self.options.resume)
        self.workers = self.options.workers or available_cpus()
        self._source = source
        self._progress = progress
        self._listed: Catalog | None = None
        self._plan: ConvertPlan | None = None
        self._stack = contextlib.ExitStack()
        self._executor: Executor | None = None
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> Conversion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        writer.release()

    def finished_before(self) -> ConvertReport | None:
        """With `resume`, the report of an output that is complete already; None where there is work to do.

        Raises
        ------
        OutputExistsError
            If the output is something else than this conversion's.
        """
        output = self.output
        if not self.options.resume or not output.final.exists() or output.partial.exists():
            return None
        if self.options.overwrite and output.journal_identity() is None:
            return None
        rows, rejects = require_finished(output.final, self._catalog(), self.options)
        if not output.partial.exists():
            output.remove_leftovers()
        size = output.final.stat().st_size
        return ConvertReport(str(output.final), rows, rejects, size, self.workers, already_complete=True)

    def _catalog(self) -> Catalog:
        if self._listed is None:
            self._listed = open_source(self._source, self.options.source_options)
        return self._listed

    def plan(self) -> ConvertPlan:
        """List the source, survey its headers, and settle everything; writes nothing.

        Raises
        ------
        SourceError, SizesDifferError, NoImagesError, RejectedImageError
        """
        if self._plan is None:
            begin = time.perf_counter()
            options = self.options
            catalog = self._catalog()
            self._executor = self._stack.enter_context(
                open_executor(self.workers, options.start_method, catalog.reader)
            )
            with self._bar("survey", len(catalog)) as advance:
                surveyed = survey(catalog, self._executor, 2 * self.workers, options.max_pixels, advance)
            name = os.fspath(self._source) if isinstance(self._source, (str, os.PathLike)) else "dataset"
            self._plan = make_plan(name, catalog, surveyed, options)
            self._seconds["survey"] = time.perf_counter() - begin
        return self._plan

    def estimate_seconds(self) -> float:
        """How long writing will take, from decoding, and where asked for compressing, a few images here."""
        plan = self.plan()
        decoder = Decoder(plan.pixels)
        row = np.empty((plan.height, plan.width, plan.options.channels), np.uint8)
        picked = plan.placement.order[:: max(1, plan.rows // _TIMED_IMAGES)]
        groups = plan.catalog.reader.groups(plan.placement.order)
        if groups is not None:
            # The first group whole: reading one of its images costs as much.
            picked = plan.placement.order[groups == groups.min()][:_TIMED_TOGETHER]
            plan.catalog.reader.begin(picked.tolist())
        begin = time.perf_counter()
        with strict_pillow():
            for index in picked.tolist():
                with contextlib.suppress(OSError, RejectedImageError):
                    source = plan.catalog.reader.read(index, plan.catalog.names[index])
                    decoder.decode(source, int(plan.kinds[index]), row)
                    if plan.options.filter is not None:
                        filtered_chunk(row, plan.options.filter)
        return (time.perf_counter() - begin) / len(picked) * plan.rows / self.workers

    def run(self) -> ConvertReport:
        """Do it.

        Raises
        ------
        H5PackError
        """
        finished = self.finished_before()
        if finished is not None:
            return finished
        plan = self.plan()
        output = self.output
        output.require_space(plan.needed_bytes)
        created = creation_time()
        lock = OutputLock(output)
        try:
            with self._stopping_workers():
                return self._write_and_finish(plan, lock, created)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise NoSpaceError(
                f"{output.partial}: {os.strerror(error.errno)}; make room, then run the same command with --resume"
            ) from error
        finally:
            lock.release()

    @contextlib.contextmanager
    def _stopping_workers(self) -> Iterator[None]:
        """Whatever goes wrong, no worker writes when the lock is given up."""
        try:
            yield
        except BaseException:
            self._stack.__exit__(*sys.exc_info())
            raise

    def _write_and_finish(self, plan: ConvertPlan, lock: OutputLock, created: str) -> ConvertReport:
        session = Session(plan, self.output, lock, created)
        written = session.journal.written()
        moving = written is not None
        resumed = len(written.packed) if written is not None else 0
        begin = time.perf_counter()
        if written is None:
            rows = self._written_before(session)
            resumed = int(rows.settled.sum())
            self._write_missing(session, rows)
            begin = time.perf_counter()
            written = rows.record()
            if not written.packed.any():
                self._abandon()
                raise NoImagesError(f"{plan.source}: none of its images can be decoded; the first: {_first(written)}")
            # Rows first, then the note that they are there.
            os.fsync(lock.descriptor)
            session.journal.save_written(written)
        if self.options.strict:
            _refuse_rejects(plan, written)
        final = close_up(plan.placement.starts, written.packed, plan.options.order == "sorted")
        if moving and self.options.filter is not None and finisher.is_compressed(self.output.partial):
            finisher.publish(self.output, lock, list_rejects(plan, written), session.overwrite)
        else:
            if moving:
                self._mend(session, written, final, lock)
            else:
                finisher.move_rows(lock.descriptor, session.places, final.order)
            tables = make_tables(plan, written, final, session.places, lock.descriptor)
            finish = finisher.Finish(self.output, lock, session.skeleton, session.places, tables, session.overwrite)
            if self.options.filter is None:
                finish.complete()
            else:
                self._compress(finish)
            finish.publish()
        self._seconds["finish"] = time.perf_counter() - begin - self._seconds.get("compress", 0.0)
        return ConvertReport(
            str(self.output.final),
            len(final.order),
            len(plan.rejects) + len(written.reasons),
            os.fstat(lock.descriptor).st_size,
            self.workers,
            resumed,
            int((final.order != np.arange(len(final.order))).sum()),
            self._seconds,
        )

    def _compress(self, finish: finisher.Finish) -> None:
        begin = time.perf_counter()
        assert self._executor is not None
        with self._bar("compress", finish.rows) as advance:
            finish.compress(self._executor, 2 * self.workers, advance)
        self._seconds["compress"] = time.perf_counter() - begin

    def _mend(self, session: Session, written: RowRecord, final: Placement, lock: OutputLock) -> None:
        """Repeat the moves that an interrupted run left undone."""
        order = final.order
        wrong = self._wrong_rows(session.places, np.arange(len(order)), written.checksums[order])
        decoder = Decoder(session.plan.pixels)
        finisher.mend_rows(
            lock.descriptor,
            session.places,
            order,
            written.checksums,
            wrong,
            lambda row: _decode_anew(session.plan, decoder, row),
        )

    def _written_before(self, session: Session) -> Written:
        """What the journal says is done and the file confirms; everything else is to do."""
        begin = time.perf_counter()
        rows = Written(session.plan.rows, session.plan.options.channels)
        for record in session.journal.records():
            rows.add(record)
        if rows.settled.any():
            rows.forget(self._wrong_rows(session.places, np.flatnonzero(rows.packed), rows.checksums))
            self._seconds["check"] = time.perf_counter() - begin
        return rows

    def _wrong_rows(
        self, places: RowPlaces, rows: npt.NDArray[np.int64], checksums: npt.NDArray[np.uint32]
    ) -> list[int]:
        """Rows, ascending, that do not hold what `checksums`, indexed by row, says."""
        assert self._executor is not None
        wrong: list[int] = []
        tasks = check_tasks(str(self.output.partial), places, rows, checksums, _CHECK_BYTES)
        with self._bar("check", len(rows)) as advance:
            for count, found in run(self._executor, check_counted, tasks, 2 * self.workers, describe_check):
                wrong += found
                advance(count)
        return sorted(wrong)

    def _write_missing(self, session: Session, rows: Written) -> None:
        begin = time.perf_counter()
        assert self._executor is not None
        plan = session.plan
        missing = np.flatnonzero(~rows.settled)
        tasks = session.tasks(missing, self.workers)
        with self._bar("write", len(missing)) as advance:
            for records in run(self._executor, writer.write_rows, tasks, 2 * self.workers, writer.describe):
                for record in records:
                    rows.add(record)
                    advance(len(record.packed))
                    if self.options.strict:
                        _refuse_rejects(plan, record)
        self._seconds["write"] = time.perf_counter() - begin

    def _abandon(self) -> None:
        """Leave nothing behind where nothing could be packed."""
        self.output.remove_leftovers()
        self.output.partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _bar(self, title: str, total: int) -> Iterator[Callable[[int], object]]:
        if not self._progress:
            yield lambda count: None
            return
        # The monitor thread would be a second thread at the next fork.
        tqdm.monitor_interval = 0
        with tqdm(total=total, desc=title, unit=" images", disable=None, smoothing=0.1, leave=False) as bar:
            yield bar.update


def _refuse_rejects(plan: ConvertPlan, record: RowRecord) -> None:
    for row, reason in record.reasons.items():
        name = plan.catalog.names[int(plan.placement.order[row])]
        raise RejectedImageError(
            f"{plan.source}: {name}: {reason}; mend or remove it and start over with --overwrite, or go on without it "
            "by --resume and no --strict"
        )


def _is_same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    return os.path.isfile(one) and os.path.exists(other) and os.path.samefile(one, other)


def _first(written: RowRecord) -> str:
    return next(iter(written.reasons.values()), "no reason known")


def _decode_anew(plan: ConvertPlan, decoder: Decoder, row: int) -> bytes:
    """The bytes of a planned row, decoded here."""
    index = int(plan.placement.order[row])
    row_pixels = np.empty(plan.row_shape, np.uint8)
    with strict_pillow():
        source = plan.catalog.reader.read(index, plan.catalog.names[index])
        upright = writer.upright_buffer(plan.pixels, plan.options.layout)
        writer.decode_row(decoder, source, int(plan.kinds[index]), row_pixels, upright)
    return row_pixels.tobytes()
