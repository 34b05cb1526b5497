import random

import pytest

from intervals import Interval, IntervalSet


def of(numbers):
    return IntervalSet(Interval(n, n) for n in numbers)


def test_neighbours_become_one_interval():
    assert of([3, 1, 2, 7]).intervals == (Interval(1, 3), Interval(7, 7))


def test_membership_and_order():
    numbers = of([5, 9, 6])
    assert 6 in numbers
    assert 7 not in numbers
    assert list(numbers) == [5, 6, 9]
    assert len(numbers) == 3


def test_empty_set():
    empty = IntervalSet()
    assert len(empty) == 0
    assert 0 not in empty
    assert str(empty) == ""
    assert empty == of([])


@pytest.mark.parametrize("seed", range(20))
def test_operations_agree_with_sets(seed):
    source = random.Random(seed)
    one = {source.randrange(40) for _ in range(source.randrange(30))}
    two = {source.randrange(40) for _ in range(source.randrange(30))}
    assert set(of(one) | of(two)) == one | two
    assert set(of(one) & of(two)) == one & two
    assert set(of(one) - of(two)) == one - two


def test_equal_sets_hash_alike():
    assert hash(of([1, 2])) == hash(IntervalSet([Interval(1, 2)]))
