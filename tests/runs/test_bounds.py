"""The settings that a report computes with, at the ends of what it takes."""

import pytest

from gcfed.runs.reading import check_config, plain

RIGHT = {"seed": 1, "rounds": 10}


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("seed", [0, 2**63 - 1], [-1, 1.0, 2**63, "1", True, None]),
        ("rounds", [0, 10**7], [-1, 10**7 + 1, 10.0, None]),
        ("eval_every", [1, 2**63 - 1, None], [0, 1.0, "1", True]),
        ("targets", [[], [0.5] * 100], [[0.5] * 101, ["0.5"], 0.5, None]),
        ("precision", ["", "x" * 100, None], ["x" * 101, "a\nb", 32, ["32-true"]]),
        ("tags", [{"data": "x" * 100}, None], [{"data": "x" * 101}, {"data": 1}, "data"]),
        ("labels", [{"gc": None}, {}], [{"gc": "a\tb"}, ["gc"]]),
        ("metrics", [{"drift": {"every": "x"}}, {"drift": None}], [{"drift": 1}, "drift"]),
    ],
)
def test_what_a_report_takes_ends_where_it_says(key, right, wrong):
    for value in right:
        check_config(RIGHT | {key: value})
    for value in wrong:
        with pytest.raises(ValueError, match=rf"^{key}\b"):
            check_config(RIGHT | {key: value})


@pytest.mark.parametrize("whole", [2**63, -(2**63)])
def test_a_whole_number_has_at_most_64_bits(whole):
    smaller = whole - 1 if whole > 0 else whole + 1
    plain({"a": [smaller]})
    with pytest.raises(ValueError, match="more than 64 bits"):
        plain({"a": [whole]})
