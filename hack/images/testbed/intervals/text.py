"""Interval sets as text: ``1-3,5``."""

import re

from .interval import Interval
from .interval_set import IntervalSet

_PART = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def parse(text):
    """Read a set; the empty text is the empty set."""
    if not text.strip():
        return IntervalSet()
    intervals = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"not an interval: {part.strip()!r}")
        first = int(match[1])
        intervals.append(Interval(first, int(match[2]) if match[2] else first))
    return IntervalSet(intervals)
