"""The PyTorch reference, against a loop over rows and keys in float64: every clause of the numerics."""

import concurrent.futures
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_mla import kv_cache, reference
from flash_mla.kv_cache import V4, V32
from flash_mla.testing import (
    INT32_MAX,
    INT32_MIN,
    assert_close_flashmla,
    assert_close_rownorm,
    make_case,
    poison_unused,
)

ROOT = Path(__file__).resolve().parent.parent


def naive(case):
    """One row and one key at a time, from the definition; float64 (out, lse)."""
    b, s_q, h_q, _ = case.q.shape
    out = torch.zeros(b, s_q, h_q, 512, dtype=torch.float64)
    lse = torch.full((b, h_q, s_q), math.inf, dtype=torch.float64)
    caches = [(case.kv, case.indices, case.topk_length)]
    if case.extra_kv is not None:
        caches.append((case.extra_kv, case.extra_indices, case.extra_topk_length))
    caches = [
        (kv_cache.unpack(kv, case.record).flatten(0, 1).double(), slots, length)
        for kv, slots, length in caches
    ]
    for i in range(b):
        for j in range(s_q):
            keys = []
            for cache, slots, length in caches:
                count = slots.shape[-1] if length is None else length[i].item()
                for slot in slots[i, j, : max(count, 0)].tolist():
                    if 0 <= slot < len(cache):
                        keys.append(cache[slot])
            if not keys:
                continue
            for h in range(h_q):
                scores = [torch.dot(case.q[i, j, h].double(), k).item() for k in keys]
                scores = [s * case.sm_scale for s in scores]
                top = max(scores)
                total = sum(math.exp(s - top) for s in scores)
                row_lse = top + math.log(total)
                row = sum(math.exp(s - row_lse) * k[:512] for s, k in zip(scores, keys))
                if case.attn_sink is not None:
                    sink = case.attn_sink[h].item()
                    row *= 0.0 if sink == math.inf else 1 / (1 + math.exp(sink - row_lse))
                out[i, j, h], lse[i, h, j] = row, row_lse
    return out, lse


def assert_matches_naive(case):
    out, lse = case.reference()
    expected_out, expected_lse = naive(case)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


# ---- Against the loop ----------------------------------------------------------------------------


def test_one_cache(record):
    assert_matches_naive(make_case(2, 1, 3, 20, record=record))


def test_two_caches_with_their_own_pages_lengths_and_invalid_indices(record):
    assert_matches_naive(
        make_case(
            4, 2, 3, 20, 13, record=record, page=7, extra_page=2,
            invalid_fraction=0.3, lengths="random", extra_lengths="random", sinks=True,
        )
    )  # fmt: skip


def test_v32_scales_that_are_no_powers_of_two():
    case = make_case(2, 1, 3, 20, record=V32)
    keys = kv_cache.unpack(case.kv, V32) * 1.37
    assert_matches_naive(case.replace(kv=kv_cache.pack(keys, V32)))


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(record, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return torch.randint(low, high + 1, (), generator=generator).item()

    assert_matches_naive(
        make_case(
            draw(1, 3), draw(1, 3), draw(1, 5), draw(1, 30), draw(0, 30), record=record, seed=seed,
            page=draw(1, 9), extra_page=draw(1, 9), invalid_fraction=draw(0, 10) / 10,
            lengths=["random", None][draw(0, 1)], extra_lengths=["random", None][draw(0, 1)],
            sinks=draw(0, 1) == 1,
        )
    )  # fmt: skip


# ---- Which indices are keys ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, -2, INT32_MIN, INT32_MAX, 128])
@pytest.mark.parametrize("which", ["indices", "extra_indices"])
def test_index_outside_its_cache_is_no_key(bad, which):
    """128 is one past the end of either cache."""
    case = make_case(1, 1, 2, 5, 5, page=64)
    spoiled = getattr(case, which).clone()
    spoiled[..., 1:4] = bad
    kept = getattr(case, which)[..., [0, 4]]
    for got, expected in zip(
        case.replace(**{which: spoiled}).reference(), case.replace(**{which: kept}).reference()
    ):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "length, counts_as",
    [(INT32_MIN, 0), (-1, 0), (0, 0), (3, 3), (5, 5), (6, 5), (INT32_MAX, 5)],
)
@pytest.mark.parametrize("which", ["topk_length", "extra_topk_length"])
def test_lengths_are_clamped(length, counts_as, which):
    case = make_case(1, 1, 2, 5, 5)
    got = case.replace(**{which: torch.tensor([length], dtype=torch.int32)})
    indices = which.replace("topk_length", "indices")
    kept = case.replace(**{indices: getattr(case, indices)[..., :counts_as]})
    torch.testing.assert_close(got.reference(), kept.reference(), rtol=1e-6, atol=1e-7)


