"""Of 17 to 64 heads, tiles whose rows from 16 on are zero become tiles of 16 on the GPU: bit for bit the results of those."""

import pytest
import torch
from test_zero_rows import (
    ALIGNMENTS,
    DENORMAL,
    NEGATIVE_ZERO,
    PATTERNS,
    assert_only_within,
    out_within,
    padded_case,
    q_within,
    rows,
    tile_by_tile,
)

import flash_mla
from flash_mla import kv_cache
from flash_mla.testing import assert_close_flashmla, make_case

pytestmark = pytest.mark.gpu

PADDED = {
    "16 real": rows((16, 64)),
    "8 real": rows((8, 64)),
    "1 real": rows((1, 64)),
    "all zero": rows((0, 64)),
    "only the 16th real": rows((0, 15), (16, 64)),
}
SPLITS = range(1, 17)


def forced(head_tile, splits):
    return flash_mla.FlashMLASchedMeta().force_plan(head_tile=head_tile, splits=splits)


def run(case, splits):
    out = torch.full((*case.q.shape[:3], 512), torch.nan, dtype=torch.bfloat16, device=case.q.device)
    return case.run(forced(64, splits), out=out)


def assert_same_bits(got, expected):
    assert torch.equal(got[0].view(torch.int16), expected[0].contiguous().view(torch.int16))
    assert torch.equal(got[1].view(torch.int32), expected[1].contiguous().view(torch.int32))


def check(case, splits):
    got = run(case, splits)
    assert_same_bits(got, tile_by_tile(case, 16, splits=splits, block_keys=64))
    return got


def check_but_one(case, splits, token):
    """One token's tile is computed as it is, as all are if rows of q are not aligned; those of the others as padded ones."""
    as_it_is = run(case.replace(q=q_within(case, 1, 3)), splits)
    padded = tile_by_tile(case, 16, splits=splits, block_keys=64)
    out, lse = got = run(case, splits)
    others = [i for i in range(len(out)) if i != token]
    assert_same_bits((out[token], lse[token]), (as_it_is[0][token], as_it_is[1][token]))
    assert_same_bits((out[others], lse[others]), (padded[0][others], padded[1][others]))
    return got


def key_of_token_1(case, position):
    """Block and offset of a key that token 1 attends to there, and no other token."""
    half = kv_cache.num_slots(case.kv) // 2
    case.indices.remainder_(half)
    case.indices[1, :, position] = slot = half + 3
    return divmod(slot, case.kv.shape[1])


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("pattern", PADDED.values(), ids=list(PADDED))
def test_a_padded_tile_is_bit_for_bit_one_of_16_rows(record, pattern, splits, device):
    case = padded_case(record, pattern, device)
    assert_close_flashmla(*check(case, splits), *case.reference())


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("topk, extra_topk", [(16, 0), (97, 0), (128, 512), (2048, 0)])
def test_any_width(record, topk, extra_topk, splits, device):
    case = make_case(3, 2, 64, topk, extra_topk, record=record, device=device, sinks=True, invalid_fraction=0.1)
    case.q[:, :, 16:] = 0
    check(case, splits)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("heads", [17, 24, 31, 48, 63])
def test_any_number_of_rows(record, heads, splits, device):
    check(padded_case(record, PADDED["16 real"], device, heads=heads), splits)


@pytest.mark.parametrize("heads", [65, 72, 80, 81, 100, 128])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_of_more_than_64_heads_every_row_is_computed(record, splits, heads, device):
    """Both tiles padded, then the one or the other. Rows of zeros have one result but for their sinks."""
    case = make_case(4, 1, heads, 200, record=record, device=device, sinks=True, lengths="random")
    full = case.q.clone()
    zero = torch.cat([PADDED["16 real"], PADDED["8 real"]]).to(device)
    case.q[:, :, zero[:heads]] = 0
    case.q[1, :, :64] = full[1, :, :64]
    case.q[2, :, 64:] = full[2, :, 64:]
    out, lse = run(case, splits)
    assert_close_flashmla(out, lse, *case.reference())
    assert torch.equal(lse[0, 16:64], lse[0, 16:17].expand(48, -1))


@pytest.mark.parametrize("splits", SPLITS)
def test_every_token_has_its_own_pattern(record, splits, device):
    case = padded_case(record, rows(), device, tokens=len(PATTERNS))
    for token, pattern in enumerate(PATTERNS.values()):
        case.q[token, :, pattern.to(device)] = 0
    assert_close_flashmla(*run(case, splits), *case.reference())


def test_negative_zero_is_zero_and_a_denormal_or_nan_is_not(record, device):
    case = padded_case(record, PADDED["8 real"], device, tokens=4)
    bits = case.q.view(torch.int16)
    bits[0, :, 16:] = NEGATIVE_ZERO
    check(case, 4)
    # Not padded any more: as with any other row there.
    bits[1, :, 40, 300] = DENORMAL
    bits[2, :, 63, record.d_qk - 1] = DENORMAL
    case.q[3, :, 16, 0] = torch.nan
    out, lse = run(case, 4)
    assert out[3, :, 16].isnan().all() and lse[3, 16].isnan().all()
    case.q[3, :, 16, 0] = 1
    expected = run(case, 4)
    assert_close_flashmla(*expected, *case.reference())
    assert_same_bits((out[:3], lse[:3]), (expected[0][:3], expected[1][:3]))
    assert torch.equal(out[3, :, 17:], expected[0][3, :, 17:])


