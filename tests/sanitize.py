"""A small subset of calls to run under compute-sanitizer (see benchmark/sanitize.sh). No pytest.

Inputs are made, and results compared, on the CPU: the only GPU kernels are the ones to check. Run
with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor is an allocation of its own and an
access behind its end is seen.
"""

import sys
import time

from flash_mla import FlashMLASchedMeta
from flash_mla.kv_cache import V4, V32
from flash_mla.testing import assert_close_flashmla, make_case, poison_unused

# (splits, block_keys)
LAYOUTS = ((1, 64), (1, 32), (3, 64), (16, 32))
# Heads, those that are not zero, head tile. Tiles of 8 and 16 rows, one and several; tiles of 64, padded and not, and two.
CASES = (
    (V4, 5, 5, 8), (V4, 20, 11, 8), (V4, 12, 11, 16), (V4, 20, 11, 16), (V4, 20, 11, 64), (V4, 20, 20, 64), (V4, 70, 70, 64),
    (V32, 20, 11, 8), (V32, 20, 11, 64), (V32, 20, 20, 64), (V32, 70, 70, 64),
)  # fmt: skip


def cases():
    for record, h_q, real, head_tile in CASES:
        case = make_case(
            3, 2, h_q, 130, 65, record=record, page=3, extra_page=64, sinks=True,
            lengths=[130, 0, 77], extra_lengths=[0, 0, 65], invalid_fraction=0.2,
        )  # fmt: skip
        case.q[:, :, real:] = 0
        if head_tile == 64 and real < 16:  # two tiles are rejected: see test_one_element_that_the_sample_misses, test_wide_q
            case.q[0, 1, h_q - 1, 9] = 1
            case.q[2, 0, 1, 10], case.q[2, 0, 1, 11] = 1e-12, 1.0
        yield case, head_tile


def main() -> None:
    start, calls = time.monotonic(), 0
    for case, head_tile in cases():
        poison_unused(case)
        reference = case.reference()
        on_gpu = case.to("cuda")
        for splits, block_keys in LAYOUTS if head_tile < 64 else ((1, 64), (3, 64), (5, 64), (16, 64)):
            plan = FlashMLASchedMeta().force_plan(
                head_tile=head_tile, splits=splits, block_keys=block_keys
            )
            out, lse = on_gpu.run(plan)
            assert_close_flashmla(out.cpu(), lse.cpu(), *reference)
            calls += 1
        print(
            f"{case.record.name}, {case.q.shape[2]} heads: {calls} calls, "
            f"{time.monotonic() - start:.0f} s",
            file=sys.stderr,
        )
    print(f"{calls} calls agree with the reference")


if __name__ == "__main__":
    main()
