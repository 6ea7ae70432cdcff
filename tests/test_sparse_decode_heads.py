"""Any number of heads from 1 to 128, few tokens and many."""

import pytest

from flash_mla.testing import make_case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("any_tile")]


@pytest.mark.parametrize("h_q", [1, 2, 7, 8, 9, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("b", [1, 5, 150], ids=lambda b: f"tokens{b}")
def test_heads(record, h_q, b, device):
    make_case(b, 1, h_q, 128, 65, record=record, device=device, sinks=True).check()
