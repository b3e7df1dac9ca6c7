"""Advice on made-up evidence: which, in which order, and which not."""

from __future__ import annotations

import re
import string
from random import Random
from typing import Any

import pytest

from h5pack.monitor.advice import Advice, Remedy, advise
from h5pack.monitor.bottleneck import Encoding, Evidence, Outcome, Rates, judge
from tests.monitor.figures import evidence, rates
from tests.monitor.test_bottleneck import THREADS, WORKERS, random_evidence

FED: dict[str, Any] = {}
LOADER = {"storage_hot": 900, "loader": 850, "everything": 840}
TRANSFORM = {"transform": 700, "everything": 690}
COPY = {"copy": 1_000, "everything": 980}
SEEKS = {"storage_cold": 200, "storage_cold_stored_order": 900, "everything": 190}
ON_CPU = {"copy": None}
NO_GPU = {"on_gpu": False, "gpus": 0}
STEADY = {"stall_fraction": 0.01}
BUSY = {"loader": 3.9}
WAITS = {"read_busy_fraction": 0.05}
SLEEPS = {"transform_busy_fraction": 0.03}
COMPUTES = {"transform_busy_fraction": 0.99}
FLOATS = {"loaded_float": True, "loaded_row_bytes": 602_112}
ONE = {"cpus": 1}


def given(known: Evidence) -> list[Advice]:
    return advise(judge(known), known)


def remedies(found: list[Advice], *, moves: bool) -> str:
    """Names of the remedies that move the bottleneck, or of the others."""
    return " ".join(one.remedy.name for one in found if one.moves == moves)