# Chunks of 8 dims that the sample does not look at: it takes even ones.
@pytest.mark.parametrize("offset", [0, 1, 8], ids="{} elements off".format)
@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("heads, row", [(17, 16), (40, 39), (64, 16), (64, 40), (64, 63)])
def test_one_element_that_the_sample_misses(record, heads, row, splits, offset, device):
    """The tile is computed as a padded one, and then as it is (with an offset of 1 at once). Some tokens have no keys."""
    case = make_case(
        4, 2, heads, 300, 150, record=record, device=device, sinks=True, lengths=[300, 0, 50, 129], extra_lengths=[150, 0, 0, 70]
    )  # fmt: skip
    case.q[:, :, 8:] = 0
    for dim in 9, record.d_qk - 3:
        # Rows are aligned to 16 bytes with an offset of 0 or 8.
        changed = case.replace(q=q_within(case, offset, 8 + offset % 8))
        changed.q[:, :, row, dim] = 50
        out, lse = run(changed, splits)
        assert_close_flashmla(out, lse, *changed.reference())
        assert not torch.equal(out[0, :, row], out[0, :, 8])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("bad", [[3], [1, 2, 4, 5, 6, 7], [9], [15]], ids=str)
def test_what_is_not_finite_in_real_rows_stays_there(record, bad, value, splits, device):
    case = padded_case(record, PADDED["16 real"], device)
    for row in bad:
        case.q[0, :, row, 7 * row] = value
    out, lse = check(case, splits)
    others = [row for row in range(64) if row not in bad]
    assert out[0, :, others].isfinite().all() and lse[0, others].isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_if_the_first_row_is_not_finite_it_stays_a_tile_of_64(record, value, splits, device):
    """The first row's scores tell which keys are finite. Other rows get what they should all the same."""
    case = padded_case(record, PADDED["16 real"], device)
    case.q[0, :, 0, 5] = value
    out, lse = run(case, splits)
    assert out[0, :, 0].isnan().all()
    case.q[0, :, 0] = 0
    reference, reference_lse = case.reference()
    assert_close_flashmla(out[:, :, 1:], lse[:, 1:], reference[:, :, 1:], reference_lse[:, 1:])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_or_infinity_in_a_key(record, value, splits, device):
    """0 times either is NaN, in rows of zeros as well, unless nobody attends to the key."""
    keys = torch.randn(4, 64, record.d_qk, device=device) / 10
    keys[2, 7, -5] = value  # RoPE, which is bf16
    case = make_case(2, 1, 64, 192, record=record, device=device, num_blocks=4, sinks=True)
    case = case.replace(kv=kv_cache.pack(keys, record, power_of_two_scales=True))
    case.q[:, :, 16:] = 0
    case.indices[0] = torch.arange(192, device=device)
    case.indices[1] = torch.arange(64, 256, device=device)
    case.indices[1][case.indices[1] == 2 * 64 + 7] = -1
    out, lse = check_but_one(case, splits, token=0)
    assert out[0, :, 16:].isnan().all() and lse[0, 16:].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dim", [0, 100, 300, 447])
def test_nan_byte_in_a_key(record, dim, splits, device):
    case = padded_case(record, PADDED["16 real"], device)
    case.topk_length.fill_(200)
    rows_of_kv, _ = kv_cache.regions(case.kv, record)
    rows_of_kv[(*key_of_token_1(case, 70), dim)] = 0x7F
    out, lse = check_but_one(case, splits, token=1)
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert out[[0, 2]].isfinite().all() and lse[[0, 2]].isfinite().all()


@pytest.mark.parametrize("splits, topk", [(1, 2048), (3, 2048), (16, 600), (16, 64)])
@pytest.mark.parametrize("where", [0, 0.5, 1], ids=["first", "middle", "last"])
def test_nan_in_one_key_of_many(record, splits, topk, where, device):
    """Of any block of any split, also if the others have other blocks before and behind, or none at all."""
    case = make_case(2, 1, 64, topk, record=record, device=device, sinks=True)
    case.q[:, :, 16:] = 0
    rows_of_kv, _ = kv_cache.regions(case.kv, record)
    rows_of_kv[(*key_of_token_1(case, int(where * (topk - 1))), 70)] = 0x7F
    out, lse = check_but_one(case, splits, token=1)
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert out[0].isfinite().all() and lse[0].isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_scores_of_the_first_row_that_leave_fp32(record, splits, device):
    """They are infinite though all keys are finite, so rows of zeros get what they should."""
    case = padded_case(record, PADDED["16 real"], device).replace(sm_scale=1e3)
    case.q[1, :, 0] = 3e38
    out, lse = check_but_one(case, splits, token=1)
    reference, reference_lse = case.reference()
    assert_close_flashmla(out[:, :, 16:], lse[:, 16:], reference[:, :, 16:], reference_lse[:, 16:])


