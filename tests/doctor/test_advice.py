"""Advice on figures that are made up: what is said, in which order, and what is not said."""

from __future__ import annotations

from typing import Any

import pytest

from h5pack.doctor.advice import Advice, advise
from h5pack.doctor.judgement import judge
from h5pack.doctor.trial import Trial
from tests.doctor.figures import facts, rates, stages

LOADER = {"storage_hot": 900, "loader": 850, "everything": 840}
TRANSFORM = {"transform": 700, "everything": 690}
COPY = {"copy": 1_000, "everything": 980}
WAITS = {"reading_share": 0.05}
FED: dict[str, float] = {}


def advice(
    figures: dict[str, float], trial: Trial | None = None, used: dict[str, float] | None = None, **known: Any
) -> Advice:
    found, evidence = stages(used=used, **figures), facts(**known)
    return advise(judge(found, evidence), found, evidence, trial)


def text(found: Advice) -> str:
    return " / ".join(found.moves)


def test_too_few_reads_in_flight() -> None:
    untried = advice(LOADER, **WAITS)
    assert untried.moves[0] == "Perhaps too few reads in flight: try --threads 16."
    helps = advice(LOADER, Trial("loader", 16, rates(850), rates(2_600)), **WAITS)
    assert helps.moves[0].startswith(
        "Too few reads in flight: 16 threads instead of 4 give 3.1 times as much (2,600 im"
    )
    assert "Raise --threads to 16" in helps.moves[0]
    helpless = advice(LOADER, Trial("loader", 16, rates(850), rates(860)), **WAITS)
    assert "in flight" not in text(helpless)
    assert helpless.moves[0].startswith("More threads do not help (16: 1.01 times). Put the file on a faster disk")
    workers = advice(LOADER, Trial("loader", 16, rates(850), rates(2_600)), workers=4, **WAITS)
    assert "Raise --workers to 16: workers that wait need no CPU of their own" in text(workers)


def test_a_disk_that_seeks() -> None:
    cold = {"storage_cold": 200, "storage_cold_stored_order": 900, "everything": 190}
    found = advice(cold, fits_cache=False)
    assert "In stored order the disk gives 900 images/s, in the loader's order 200" in text(found)
    assert "--chunk-bytes" in text(found)
    assert "--chunk-bytes" not in text(advice({**cold, "storage_cold_stored_order": 220}, fits_cache=False))


def test_a_slow_first_epoch_is_a_note_where_later_ones_are_fed() -> None:
    found = advice({"storage_cold": 500})
    assert any("read it once before the training" in note for note in found.notes)
    assert "disk" not in text(found)
    assert any("try --threads 16" in note for note in found.notes)
    crowded = advice({"storage_cold": 500}, cpus=1)
    assert any("lower --threads to 1" in part for part in (*crowded.moves, *crowded.notes))
    assert not any("in flight" in part for part in (*crowded.moves, *crowded.notes)), "not at the same time"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"encoding": "encoded images are decoded"}, "Encoded images are decoded in every epoch; do it once (h5pack"),
        ({"library": "its layout is compact"}, "through the HDF5 library (its layout is compact)"),
    ],
)
def test_decoding(known: dict[str, Any], words: str) -> None:
    assert words in text(advice(LOADER, **known))
    # In the second place, where it is not what holds the loop up.
    assert any(words in note for note in advice(FED, **known).notes)
    assert "decode" not in text(advice(LOADER))


def test_rows_that_stay_decoded_in_memory() -> None:
    known = {"encoding": "compressed chunks are decoded"}
    assert "resident='auto'" in text(advice(LOADER, **known))
    assert "resident" not in text(advice(LOADER, fits_resident=False, **known))
    assert "resident" not in text(advice(LOADER, workers=4, **known))


def test_a_slow_transform() -> None:
    computes = advice(TRANSFORM, transformed=True, transform_share=0.99, used={"transform": 3.9})
    assert computes.moves[0].startswith("The transform on the host")
    assert "waits more" not in text(computes)
    assert "GIL" not in text(computes)
    assert "Too few threads: 4 for 8 CPUs" in text(computes)
    waits = advice(TRANSFORM, transformed=True, transform_share=0.03, used={"transform": 0.1})
    assert "it runs 3 % of its time" in text(waits)
    assert "CPUs that this process may use" not in text(waits)
    tried = Trial("transform", 16, rates(700), rates(2_700))
    assert "(--threads 16) (measured: 3.86 times, 2,700 images/s)" in text(
        advice(TRANSFORM, tried, transformed=True, transform_share=0.03)
    )
    assert "GIL" in text(advice(TRANSFORM, transformed=True, transform_share=0.99, used={"transform": 1.05}))
    assert "transform" not in text(advice(LOADER))


def test_a_small_batch() -> None:
    assert "takes 55 % of its images/s" in text(advice(FED, half_batch=0.55))
    assert "small batch" not in text(advice(FED, half_batch=0.9))
    assert "small batch" not in text(advice(FED))
    few = {"batch_rows": 8, "handed_bytes": 3_072}
    assert "A small batch: 8 images of 3,072 bytes" in text(advice(LOADER, **few))
    assert "small batch" not in text(advice(FED, **few))


def test_float_batches_on_the_host() -> None:
    known = {"handed_float": True, "handed_bytes": 602_112}
    assert "602,112 bytes an image, 4.0 times what is stored; keep uint8" in text(advice(COPY, **known))
    assert any("Float batches" in note for note in advice(FED, **known).notes)
    assert "store them as uint8" in text(advice(COPY, stored_float=True, **known))
    assert "Float" not in text(advice(COPY))


