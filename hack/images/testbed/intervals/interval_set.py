"""A set of integers."""

from bisect import bisect_right

from .interval import Interval


class IntervalSet:
    """Integers as sorted intervals that do not touch each other."""

    def __init__(self, intervals=()):
        self._intervals = _normalise(intervals)

    @property
    def intervals(self):
        """The intervals, in order."""
        return tuple(self._intervals)

    def __contains__(self, number):
        at = bisect_right(self._intervals, number, key=lambda interval: interval.first)
        return at > 0 and number in self._intervals[at - 1]

    def __len__(self):
        return sum(len(interval) for interval in self._intervals)

    def __iter__(self):
        for interval in self._intervals:
            yield from range(interval.first, interval.last + 1)

    def __eq__(self, other):
        return isinstance(other, IntervalSet) and self._intervals == other._intervals

    def __hash__(self):
        return hash(self.intervals)

    def __or__(self, other):
        return IntervalSet(self._intervals + other._intervals)

    def __and__(self, other):
        found = []
        for one in self._intervals:
            for two in other._intervals:
                first, last = max(one.first, two.first), min(one.last, two.last)
                if first <= last:
                    found.append(Interval(first, last))
        return IntervalSet(found)

    def __sub__(self, other):
        left = list(self._intervals)
        for hole in other._intervals:
            left = [part for interval in left for part in _cut(interval, hole)]
        return IntervalSet(left)

    def __str__(self):
        return ",".join(
            str(i.first) if len(i) == 1 else f"{i.first}-{i.last}" for i in self._intervals
        )

    def __repr__(self):
        return f"IntervalSet({str(self)!r})"


def _normalise(intervals):
    merged = []
    for interval in sorted(intervals):
        if merged and merged[-1].touches(interval):
            merged[-1] = merged[-1].merge(interval)
        else:
            merged.append(interval)
    return merged


def _cut(interval, hole):
    if interval.first < hole.first:
        yield Interval(interval.first, min(interval.last, hole.first - 1))
    if interval.last > hole.last:
        yield Interval(max(interval.first, hole.last + 1), interval.last)