@pytest.mark.parametrize(
    ("figures", "known", "moving", "others"),
    [
        # Storage that waits needs more reads at the same time, as far as there are CPUs.
        (LOADER, WAITS, "TRY_MORE_READS FASTER_DISK", ""),
        (LOADER, {**WAITS, "num_threads": 8}, "FASTER_DISK", ""),
        (LOADER, {**WAITS, **ONE}, "FASTER_DISK", ""),
        (SEEKS, {"fits_cache": False}, "TRY_MORE_READS LARGER_CHUNKS FASTER_DISK", ""),
        ({**SEEKS, "storage_cold_stored_order": 220}, {"fits_cache": False}, "TRY_MORE_READS FASTER_DISK", ""),
        # Repeats that differ much do not show seeks.
        ({**SEEKS, "storage_cold_stored_order": rates(900, 0.8)}, {"fits_cache": False},
         "TRY_MORE_READS FASTER_DISK", ""),
        # A slow first epoch is a note if later ones are fed. Not more and fewer threads at the same time.
        ({"storage_cold": 500}, {}, "FASTER_STEP", "TRY_MORE_READS READ_ONCE_BEFORE FASTER_DISK"),
        ({"storage_cold": 500}, ONE, "FASTER_STEP", "READ_ONCE_BEFORE FASTER_DISK LOWER_PARALLELISM"),
        # Decoding is advice if it limits, and a note if not.
        (LOADER, {"encoding": Encoding.IMAGES, "num_workers": 4}, "DECODE_ONCE", ""),
        (LOADER, {"encoding": Encoding.CHUNKS}, "DECODE_ONCE", ""),
        (FED, {"encoding": Encoding.IMAGES}, "FASTER_STEP", "DECODE_ONCE"),
        (LOADER, {"library_reason": "it is compact"}, "CONVERT_FOR_DIRECT_READS", ""),
        (FED, {"library_reason": "it is compact"}, "FASTER_STEP", "CONVERT_FOR_DIRECT_READS"),
        # A transform that computes, waits, or holds a lock. No GPU is recommended where there is none.
        (TRANSFORM, {**COMPUTES, "used": {"transform": 3.9}},
         "TRANSFORM_ON_DEVICE CHEAPER_TRANSFORM RAISE_PARALLELISM", ""),
        (TRANSFORM, {**SLEEPS, "used": {"transform": 0.1}},
         "TRANSFORM_ON_DEVICE CHEAPER_TRANSFORM TRANSFORM_WAITS TRANSFORM_IN_MORE_THREADS", ""),
        (TRANSFORM, {**SLEEPS, **ONE, **NO_GPU}, "CHEAPER_TRANSFORM TRANSFORM_WAITS", ""),
        (TRANSFORM, {**COMPUTES, "used": {"transform": 1.05}},
         "TRANSFORM_ON_DEVICE CHEAPER_TRANSFORM TRANSFORM_IN_PARALLEL", ""),
        # The size and type of batches.
        (FED, {"half_batch_ratio": 0.55}, "LARGER_BATCH_FOR_STEP FASTER_STEP", ""),
        (FED, {"half_batch_ratio": 0.9}, "FASTER_STEP", ""),
        ({**FED, "step": Rates(3_000, 500, 3_100, 5)}, {"half_batch_ratio": 0.55}, "FASTER_STEP", ""),
        (LOADER, {"batch_rows": 8, "loaded_row_bytes": 3_072}, "LARGER_BATCH_FOR_LOADER", ""),
        # A batch that is about a quarter of the images is the largest that can be measured.
        (FED, {"half_batch_ratio": 0.55, "epoch_batches": 6}, "LARGER_BATCH_FOR_STEP FASTER_STEP", ""),
        (FED, {"half_batch_ratio": 0.55, "epoch_batches": 5}, "FASTER_STEP", ""),
        (LOADER, {"batch_rows": 8, "loaded_row_bytes": 3_072, "epoch_batches": 4}, "", ""),
        (COPY, FLOATS, "UINT8_BATCHES", ""),
        (FED, FLOATS, "FASTER_STEP", "UINT8_BATCHES"),
        (COPY, {**FLOATS, "stored_float": True}, "STORE_UINT8", ""),
        (TRANSFORM, {**FLOATS, **NO_GPU, **COMPUTES}, "CHEAPER_TRANSFORM", ""),
        (COPY, {"pinned": False}, "PIN_MEMORY", ""),
        (FED, {"pinned": False}, "FASTER_STEP", "PIN_MEMORY"),
        (ON_CPU, {"pinned": False, "on_gpu": False}, "USE_GPU", ""),
        (ON_CPU, {"pinned": False, **NO_GPU}, "LESS_ARITHMETIC", ""),
        # Only a step in several threads competes for the CPUs. That of the doctor is not to be made faster.
        (ON_CPU, {**NO_GPU, "step_threads": 2}, "LESS_ARITHMETIC", ""),
        (ON_CPU, {**NO_GPU, "step_threads": 1}, "LESS_ARITHMETIC", ""),
        (ON_CPU, {**NO_GPU, "step_threads": 2, "one_thread_ratio": 80.0}, "ONE_STEP_THREAD LESS_ARITHMETIC", ""),
        (ON_CPU, {**NO_GPU, "step_threads": 2, "one_thread_ratio": 1.1}, "LESS_ARITHMETIC", ""),
        (FED, {"step_threads": 2}, "FASTER_STEP", ""),
        (FED, {"builtin_step": True}, "", "OWN_MODEL"),
        # More threads if CPUs are free and the loader is bound by them.
        (LOADER, {"used": BUSY}, "RAISE_PARALLELISM", ""),
        (LOADER, {"used": BUSY, "num_workers": 4}, "RAISE_PARALLELISM", ""),
        (LOADER, {"used": {"loader": 1.0}}, "", ""),
        # Fewer if they take turns. A GPU that is fed is not slowed by them; a CPU that is the device is.
        (LOADER, ONE, "LOWER_PARALLELISM", ""),
        (FED, ONE, "FASTER_STEP", "LOWER_PARALLELISM"),
        (ON_CPU, {**ONE, "on_gpu": False}, "LOWER_PARALLELISM USE_GPU", ""),
        (LOADER, {**ONE, "num_threads": 1, "used": {"loader": 0.98}}, "MORE_CPUS", ""),
        (LOADER, {**ONE, "num_threads": 1, "used": {"loader": 0.2}}, "", ""),
        (LOADER, {"num_workers": 0}, "START_WORKERS", ""),
        (LOADER, {**ONE, "machine_cpus": 1, "num_threads": 1, "used": {"loader": 0.98}}, "", ""),
        # The device. A step that waits although nothing is slow may do so because of synchronization.
        (FED, {"synchronizations": 2.0}, "AVOID_SYNCHRONIZATION FASTER_STEP", ""),
        (FED, {"synchronizations": 0.0}, "FASTER_STEP", ""),
        (COPY, {"synchronizations": 2.0}, "", "AVOID_SYNCHRONIZATION"),
        ({"everything": 1_000}, {"synchronizations": 2.0, "stall_fraction": 0.8}, "AVOID_SYNCHRONIZATION", ""),
        (FED, {"idle_gpus": 1}, "USE_IDLE_GPUS FASTER_STEP", ""),
        (COPY, {"idle_gpus": 1}, "", "USE_IDLE_GPUS"),
        (FED, {"idle_gpus": 1, "world_size": 2}, "FASTER_STEP", ""),
        ({**ON_CPU, "normalize": 900, "everything": 680}, {"on_gpu": False, **STEADY}, "NORMALIZE_ON_GPU", ""),
        ({**ON_CPU, "normalize": 900, "everything": 680}, {**NO_GPU, **STEADY}, "LESS_ARITHMETIC", ""),
        ({"loader": None}, {}, "", ""),
    ],
)  # fmt: skip
def test_what_is_recommended(figures: dict[str, Any], known: dict[str, Any], moving: str, others: str) -> None:
    found = given(evidence(figures, **known))
    assert remedies(found, moves=True) == moving
    assert remedies(found, moves=False) == others


