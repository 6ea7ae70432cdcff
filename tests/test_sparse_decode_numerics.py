"""Sinks, the whole range of scales and data, large logits, and inputs of any magnitude.

Where inputs leave the distribution of FlashMLA's tests, rows are compared by their norm.
"""

import math

import pytest
import torch

import flash_mla
from flash_mla import kv_cache
from flash_mla.kv_cache import V4, V32
from flash_mla.testing import LSE_REL, assert_close_rownorm, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("any_tile")]


def check_rows(case, lse_abs=1e-6):
    """Rows of out by their norm; lse by FlashMLA's relative tolerance, or absolutely if larger."""
    out, lse = case.run()
    ref_out, ref_lse = case.reference()
    assert ref_out.isfinite().all()
    assert_close_rownorm(out, ref_out)
    torch.testing.assert_close(lse, ref_lse, rtol=LSE_REL, atol=lse_abs)


# ---- Sinks -----------------------------------------------------------------------------------------


def test_sinks(record, device):
    """-inf: no effect; +inf: zeros; large ones either way; and lse does not see any of them."""
    case = make_case(3, 1, 16, 200, 100, record=record, device=device)
    plain, plain_lse = case.run()
    special = [-math.inf, math.inf, 1e4, -1e4, 88.0, -88.0, 3e38, -3e38]
    case.attn_sink = torch.tensor(special + [0.5 * i for i in range(8)], device=device)
    out, lse = case.check()
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out[..., [0, 3, 7], :], plain[..., [0, 3, 7], :])
    assert (out[..., [1, 2, 6], :] == 0).all()


def test_sink_of_a_row_without_keys(record, device):
    case = make_case(2, 1, 8, 64, record=record, device=device, lengths=[0, 64])
    case.attn_sink = torch.tensor([-math.inf, math.inf, 0, 1, -1, 1e4, -1e4, 5], device=device)
    out, lse = case.check()
    assert (out[0] == 0).all() and (lse[0] == math.inf).all()


# ---- Scales and data bytes ------------------------------------------------------------------------


def fill(case, data, exponents, rope):
    """Overwrite the cache's tokens: data bytes, ue8m0 bytes (as floats for V3.2), and RoPE dims."""
    record = case.record
    rows, scales = kv_cache.regions(case.kv, record)
    rows[..., : record.nope_dims] = data
    rope_bytes = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    rows[..., record.rope_offset : record.rope_offset + 2 * record.rope_dims] = rope_bytes
    if scales is None:
        as_bytes = kv_cache.ue8m0_to_float(exponents).view(torch.uint8)
        rows[..., record.scale_offset : record.scale_offset + record.scale_bytes] = as_bytes
    else:
        scales[..., : record.num_scales] = exponents


def random_data(case, generator, largest=0x7E):
    """Random e4m3 bytes, no NaN, magnitudes up to the byte ``largest``."""
    shape = (*case.kv.shape[:2], case.record.nope_dims)
    device = case.kv.device
    magnitude = torch.randint(largest + 1, shape, generator=generator, device=device)
    sign = torch.randint(2, shape, generator=generator, device=device) * 0x80
    return (magnitude + sign).to(torch.uint8)


def test_every_scale_that_keeps_keys_finite(record, device):
    """ue8m0 bytes 0 to 246 (448 * 2^119 is finite, 448 * 2^120 is not), one token for each.

    All keys of a token share the scale. Its q is as small as its keys are large; for tiny keys
    the softmax is nearly uniform instead, since q cannot be arbitrarily large.
    """
    case = make_case(247, 1, 8, 60, record=record, device=device, page=64, num_blocks=247)
    generator = torch.Generator(device=device).manual_seed(0)
    byte = torch.arange(247, device=device).view(247, 1, 1)
    unit = torch.ldexp(torch.ones(247, 1, 1, device=device), byte - 127)
    rope = torch.randn(247, 64, 64, generator=generator, device=device).clamp_(-8, 8) * unit
    # Up to ±448 while the sum over 60 keys is finite as well; then smaller data, up to ±1.
    data = random_data(case, generator)
    data[240:] = random_data(case, generator, largest=0x38)[240:]
    fill(case, data, byte.expand(247, 64, record.num_scales).to(torch.uint8), rope)
    case.indices = torch.stack(
        [64 * token + torch.randperm(64, device=device)[:60] for token in range(247)]
    ).view(247, 1, 60).int()
    power = (127 - byte).clamp(max=80).float() - 8
    case.q = (case.q.float() * torch.exp2(power).view(247, 1, 1, 1)).bfloat16()
    check_rows(case, lse_abs=2e-5)


