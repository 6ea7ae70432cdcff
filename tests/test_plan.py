"""The plan: a function of shapes and the SM count alone, always admissible, and sensible at the ends."""

import itertools

import host_cpp
import pytest
import torch

H20, H200 = 78, 132
TOKENS = [0, 1, 2, 3, 4, 7, 8, 16, 24, 32, 64, 100, 128, 1000, 2**20]
WIDTHS = [0, 1, 15, 64, 128, 192, 640, 2048, 4096, 10**6]
HEADS = [1, 8, 9, 16, 17, 64, 128]


def plan(tokens, width, heads, num_sms=H200):
    head_tile, splits, block_keys = torch.ops.flash_mla.sparse_decode_plan(
        tokens, width, heads, num_sms
    )
    return head_tile, splits, block_keys


@pytest.mark.parametrize("num_sms", [1, H20, H200])
def test_every_plan_is_one_that_the_operator_takes(num_sms):
    for tokens, width, heads in itertools.product(TOKENS, WIDTHS, HEADS):
        head_tile, splits, block_keys = plan(tokens, width, heads, num_sms)
        assert (head_tile, block_keys) in [(8, 32), (8, 64), (16, 32), (16, 64), (64, 64)]
        assert 1 <= splits <= 16


def test_few_tokens_are_split_and_many_are_not():
    """At one token the GPU is empty; beyond several waves a split only adds a merge."""
    for heads in 8, 16:
        assert plan(1, 640, heads)[1] >= 8
        assert plan(2000, 640, heads)[1] == 1


def test_no_more_splits_than_groups_of_keys():
    """16 keys are the grain: a CTA without any would only join the merge."""
    for tokens, width, heads in itertools.product(TOKENS, WIDTHS, HEADS):
        assert plan(tokens, width, heads)[1] <= max(1, -(-width // 16))


def test_heads_count_in_tiles():
    """Tiles are CTAs of their own: 16 heads in tiles of 8 are split as twice the tokens with 8 heads."""
    assert plan(4, 640, 17) == plan(4, 640, 24)
    assert plan(4, 128, 16) == plan(8, 128, 8)


def test_16_heads_take_two_tiles_of_8_at_few_tokens_and_one_of_16_at_many():
    """Two tiles side by side are the faster while SMs idle; later each key is better fetched once."""
    assert plan(1, 640, 16)[0] == plan(8, 128, 16)[0] == 8
    assert plan(128, 640, 16)[0] == 16
    assert plan(128, 640, 8)[0] == 8  # no more rows than there are


def test_many_heads_take_tiles_of_64_rows_from_some_token_count_on():
    for heads in 32, 64, 100, 128:
        for width in 128, 640, 2048:
            assert plan(128, width, heads)[0] == 64
    # At few tokens smaller tiles have SMs that would idle.
    assert [plan(tokens, 640, 64)[0] for tokens in (2, 4, 16)] == [8, 16, 64]


def test_splits_follow_from_the_sm_count():
    """Of 32 clusters, an H200 has room for 3 splits each and an H20 for 2."""
    assert plan(32, 640, 8, H200)[1] == 3
    assert plan(32, 640, 8, H20)[1] == 2


@pytest.mark.parametrize("width, first", [(128, 34), (192, 17), (640, 6), (2048, 2)])
def test_padded_calls_take_tiles_of_64_rows_from_some_token_count_on(width, first):
    """The more keys, the sooner: smaller tiles compute what is padding, too. docs/vllm.md names these counts."""
    head_tiles = [plan(tokens, width, 64)[0] for tokens in range(1, 129)]
    assert all(head_tile < 64 for head_tile in head_tiles[: first - 1])
    assert all(head_tile == 64 for head_tile in head_tiles[first - 1 :])


def test_clusters_at_once_and_tiles(tmp_path):
    """A cluster lies within a GPC, so fewer run at once than SMs / splits."""
    calls = {
        "concurrent_clusters(1, 132)": 132,
        "concurrent_clusters(4, 132)": 30,
        "concurrent_clusters(10, 132)": 7,
        "concurrent_clusters(16, 132)": 7,
        "concurrent_clusters(16, 78)": 4,
        "concurrent_clusters(16, 8)": 0,
        "tiles_of_token(8, 1)": 1,
        "tiles_of_token(8, 16)": 2,
        "tiles_of_token(8, 17)": 3,
        "tiles_of_token(8, 64)": 8,
        "tiles_of_token(16, 16)": 1,
        "tiles_of_token(16, 17)": 2,
        "tiles_of_token(16, 64)": 4,
        "tiles_of_token(64, 65)": 2,
        "batch_invariant_plan(8).head_tile": 8,
        "batch_invariant_plan(9).head_tile": 16,
        "batch_invariant_plan(16).head_tile": 16,
        "batch_invariant_plan(17).head_tile": 64,
        "batch_invariant_plan(8).splits": 1,
        "batch_invariant_plan(8).block_keys": 64,
    }
    body = ["using namespace flash_mla;"]
    body += [f'std::printf("%d\\n", int({call}));' for call in calls]
    assert dict(zip(calls, map(int, host_cpp.run(tmp_path, ["plan.h"], body)))) == calls


def test_planning_costs_no_more_than_a_few_microseconds():
    """It runs at every call; through the dispatcher and Python it has to stay far below one."""
    import time

    plan(4, 640, 8)
    start = time.perf_counter()
    for _ in range(1000):
        plan(4, 640, 8)
    assert (time.perf_counter() - start) / 1000 < 50e-6


@pytest.mark.parametrize("num_sms", [1, 2, 4, 8, 16, 18])
def test_a_cluster_fits_a_small_gpu(num_sms):
    """A slice of a GPU has fewer SMs than a large cluster needs."""
    for tokens, width, heads in itertools.product(TOKENS, WIDTHS, HEADS):
        _, splits, _ = plan(tokens, width, heads, num_sms)
        assert splits <= num_sms
