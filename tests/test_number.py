"""The checks of single settings: what they let through, and the sentence that they refuse with."""

import re
from math import inf, nan

import numpy as np
import pytest

from gcfed.utils.number import choice, flag, number, numbers


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5), np.int64(1)])
def test_a_number_within_its_range_is_returned_as_it_is(value):
    assert number("key", value, 0, 1) is value


@pytest.mark.parametrize("value", [nan, inf, -inf, -1, 1.5, True, False, None, "0.5", "auto", [], {}])
def test_nothing_else_is_a_number_from_0_to_1(value):
    with pytest.raises(ValueError, match=r"^a\.key=.* must be a number from 0 to 1\.$"):
        number("a.key", value, 0, 1)


@pytest.mark.parametrize(
    ("value", "low", "high", "rules", "sentence"),
    [
        (0, 1, 2**40, {"whole": True}, "k=0 must be a whole number of at least 1."),
        (1.0, 2, 32, {"whole": True}, "k=1.0 must be a whole number from 2 to 32."),
        (0, 0, 1, {"above": True}, "k=0 must be a number above 0, at most 1."),
        (1, 0, 1, {"below": True, "none": True}, "k=1 must be a number of at least 0, below 1, or null."),
        (1e-300, 0, 1e9, {"above": True}, "k=1e-300 must be a number of at least 1e-18."),  # which float32 squares to 0
        ("on", 1, 8, {"whole": True, "auto": True}, "k=on must be auto or a whole number from 1 to 8."),
    ],
)
def test_the_sentence_names_the_range(value, low, high, rules, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        number("k", value, low, high, **rules)


def test_numbers_stay_finite_in_float32_without_a_bound_of_their_own():
    with pytest.raises(ValueError, match=r"k=1e\+30 must be a number from 0 to 1,000,000,000\."):
        number("k", 1e30, 0)
    with pytest.raises(ValueError, match=r"k=-1 must be a number of at least 0\."):  # who reads this needs no bound
        number("k", -1, 0)
    assert number("k", 10**15, 0, whole=True) == 10**15


def test_null_and_auto_pass_where_they_are_allowed():
    assert number("k", None, 1, none=True) is None
    assert number("k", "auto", 1, auto=True) == "auto"


def test_lists_switches_and_choices():
    assert numbers("k", [1, 2.5], 0) == [1, 2.5]
    with pytest.raises(ValueError, match=r"k\[1\]=-1 must be"):
        numbers("k", [0, -1], 0)
    with pytest.raises(ValueError, match="k=12 must be a list of numbers"):
        numbers("k", "12")
    assert flag("k", False) is False
    with pytest.raises(ValueError, match="k=1 must be true or false"):
        flag("k", 1)
    assert choice("k", "a", ("a", "b")) == "a"
    with pytest.raises(ValueError, match=r"k=\['a'\] is unknown: choose a, b or null\."):
        choice("k", ["a"], ("a", "b", None))