def test_duplicates_count_as_often_as_they_occur():
    case = make_case(1, 1, 1, 3)
    case.indices[...] = torch.tensor([5, 5, 9], dtype=torch.int32)
    keys = kv_cache.gather(case.kv, V4, case.indices[0, 0])
    scores = keys @ case.q[0, 0, 0].float() * case.sm_scale
    out, lse = case.reference()
    p = torch.exp(scores - torch.log(2 * scores[0].exp() + scores[2].exp()))
    torch.testing.assert_close(out[0, 0, 0], 2 * p[0] * keys[0] + p[2] * keys[2])
    torch.testing.assert_close(lse[0, 0, 0], torch.log(2 * scores[0].exp() + scores[2].exp()))


# ---- Rows without keys, sinks ---------------------------------------------------------------------


@pytest.mark.parametrize("sink", [None, 0.0, -math.inf, math.inf])
@pytest.mark.parametrize("extra", [0, 4])
def test_row_without_keys_is_zero_with_infinite_lse(sink, extra):
    case = make_case(2, 1, 2, 4, extra, lengths=[0, 4], extra_lengths=[0, 4] if extra else None)
    if sink is not None:
        case.attn_sink = torch.full((2,), sink)
    out, lse = case.reference()
    assert (out[0] == 0).all() and (lse[0] == math.inf).all()
    assert lse[1].isfinite().all()


def test_no_width_and_no_blocks():
    case = make_case(2, 1, 2, 4)
    for empty in (
        case.replace(indices=case.indices[..., :0]),
        case.replace(kv=case.kv[:0]),
    ):
        out, lse = empty.reference()
        assert (out == 0).all() and (lse == math.inf).all()


def test_sink():
    """-inf has no effect, +inf gives zeros, others scale by 1/(1+exp(sink-lse)); lse is blind to it."""
    case = make_case(1, 1, 5, 10)
    plain, plain_lse = case.reference()
    sinks = torch.tensor([-math.inf, math.inf, 0.5, 1e4, -1e4])
    out, lse = case.replace(attn_sink=sinks).reference()
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out[0, 0, [0, 4]], plain[0, 0, [0, 4]])
    assert (out[0, 0, [1, 3]] == 0).all()
    factor = 1 / (1 + math.exp(0.5 - lse[0, 2, 0].item()))
    torch.testing.assert_close(out[0, 0, 2], plain[0, 0, 2] * factor)


# ---- Unused bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [0, 9])
def test_nan_and_inf_in_unused_slots_do_not_matter(record, extra):
    case = make_case(
        3, 2, 2, 17, extra, record=record, page=5, invalid_fraction=0.4,
        lengths=[0, 9, 17], extra_lengths=[9, 0, 4] if extra else None,
    )  # fmt: skip
    before = case.reference()
    poison_unused(case)
    assert not kv_cache.unpack(case.kv, record).isfinite().all()
    for got, expected in zip(case.reference(), before):
        assert torch.equal(got, expected)


def test_poison_reaches_every_byte_that_is_not_needed(record):
    """Other slots, V4's padding byte, the gaps between blocks; and no byte of a named slot."""
    stride = record.default_block_stride(4) + 100 * 16
    slots = torch.tensor([1, 6, 11], dtype=torch.int32)
    pool = torch.full((3 * stride,), 0x11, dtype=torch.uint8)  # a byte of no poison
    kv = kv_cache.view_pool(pool, 3, 4, record, stride)
    kv_cache.scatter(kv, record, slots, torch.randn(3, record.d_qk))
    if record.scales_after_rows:
        kv_cache.regions(kv, record)[1][..., record.num_scales :] = 0x11
    case = make_case(1, 1, 1, 3, record=record).replace(kv=kv, indices=slots.view(1, 1, 3))
    kept, before = kv_cache.gather(kv, record, slots), pool.clone()
    poison_unused(case)
    assert torch.equal(kv_cache.gather(kv, record, slots), kept)
    padding = record.scale_bytes - record.num_scales if record.scales_after_rows else 0
    needed = 3 * (record.bytes_per_token - padding)
    assert (pool != before).sum().item() == pool.numel() - needed


def test_nan_in_a_valid_key_is_not_hidden():
    case = make_case(2, 1, 2, 4)
    case.indices[0], case.indices[1] = torch.arange(4), torch.arange(4, 8)
    kv_cache.regions(case.kv, V4)[0][0, 2, 7] = 0x7F
    out, lse = case.reference()
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


# ---- Shapes, outputs, memory ------------------------------------------------------------------------


@pytest.mark.parametrize("b, s_q", [(0, 1), (1, 0), (0, 0)])
def test_no_tokens(b, s_q):
    out, lse = make_case(b, s_q, 3, 4).reference()
    assert out.shape == (b, s_q, 3, 512) and lse.shape == (b, 3, s_q)


def test_default_out_is_bfloat16_and_a_given_one_is_written_in_place():
    case = make_case(2, 3, 4, 10)
    exact, _ = case.reference()
    out, _ = reference.sparse_decode(case.q, case.kv, case.indices, sm_scale=case.sm_scale)
    assert out.dtype == torch.bfloat16 and torch.equal(out, exact.bfloat16())

    buffer = torch.full((2, 3, 9, 640), 7.0, dtype=torch.bfloat16)
    given = buffer[:, :, 2:6, 64:576]
    returned, _ = reference.sparse_decode(
        case.q, case.kv, case.indices, sm_scale=case.sm_scale, out=given
    )
    assert returned is given and torch.equal(given, out)
    given.fill_(7.0)
    assert (buffer == 7.0).all()


