"""The whole conversion: survey (one pass over all image headers before writing), plan, encode, write and finish.

A run with `resume`, `part` or `finish` continues an interrupted conversion where it stopped. What such a run does
depends on the files that it finds:

- the output, but no ``OUT.partial``: usually, the output is complete. Then the run only compares it with the source and
  the options, and removes temporary files. In two cases, the output is an older one that is still to be replaced:

  - The run has `overwrite`, and nothing shows that the interrupted run had already replaced the output. Any of these
    would show it: a journal with ``written.bin``, a journal without a plan or, with `finish`, a missing journal.
  - An array job has begun, but none of its parts has written a row;

- ``OUT.partial.survey``: the run continues the survey;
- a journal with a plan: the run surveys the images again (but parts of an array job share one survey), and requires the
  same plan and the same images. With `keep`, it encodes the images that are not encoded yet. It checks the rows that
  the journal lists, and writes damaged and missing rows. With `finish`, it writes no rows, but raises an error if rows
  are missing, and it checks rows only if some may not have been flushed;
- a journal with ``written.bin``: every row was written, and rows may have moved. Unless it has `part`, the run repairs
  the rows whose bytes are not intact at their final position, and finishes the file;
- a journal with ``written.bin``, and a complete compressed file as ``OUT.partial``: the run only renames this file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.cluster.dask_client import count_threads, open_dask_executor
from h5pack.cluster.parts import PartsFolder, finished_by_others
from h5pack.errors import OptionsError
from h5pack.format.row_offsets import check_rows, check_tasks
from h5pack.pack import finish, writer
from h5pack.pack.compression import require_filter
from h5pack.pack.direct_io import drop_partial_pages
from h5pack.pack.encode import encode_images
from h5pack.pack.estimate import estimate_seconds
from h5pack.pack.journal import Journal, RowRecord, RowResults, SurveyJournal
from h5pack.pack.kept import make_kept_plan
from h5pack.pack.options import ConvertOptions, output_path, require_suitable
from h5pack.pack.output import ConvertReport, Output, OutputLock, PartFile
from h5pack.pack.plan import ConvertPlan, NoRowsError, make_plan
from h5pack.pack.resume import UnfinishedPack, source_changed, verify_existing
from h5pack.pack.row_order import close_holes
from h5pack.pack.survey import (
    again_task,
    first_changed_of,
    shares,
    survey,
    survey_identity,
    with_placed_fields,
    with_size_note,
)
from h5pack.sources.catalog import Catalog
from h5pack.sources.detect import open_source
from h5pack.sources.map_style import MapStyleDataset
from h5pack.system.files import reporting_disk_errors, require_other_files
from h5pack.system.machine import available_cpus, release_free_memory
from h5pack.system.parameters import require_local
from h5pack.system.processes import open_executor, run
from h5pack.system.progress import Stages

_CHECK_BYTES = 8 * 1024 * 1024


class Conversion:
    """A conversion whose plan can be inspected before any row is written.

    Use it as a context manager. The parameters are those of `h5pack.convert`.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | MapStyleDataset,
        out: str | os.PathLike[str],
        *,
        client: Any = None,
        progress: bool = False,
        **keywords: Any,
    ) -> None:
        self.options = ConvertOptions.from_keywords(keywords)
        if client is not None and self.options.part is not None:
            raise OptionsError("client and part cannot be combined; give one of them", parameters=("client", "part"))
        if self.options.filter is not None:
            require_filter(self.options.filter)
        if isinstance(source, (str, bytes, os.PathLike)):
            source = os.fsdecode(source)
            require_local(source, "source")
        self.output = Output(output_path(out), f"-{secrets.token_hex(6)}" if self.options.part else "")
        path = source if isinstance(source, str) else ""
        if os.path.isfile(path):
            require_other_files([self.output.final], [path])
        self._parts = PartsFolder(self.output.parts)
        self.output.check(self.options)
        # If this run or the interrupted one has `overwrite`, the new file gets the permissions of the one it replaces.
        before = Journal(self.output.journal).plan() if self.options.continues else None
        if self.options.overwrite or (before is not None and before["overwrite"]):
            self.output.permissions_of = self.output.final
        self.num_workers = self.options.num_workers or available_cpus()
        if client is not None:
            self.num_workers = max(1, count_threads(client))
        self._client = client
        self._source = source
        self._stage = Stages(progress)
        self._plan: ConvertPlan | None = None
        self._runs = False  # whether `run` was called; a plan alone removes no files
        self._stack = contextlib.ExitStack()
        self._executor: Executor
        self._seconds = self._stage.seconds

    def __repr__(self) -> str:
        return f"Conversion({_source_name(self._source)!r}, {str(self.output.final)!r})"

    def __enter__(self) -> Conversion:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        writer.release()
        if self._runs:
            self.output.remove_emptied()

    def existing_report(self) -> ConvertReport | None:
        """Return the report of an output that is already complete; None if work remains.

        Return None, too, if this run does not continue an earlier one (see `ConvertOptions.continues`). Raises
        OutputExistsError if the output was made with other options or from another source.
        """
        output = self.output
        if not self.options.continues or not output.final.exists() or output.partial.exists():
            return None
        # With `overwrite` and without a journal, `part` and `resume` begin a new conversion. But `finish` never begins
        # one: the array job is complete, and its journal was removed.
        journal = Journal(output.journal)
        begins = not journal.folder.exists() and not self.options.finish
        rows_are_missing = journal.written() is None
        # A journal without a plan was left by a run that was killed while it removed the journal, after it had replaced
        # the output: `remove_leftovers` deletes the plan first.
        if self.options.overwrite and (begins or (rows_are_missing and journal.plan() is not None)):
            return None
        if rows_are_missing and self._parts.count:
            # No part has written a row yet, because there is no `partial`. So the output is from an earlier conversion.
            return None
        shards = finish.shards_of(output.final, output.final)
        rows, rejects = verify_existing(output.final, shards, self.catalog, self.options)
        size = sum(path.stat().st_size for path in (output.final, *shards))
        return ConvertReport(
            str(output.final), rows, rejects, size, self.num_workers, already_complete=True, shards=len(shards)
        )

    @functools.cached_property
    def catalog(self) -> Catalog:
        """The images of the source, which are listed when this property is first used."""
        found = open_source(self._source, self.options.source_options, self.output.final.parent)
        release_free_memory()
        require_other_files([self.output.final], found.reader.paths())
        require_suitable(_source_name(self._source), found, self.options)
        return found

    def plan(self, *, resumable: bool = False) -> ConvertPlan:
        """List the images of the source, survey their headers and return the plan. Later calls return the same plan.

        With `resumable`, results of the survey are saved beside the output: those of a long one (see `SurveyJournal`),
        except on a Dask cluster, and in an array job those of every one, because all parts share them.
        """
        if self._plan is None:
            begin = time.perf_counter()
            catalog = self.catalog  # Errors of listing the source do not concern the output.
            with self._reporting_disk_errors(self.output):
                self._plan = self._make_plan(catalog, resumable)
            self._seconds["survey"] = time.perf_counter() - begin
        return self._plan

    def _make_plan(self, catalog: Catalog, resumable: bool) -> ConvertPlan:
        options = self.options
        if options.in_array_job and (resumable or self._parts.count):
            count = self._parts.count if options.part is None else options.part[1]
            begins = self._parts.agree(count, options.content(), catalog)
            if begins and self.output.final.exists() and not options.overwrite:
                shutil.rmtree(self._parts.folder, ignore_errors=True)
                raise finished_by_others(self.output.partial)
        if self._client is None:
            executor = open_executor(self.num_workers, options.start_method, catalog.reader)
        else:
            path = self._source if isinstance(self._source, str) else None
            executor = open_dask_executor(self._client, catalog.reader, path, self.output.partial)
        self._executor = self._stack.enter_context(executor)
        journal = None
        if resumable and self._client is None and not options.in_array_job:
            identity = survey_identity(self._source, catalog, options)
            journal = SurveyJournal(self.output.survey, identity, resume=options.resume)
            self._stack.enter_context(journal)
        shared = self._sharing("survey") if resumable else self._executor
        with self._stage("survey", len(catalog)) as advance:
            surveyed = survey(catalog, shared, 2 * self.num_workers, options, advance, journal)
        catalog = with_size_note(with_placed_fields(catalog, surveyed, options), surveyed, options)
        make = make_plan if options.keep is None else make_kept_plan
        return make(_source_name(self._source), catalog, surveyed, options)

    def _reporting_disk_errors(self, output: Output) -> contextlib.AbstractContextManager[None]:
        resume = ("resume=True",) if not self.options.in_array_job else ()
        advice = f"make room, then run again{' with resume=True' if resume else ''}"
        return reporting_disk_errors(output.partial, advice, *resume)

    def _sharing(self, stage: str) -> Executor:
        """Return the executor of a stage. In an array job, it shares results with other parts (`SharedResults`)."""
        if not self.options.in_array_job:
            return self._executor
        return self._parts.shared_results(stage, self._executor, self.num_workers)

    def estimate_seconds(self) -> float:
        """Return an estimate of the seconds that `run` will take after the survey; see `h5pack.pack.estimate`."""
        return estimate_seconds(self.plan(), self._executor, self.num_workers)

    def run(self, show: Callable[[ConvertPlan], None] | None = None) -> ConvertReport:
        """Run the conversion and return its report. If work remains, call `show` with the plan before writing rows."""
        self._runs = True
        existing = self.existing_report()
        if existing is None:
            plan = self.plan(resumable=True)
            if show is not None:
                show(plan)
            # Another run may have completed the output during the survey.
            existing = self.existing_report()
        if existing is None:
            return replace(self._write_all(plan), notes=tuple(note.text for note in plan.notes()))
        if not self.output.partial.exists():
            self.output.remove_leftovers()
            self.output.owner.unlink(missing_ok=True)
        return existing

    def _write_all(self, plan: ConvertPlan) -> ConvertReport:
        self.output.require_space(plan.needed_bytes, resumable=not self.options.in_array_job)
        # If the old output has shards, they are removed when it is replaced. So no shard may be a file of the source.
        require_other_files(finish.shards_of(self.output.final, self.output.final), plan.catalog.reader.paths())
        return self.write(plan, self.output)

    def write(self, plan: ConvertPlan, output: Output) -> ConvertReport:
        """Write a pack, or this run's part of an array job. If the options allow that, continue an earlier run."""
        in_parts, distributed = self.options.part is not None, self._client is not None or self.options.finish
        with self._reporting_disk_errors(output):
            lock = PartFile(output) if in_parts else OutputLock(output, distributed)
        try:
            with self._reporting_disk_errors(output):
                pack = UnfinishedPack(plan, output, lock, in_parts or distributed)
                if plan.to_encode.any():
                    with self._stage("encode", int(plan.to_encode.sum())) as advance:
                        plan = encode_images(pack, self._sharing("encode"), self.num_workers, advance)
                pack.allocate(plan)
                return self._write_part(pack) if in_parts else self._write_and_finish(pack)
        except NoRowsError:
            # Nothing is left to resume, so remove the files. All tasks have ended, so the workers need not be stopped:
            # the next shard may use them.
            if not in_parts:  # Other parts may still use the files.
                output.remove_leftovers()
                output.partial.unlink(missing_ok=True)
            raise
        except BaseException:
            # Stop the workers before the lock is released, so that none of them writes afterwards.
            self._stack.__exit__(*sys.exc_info())
            raise
        finally:
            lock.close()

    def _write_and_finish(self, pack: UnfinishedPack) -> ConvertReport:
        plan = pack.plan
        written = pack.journal.written()
        rows_moved_before = written is not None
        if written is None:
            pack.journal.discard_written()
            # Rows of parts need no check, because they were flushed before they were journaled.
            check = not self.options.finish or pack.journal.has_unflushed_rows()
            results = self._earlier_results(pack, check=check)
            if self.options.finish:
                pack.require_all_parts(self._parts.count, results)
                if plan.catalog.reader.uniform_size() is None:  # Otherwise, there is no survey.
                    self._require_unchanged(pack, np.flatnonzero(~plan.has_row))
            resumed = int(results.settled.sum())
            written = self._write(pack, results)
        else:
            resumed = len(written.packed)
        begin, earlier = time.perf_counter(), sum(self._seconds.values())
        plan.require_no_rejects(written.reasons)
        final = close_holes(plan.row_order.split_starts, written.packed, plan.options.order == "sorted")
        pack.begin_finish(len(final.origins))
        if not (rows_moved_before and self.options.filter is not None and finish.is_complete(pack.output.partial)):
            if rows_moved_before:
                expected = [some[final.origins] for some in written.all_checksums]
                rows = np.arange(len(final.origins))
                wrong = self._wrong_rows(pack, rows, expected)
                finish.repair_rows(pack, written, final.origins, wrong)
            else:
                finish.move_rows(pack, final.origins)
            tables = finish.make_tables(pack, written, final)
            if self.options.filter is None:
                finish.complete(pack, tables)
                start = pack.structure.metadata_block_bytes
                drop_partial_pages(pack.job.path, pack.job.io, pack.lock.descriptor, start)
            else:
                with self._stage("compress", len(final.origins) * len(pack.all_offsets)) as advance:
                    finish.compress(pack, tables, self._executor, 2 * self.num_workers, advance)
        rejects = plan.all_rejects(written.reasons)
        if pack.overwrite and (shards := finish.shards_of(pack.output.final, pack.output.final)):
            pack.output.note_replaced(shards)
        finish.publish(pack.output, pack.own_lock, pack.overwrite, rejects)
        seconds = time.perf_counter() - begin - (sum(self._seconds.values()) - earlier)
        self._seconds["finish"] = self._seconds.get("finish", 0.0) + seconds
        return ConvertReport(
            path=str(pack.output.final),
            images=len(final.origins),
            rejects=len(rejects),
            bytes=os.fstat(pack.lock.descriptor).st_size,
            num_workers=self.num_workers,
            resumed_rows=resumed,
            moved_rows=int((final.origins != np.arange(len(final.origins))).sum()),
            seconds=self._seconds,
        )

    def _earlier_results(
        self, pack: UnfinishedPack, *, check: bool, rows: npt.NDArray[np.int64] | None = None
    ) -> RowResults:
        """Return the results in the journal. With `check`, read `rows`, and discard the results of damaged rows.

        `rows` are planned rows, ascending; None stands for all rows.
        """
        results = RowResults(pack.plan.rows, pack.plan.options.channels, len(pack.all_offsets) - 1)
        for record in pack.journal.records():
            results.add(record)
        if check and results.settled.any():
            packed = np.flatnonzero(results.packed) if rows is None else rows[results.packed[rows]]
            results.discard(self._wrong_rows(pack, packed, results.record().all_checksums))
        return results

    def _wrong_rows(
        self, pack: UnfinishedPack, rows: npt.NDArray[np.int64], checksums: Sequence[npt.NDArray[np.uint32]]
    ) -> list[int]:
        """Return the rows among `rows` (ascending) whose bytes do not match `checksums` in at least one dataset.

        `checksums` has one array for each dataset in `FileStructure.datasets`.
        """
        wrong: set[int] = set()
        tasks = itertools.chain.from_iterable(
            check_tasks(str(pack.output.partial), offsets, rows, expected, _CHECK_BYTES)
            for offsets, expected in zip(pack.all_offsets, checksums, strict=True)
        )
        with self._stage("check", len(rows) * len(checksums)) as advance:
            for count, found in self._run_tasks(check_rows, tasks):
                wrong.update(found)
                advance(count)
        return sorted(wrong)

    def _write(self, pack: UnfinishedPack, results: RowResults) -> RowRecord:
        """Write the rows that are missing in `results`, then record durably that every row is written or rejected."""
        self._write_rows(pack, np.flatnonzero(~results.settled), results)
        written = results.record()
        if not written.packed.any():
            raise NoRowsError(pack.plan, pack.plan.all_rejects(written.reasons))
        # Flush the rows before saving the record, so that a power cut cannot leave a record of rows that are missing.
        os.fsync(pack.lock.descriptor)
        # Another process that took over still writes rows. Its writers would stop if there were a record.
        pack.own_lock.confirm()
        pack.journal.save_written(written)
        return written

    def _write_rows(self, pack: UnfinishedPack, missing: npt.NDArray[np.int64], results: RowResults) -> None:
        tasks = writer.write_tasks(pack.plan, pack.job, pack.all_offsets, missing, self.num_workers)
        with self._stage("write", len(missing)) as advance:
            for record in itertools.chain.from_iterable(self._run_tasks(writer.write_rows, tasks)):
                results.add(record)
                advance(len(record.packed))
                pack.plan.require_no_rejects(record.reasons)

    def _run_tasks(
        self, function: Callable[[Any], Any], tasks: Iterable[Any], *, ordered: bool = False
    ) -> Iterator[Any]:
        in_flight, resumable = 2 * self.num_workers, not self.options.in_array_job
        return run(self._executor, function, tasks, in_flight, ordered=ordered, resumable=resumable)

    def _require_unchanged(self, pack: UnfinishedPack, indices: npt.NDArray[np.int64]) -> None:
        """Raise ResumeError if images have changed since another part of the array job surveyed them."""
        plan = pack.plan
        parts = (indices[share] for share in shares(len(indices)))
        tasks = (again_task(plan.catalog, self.options, part, plan.fingerprints) for part in parts)
        with self._stage("survey", len(indices)):
            found = self._run_tasks(first_changed_of, tasks, ordered=True)
            changed = next((index for index in found if index is not None), None)
        if changed is not None:
            raise source_changed(plan, pack.journal, plan.catalog.shown(changed))

    def _write_part(self, pack: UnfinishedPack) -> ConvertReport:
        assert self.options.part is not None
        assert isinstance(pack.lock, PartFile)
        (number, count), plan = self.options.part, pack.plan
        rows = pack.part_rows(number, count)
        # Once every row is written, the process that finishes may be moving rows, or was killed while it did.
        results = self._earlier_results(pack, check=pack.journal.written() is None, rows=rows)
        missing = rows[~results.settled[rows]]
        self._require_unchanged(pack, plan.catalog.reader.changing(np.sort(plan.row_order.origins[missing])))
        try:
            self._write_rows(pack, missing, results)
        finally:
            pack.lock.require_current()
        return ConvertReport(
            path=str(self.output.final),
            images=len(rows),
            rejects=len(rows) - int(results.packed[rows].sum()),
            bytes=os.fstat(pack.lock.descriptor).st_size,
            num_workers=self.num_workers,
            resumed_rows=len(rows) - len(missing),
            seconds=self._seconds,
            part=f"{number}/{count}",
        )


def _source_name(source: str | os.PathLike[str] | MapStyleDataset) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else "dataset"
