"""Which stage holds the others up: a pure function of the figures and the facts.

The stages make three lanes that work at the same time: the feed (storage, decoding, the loader, the user's transform),
the copy to the device, and the device (normalising, the step). The slowest lane is the limit, and inside of it the part
that costs the most time is the cause. Where figures do not tell two apart both are named, and where they contradict
each other none is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h5pack.doctor.facts import WAITS, Facts
from h5pack.doctor.stage import COLD, COPY, EVERYTHING, HOT, LOADER, NORMALIZE, STEP, TRANSFORM, Rates, Stage
from h5pack.feed.cpu_time import BUSY
from h5pack.wording import counted, listed

STORAGE = "storage"
DECODING = "decoding"

_FEED, _DEVICE = "feed", "device"
_EQUAL = 1.1
"""Medians this near to each other count as equal, whatever the repeats' ranges."""
_APART = 1.5
"""Medians this far from each other count as different, although an odd repeat makes the ranges meet."""
_FED = 0.9
"""The part of the step's own speed from which on the loop counts as fed."""
_SHORT = 0.75
"""Everything together below this part of its slowest lane: something happens only together."""
_MOSTLY, _HARDLY = 0.5, 0.1
"""Stall fractions: above the first, something other than the step takes most of the time; below the second, nothing
does."""
_FASTER = 1.25
"""Everything together above this times its slowest lane: one of the two figures is wrong."""
_EXPLAINS = (0.5, 0.7)
"""How near a stage must come to the one it is a part of, to be its cause: perhaps from the first on, surely from the
second."""


@dataclass(frozen=True)
class Verdict:
    """Who is to blame.

    Attributes
    ----------
    bottleneck : tuple of str
        "storage", "decoding", "loader", "transform", "copy", "normalize" or "step"; several where the figures do not
        tell them apart, none where there is no saying.
    fed : bool or None
        Whether the loop runs as fast as the step alone; None: not known.
    sure : bool
        Whether the figures agree with each other.
    text : str
        The verdict in words.
    first_epoch : str or None
        What holds the first epoch up, where that is something else.
    """

    bottleneck: tuple[str, ...]
    fed: bool | None
    sure: bool
    text: str
    first_epoch: str | None = None


def judge(stages: Mapping[str, Stage], facts: Facts) -> Verdict:
    """Name the bottleneck.

    Parameters
    ----------
    stages : mapping of str to Stage
        By key; those that are missing count as not measured.
    facts : Facts
    """
    rates = {key: found.rates for key, found in stages.items() if found.rates is not None}
    lanes = _lanes(rates, facts)
    if _FEED not in lanes:
        return Verdict((), None, False, f"No verdict: the loader was not measured ({_why_not(stages, facts)}).")
    causes = _feed_causes(rates, facts)
    first = _first_epoch(rates, facts)
    if STEP not in rates:
        text = (
            f"No verdict: the step was not measured ({_reason(stages, STEP)}). The loader gives "
            f"{_rate(lanes[_FEED])}; what limits it is {_listed(causes)}."
        )
        return Verdict((), None, False, text, first)
    slowest = min(lanes, key=lambda name: lanes[name].median)
    limits = [name for name in lanes if name == slowest or _alike(lanes[name], lanes[slowest])]
    together = rates.get(EVERYTHING)
    fed = _is_fed(together, rates[STEP])
    odd = _contradiction(rates, lanes, slowest, fed, facts.stall)
    if odd is not None:
        text = f"No verdict: {odd}. The machine's speed changed meanwhile; measure again, with more --seconds."
        return Verdict((), None, False, text, first)
    names = _named(limits, causes, rates)
    if not fed and names == (STEP,) and facts.stall is not None and facts.stall < _HARDLY:
        # A step that shares CPUs with its loader is slower than alone, and yet does not wait.
        fed = True
    if fed:
        return Verdict((STEP,), True, True, _fed_text(rates, lanes, facts.stall), first)
    sure, remark = _remark(names, lanes, rates, stages, facts)
    text = _text(names, lanes, rates, facts)
    return Verdict(names, fed, sure, f"{text} {remark}" if remark else text, first)


def _lanes(rates: Mapping[str, Rates], facts: Facts) -> dict[str, Rates]:
    lanes: dict[str, Rates] = {}
    feed = rates.get(TRANSFORM if facts.transformed else LOADER)
    if feed is not None:
        # A file that memory cannot hold is cold in every epoch.
        cold = None if facts.fits_cache else rates.get(COLD)
        lanes[_FEED] = feed if cold is None else min(feed, cold, key=lambda found: found.median)
    if COPY in rates:
        lanes[COPY] = rates[COPY]
    if STEP in rates:
        parts = [rates[key] for key in (NORMALIZE, STEP) if key in rates]
        # A GPU may do both at a time; a CPU does them one after the other.
        lanes[_DEVICE] = min(parts, key=lambda found: found.median) if facts.on_gpu else _in_turn(parts)
    return lanes


