"""Sets of integers kept as a few sorted intervals."""

from .interval import Interval
from .interval_set import IntervalSet

__all__ = ["Interval", "IntervalSet", "parse"]


def parse(text):
    """Read a set from text such as ``1-3,5``."""
    from .text import parse as read

    return read(text)
