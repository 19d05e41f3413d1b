"""What fails today, by test: marked ``xfail(strict=True)``. Delete what has come right, and at last this file."""

from fnmatch import fnmatch

import pytest

FAILS_TODAY = {
    "test_what_cannot_be_trained_is_refused_with_the_wrapper_that_can": """
        TwoInputs TupleOutput DataclassOutput
    """,
}


@pytest.fixture(autouse=True)
def not_yet(request):
    test, _, case = request.node.name.rstrip("]").partition("[")
    if any(fnmatch(case, pattern) for pattern in FAILS_TODAY.get(test, "").split()):
        request.applymarker(pytest.mark.xfail(strict=True))
