"""A recommendation as a profile that a loader reads."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

import h5pack
from h5pack.bench.saved import profile_of, save_profile
from h5pack.errors import OptionsError
from h5pack.feed.profile import LoaderProfile
from tests.bench import reports
from tests.feed import packs

DATE = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)


def test_the_profile_has_what_was_recommended() -> None:
    assert profile_of(reports.folder_report(), DATE) == LoaderProfile(
        batch_size=256,
        window=16,
        threads=2,
        chunk_rows=36,
        compression="none",
        workers=2,
        rdcc_nbytes=0,
        rdcc_nslots=114,
        rdcc_w0=1.0,
        images_per_s=76_210.0,
        judged_by="hot",
        sure=True,
        date="2026-01-02T03:04:05+00:00",
        processor="AMD EPYC 7763 64-Core Processor",
        cpus=2,
        h5pack=h5pack.__version__,
    )


def test_what_is_not_known_is_left_out() -> None:
    report = reports.foreign_report()
    report.machine = {}
    report.recommendation = reports.recommended(report.files[0], convert=False, cache=None, sure=False)
    profile = profile_of(report)
    assert (profile.rdcc_nbytes, profile.rdcc_nslots, profile.rdcc_w0, profile.cpus) == (None, None, None, None)
    assert profile.sure is False
    assert "rdcc" not in profile.dumps().partition("[loader]")[2].replace("rdcc_nbytes=...", "")


def test_a_saved_profile_is_read_by_a_loader(tmp_path: Path) -> None:
    report = reports.folder_report()
    report.subject = "photos\n[loader]\nwindow = 0\n\udc80"
    report.recommendation = reports.recommended(reports.packed(10, 576), batch=9, window=3, threads=1)
    save_profile(report, tmp_path / "profile.toml")
    assert os.listdir(tmp_path) == ["profile.toml"]
    text = (tmp_path / "profile.toml").read_text(encoding="utf-8")
    assert "# Pack it in chunks of 10 rows, and read it with batches of 9, a window of 3 chunks and 1 thread." in text
    assert max(map(len, text.splitlines())) <= 120
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"))
    loader = h5pack.H5Loader(dataset, profile=tmp_path / "profile.toml")
    assert (loader.batch_size, loader.plan.window, loader.threads) == (9, 3, 1)
    assert len(list(loader)) == -(-packs.ROWS // 9)


def test_without_a_recommendation_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="too little was measured to recommend anything"):
        save_profile(reports.empty(), tmp_path / "profile.toml")
    assert os.listdir(tmp_path) == []