def test_chunks_do_not_change_the_result(monkeypatch):
    case = make_case(5, 3, 4, 40, 24, lengths="random", invalid_fraction=0.2)
    expected = case.reference()
    monkeypatch.setattr(reference, "_CHUNK_KEYS", 2 * 64)
    torch.testing.assert_close(case.reference(), expected, rtol=1e-6, atol=1e-6)


def test_keys_of_one_token_come_in_pieces_where_they_are_many(monkeypatch):
    case = make_case(3, 1, 8, 200, 70, sinks=True, lengths=[200, 5, 0], extra_lengths=[70, 0, 0])
    expected = case.reference()
    monkeypatch.setattr(reference, "_CHUNK_KEYS", 64)
    for got, want in zip(case.reference(), expected):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_precision_inherited_from_all_backends_stays_inherited():
    everywhere, backend = torch.backends, torch.backends.mkldnn.matmul
    before = everywhere.fp32_precision
    try:
        everywhere.fp32_precision = "tf32"
        make_case(1, 1, 8, 16).reference()
        assert backend.fp32_precision == "tf32"
        everywhere.fp32_precision = "ieee"
        assert backend.fp32_precision == "ieee"
    finally:
        everywhere.fp32_precision = before


def test_threads_leave_the_matmul_precision_as_it_was():
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    cases = [make_case(n, 1, 8, 64) for n in (1, 3, 5, 2)]
    try:
        backend.fp32_precision = "bf16"
        with concurrent.futures.ThreadPoolExecutor() as threads:
            list(threads.map(lambda case: case.reference(), cases * 10))
        assert backend.fp32_precision == "bf16"
    finally:
        backend.fp32_precision = before


def test_callers_matmul_precision_is_neither_used_nor_changed():
    backend = torch.backends.mkldnn.matmul
    case = make_case(1, 1, 8, 40)
    expected, before = case.reference(), backend.fp32_precision
    backend.fp32_precision = "bf16"
    try:
        got = case.reference()
        assert backend.fp32_precision == "bf16"
    finally:
        backend.fp32_precision = before
    for ours, theirs in zip(got, expected):
        assert torch.equal(ours, theirs)


_MEMORY_PROBE = """
import resource
from flash_mla.testing import make_case
case = make_case({b}, {s_q}, 8, 2048, num_blocks=64)
make_case(1, 1, 8, 16, num_blocks=1).reference()  # thread pools, lazy imports
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
case.reference()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("b, s_q", [(128, 1), (1, 128)])
def test_128_tokens_by_2048_keys_fit_in_1_gib(b, s_q):
    """Peak memory on top of the inputs, in a process of its own; measured for either shape."""
    program = _MEMORY_PROBE.format(b=b, s_q=s_q)
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 2**30, f"{int(run.stdout) / 2**20:.0f} MiB"


@pytest.mark.gpu
def test_128_tokens_by_2048_keys_fit_in_1_gib_on_a_gpu(device):
    case = make_case(128, 1, 64, 2048, num_blocks=64, device=device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    case.reference()
    assert torch.cuda.max_memory_allocated(device) - before < 2**30


# ---- The tolerances themselves ----------------------------------------------------------------------


def test_flashmla_tolerances_take_what_they_should_and_nothing_more():
    out, lse = torch.full((1, 1, 2, 512), 0.5), torch.tensor([[[2.0], [math.inf]]])

    def close(changed_out=out, changed_lse=lse):
        assert_close_flashmla(changed_out, changed_lse, out, lse)

    def with_element(tensor, value):
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    close()
    close(with_element(out, 0.5 * (1 + 2.0 / 128)))
    close(changed_lse=with_element(lse, 2.0 * (1 + 8.0 / 65536)))
    small = torch.full_like(out, 1e-4)
    assert_close_flashmla(small * (1 + 1e-3), lse, small, lse)
    for bad in (0.5 * (1 + 2.03 / 128), math.nan, math.inf):
        with pytest.raises(AssertionError, match="out"):
            close(with_element(out, bad))
    with pytest.raises(AssertionError, match="cosine"):
        close(out + torch.linspace(-0.004, 0.004, 512))
    for bad in (2.0 * (1 + 8.1 / 65536), math.nan, math.inf):
        with pytest.raises(AssertionError, match="lse"):
            close(changed_lse=with_element(lse, bad))
    for bad in (-math.inf, 1e30):
        with pytest.raises(AssertionError, match="lse"):
            close(changed_lse=torch.tensor([[[2.0], [bad]]]))


def test_rownorm_tolerance_is_per_row():
    ref = torch.stack([torch.full((512,), 1e30), torch.full((512,), 1e-30), torch.zeros(512)])
    assert_close_rownorm(ref * 1.004, ref)
    for row, value in ((0, 1.006e30), (1, 1.006e-30), (2, 1e-38), (1, math.nan)):
        bad = ref.clone()
        bad[row] = value
        with pytest.raises(AssertionError):
            assert_close_rownorm(bad, ref)
