"""Measure cases in turns for as long as time allows; a turn measures each case once."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from h5pack.benchmark.cases import MIN_REPEATS, NO_TIME, REPEATS, BenchCase, FileVariant, Measurement, min_seconds
from h5pack.benchmark.ceilings import Ceilings, PageState
from h5pack.benchmark.readers import CaseReader, LoaderReader, SharedDatasets, open_reader
from h5pack.errors import H5PackError
from h5pack.system.files import make_hot

_MIN_RUN_SECONDS = 0.02
_MAX_RUN_SECONDS = {"hot": 0.2, "cold": 0.5}
"""Maximum duration of a repeat, by page-cache state: more short repeats are more informative than fewer long ones."""
_MAX_LOAD_SECONDS = 1.0
_WORKER_SECONDS = 1.5  # Assumed duration of a first repeat that starts worker processes.
_WARM_BYTES = 8 * 1024 * 1024
_PAGES_STAY = "the file cannot be dropped from the page cache, as on tmpfs or if another process has mapped it"


@dataclass
class _CaseState:
    """Results of a case so far."""

    case: BenchCase
    reload: bool  # Whether to load the file into the page cache again before each repeat.
    allowance: float  # Seconds that all repeats may take together.
    end: float  # When the last repeat must end, as returned by the clock of `Sweep`.
    # Until this time, repeats may exceed the allowance if there are fewer than `MIN_REPEATS`; None: they may not.
    late_end: float | None = None
    run_seconds: float = 0.0  # Duration of the latest repeat, without loading; at first an estimate.
    speeds: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # Number of the turn that measured each repeat.
    # Images/s of the ceiling, measured after each repeat; fewer than `speeds` if it could not be measured.
    ceilings: list[float] = field(default_factory=list)
    spent: float = 0.0  # Seconds that the repeats have taken so far.
    load_seconds: float = 0.0  # Duration of the longest loading.
    bytes_per_row: list[float] = field(default_factory=list)
    hit_rate: float | None = None
    reason: str | None = None  # Why the case cannot be measured; None if it can.

    def reloads_next(self) -> bool:
        """Return whether to load the file again before the next repeat: only if the allowance covers enough of them."""
        return self.reload and MIN_REPEATS * (self.run_seconds + self.load_seconds) <= self.allowance

    def next_seconds(self) -> float:
        """Return the estimated duration of the next repeat."""
        return self.run_seconds + (self.load_seconds if self.reloads_next() else 0.0)

    def is_due(self, now: float) -> bool:
        """Return whether to measure another repeat: it must end before `end`, and must not exceed the allowance.

        The first repeat may exceed the allowance. With `late_end`, the first `MIN_REPEATS` repeats may exceed it, and
        need only end before `late_end`.
        """
        few = self.late_end is not None and len(self.speeds) < MIN_REPEATS
        within = few or not self.speeds or self.spent + self.next_seconds() <= self.allowance
        end = self.late_end if few and self.late_end is not None else self.end
        return self.reason is None and within and now + self.next_seconds() < end


class Sweep:
    """Measures cases in turns, alternately forwards and backwards, so that drifts of speed affect all cases equally.

    A turn measures one repeat of every case that has time left. `on_progress` is called after each repeat.
    """

    def __init__(
        self,
        variants: Sequence[FileVariant],
        seed: int,
        on_progress: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
        sampled: float = 1.0,  # fraction of all images that are in the sample
    ) -> None:
        self._variants = {variant.label: variant for variant in variants}
        self._seed = seed
        self._on_progress = on_progress
        self._clock = clock
        self._sampled = sampled
        self._shared = SharedDatasets(sampled)
        self._pages = {variant.label: PageState(self._shared.dataset(variant)) for variant in variants}
        self._pages_stay: set[str] = set()
        self._turn = 0  # The number of turns so far, of all calls of `measure`.

    def warm(self, seconds: float) -> None:
        """Load all variants into the page cache, but only as much of the input file as `seconds` allow."""
        for label, variant in self._variants.items():
            rows = max(1, min(variant.rows, _WARM_BYTES // variant.row_bytes))
            self._read_epoch(BenchCase(label, "window", "direct", "hot", rows, 16, 1), seconds / len(self._variants))
            if not variant.is_input:
                make_hot(Path(variant.path))
            self._on_progress()

    def first_epoch(self, case: BenchCase, end: float) -> tuple[float, ...]:
        """Return the images/s that each of several loaders reaches in its first epoch, which decodes all chunks.

        Empty if decoded chunks do not stay in memory for later epochs, or if the clock is past `end`.
        """
        speeds: list[float] = []
        while len(speeds) < MIN_REPEATS and self._clock() < end:
            with self._reader(case, SharedDatasets(self._sampled)) as reader:
                if not isinstance(reader, LoaderReader) or not reader.decodes_once:
                    return ()
                timing = reader.run(_MAX_LOAD_SECONDS, once=True)
            speeds.append(timing.rows / timing.seconds)
            self._on_progress()
        return tuple(speeds)

    def measure(
        self,
        cases: Sequence[BenchCase],
        seconds: float,
        found: list[Measurement],
        ceilings: Ceilings | None = None,
        *,
        end: float | None = None,
        reload_each_repeat: bool = False,
    ) -> float:
        """Measure cases for about `seconds`, and add one measurement per case to `found`, even if interrupted.

        If `found` has a measurement of the same case, the repeats are added to that.

        Each case gets a share of the time in proportion to its `min_seconds`, so slow cases get fewer repeats, maybe
        none. With `end`, each case gets `MIN_REPEATS` repeats even if that takes longer, but none after `end`. With
        `ceilings`, the ceiling is measured after each repeat of an H5Loader. Return the estimated seconds of one turn.

        If `reload_each_repeat` is true, the file is loaded into the page cache again before each repeat, provided that
        time remains for enough repeats. The reason: where the cached pages lie in memory changes speeds by up to a
        fifth, and they move only when the file is loaded again.
        """
        shares = sum(min_seconds(case) for case in cases)
        soft_end = self._clock() + seconds
        states = [
            _CaseState(case, reload_each_repeat, seconds * min_seconds(case) / shares, soft_end, end) for case in cases
        ]
        for state in states:
            state.run_seconds = _WORKER_SECONDS if state.case.num_workers else 0.0
        try:
            while self._take_turn(states, ceilings, backwards=self._turn % 2 == 1):
                self._turn += 1
        finally:
            merged = {one.case: one for one in found}
            for one in map(self._result, states):
                merged[one.case] = merged[one.case].with_repeats_of(one) if one.case in merged else one
            found[:] = merged.values()
        taken = [state.run_seconds + state.load_seconds for state in states if state.spent]
        return len(states) * statistics.mean(taken) if taken else 0.0

    def _take_turn(self, states: list[_CaseState], ceilings: Ceilings | None, *, backwards: bool) -> bool:
        """Measure one repeat of each case that is due. Return False if there is none."""
        measured = False
        for state in reversed(states) if backwards else states:
            begin = self._clock()
            if not state.is_due(begin):
                continue
            measured = True
            if state.reloads_next():
                self._load(state.case)
            loaded = self._clock()
            most = _MAX_RUN_SECONDS[state.case.cache]
            seconds = min(most, max(_MIN_RUN_SECONDS, state.allowance / (2 * REPEATS)))
            self._run(state, seconds, ceilings)
            now = self._clock()
            state.load_seconds, state.run_seconds = max(state.load_seconds, loaded - begin), now - loaded
            state.spent += now - begin
            self._on_progress()
        return measured

    def _run(self, state: _CaseState, seconds: float, ceilings: Ceilings | None) -> None:
        """Measure one repeat of a case, or record the reason why it cannot be measured."""
        variant = self._variants[state.case.variant]
        cold = state.case.cache == "cold"
        if cold and variant.label in self._pages_stay:
            state.reason = _PAGES_STAY
            return
        try:
            with self._reader(state.case, self._shared) as reader:
                if cold:
                    # Measure cold reads with a new reader, because an old one may hold rows of the file in memory.
                    if self._pages[variant.label].drop() is not None:
                        self._pages_stay.add(variant.label)
                        state.reason = _PAGES_STAY
                        return
                else:
                    if not variant.is_input:
                        make_hot(Path(variant.path))
                    # Run the reader once before measuring, because the first write to new memory is slow. If decoded
                    # chunks are kept in memory for later epochs, read a whole epoch.
                    keeps = isinstance(reader, LoaderReader) and reader.decodes_once
                    reader.run(_MAX_LOAD_SECONDS if keeps else seconds / 2, once=keeps)
                timing = reader.run(seconds, once=cold)
                if timing.rows == 0 or timing.seconds <= 0:
                    state.reason = "no row was read in the available time"
                    return
                state.speeds.append(timing.rows / timing.seconds)
                state.turns.append(self._turn)
                if timing.bytes_per_row is not None:
                    state.bytes_per_row.append(timing.bytes_per_row)
                if isinstance(reader, LoaderReader):
                    state.hit_rate = reader.hit_rate()
                    speed = None if ceilings is None else ceilings.measure(state.case)
                    state.ceilings += [] if speed is None else [speed]
        except (H5PackError, OSError, MemoryError, RuntimeError) as error:
            # The death of a DataLoader worker, for example for lack of shared memory, raises a RuntimeError.
            state.reason = str(error) or type(error).__name__

    def _load(self, case: BenchCase) -> None:
        """Drop a file from the page cache and load it again as training does: read an epoch in the case's order."""
        if case.cache == "hot" and self._pages[case.variant].drop() is None:
            self._read_epoch(replace(case, num_workers=None), _MAX_LOAD_SECONDS)

    def _read_epoch(self, case: BenchCase, seconds: float) -> None:
        """Read at most one epoch to fill the page cache. Errors are ignored; the measurement will report them."""
        with contextlib.suppress(H5PackError, OSError), self._reader(case, self._shared) as reader:
            reader.run(seconds, once=True)

    def _reader(self, case: BenchCase, shared: SharedDatasets) -> contextlib.closing[CaseReader]:
        return contextlib.closing(open_reader(case, self._variants[case.variant], self._seed, shared))

    def _result(self, state: _CaseState) -> Measurement:
        row_bytes = self._variants[state.case.variant].row_bytes
        amplification = statistics.mean(state.bytes_per_row) / row_bytes if state.bytes_per_row else None
        reason = state.reason or (None if state.speeds else NO_TIME)
        ceilings = tuple(state.ceilings) if len(state.ceilings) == len(state.speeds) else ()
        turns = tuple(state.turns)
        return Measurement(state.case, tuple(state.speeds), amplification, state.hit_rate, reason, ceilings, turns)