@pytest.mark.parametrize("head_tile", [8, 16, 64])
def test_many_equal_keys_whose_sum_is_not_finite(record, head_tile, device):
    """2048 keys of 448 * 2^118 in every dim and q = 0: out is their mean."""
    case = make_case(2, 1, 16, 2048, record=record, device=device)
    exponents = torch.full((*case.kv.shape[:2], record.num_scales), 245, device=device)
    rope = torch.zeros(*case.kv.shape[:2], 64, device=device)
    fill(case, 0x7E, exponents.to(torch.uint8), rope)
    case.q.zero_()
    meta = flash_mla.FlashMLASchedMeta().force_plan(head_tile=head_tile, splits=1)
    out, lse = case.run(meta)
    expected, expected_lse = case.reference()
    assert expected[..., : record.nope_dims].float().eq(448 * 2.0**118).all()
    assert torch.equal(out, expected.to(out.dtype)) and torch.allclose(lse, expected_lse)


@pytest.mark.parametrize("byte", [0x7E, 0xFE])
def test_largest_finite_key_alone(record, byte, device):
    """One key of ±448 * 2^119 in every dim: out is that key."""
    case = make_case(1, 1, 8, 1, record=record, device=device)
    exponents = torch.full((*case.kv.shape[:2], record.num_scales), 246, device=device)
    rope = torch.zeros(*case.kv.shape[:2], 64, device=device)
    fill(case, byte, exponents.to(torch.uint8), rope)
    case.q = (case.q.float() * 2.0**-130).bfloat16()
    check_rows(case)


