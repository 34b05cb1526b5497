import pytest

from intervals import parse


@pytest.mark.parametrize("text", ["", "5", "1-3", "1-3,5,7-9"])
def test_round_trip(text):
    assert str(parse(text)) == text


def test_spaces_and_order_do_not_matter():
    assert parse(" 7 - 9, 1-3 ,4") == parse("1-4,7-9")


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", "1-2-3", ","])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match="not an interval"):
        parse(text)


def test_backwards_is_refused():
    with pytest.raises(ValueError, match="ends before it starts"):
        parse("3-1")