@pytest.mark.parametrize(
    ("figures", "known", "parts"),
    [
        (LOADER, WAITS, ["at most 4, although", "8 CPUs", "num_threads=8"]),
        (LOADER, {**WAITS, "num_workers": 1}, ["num_workers=8"]),
        (TRANSFORM, SLEEPS, ["num_threads=8", "3 % of its time"]),
        (LOADER, {"used": BUSY}, ["num_threads to 8"]),
        (LOADER, ONE, ["1 CPU", "num_threads to 1"]),
        (LOADER, {"batch_rows": 8, "loaded_row_bytes": 3_072}, ["8 images of 3,072 bytes"]),
        (LOADER, {"batch_rows": 1, "loaded_row_bytes": 3_072}, ["only 1 image of 3,072 bytes"]),
        (COPY, FLOATS, ["602,112 bytes", "4.0 times"]),
        (FED, {"synchronizations": 2.0, "synchronized_at": "train.py:42"}, ["2.0 times", "train.py:42"]),
        (FED, {"idle_gpus": 1}, ["1 idle GPU:", "2 processes"]),
        (LOADER, {**ONE, "num_threads": 1, "used": {"loader": 0.98}}, ["1 CPU", "The machine has 16"]),
        ({"storage_cold": 500}, {}, ["first epoch"]),
    ],
)
def test_texts_have_the_numbers(figures: dict[str, Any], known: dict[str, Any], parts: list[str]) -> None:
    text = " ".join(one.text for one in given(evidence(figures, **known)))
    for part in parts:
        assert part in text


def test_the_usual_causes_come_first() -> None:
    figures = {"storage_hot": 1_050, "loader": 1_000, "copy": 1_010, "everything": 950}
    known: dict[str, Any] = {"encoding": Encoding.CHUNKS, "loaded_float": True, "pinned": False}
    found = given(evidence(figures, BUSY, **known))
    assert remedies(found, moves=True) == "DECODE_ONCE UINT8_BATCHES PIN_MEMORY RAISE_PARALLELISM"
    known = {"half_batch_ratio": 0.6, "synchronizations": 1.0, "idle_gpus": 1}
    assert remedies(given(evidence(FED, **known)), moves=True) == (
        "LARGER_BATCH_FOR_STEP AVOID_SYNCHRONIZATION USE_IDLE_GPUS FASTER_STEP"
    )


