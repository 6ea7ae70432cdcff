"""Numbers of keys, from 1 to 2048 + 2048 and multiples of nothing."""

import pytest
import torch

from flash_mla.testing import make_case

pytestmark = pytest.mark.gpu

MAIN = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 640, 1000, 2047, 2048]
BOTH = [(1, 1), (1, 2048), (2048, 1), (15, 17), (64, 64), (128, 64), (128, 512), (100, 1009)]
BOTH += [(2048, 2048)]


@pytest.mark.parametrize("topk", MAIN)
def test_main_cache_alone(record, topk, device):
    make_case(3, 1, 8, topk, record=record, device=device).check()


@pytest.mark.parametrize("topk, extra_topk", BOTH)
def test_main_and_extra_cache(record, topk, extra_topk, device):
    make_case(3, 1, 16, topk, extra_topk, record=record, device=device).check()


def test_many_tokens_of_the_widest(record, device):
    make_case(64, 2, 8, 2048, 2048, record=record, device=device).check()


def test_no_width_at_all(record, device):
    """topk 0 names no key: alone every row is empty, beside an extra cache only that counts."""
    case = make_case(2, 1, 8, 8, 40, record=record, device=device)
    none = case.replace(indices=case.indices[..., :0])
    none.check()
    out, lse = none.replace(extra_kv=None, extra_indices=None).run()
    assert (out == 0).all() and (lse == torch.inf).all()