def test_unpinned_memory() -> None:
    assert "Unpinned" in text(advice(COPY, pinned=False))
    assert any("Unpinned" in note for note in advice(FED, pinned=False).notes)
    assert "Unpinned" not in str(advice(COPY))
    assert "Unpinned" not in str(advice({**COPY, "copy": None}, pinned=False, on_gpu=False))


BUSY = {"loader": 3.9}


def test_more_threads_where_cpus_are_free_and_the_loader_is_bound_by_them() -> None:
    assert "Too few threads: 4 for 8 CPUs that this process may use; raise --threads to 8." in text(
        advice(LOADER, used=BUSY)
    )
    tried = advice(LOADER, Trial("loader", 8, rates(850), rates(1_600)), used=BUSY)
    assert "raise --threads to 8 (measured: 1.88 times, 1,600 images/s)." in text(tried)
    helpless = advice(LOADER, Trial("loader", 8, rates(850), rates(860)), used=BUSY)
    assert "Too few" not in text(helpless)
    assert "8 threads instead of 4 do not help (1.01 times)." in helpless.notes
    # Half asleep, and nothing tried: nobody knows.
    assert "Too few" not in str(advice(LOADER, used={"loader": 1.0}))
    assert "Too few" not in str(advice(LOADER))
    assert "Too few workers" in text(advice(LOADER, used=BUSY, workers=4))


def test_fewer_threads_where_they_take_turns() -> None:
    known = {"cpus": 1, "threads": 4}
    words = "Too many threads: 4 take turns on 1 CPU that this process may use; lower --threads to 1"
    assert f"{words}." in text(advice(LOADER, **known))
    assert f"{words} (measured: 1.20 times" in text(
        advice(LOADER, Trial("loader", 1, rates(850), rates(1_020)), **known)
    )
    # A GPU that is fed does not mind; a CPU that is the device does.
    assert any(words in note for note in advice(FED, **known).notes)
    assert words in text(advice({"copy": None}, on_gpu=False, **known))
    slower = advice(LOADER, Trial("loader", 1, rates(850), rates(600)), **known)
    assert "Too many" not in str(slower)
    assert any("fewer are slower, as measured" in note for note in slower.notes)
    # Threads that wait for a disk need no CPU.
    assert "Too many" not in str(advice(LOADER, **known, **WAITS))
    assert "Too many" not in str(advice(TRANSFORM, transformed=True, transform_share=0.1, **known))


def test_as_many_threads_as_cpus_are_right() -> None:
    known = {"cpus": 1, "threads": 1, "machine_cpus": 16}
    found = text(advice(LOADER, used={"loader": 0.98}, **known))
    assert "1 thread for 1 CPU that this process may use: that is right" in found
    assert "The machine has 16" in found
    assert "ask for more" not in text(advice(LOADER, used={"loader": 0.98}, **{**known, "machine_cpus": 1}))
    assert "lower" not in found
    assert "is right" not in text(advice(LOADER, used={"loader": 0.2}, **known))


def test_a_loader_without_workers() -> None:
    assert "without workers reads while the step waits" in text(advice(LOADER, workers=0, threads=1))


def test_host_synchronisation() -> None:
    known = {"synchronisations": 2.0, "synchronised_at": "train.py:42"}
    assert "2.0 times a step the process waits for the GPU" in text(advice(FED, **known))
    assert "first at train.py:42" in text(advice(FED, **known))
    assert any("synchronisation" in note for note in advice(COPY, **known).notes)
    assert "synchronisation" not in str(advice(FED, synchronisations=0.0))
    # A loop that is slower than its parts may be so because of it.
    assert "synchronisation" in text(advice({**COPY, "everything": 300}, **known))


def test_an_idle_second_gpu() -> None:
    assert "An idle second GPU: train on 2 (torchrun --nproc_per_node 2)." in text(advice(FED, gpus=2, idle_gpus=1))
    assert "3 idle GPUs (unless others use it" in text(advice(FED, gpus=4))
    assert any("idle second GPU" in note for note in advice(COPY, gpus=2, idle_gpus=1).notes)
    for known in ({"gpus": 2, "idle_gpus": 0}, {"gpus": 2, "world_size": 2}, {"gpus": 1}, {"gpus": 0, "on_gpu": False}):
        assert "idle" not in str(advice(FED, **known))


def test_the_step_itself() -> None:
    assert advice(FED).moves[-1].startswith("The step itself")
    assert advice({"copy": None}, on_gpu=False).moves[-1].startswith("The step runs on the CPU")
    slow = {"copy": None, "normalize": 900, "everything": 680}
    assert advice(slow, on_gpu=False).moves[-1].startswith("Normalising takes the CPUs' time")


def test_causes_come_in_their_order() -> None:
    found = advice(
        {"storage_hot": 1_050, "loader": 1_000, "copy": 1_010, "step": 1_020, "everything": 700},
        used={"loader": 3.9},
        encoding="compressed chunks are decoded",
        fits_resident=False,
        half_batch=0.6,
        handed_float=True,
        pinned=False,
        synchronisations=1.0,
        gpus=2,
        idle_gpus=1,
    )
    assert [" ".join(item.split()[:2]) for item in found.moves] == [
        "Compressed chunks", "A small", "Float batches", "Unpinned memory:", "Too few", "Host synchronisation",
        "An idle", "The step",
    ]  # fmt: skip
    assert found.notes == ()


def test_nothing_is_advised_where_nothing_is_known() -> None:
    assert advice({"loader": None}) == Advice((), ())
