"""V3.2's scales are any fp32, in every tile: signs, zeros, subnormals, both ends of the range, far apart."""

import pytest
import torch

import flash_mla
from flash_mla import kv_cache
from flash_mla.kv_cache import V32
from flash_mla.testing import LSE_REL, assert_close_rownorm, make_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_tile, real", [(8, 16), (16, 16), (64, 16), (64, 64)])
@pytest.mark.parametrize(
    "scales",
    [
        (-1.0, -1.5, 0.75),
        (1.0, 0.0, -0.0, 1.25),
        (2.0**-127, -(2.0**-128), 1.75 * 2.0**-127),
        (2.0**-126, 1.5 * 2.0**-126, 2.0**-125),
        (2.0**117, -(2.0**116), 1.5 * 2.0**116),
        (1.0, 2.0**-9, 1.875 * 2.0**-9, -1.875),
        (2.0**50, 2.0**-50, -1.5 * 2.0**50),
    ],
    ids=["negative", "zero", "subnormal", "least", "largest", "apart", "far apart"],
)
def test_fp32_scales(scales, head_tile, real, device):
    """V3.2's, each key and group its own."""
    case = make_case(2, 1, 64, 400, record=V32, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (*case.kv.shape[:2], V32.num_scales)
    chosen = torch.randint(len(scales), shape, generator=generator, device=device)
    values = torch.tensor(scales, device=device)[chosen]
    rows, _ = kv_cache.regions(case.kv, V32)
    # Bytes of up to ±448, or of ±1, and q as small as the scales are large: sums stay in bf16's range, logits small.
    largest = 0x7E if max(scales) < 1 else 0x38
    magnitude = torch.randint(largest + 1, rows[..., : V32.nope_dims].shape, generator=generator, device=device)
    sign = torch.randint(2, magnitude.shape, generator=generator, device=device) * 0x80
    rows[..., : V32.nope_dims] = (magnitude + sign).to(torch.uint8)
    rows[..., V32.scale_offset : V32.scale_offset + V32.scale_bytes] = values.view(torch.uint8)
    case.q[..., : V32.nope_dims] *= min(1.0, 1 / max(map(abs, scales)))
    case.q[:, :, real:] = 0
    meta = flash_mla.FlashMLASchedMeta().force_plan(head_tile=head_tile, splits=1)
    out, lse = case.run(meta)
    expected, expected_lse = case.reference()
    assert expected.isfinite().all()
    assert_close_rownorm(out, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=LSE_REL, atol=2e-5)