def test_subnormal_data(record, device):
    """Only e4m3's subnormals, ±1 to ±7 times 2^-9 and zeros of both signs."""
    case = make_case(3, 1, 8, 100, record=record, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    exponents = torch.full((*case.kv.shape[:2], record.num_scales), 127 + 6, device=device)
    rope = torch.randn(*case.kv.shape[:2], 64, generator=generator, device=device) / 10
    fill(case, random_data(case, generator, largest=7), exponents.to(torch.uint8), rope)
    case.check()


def test_every_finite_data_byte(record, device):
    """±448 and everything below, uniformly over bytes."""
    case = make_case(3, 1, 8, 100, record=record, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    exponents = torch.full((*case.kv.shape[:2], record.num_scales), 127 - 8, device=device)
    rope = torch.randn(*case.kv.shape[:2], 64, generator=generator, device=device) / 10
    fill(case, random_data(case, generator), exponents.to(torch.uint8), rope)
    check_rows(case, lse_abs=2e-5)


@pytest.mark.parametrize("spread", [4, 20, 60])
def test_scales_that_differ_between_keys_and_groups(record, spread, device):
    """Exponents uniform in ±spread, each key and group its own; the largest decide the logits."""
    case = make_case(4, 1, 8, 150, record=record, device=device)
    generator = torch.Generator(device=device).manual_seed(spread)
    shape = (*case.kv.shape[:2], record.num_scales)
    exponents = torch.randint(
        127 - spread, 127 + spread + 1, shape, generator=generator, device=device
    )
    rope = torch.randn(*case.kv.shape[:2], 64, generator=generator, device=device)
    fill(case, random_data(case, generator, largest=0x40), exponents.to(torch.uint8), rope)
    case.q = (case.q.float() * 2.0**-spread).bfloat16()
    check_rows(case, lse_abs=2e-5)


@pytest.mark.parametrize("h_q", [8, 16])
@pytest.mark.parametrize(
    "exponents",
    [
        (0, -4, 4, -7, 7),
        (0, 0, -12, 0, 12),
        (20, 0, -20, -40, 0),
        (20, -20),
        (-20, 20),
        (-30, -30, -9, 0, 30),
        (0, 8, 16, 24, 32),
        (0, -8, -16, -24, -32),
    ],
    ids=lambda exponents: "/".join(map(str, exponents)),
)
@pytest.mark.parametrize("gap", [2.0, 25.0])
def test_blocks_with_scales_of_their_own(record, exponents, gap, h_q, device):
    """Rows prefer one block of 64 keys each by ``gap``, whether its scales are the largest or the smallest.

    Their RoPE parts choose the block, too small to be seen in V; the other dims hardly add to logits.
    """
    case = make_case(2, 1, h_q, 64 * len(exponents), record=record, device=device)
    generator = torch.Generator(device=device).manual_seed(h_q)
    slots = torch.arange(case.kv.shape[0] * case.kv.shape[1], device=device)
    case.indices = slots[: case.indices.shape[-1]].int().expand(2, 1, -1).contiguous()
    block = (slots // 64).clamp(max=len(exponents) - 1).view(case.kv.shape[:2])
    shape = (*case.kv.shape[:2], record.num_scales)
    scales = 127 + torch.tensor(exponents, device=device)[block][..., None].expand(shape)
    rope = torch.nn.functional.one_hot(block, record.rope_dims) * 2.0**-60
    fill(case, random_data(case, generator), scales.to(torch.uint8), rope)
    case.q[..., : record.nope_dims] *= 2.0**-60
    case.q[..., record.nope_dims :] = 0
    for head in range(h_q):
        case.q[..., head, record.nope_dims + head % len(exponents)] = 2.0**60 * gap / case.sm_scale
    check_rows(case, lse_abs=2e-5)


@pytest.mark.parametrize("h_q", [8, 16])
def test_one_group_of_dims_with_scales_far_apart(record, h_q, device):
    """The second half of the keys, in one group of dims only, and the others as they were."""
    case = make_case(3, 1, h_q, 256, record=record, device=device)
    generator = torch.Generator(device=device).manual_seed(h_q)
    slots = torch.arange(case.kv.shape[0] * case.kv.shape[1], device=device)
    case.indices = slots[:256].int().expand(3, 1, -1).contiguous()
    late = (slots >= 128).view(case.kv.shape[:2])
    scales = torch.full((*case.kv.shape[:2], record.num_scales), 127 - 8, device=device)
    scales[..., 1] += torch.where(late, 24, 0)
    rope = torch.randn(*case.kv.shape[:2], record.rope_dims, generator=generator, device=device) / 10
    fill(case, random_data(case, generator, largest=0x40), scales.to(torch.uint8), rope)
    group = torch.arange(record.d_qk, device=device) // record.scale_group == 1
    case.q[..., group] *= 2.0**-24
    check_rows(case, lse_abs=2e-5)


@pytest.mark.parametrize("offset", [-110, -30, -9, -3, 3, 9, 30, 110, "no key"])
def test_first_key_of_a_split_with_a_scale_of_its_own(record, offset, device):
    """Tiles of 8 and 16 rows take their units for V from it. Its e4m3 dims are zeros, so the others decide the result."""
    case = make_case(2, 1, 16, 300, record=record, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    slots = torch.arange(case.kv.shape[0] * case.kv.shape[1], device=device)
    case.indices = slots[:300].int().expand(2, 1, -1).contiguous()
    first = ((slots == 0) | (slots == 160)).view(case.kv.shape[:2])[..., None]  # of two splits
    if offset == "no key":
        case.indices[..., [0, 160]] = -1
        offset = 0
    shape = (*case.kv.shape[:2], record.num_scales)
    exponents = 127 - 8 + torch.randint(-3, 4, shape, generator=generator, device=device)
    exponents = torch.where(first, 127 - 8 + offset, exponents)
    rope = torch.randn(*case.kv.shape[:2], record.rope_dims, generator=generator, device=device) / 100
    data = torch.where(first, 0, random_data(case, generator, largest=0x40))
    fill(case, data, exponents.to(torch.uint8), rope)
    check_rows(case, lse_abs=2e-5)


@pytest.mark.parametrize("where", ["some", "first", "last", "all"])
def test_v32_scales_of_zero(where, device):
    """Zeros in some group of dims, which say nothing about the scales of other keys."""
    case = make_case(3, 1, 16, 256, record=V32, device=device)
    slots = torch.arange(case.kv.shape[0] * case.kv.shape[1], device=device)
    case.indices = slots[:256].int().expand(3, 1, -1).contiguous()
    zero = {"some": slots % 3 == 0, "first": slots < 128, "last": slots >= 128, "all": slots >= 0}[where]
    rows, _ = kv_cache.regions(case.kv, V32)
    scales = rows[..., V32.scale_offset : V32.scale_offset + 16].view(torch.float32)
    scales[..., 2] *= ~zero.view(case.kv.shape[:2])
    check_rows(case)


def test_v32_scales_that_are_no_powers_of_two(device):
    case = make_case(4, 1, 8, 150, 60, record=V32, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    for kv in case.kv, case.extra_kv:
        keys = kv_cache.unpack(kv, V32)
        group = torch.rand(*kv.shape[:2], 4, 1, generator=generator, device=device) * 3 + 0.01
        keys[..., :512].unflatten(-1, (4, 128)).mul_(group)
        kv.copy_(kv_cache.pack(keys, V32))
    check_rows(case, lse_abs=2e-5)


# ---- Logits and magnitudes ------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_1e4(record, sign, device):
    """Some 1e4 and apart by as much: mostly one key counts."""
    case = make_case(4, 1, 8, 200, 100, record=record, device=device)
    case.sm_scale = sign * 1e4 / 8
    check_rows(case)
    assert case.reference()[1].abs().max() > 5e3


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_logits_near_1e4(record, offset, device):
    """All near ±1e4 and apart by little: every key counts, and nothing over- or underflows.

    float32 holds a logit of 1e4 to 1e-3, so weights are good to some 1e-3 and no better.
    """
    case = make_case(4, 1, 8, 200, record=record, device=device)
    keys = kv_cache.unpack(case.kv, record)
    keys[..., -1] = 64.0  # a RoPE dim, kept exactly
    case.kv.copy_(kv_cache.pack(keys, record, power_of_two_scales=True))
    case.q[..., -1] = offset / case.sm_scale / 64.0
    check_rows(case)
    assert (case.reference()[1] / offset - 1).abs().max() < 0.05


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("head_tile", [8, 16])
@pytest.mark.parametrize("magnitude", [1e7, 1e9])
def test_one_key_outweighs_all_others_by_far(record, magnitude, head_tile, splits, device):
    """Logits so large that a reference plus a few says nothing: out is the key's V, not a multiple of it."""
    case = make_case(3, 1, head_tile, 200, record=record, device=device)
    case.sm_scale = magnitude
    # No key twice: the reference's own log-sum-exp would lose the 2.
    case.indices = torch.arange(200, dtype=torch.int32, device=device).expand(3, 1, 200).contiguous()
    forced = flash_mla.FlashMLASchedMeta().force_plan(head_tile=head_tile, splits=splits)
    out, lse = case.run(forced)
    ref_out, ref_lse = case.reference()
    assert_close_rownorm(out, ref_out)
    torch.testing.assert_close(lse, ref_lse, rtol=LSE_REL, atol=0)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e-10, 1e-5, 1e5, 1e10, 1e20, 1e30])
def test_magnitude_of_q(record, magnitude, device):
    """Keys compensate, so that the logits are those of the plain case and V is scaled."""
    case = make_case(4, 1, 8, 200, 100, record=record, device=device)
    for name in "kv", "extra_kv":
        keys = kv_cache.unpack(getattr(case, name), record) / magnitude
        setattr(case, name, kv_cache.pack(keys, record, power_of_two_scales=True))
    case.q = (case.q.float() * magnitude).bfloat16()
    check_rows(case, lse_abs=2e-5)
    assert case.reference()[1].min() > 0


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_magnitude_of_sm_scale(record, magnitude, device):
    case = make_case(4, 1, 8, 200, record=record, device=device)
    case.sm_scale *= magnitude
    case.q = (case.q.float() / magnitude).bfloat16()
    check_rows(case, lse_abs=2e-5)


@pytest.mark.parametrize("spread", [4, 12, 40])
def test_q_and_keys_whose_groups_compensate_each_other(record, spread, device):
    """Dims that share a scale have q times 2^±spread and keys 2^∓spread: all decide the logits."""
    case = make_case(4, 1, 8, 200, record=record, device=device)
    group = torch.arange(record.d_qk, device=device) // record.scale_group
    exponent = torch.where(group % 2 == 0, float(spread), -float(spread))
    keys = kv_cache.unpack(case.kv, record) * torch.exp2(-exponent)
    case.kv.copy_(kv_cache.pack(keys, record, power_of_two_scales=True))
    case.q = (case.q.float() * torch.exp2(exponent)).bfloat16()
    check_rows(case, lse_abs=2e-5)


@pytest.mark.parametrize("power", [10, 20, 40])
def test_one_huge_q_element_that_meets_only_zeros(record, power, device):
    """It adds nothing to any logit and must not drown the elements beside it."""
    case = make_case(4, 1, 8, 200, record=record, device=device)
    keys = kv_cache.unpack(case.kv, record)
    dims = torch.arange(3, 448, 64, device=device)
    keys[..., dims] = 0
    case.kv.copy_(kv_cache.pack(keys, record, power_of_two_scales=True))
    case.q[..., dims] = 2.0**power
    check_rows(case, lse_abs=2e-5)


def test_zero_q(record, device):
    """All logits are 0: out is the mean of V and lse the logarithm of the number of keys."""
    case = make_case(2, 1, 8, 200, record=record, device=device)
    case.q.zero_()
    case.q[:, :, ::2].neg_()  # -0 as well
    _, lse = case.check()
    assert (lse - math.log(200)).abs().max() < 1e-5


def test_a_head_does_not_depend_on_the_others(record, device):
    """Also where the references of others move: each head alone, under the same plan, has the same bits."""
    case = make_case(4, 1, 8, 320, record=record, device=device)
    case.sm_scale *= 30
    meta = flash_mla.get_mla_metadata()[0]
    out, lse = case.run(meta)
    for head in range(8):
        alone = case.replace(q=case.q[:, :, head : head + 1])
        forced = flash_mla.FlashMLASchedMeta().force_plan(
            head_tile=meta.plan.head_tile, splits=meta.plan.splits, block_keys=meta.plan.block_keys
        )
        one, one_lse = alone.run(forced)
        assert torch.equal(one[:, :, 0], out[:, :, head]) and torch.equal(one_lse[:, 0], lse[:, head])


@pytest.mark.parametrize("last", [False, True], ids=["rising", "falling"])
def test_logits_in_order(record, last, device):
    """The running maximum moves at every block, or never again after the first."""
    case = make_case(2, 1, 8, 640, record=record, device=device)
    case.sm_scale *= 30
    keys = kv_cache.gather(case.kv, record, case.indices)
    scores = torch.einsum("bshd,bskd->bshk", case.q.float(), keys)[:, :, 0]
    order = torch.argsort(scores, dim=-1, descending=last)
    case.indices = torch.gather(case.indices, 2, order)
    check_rows(case)


def test_duplicate_indices_count_each_time(record, device):
    case = make_case(2, 1, 8, 200, record=record, device=device)
    case.indices[..., 50:150] = case.indices[..., :1]
    case.check()


# ---- NaN in keys that do count ----------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("dim", [0, 200, 447])
def test_nan_data_byte_in_a_valid_key_gives_nan(record, byte, dim, device):
    """In every head of that token, and in no other token."""
    case = make_case(3, 1, 8, 100, record=record, device=device)
    half = kv_cache.num_slots(case.kv) // 2
    case.indices.remainder_(half)
    case.indices[1, :, 70] = half + 3
    clean_out, clean_lse = case.run()
    slot = half + 3
    rows, _ = kv_cache.regions(case.kv, record)
    rows[slot // case.kv.shape[1], slot % case.kv.shape[1], dim] = byte
    out, lse = case.run()
    assert out[1].isnan().all()
    for token in 0, 2:
        assert torch.equal(out[token], clean_out[token])
        assert torch.equal(lse[token], clean_lse[token])


def test_nan_in_the_rope_part_of_a_valid_key_gives_nan(record, device):
    case = make_case(1, 1, 8, 100, record=record, device=device)
    keys = kv_cache.gather(case.kv, record, case.indices[0, 0, 30:31].long())
    keys[..., -5] = torch.nan
    kv_cache.scatter(case.kv, record, case.indices[0, 0, 30:31].long(), keys, True)
    assert case.run()[0].isnan().all()


def test_nan_in_q_stays_in_its_row(device):
    """Of the heads that share a tile only the one that has it is NaN."""
    case = make_case(2, 1, 16, 100, record=V4, device=device)
    clean, _ = case.run()
    case.q[0, 0, 5, 77] = torch.nan
    out, _ = case.run()
    assert out[0, 0, 5].isnan().all()
    out[0, 0, 5] = clean[0, 0, 5]
    assert torch.equal(out, clean)
