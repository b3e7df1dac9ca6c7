"""Advice on made-up evidence: which, in which order, and which not."""

from __future__ import annotations

from typing import Any

import pytest

from h5pack.monitor.advice import Advice, Remedy, advise
from h5pack.monitor.bottleneck import Encoding, Evidence, Stage, Trial, judge
from tests.monitor.figures import evidence, rates

LOADER = {"storage_hot": 900, "loader": 850, "everything": 840}
TRANSFORM = {"transform": 700, "everything": 690}
COPY = {"copy": 1_000, "everything": 980}
WAITS = {"read_busy_fraction": 0.05}
FED: dict[str, float] = {}


def given(known: Evidence) -> list[Advice]:
    return advise(judge(known), known)


def remedies(
    figures: dict[str, Any], used: dict[str, float] | None = None, *, moves: bool = True, **known: Any
) -> list[str]:
    """Names of the remedies that move the bottleneck, or of the others."""
    return [one.remedy.name for one in given(evidence(figures, used, **known)) if one.moves == moves]


def text(remedy: Remedy, figures: dict[str, Any], used: dict[str, float] | None = None, **known: Any) -> str:
    return next(one.text for one in given(evidence(figures, used, **known)) if one.remedy is remedy)


def trial(number: int, before: float, after: float, stage: Stage = Stage.LOADER) -> Trial:
    return Trial(stage, number, rates(before), rates(after))


def test_more_reads_in_flight_for_storage_that_waits() -> None:
    assert remedies(LOADER, **WAITS) == ["TRY_MORE_READS", "FASTER_DISK"]
    assert "num_threads=16" in text(Remedy.TRY_MORE_READS, LOADER, **WAITS)
    helps = trial(16, 850, 2_600)
    assert remedies(LOADER, **WAITS, trial=helps) == ["RAISE_READS", "FASTER_DISK"]
    assert "3.1 times as much (2,600 images/s)" in text(Remedy.RAISE_READS, LOADER, **WAITS, trial=helps)
    helpless = trial(16, 850, 860)
    assert remedies(LOADER, **WAITS, trial=helpless) == ["FASTER_DISK"]
    assert remedies(LOADER, **WAITS, trial=helpless, moves=False) == ["MORE_DO_NOT_HELP"]
    assert "num_workers=16" in text(Remedy.RAISE_READS, LOADER, **WAITS, num_workers=4, trial=helps)


def test_larger_chunks_for_a_disk_that_seeks() -> None:
    cold = {"storage_cold": 200, "storage_cold_stored_order": 900, "everything": 190}
    assert "LARGER_CHUNKS" in remedies(cold, fits_cache=False)
    assert "LARGER_CHUNKS" not in remedies({**cold, "storage_cold_stored_order": 220}, fits_cache=False)


def test_a_slow_first_epoch_is_a_note_if_later_ones_are_fed() -> None:
    found = {"moves": False, "figures": {"storage_cold": 500}}
    assert remedies(**found) == ["TRY_MORE_READS", "READ_ONCE_BEFORE", "FASTER_DISK"]
    assert remedies({"storage_cold": 500}) == ["FASTER_STEP"]
    # Not more threads and fewer threads at the same time.
    assert remedies(**found, cpus=1) == ["READ_ONCE_BEFORE", "FASTER_DISK", "LOWER_PARALLELISM"]


@pytest.mark.parametrize(
    ("known", "remedy"),
    [
        ({"encoding": Encoding.IMAGES}, Remedy.DECODE_ONCE),
        ({"library_reason": "its layout is compact"}, Remedy.CONVERT_FOR_DIRECT_READS),
    ],
)
def test_decoding_is_advice_if_it_limits_and_a_note_if_not(known: dict[str, Any], remedy: Remedy) -> None:
    assert remedies(LOADER, **known)[0] == remedy.name
    assert remedies(FED, **known, moves=False) == [remedy.name]
    assert remedies(LOADER) == []


def test_decoded_rows_are_kept_if_they_fit_into_memory() -> None:
    known = {"encoding": Encoding.CHUNKS}
    assert "KEEP_DECODED_ROWS" in remedies(LOADER, **known)
    assert "KEEP_DECODED_ROWS" not in remedies(LOADER, fits_resident=False, **known)
    assert "KEEP_DECODED_ROWS" not in remedies(LOADER, num_workers=4, **known)


def test_a_slow_transform() -> None:
    computes = remedies(TRANSFORM, {"transform": 3.9}, transform_busy_fraction=0.99)
    assert computes == ["TRANSFORM_ON_DEVICE", "RAISE_PARALLELISM"]
    waits = {"transform_busy_fraction": 0.03}
    assert remedies(TRANSFORM, {"transform": 0.1}, **waits) == ["TRANSFORM_ON_DEVICE", "TRANSFORM_IN_MORE_THREADS"]
    tried = trial(16, 700, 2_700, Stage.TRANSFORM)
    assert "(num_threads=16) (measured: 3.86 times, 2,700 images/s)" in text(
        Remedy.TRANSFORM_IN_MORE_THREADS, TRANSFORM, trial=tried, **waits
    )
    serial = remedies(TRANSFORM, {"transform": 1.05}, transform_busy_fraction=0.99)
    assert serial == ["TRANSFORM_ON_DEVICE", "TRANSFORM_IN_PARALLEL"]