def _in_turn(parts: list[Rates]) -> Rates:
    """Images a second where each passes all parts one after the other."""
    return Rates(
        1 / sum(1 / part.median for part in parts),
        1 / sum(1 / part.low for part in parts),
        1 / sum(1 / part.high for part in parts),
        min(part.repeats for part in parts),
    )


def _alike(one: Rates, other: Rates) -> bool:
    larger, smaller = max(one.median, other.median), min(one.median, other.median)
    return larger <= _EQUAL * smaller or (larger <= _APART * smaller and one.meets(other))


def _is_fed(together: Rates | None, step: Rates) -> bool | None:
    if together is None:
        return None
    return together.median >= _FED * step.median or (together.median >= _SHORT * step.median and together.meets(step))


def _contradiction(
    rates: Mapping[str, Rates], lanes: Mapping[str, Rates], slowest: str, fed: bool | None, stall: float | None
) -> str | None:
    """What figures of stages alone and of everything cannot be true together, in words; None: they may."""
    together = rates.get(EVERYTHING)
    if together is None:
        return None
    if fed and stall is not None and stall > _MOSTLY:
        return (
            f"everything together ran at the step's own speed ({_rate(together)}), and yet the step waited "
            f"{100 * stall:.0f} % of the time"
        )
    if not fed and together.low > _FASTER * lanes[slowest].high:
        lane = {_FEED: "the loader", COPY: "the copy"}.get(slowest, "the step")
        return f"everything together ran at {_rate(together)}, faster than {lane} alone ({_rate(lanes[slowest])})"
    return None


def _feed_causes(rates: Mapping[str, Rates], facts: Facts) -> tuple[str, ...]:
    """What limits the feed."""
    hot = rates[TRANSFORM if facts.transformed else LOADER]
    cold = None if facts.fits_cache else rates.get(COLD)
    if cold is not None and cold.median < hot.median and not _alike(cold, hot):
        return (STORAGE,)
    causes = _transform_causes(rates, facts)
    if cold is not None and _alike(cold, hot) and STORAGE not in causes:
        causes = (STORAGE, *causes)
    return causes


def _transform_causes(rates: Mapping[str, Rates], facts: Facts) -> tuple[str, ...]:
    if not facts.transformed:
        return _loader_causes(rates, facts)
    if LOADER not in rates:
        return (TRANSFORM,)
    # Of the time that an image takes, the part that is there with the transform only.
    share = 1 - rates[TRANSFORM].median / rates[LOADER].median
    if share >= _EXPLAINS[0]:
        return (TRANSFORM,)
    rest = _loader_causes(rates, facts)
    return rest if share < 1 - _EXPLAINS[1] else (*rest, TRANSFORM)


def _loader_causes(rates: Mapping[str, Rates], facts: Facts) -> tuple[str, ...]:
    hot = rates.get(HOT)
    if hot is None:
        return (LOADER,)
    below = _storage_cause(facts)
    explained = rates[LOADER].median / hot.median
    if below == LOADER or explained < _EXPLAINS[0]:
        return (LOADER,)
    return (below,) if explained >= _EXPLAINS[1] else (below, LOADER)


def _storage_cause(facts: Facts) -> str:
    """Why the engine reads no faster from the page cache: it waits, it decodes, or it copies as fast as it can."""
    if facts.reading_share is not None and facts.reading_share < WAITS:
        return STORAGE
    return DECODING if facts.encoding or facts.library else LOADER


def _named(limits: list[str], causes: tuple[str, ...], rates: Mapping[str, Rates]) -> tuple[str, ...]:
    """The parts of the slowest lanes, in the order in which an image passes them."""
    names: list[str] = []
    for lane in limits:
        if lane == _FEED:
            names += causes
        elif lane == COPY:
            names.append(COPY)
        elif NORMALIZE not in rates:
            names.append(STEP)
        else:
            one, other = rates[NORMALIZE], rates[STEP]
            names += [NORMALIZE, STEP] if _alike(one, other) else [NORMALIZE if one.median < other.median else STEP]
    order = (STORAGE, DECODING, LOADER, TRANSFORM, COPY, NORMALIZE, STEP)
    return tuple(name for name in order if name in names)


def _first_epoch(rates: Mapping[str, Rates], facts: Facts) -> str | None:
    cold, usual = rates.get(COLD), rates.get(EVERYTHING) or rates.get(LOADER)
    if cold is None or usual is None or not facts.fits_cache or cold.median >= usual.median or _alike(cold, usual):
        return None
    return (
        f"The first epoch, and each one after the system has dropped the file from memory, runs at {_rate(cold)} at "
        "most: it waits for the disk."
    )