@pytest.mark.parametrize("splits", [1, 5])
def test_first_row_that_is_not_finite_without_keys(record, splits, device):
    """Nobody attends to anything: no reason to compute the tile as it is."""
    case = padded_case(record, PADDED["16 real"], device)
    case.topk_length[1] = case.extra_topk_length[1] = 0
    case.q[1, :, 0] = torch.nan
    out, lse = check(case, splits)
    assert (out[1] == 0).all() and (lse[1] == torch.inf).all()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("group", [0, -1], ids=["first scale", "last scale"])
def test_scale_that_is_not_finite(record, group, splits, device):
    case = padded_case(record, PADDED["16 real"], device)
    case.topk_length.fill_(200)
    place = key_of_token_1(case, 70)
    rows_of_kv, scales = kv_cache.regions(case.kv, record)
    group %= record.num_scales
    if scales is not None:
        scales[(*place, group)] = 255
    else:
        at = record.scale_offset + 4 * group
        infinity = torch.tensor([0, 0, 0x80, 0x7F], dtype=torch.uint8, device=device)
        rows_of_kv[(*place, slice(at, at + 4))] = infinity
    out, lse = check_but_one(case, splits, token=1)
    assert out[1, :, 16:].isnan().all() and lse[1, 16:].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_tokens_without_keys(record, device):
    case = padded_case(record, PADDED["8 real"], device)
    case.topk_length.zero_()
    case.extra_topk_length.zero_()
    for splits in 1, 3:
        out, lse = check(case, splits)
        assert (out == 0).all() and (lse == torch.inf).all()


@ALIGNMENTS
@pytest.mark.parametrize("splits", [1, 5, 16])
def test_rows_of_out_wherever_they_lie(record, splits, offset, more, device):
    case = make_case(3, 2, 40, 200, 70, record=record, device=device, sinks=True, lengths="random")
    case.q[:, :, 8:] = 0
    buffer, out = out_within(case, offset, more)
    assert_same_bits(case.run(forced(64, splits), out=out), run(case, splits))
    assert_only_within(buffer, offset)


@ALIGNMENTS
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("heads", [40, 65, 100])
def test_rows_of_q_wherever_they_lie(record, heads, splits, offset, more, device):
    """Such as are not aligned to 16 bytes are not looked at: the results are those of a tile that is not padded, a row repeated. Nor are
    those of two tiles."""
    case = make_case(3, 2, heads, 200, 70, record=record, device=device, sinks=True, lengths="random")
    case.q[:, :, 8:] = 0
    buffer, out = out_within(case, offset, more)
    got = case.replace(q=q_within(case, offset, more)).run(forced(64, splits), out=out)
    assert_close_flashmla(*got, *case.reference())
    assert_only_within(buffer, offset)
    if heads <= 64 and offset % 8 != 0:
        rows_more = case.replace(
            q=torch.cat([case.q, case.q[:, :, :1]], dim=2), attn_sink=torch.cat([case.attn_sink, case.attn_sink[:1]])
        )
        expected = rows_more.run(forced(64, splits))
        assert_same_bits(got, (expected[0][:, :, :heads], expected[1][:, :heads]))
    else:
        assert_same_bits(got, run(case, splits))


@ALIGNMENTS
@pytest.mark.parametrize("splits", [2, 5, 16])
def test_rows_of_out_wherever_they_lie_if_all_rows_are_real(record, splits, offset, more, device):
    case = make_case(2, 2, 64, 200, 70, record=record, device=device, sinks=True, lengths="random")
    buffer, out = out_within(case, offset, more)
    got = case.run(forced(64, splits), out=out)
    assert_same_bits(got, run(case, splits))
    assert_only_within(buffer, offset)
    assert_close_flashmla(*got, *case.reference())


def test_wide_q(record, device):
    """A token with magnitudes that f16 cannot hold side by side is begun as a padded tile and then computed as it is."""
    case = padded_case(record, PADDED["16 real"], device)
    narrow = run(case, 4)
    case.q[0, 0, 2, 10], case.q[0, 0, 2, 11] = 1e-12, 1.0
    for splits in 1, 4:
        out, lse = run(case, splits)
        assert_close_flashmla(out, lse, *case.reference())
    assert_same_bits((out[1:], lse[1:]), (narrow[0][1:], narrow[1][1:]))


def test_a_graph_is_replayed_with_other_rows_zero(record, device):
    """What kind of tile it is, is looked at in every launch."""
    case = padded_case(record, rows(), device)
    full = case.q.clone()
    meta = forced(64, 3)
    case.run(meta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.run(meta)
    for pattern in PADDED["8 real"], rows(), PADDED["16 real"], PATTERNS["20 real"], PADDED["all zero"]:
        case.q.copy_(full)
        case.q[:, :, pattern.to(device)] = 0
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert_close_flashmla(out, lse, *case.reference())
