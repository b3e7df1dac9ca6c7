"""`Sweep`, which measures cases in turns for as long as time allows."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from h5pack.benchmark.cases import MIN_REPEATS, REPEATS, BenchCase, FileVariant, Measurement, min_seconds
from h5pack.benchmark.ceilings import PageState
from h5pack.benchmark.readers import CaseReader, LoaderReader, SharedDatasets, open_reader
from h5pack.errors import H5PackError
from h5pack.system.files import make_hot

_MIN_RUN_SECONDS = 0.02
_MAX_RUN_SECONDS = 0.5
"""Maximum duration of a repeat: more short repeats are more informative than fewer long ones."""
_MAX_LOAD_SECONDS = 1.0
_WARM_BYTES = 8 * 1024 * 1024
_PAGES_STAY = "the file stays in the page cache, because the file system does not drop its pages"
_NO_TIME = "no time was left"


@dataclass
class _CaseState:
    """Results of a case so far."""

    case: BenchCase
    reload: bool  # Whether to load the file into the page cache again before each repeat.
    allowance: float  # Seconds that all repeats may take together.
    speeds: list[float] = field(default_factory=list)
    spent: float = 0.0  # Seconds that the repeats have taken so far.
    run_seconds: float = 0.0  # Duration of the last repeat, without loading.
    load_seconds: float = 0.0  # Duration of the longest loading.
    bytes_per_row: list[float] = field(default_factory=list)
    hit_rate: float | None = None
    reason: str | None = None  # Why the case cannot be measured; None if it can.

    def reloads_next(self) -> bool:
        """Return whether to load the file again before the next repeat: only if time is left for enough repeats."""
        return self.reload and MIN_REPEATS * (self.run_seconds + self.load_seconds) <= self.allowance

    def next_seconds(self) -> float:
        """Return the estimated duration of the next repeat."""
        return self.run_seconds + (self.load_seconds if self.reloads_next() else 0.0)

    def is_due(self) -> bool:
        """Return whether the case gets another repeat: always a first one, and more within its allowance."""
        return self.reason is None and (not self.speeds or self.spent + self.next_seconds() <= self.allowance)


class Sweep:
    """Measures cases in turns, alternately forwards and backwards, so that drifts of speed affect all cases equally.

    A turn measures one repeat of every case that has time left. `on_progress` is called with the seconds since its last
    call.
    """

    def __init__(
        self,
        variants: Sequence[FileVariant],
        seed: int,
        on_progress: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._variants = {variant.label: variant for variant in variants}
        self._seed = seed
        self._on_progress = on_progress
        self._clock = clock
        self._last = clock()
        self._shared = SharedDatasets()
        self._pages = {variant.label: PageState(self._shared.dataset(variant)) for variant in variants}
        self._pages_stay: set[str] = set()

    def warm(self, seconds: float) -> None:
        """Load all variants into the page cache, but only as much of the input file as can be read in `seconds`."""
        for label, variant in self._variants.items():
            rows = max(1, min(variant.rows, _WARM_BYTES // variant.row_bytes))
            self._read_epoch(BenchCase(label, "window", "direct", "hot", rows, 16, 1), seconds)
            if not variant.is_input:
                make_hot(Path(variant.path))
            self._tick()

    def measure(
        self,
        cases: Sequence[BenchCase],
        seconds: float,
        found: list[Measurement],
        ceilings: Sequence[Callable[[], None]] = (),
        *,
        reload_each_repeat: bool = False,
    ) -> None:
        """Measure cases for about `seconds`, and append one measurement per case to `found`, even if interrupted.

        Each case gets a share of the time in proportion to its `min_seconds`, so slow cases get fewer repeats, maybe
        none. `ceilings` are called once per turn.

        If `reload_each_repeat` is true, the file is loaded into the page cache again before each repeat, provided that
        time remains for enough repeats. The reason is that where the cached pages lie in memory changes the speed of
        all epochs by up to a fifth, until the file is loaded again.
        """
        shares = sum(min_seconds(case) for case in cases)
        states = [_CaseState(case, reload_each_repeat, seconds * min_seconds(case) / shares) for case in cases]
        end = self._clock() + seconds
        try:
            turn = 0
            while states and self._take_turn(states, end, ceilings, backwards=turn % 2 == 1):
                turn += 1
        finally:
            found += [self._result(state) for state in states]

    def _take_turn(
        self, states: list[_CaseState], end: float, ceilings: Sequence[Callable[[], None]], *, backwards: bool
    ) -> bool:
        """Measure one repeat of each case that is due and fits into the time. Return False if there is none."""
        left = end - self._clock()
        due = [state for state in states if state.is_due() and state.next_seconds() < left]
        if not due:
            return False
        for measure_ceiling in ceilings:
            measure_ceiling()
            self._tick()
        for state in reversed(due) if backwards else due:
            begin = self._clock()
            if begin + state.next_seconds() > end:
                continue
            if state.reloads_next():
                self._load(state.case)
            loaded = self._clock()
            self._run(state, min(_MAX_RUN_SECONDS, max(_MIN_RUN_SECONDS, state.allowance / (2 * REPEATS))))
            now = self._clock()
            state.load_seconds, state.run_seconds = max(state.load_seconds, loaded - begin), now - loaded
            state.spent += now - begin
            self._tick()
        return True

    def _run(self, state: _CaseState, seconds: float) -> None:
        """Measure one repeat of a case, or record the reason why it cannot be measured."""
        variant = self._variants[state.case.variant]
        cold = state.case.cache == "cold"
        if cold and variant.label in self._pages_stay:
            state.reason = _PAGES_STAY
            return
        reader: CaseReader | None = None
        try:
            reader = open_reader(state.case, variant, self._seed, self._shared)
            if cold:
                # Measure cold reads with a new reader, because an old one may hold rows of the file in memory.
                if self._pages[variant.label].drop() is not None:
                    self._pages_stay.add(variant.label)
                    state.reason = _PAGES_STAY
                    return
            else:
                if not variant.is_input:
                    make_hot(Path(variant.path))
                # Run the reader once before measuring, because the first write to new memory is slow.
                reader.run(seconds / 2)
            timing = reader.run(seconds, once=cold)
            if timing.rows == 0 or timing.seconds <= 0:
                state.reason = "no row was read in the available time"
                return
            state.speeds.append(timing.rows / timing.seconds)
            if timing.bytes_per_row is not None:
                state.bytes_per_row.append(timing.bytes_per_row)
            if isinstance(reader, LoaderReader):
                state.hit_rate = reader.hit_rate()
        except (H5PackError, OSError, MemoryError, RuntimeError) as error:
            # The death of a DataLoader worker, for example for lack of shared memory, raises a RuntimeError.
            state.reason = str(error) or type(error).__name__
        finally:
            if reader is not None:
                reader.close()

    def _load(self, case: BenchCase) -> None:
        """Drop a file from the page cache and load it again as training does: read an epoch in the case's order."""
        if case.cache == "hot" and self._pages[case.variant].drop() is None:
            self._read_epoch(replace(case, num_workers=None), _MAX_LOAD_SECONDS)

    def _read_epoch(self, case: BenchCase, seconds: float) -> None:
        """Read at most one epoch to fill the page cache. Errors are ignored; the measurement will report them."""
        with contextlib.suppress(H5PackError, OSError):
            reader = open_reader(case, self._variants[case.variant], self._seed, self._shared)
            reader.run(seconds, once=True)
            reader.close()

    def _result(self, state: _CaseState) -> Measurement:
        row_bytes = self._variants[state.case.variant].row_bytes
        amplification = statistics.mean(state.bytes_per_row) / row_bytes if state.bytes_per_row else None
        reason = state.reason or (None if state.speeds else _NO_TIME)
        return Measurement(state.case, tuple(state.speeds), amplification, state.hit_rate, reason)

    def _tick(self) -> None:
        now = self._clock()
        self._on_progress(now - self._last)
        self._last = now
