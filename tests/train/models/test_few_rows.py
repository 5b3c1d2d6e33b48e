"""Linear layers with few rows compute the same result as other linear layers."""

import pytest
import torch
from torch.nn.functional import linear

from clipmill.train.models.captioner import linear_of_few_rows


@pytest.mark.parametrize("shape", [(1, 1, 24), (4, 1, 24), (2, 2, 24), (5, 1, 24), (3, 24), (1, 40, 24)])
@pytest.mark.parametrize(("num_out", "has_bias"), [(7, True), (24, True), (90, True), (90, False)])
def test_it_is_a_linear_layer(shape: tuple[int, ...], num_out: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (shape, (num_out, 24), (num_out,))
    )
    outputs = linear_of_few_rows(x, weight, bias if has_bias else None)
    torch.testing.assert_close(outputs, linear(x, weight, bias if has_bias else None), atol=1e-12, rtol=0)


def test_its_precision_is_autocasts() -> None:
    x, weight, bias = torch.randn(2, 24), torch.randn(90, 24), torch.randn(90)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, expected = linear_of_few_rows(x, weight, bias), linear(x, weight, bias)
    assert outputs.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(outputs, expected, atol=0.1, rtol=0.02)
