"""One run of consecutive integers."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Interval:
    """The integers from ``first`` to ``last``, both included."""

    first: int
    last: int

    def __post_init__(self):
        if self.first > self.last:
            raise ValueError(f"interval ends before it starts: {self.first} > {self.last}")

    def __len__(self):
        return self.last - self.first + 1

    def __contains__(self, number):
        return self.first <= number <= self.last

    def touches(self, other):
        """Whether both together are one interval."""
        return self.first <= other.last + 1 and other.first <= self.last + 1

    def merge(self, other):
        """The one interval that both together are."""
        if not self.touches(other):
            raise ValueError(f"{self} and {other} are apart")
        return Interval(min(self.first, other.first), max(self.last, other.last))