GPU_REMEDIES = {
    Remedy.TRANSFORM_ON_DEVICE, Remedy.UINT8_BATCHES, Remedy.PIN_MEMORY, Remedy.CHEAPER_COPY, Remedy.USE_IDLE_GPUS,
    Remedy.NORMALIZE_ON_GPU, Remedy.USE_GPU, Remedy.FASTER_STEP, Remedy.AVOID_SYNCHRONIZATION,
}  # fmt: skip
NUMBER = re.compile(r"num_(?:threads|workers)(?:=| to )(\d+)")


def test_whatever_was_measured_all_advice_can_be_followed_here() -> None:
    for known in (random_evidence(Random(seed)) for seed in range(300)):
        verdict, found = judge(known), given(known)
        numbers = [int(number) for one in found for number in NUMBER.findall(one.text)]
        assert all(number <= known.cpus for number in numbers)
        # Not more and fewer at once, and nothing that is as it should be.
        assert len(set(numbers)) <= 1
        assert known.parallel not in numbers
        if not known.gpus:
            assert not {one.remedy for one in found} & GPU_REMEDIES
        if verdict.outcome in (Outcome.NOISY, Outcome.TOO_LITTLE, Outcome.NOT_MEASURED):
            assert not any(one.moves for one in found if one.remedy is not Remedy.LOWER_PARALLELISM)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({**THREADS, "transform_wait_fraction": 0.8}, "TRANSFORM_ON_DEVICE CHEAPER_TRANSFORM"),
        ({**THREADS, "transform_wait_fraction": 0.8, "gpus": 0}, "CHEAPER_TRANSFORM"),
        ({**THREADS, "wait_fraction": 0.02}, "CHEAPER_COPY"),
        ({**WORKERS, "cpus": 1, "gpus": 1, "wait_fraction": 0.02}, "CHEAPER_COPY"),
        ({**WORKERS, "cpus": 1, "gpus": 0, "cpus_used": 0.9}, "LOWER_PARALLELISM USE_H5LOADER"),
        ({"cpus": 8}, "READ_IN_WORKERS"),
        ({"cpus": 8, "num_workers": 0}, "START_WORKERS"),
        ({**THREADS, "library_reason": "its filter is unknown"}, "CONVERT_FOR_DIRECT_READS"),
        ({**THREADS, "encoding": Encoding.CHUNKS, "full_shuffle": True}, "SHUFFLE_WINDOWS DECODE_ONCE"),
        ({**THREADS, "cpus_used": 0.2}, "TRY_MORE_READS FASTER_DISK"),
        ({**THREADS, "cpus_used": 1.8}, "RAISE_PARALLELISM"),
        ({**THREADS, "cpus": 2, "machine_cpus": 4, "cpus_used": 1.8}, "MORE_CPUS"),
        ({**THREADS, "cpus": 2, "cpus_used": 0.2}, "FASTER_DISK"),
        ({**WORKERS, "cpus_used": 0.3}, "TRY_MORE_READS FASTER_DISK USE_H5LOADER"),
        ({**WORKERS, "cpus_used": 1.9}, "RAISE_PARALLELISM USE_H5LOADER"),
        (WORKERS, "USE_H5LOADER"),
    ],
)
def test_every_bottleneck_of_a_training_loop_has_advice(known: dict[str, Any], expected: str) -> None:
    found = given(Evidence(**{"wait_fraction": 1.0, **known}))
    assert remedies(found, moves=True) == expected


def test_every_remedy_names_its_parameters_as_they_stand_in_its_text() -> None:
    for remedy in Remedy:
        fields = {name: 3.0 for _, name, _, _ in string.Formatter().parse(remedy.value) if name}
        found = Advice(remedy, True, fields)
        assert "`" not in found.text
        assert "--" not in found.text
        assert all(fragment in found.text for fragment in found.parameters)
        assert len(found.parameters) == remedy.value.count("`") / 2
