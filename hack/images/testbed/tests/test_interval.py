import pytest

from intervals import Interval


def test_length_counts_both_ends():
    assert len(Interval(3, 3)) == 1
    assert len(Interval(-2, 2)) == 5


def test_ends_in_order():
    with pytest.raises(ValueError, match="ends before it starts"):
        Interval(2, 1)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        (Interval(1, 3), Interval(4, 5), True),
        (Interval(1, 3), Interval(2, 9), True),
        (Interval(1, 3), Interval(5, 6), False),
        (Interval(1, 9), Interval(3, 4), True),
    ],
)
def test_touching_is_mutual(one, two, expected):
    assert one.touches(two) is expected
    assert two.touches(one) is expected


def test_only_touching_intervals_merge():
    assert Interval(1, 3).merge(Interval(4, 6)) == Interval(1, 6)
    with pytest.raises(ValueError, match="apart"):
        Interval(1, 2).merge(Interval(4, 5))
