"""The rule that tells a right answer from a wrong one."""

import math

import pytest
import torch

from bench.check import Error, as_tuple, errors, run_poisoned, verdict

TORCH = (Error(relative=1e-3, largest=0.1),)


@pytest.mark.parametrize(
    "error, is_wrong",
    [
        pytest.param(Error(1e-3, 0.1), False, id="as-torch"),
        pytest.param(Error(2e-3, 0.1), False, id="twice-torch"),
        pytest.param(Error(2.1e-3, 0.1), True, id="more-than-twice"),
        pytest.param(Error(1e-3, 0.5), True, id="one-element-far-off"),
        pytest.param(Error(math.nan, math.nan), True, id="nan"),
    ],
)
def test_at_most_twice_the_error_of_torch(error, is_wrong):
    assert (verdict((error,), TORCH) is not None) == is_wrong


def test_verdict_says_which_output_and_how_far():
    reason = verdict((Error(1e-3, 0.1), Error(0.5, 3.0)), TORCH * 2)

    assert "output 1" in reason and "5.00e-01" in reason


def test_an_element_left_unwritten_shows():
    reference = torch.ones(4, 4, dtype=torch.float64)
    output = torch.ones(4, 4)
    output[2, 3] = math.nan

    (error,) = errors((output,), (reference,))

    assert verdict((error,), TORCH) is not None


def test_error_is_the_relative_norm_and_the_largest_element():
    (error,) = errors((torch.tensor([3.0, 4.5]),), (torch.tensor([3.0, 4.0], dtype=torch.float64),))

    assert error == Error(relative=0.1, largest=0.5)


def test_a_wrong_shape_is_an_error():
    with pytest.raises(ValueError, match=r"\(4,\)"):
        errors((torch.zeros(4),), (torch.zeros(5, dtype=torch.float64),))


def test_outputs_are_taken_from_any_container():
    x, y = torch.zeros(1), torch.ones(1)

    assert as_tuple(x) == (x,)
    assert as_tuple((x, y)) == as_tuple([x, y]) == as_tuple({"D": x, "preact": y}) == (x, y)


def test_a_rung_that_writes_into_the_memory_it_had_is_poisoned_first():
    buffer = torch.zeros(4)

    def writes_half():
        buffer[:2] = 1.0
        return buffer

    (output,) = run_poisoned(writes_half)

    assert output[:2].tolist() == [1.0, 1.0] and output[2:].isnan().all()