def test_a_small_batch() -> None:
    assert "LARGER_BATCH_FOR_STEP" in remedies(FED, half_batch_ratio=0.55)
    assert "LARGER_BATCH_FOR_STEP" not in remedies(FED, half_batch_ratio=0.9)
    assert "LARGER_BATCH_FOR_STEP" not in remedies(FED)
    few = {"batch_rows": 8, "loaded_row_bytes": 3_072}
    assert "8 images of 3,072 bytes" in text(Remedy.LARGER_BATCH_FOR_LOADER, LOADER, **few)
    assert "LARGER_BATCH_FOR_LOADER" not in remedies(FED, **few)


def test_float_batches_on_the_host() -> None:
    known = {"loaded_float": True, "loaded_row_bytes": 602_112}
    assert "602,112 bytes an image, 4.0 times what is stored" in text(Remedy.UINT8_BATCHES, COPY, **known)
    assert remedies(FED, **known, moves=False) == ["UINT8_BATCHES"]
    assert remedies(COPY, stored_float=True, **known) == ["STORE_UINT8"]
    assert remedies(COPY) == []


def test_unpinned_memory_is_advice_only_on_a_gpu() -> None:
    assert remedies(COPY, pinned=False) == ["PIN_MEMORY"]
    assert remedies(FED, pinned=False, moves=False) == ["PIN_MEMORY"]
    assert "PIN_MEMORY" not in remedies({**COPY, "copy": None}, pinned=False, on_gpu=False)


BUSY = {"loader": 3.9}


def test_more_threads_if_cpus_are_free_and_the_loader_is_bound_by_them() -> None:
    assert remedies(LOADER, BUSY) == ["RAISE_PARALLELISM"]
    assert "raise num_threads to 8." in text(Remedy.RAISE_PARALLELISM, LOADER, BUSY)
    tried = text(Remedy.RAISE_PARALLELISM, LOADER, BUSY, trial=trial(8, 850, 1_600))
    assert "num_threads to 8 (measured: 1.88 times, 1,600 images/s)." in tried
    helpless = {"used": BUSY, "trial": trial(8, 850, 860)}
    assert remedies(LOADER, **helpless) == []
    assert remedies(LOADER, **helpless, moves=False) == ["MORE_DO_NOT_HELP"]
    # Half idle, and nothing tried.
    assert remedies(LOADER, {"loader": 1.0}) == remedies(LOADER) == []
    assert "raise num_workers" in text(Remedy.RAISE_PARALLELISM, LOADER, BUSY, num_workers=4)


def test_fewer_threads_if_they_take_turns() -> None:
    known = {"cpus": 1}
    assert remedies(LOADER, **known) == ["LOWER_PARALLELISM"]
    words = "4 take turns on 1 CPU that this process may use; lower num_threads to 1"
    assert f"{words}." in text(Remedy.LOWER_PARALLELISM, LOADER, **known)
    tried = text(Remedy.LOWER_PARALLELISM, LOADER, **known, trial=trial(1, 850, 1_020))
    assert f"{words} (measured: 1.20 times" in tried
    # A GPU that is fed is not slowed by them; a CPU that is the device is.
    assert remedies(FED, **known, moves=False) == ["LOWER_PARALLELISM"]
    assert "LOWER_PARALLELISM" in remedies({"copy": None}, on_gpu=False, **known)
    slower = {**known, "trial": trial(1, 850, 600)}
    assert remedies(LOADER, **slower) == []
    assert remedies(LOADER, **slower, moves=False) == ["FEWER_ARE_SLOWER"]
    # Threads that wait for a disk need no CPU.
    for moves in (True, False):
        assert "LOWER_PARALLELISM" not in remedies(LOADER, **known, **WAITS, moves=moves)
        assert "LOWER_PARALLELISM" not in remedies(TRANSFORM, transform_busy_fraction=0.1, **known, moves=moves)


def test_as_many_threads_as_cpus_are_right() -> None:
    known = {"cpus": 1, "num_threads": 1}
    assert remedies(LOADER, {"loader": 0.98}, **known) == ["ASK_FOR_MORE_CPUS"]
    assert remedies(LOADER, {"loader": 0.98}, **known, machine_cpus=1) == ["MORE_CPUS"]
    assert remedies(LOADER, {"loader": 0.2}, **known) == []


def test_a_dataloader_without_workers_needs_some() -> None:
    assert remedies(LOADER, num_workers=0) == ["START_WORKERS"]


