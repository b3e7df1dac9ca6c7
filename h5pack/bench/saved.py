"""A bench's recommendation as a loader's profile."""

from __future__ import annotations

import datetime
import os

from h5pack.bench.report import BenchReport
from h5pack.bench.result_file import write_result
from h5pack.bench.statements import advice
from h5pack.errors import OptionsError
from h5pack.feed.profile import LoaderProfile
from h5pack.version import __version__


def profile_of(report: BenchReport, date: datetime.datetime | None = None) -> LoaderProfile:
    """The recommendation as a profile.

    Parameters
    ----------
    report : BenchReport
    date : datetime, optional
        When it was measured; None: now.

    Raises
    ------
    OptionsError
        If there is no recommendation.
    """
    chosen = report.recommendation
    if chosen is None:
        raise OptionsError("too little was measured to recommend anything, so there is no profile; give more --seconds")
    date = datetime.datetime.now(datetime.timezone.utc) if date is None else date
    cache = chosen.cache
    return LoaderProfile(
        batch_size=chosen.batch,
        window=chosen.window,
        threads=chosen.threads,
        chunk_rows=chosen.chunk_rows,
        compression=chosen.compression,
        workers=chosen.workers,
        rdcc_nbytes=None if cache is None else cache.nbytes,
        rdcc_nslots=None if cache is None else cache.nslots,
        rdcc_w0=None if cache is None else cache.w0,
        images_per_s=chosen.images_per_s,
        judged_by=chosen.judged_by,
        sure=chosen.sure,
        date=date.isoformat(timespec="seconds"),
        processor=report.machine.get("processor"),
        cpus=report.machine.get("cpus"),
        h5pack=__version__,
    )


def save_profile(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Write the recommendation into a TOML file that ``H5Loader(profile=...)`` reads.

    Raises
    ------
    OptionsError
        If there is no recommendation, or the file cannot be written.
    """
    chosen = report.recommendation
    notes = [] if chosen is None else [f"Of {report.subject}:", advice(chosen), *chosen.reasons]
    write_result(path, profile_of(report).dumps(notes).encode("utf-8", "replace"))
