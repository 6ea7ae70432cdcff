"""Page sizes, of the main cache and of the extra cache on its own."""

import pytest

from flash_mla.testing import make_case

pytestmark = pytest.mark.gpu

PAGES = [1, 2, 3, 32, 53, 61, 64, 69, 128, 256, 576]


@pytest.mark.parametrize("page, extra_page", list(zip(PAGES, PAGES[4:] + PAGES[:4])))
def test_page_sizes(record, page, extra_page, device):
    case = make_case(
        4, 1, 8, 150, 200, record=record, page=page, extra_page=extra_page, device=device,
        num_blocks=max(3, 300 // page), extra_num_blocks=max(3, 300 // extra_page),
    )  # fmt: skip
    case.check()


def test_one_block(record, device):
    """A single block, whose stride means nothing."""
    make_case(2, 1, 8, 40, record=record, num_blocks=1, device=device).check()