def test_host_synchronisation() -> None:
    known = {"synchronisations": 2.0, "synchronised_at": "train.py:42"}
    found = text(Remedy.AVOID_SYNCHRONISATION, FED, **known)
    assert "2.0 times a step" in found
    assert "first at train.py:42" in found
    assert "AVOID_SYNCHRONISATION" in remedies(COPY, **known, moves=False)
    assert "AVOID_SYNCHRONISATION" not in remedies(FED, synchronisations=0.0)
    # A loop that is slower than its parts may be so because of it.
    assert "AVOID_SYNCHRONISATION" in remedies({**COPY, "everything": 300}, **known)


def test_idle_gpus() -> None:
    assert "1 idle GPU: train with 2 processes" in text(Remedy.USE_IDLE_GPUS, FED, num_gpus=2, idle_gpus=1)
    assert "3 idle GPUs (unless others use them" in text(Remedy.USE_IDLE_GPUS, FED, num_gpus=4)
    assert remedies(COPY, num_gpus=2, idle_gpus=1, moves=False) == ["USE_IDLE_GPUS"]
    for known in ({"num_gpus": 2, "idle_gpus": 0}, {"num_gpus": 2, "world_size": 2}, {"num_gpus": 1}):
        assert remedies(FED, **known) == ["FASTER_STEP"]


def test_the_step_itself_is_the_last_advice() -> None:
    assert remedies(FED) == ["FASTER_STEP"]
    assert remedies({"copy": None}, on_gpu=False) == ["USE_GPU"]
    assert remedies({"copy": None, "normalize": 900, "everything": 680}, on_gpu=False) == ["NORMALIZE_ON_GPU"]


def test_the_usual_causes_come_first() -> None:
    figures = {"storage_hot": 1_050, "loader": 1_000, "copy": 1_010, "step": 1_020, "everything": 700}
    known: dict[str, Any] = {"encoding": Encoding.CHUNKS, "fits_resident": False, "half_batch_ratio": 0.6}
    known |= {"loaded_float": True, "pinned": False, "synchronisations": 1.0, "num_gpus": 2, "idle_gpus": 1}
    assert remedies(figures, {"loader": 3.9}, **known) == [
        *("DECODE_ONCE", "LARGER_BATCH_FOR_STEP", "UINT8_BATCHES", "PIN_MEMORY", "RAISE_PARALLELISM"),
        *("AVOID_SYNCHRONISATION", "USE_IDLE_GPUS", "FASTER_STEP"),
    ]
    assert remedies(figures, {"loader": 3.9}, **known, moves=False) == []
    assert given(evidence({"loader": None})) == []


THREADS = {"num_threads": 2, "cpus": 8}
WORKERS = {"num_workers": 2, "cpus": 8}


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({**THREADS, "transform_wait_fraction": 0.8}, ["TRANSFORM_ON_DEVICE"]),
        ({**THREADS, "wait_fraction": 0.02}, ["CHEAPER_COPY"]),
        ({"cpus": 8}, ["READ_IN_WORKERS"]),
        ({"cpus": 8, "num_workers": 0}, ["START_WORKERS", "USE_H5LOADER"]),
        ({**THREADS, "library_reason": "its filter is unknown"}, ["CONVERT_FOR_DIRECT_READS"]),
        ({**THREADS, "encoding": Encoding.CHUNKS, "full_shuffle": True}, ["SHUFFLE_WINDOWS", "DECODE_ONCE"]),
        ({**THREADS, "cpus_used": 0.2}, ["TRY_MORE_READS", "FASTER_DISK"]),
        ({**THREADS, "cpus_used": 1.8}, ["RAISE_PARALLELISM"]),
        ({**THREADS, "cpus": 2, "cpus_used": 1.8}, ["MORE_CPUS"]),
        ({**WORKERS, "cpus_used": 0.3}, ["TRY_MORE_READS", "FASTER_DISK", "USE_H5LOADER"]),
        ({**WORKERS, "cpus_used": 1.9}, ["RAISE_PARALLELISM", "USE_H5LOADER"]),
        (WORKERS, ["USE_H5LOADER"]),
    ],
)
def test_every_bottleneck_of_a_training_loop_has_advice(known: dict[str, Any], expected: list[str]) -> None:
    found = given(Evidence(**{"wait_fraction": 1.0, **known}))
    assert [one.remedy.name for one in found if one.moves] == expected


@pytest.mark.parametrize("remedy", Remedy)
def test_every_remedy_names_its_parameters_as_they_stand_in_its_text(remedy: Remedy) -> None:
    fields = dict.fromkeys(("parameter", "units", "rate", "stored", "order", "reason", "encoding"), "words")
    fields |= dict.fromkeys(("measured", "where", "known"), "")
    numbers = dict.fromkeys(("number", "parallel", "gain", "half", "rows", "size", "times", "gpus", "busy"), 3)
    found = Advice(remedy, True, {**fields, **numbers, "cpus": "3 CPUs", "machine": 8, "others": "1 GPU"})
    assert "`" not in found.text
    assert "--" not in found.text
    assert found.text.endswith(".")
    assert all(fragment in found.text for fragment in found.parameters)
    assert len(found.parameters) == remedy.value.count("`") / 2