def _fed_text(rates: Mapping[str, Rates], lanes: Mapping[str, Rates], stall: float | None) -> str:
    together, step, feed = rates[EVERYTHING], rates[STEP], lanes[_FEED]
    text = f"All is well, the step is fed: it takes {_rate(step)} alone and gets {_rate(together)} with everything"
    text += "." if stall is None else f", where it waits {100 * stall:.0f} % of the time."
    if feed.median < _APART * step.median:
        return f"{text} But the loader has little to spare ({_rate(feed)}): a faster step would wait for it."
    return f"{text} The loader could give {_rate(feed)}."


def _remark(
    names: tuple[str, ...],
    lanes: Mapping[str, Rates],
    rates: Mapping[str, Rates],
    stages: Mapping[str, Stage],
    facts: Facts,
) -> tuple[bool, str | None]:
    """Whether the loop bears out a verdict on stages that were measured alone, and what is to be said of it."""
    together, stall = rates.get(EVERYTHING), facts.stall
    if together is None:
        return False, f"This is not certain: everything together was not measured ({_reason(stages, EVERYTHING)})."
    waits = stall is not None and stall > _MOSTLY
    feeding = bool(set(names) - {NORMALIZE, STEP})
    if waits and names == (STEP,):
        return False, (
            f"This is not certain: in the loop the step waits {100 * (stall or 0):.0f} % of the time, so loading and "
            "normalising are slower beside it than they are alone."
        )
    if stall is not None and stall < _HARDLY and STEP not in names:
        return False, f"This is not certain: in the loop the step waits only {100 * stall:.0f} % of the time."
    slowest = min(lanes.values(), key=lambda found: found.median)
    if together.median >= _SHORT * slowest.median or together.meets(slowest):
        return True, None
    used = stages[EVERYTHING].cpus_used
    if used is not None and used >= BUSY * facts.cpus:
        why = f"they share {counted(facts.cpus, 'CPU')}"
    elif facts.crowded:
        why = "other processes use the CPUs, too"
    else:
        why = "they wait for each other (Python's GIL, memory, synchronisation), or the machine's speed changed"
    # That the step waits is what a slow feed looks like, whatever else is slow.
    sure = waits and feeding
    return (
        sure,
        f"{'' if sure else 'This is not certain: '}{'T' if sure else 't'}ogether they are slower than alone, as {why}.",
    )


def _text(names: tuple[str, ...], lanes: Mapping[str, Rates], rates: Mapping[str, Rates], facts: Facts) -> str:
    if len(names) == 1:
        text = f"The bottleneck is {_listed(names)}"
    else:
        text = f"The bottleneck is one of {_listed(names)}, which these figures do not tell apart"
    text += f": {'; '.join(_grounds(name, lanes, rates, facts) for name in names)}."
    together = rates.get(EVERYTHING)
    if together is None:
        return text
    part = 100 * together.median / rates[STEP].median
    return f"{text} Everything together runs at {_rate(together)}, {part:.0f} % of the step's own speed."


def _grounds(name: str, lanes: Mapping[str, Rates], rates: Mapping[str, Rates], facts: Facts) -> str:
    feed = _rate(lanes[_FEED])
    if name == STORAGE:
        if not facts.fits_cache and COLD in rates:
            return f"the disk gives {_rate(rates[COLD])}, and the file does not fit into memory"
        share = 100 * (facts.reading_share or 0.0)
        return f"the loader gives {feed}, as reads wait for the disk or the network {100 - share:.0f} % of their time"
    if name == DECODING:
        why = facts.encoding or "rows come through the HDF5 library"
        return f"the loader gives {feed}, as {why} in every epoch"
    if name == LOADER:
        return f"{facts.feeder} gives {_rate(rates[LOADER])}"
    if name == TRANSFORM:
        alone = "" if LOADER not in rates else f", {_rate(rates[LOADER])} without it"
        return f"the loader gives {_rate(rates[TRANSFORM])} with --transform{alone}"
    if name == COPY:
        return f"the copy to the device gives {_rate(rates[COPY])}"
    if name == NORMALIZE:
        return f"normalising gives {_rate(rates[NORMALIZE])}"
    return f"the step alone takes {_rate(rates[STEP])}"


_WORDS = {
    STORAGE: "storage",
    DECODING: "decoding",
    LOADER: "the loader",
    TRANSFORM: "the transform on the host",
    COPY: "the copy to the device",
    NORMALIZE: "normalising",
    STEP: "the step",
}


def _listed(names: tuple[str, ...]) -> str:
    return listed([_WORDS[name] for name in names])


def _why_not(stages: Mapping[str, Stage], facts: Facts) -> str:
    return _reason(stages, TRANSFORM if facts.transformed else LOADER)


def _reason(stages: Mapping[str, Stage], key: str) -> str:
    found = stages.get(key)
    return (found.reason if found is not None else None) or "the measurement was interrupted"


def _rate(rates: Rates) -> str:
    return f"{rate_text(rates.median)} images/s"


def rate_text(value: float) -> str:
    """Images a second, with as many digits as mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
