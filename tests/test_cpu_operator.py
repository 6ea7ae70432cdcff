"""The public API on CPU tensors: the reference's answer, FlashMLA's calling forms, and tracing.

tests/test_tracing.py has the operators' side of tracing.
"""

import inspect
import itertools

import pytest
import torch

import flash_mla
from flash_mla import flash_mla_interface
from flash_mla.testing import assert_close_flashmla, make_case


# ---- Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s_q", [1, 2, 3])
@pytest.mark.parametrize("extra_topk", [0, 19])
def test_agrees_with_the_reference(record, s_q, extra_topk):
    case = make_case(
        3, s_q, 9, 50, extra_topk, record=record, page=7, extra_page=3, sinks=True,
        lengths="random", extra_lengths="random", invalid_fraction=0.2,
    )  # fmt: skip
    out, lse = case.check()
    assert out.dtype == torch.bfloat16 and out.shape == (3, s_q, 9, 512)
    assert lse.dtype == torch.float32 and lse.shape == (3, 9, s_q)


@pytest.mark.parametrize("b, s_q", [(0, 1), (1, 0)])
def test_no_tokens(record, b, s_q):
    out, lse = make_case(b, s_q, 8, 16, 8, record=record).run()
    assert out.shape == (b, s_q, 8, 512) and lse.shape == (b, 8, s_q)


def test_no_keys(record):
    out, lse = make_case(2, 1, 8, 16, record=record, lengths=[0, -1]).run()
    assert (out == 0).all() and (lse == torch.inf).all()


def test_softmax_scale_defaults_to_d_qk_to_the_minus_half(record):
    case = make_case(2, 1, 8, 16, record=record)
    default = case.run(softmax_scale=None)
    case.sm_scale = record.d_qk**-0.5
    assert_close_flashmla(*default, *case.reference())


def test_q_without_dims_is_refused_by_name():
    case = make_case(2, 1, 8, 16)
    with pytest.raises(RuntimeError, match="q: got"):
        case.replace(q=case.q[..., :0], sm_scale=None).run()


def test_out_is_written_and_nothing_around_it():
    case = make_case(2, 3, 8, 16)
    expected, _ = case.run()
    buffer = torch.full((2, 3, 64, 512), 7.0, dtype=torch.bfloat16)
    returned, _ = case.run(out=buffer[:, :, :8])
    assert returned.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:, :, :8], expected)
    assert (buffer[:, :, 8:] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_any_one_byte_dtype(dtype):
    case = make_case(2, 1, 8, 16)
    expected = case.run()
    got = case.replace(kv=case.kv.view(dtype)).run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype):
    case = make_case(2, 1, 8, 16, 8, sinks=True)
    expected = case.run()
    with torch.autocast("cpu", dtype):
        got = case.run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("h_q, head_tile", [(8, 8), (16, 16), (20, 64), (64, 64), (128, 64)])
def test_batch_invariance(h_q, head_tile):
    case = make_case(2, 1, h_q, 16)
    meta, _ = flash_mla.get_mla_metadata()
    assert_close_flashmla(*case.run(meta, enable_batch_invariant=True), *case.reference())
    assert (meta.plan.head_tile, meta.plan.splits, meta.plan.block_keys) == (head_tile, 1, 64)
    assert "batch-invariant" in str(meta.plan)


# ---- FlashMLA's calling forms --------------------------------------------------------------------------


def test_signatures_are_flashmlas():
    """Callers use positions and names; both are part of the interface."""

    def parameters(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    none = inspect.Parameter.empty
    assert parameters(flash_mla.flash_mla_with_kvcache) == [
        ("q", none), ("k_cache", none), ("block_table", none), ("cache_seqlens", none),
        ("head_dim_v", none), ("tile_scheduler_metadata", none), ("num_splits", None),
        ("softmax_scale", None), ("causal", False), ("is_fp8_kvcache", False), ("indices", None),
        ("attn_sink", None), ("extra_k_cache", None), ("extra_indices_in_kvcache", None),
        ("topk_length", None), ("extra_topk_length", None), ("out", None),
        ("enable_batch_invariant", False),
    ]  # fmt: skip
    assert parameters(flash_mla.flash_mla_sparse_fwd) == [
        ("q", none), ("kv", none), ("indices", none), ("sm_scale", none), ("d_v", 512),
        ("attn_sink", None), ("topk_length", None), ("out", None),
    ]  # fmt: skip


def test_positional_call():
    case = make_case(2, 1, 8, 16, 8, lengths=[3, 16], extra_lengths=[8, 0], sinks=True)
    meta, rest = flash_mla.get_mla_metadata()
    assert rest is None
    got = flash_mla.flash_mla_with_kvcache(
        case.q, case.kv, None, None, 512, meta, None, case.sm_scale, False, True, case.indices,
        case.attn_sink, case.extra_kv, case.extra_indices, case.topk_length, case.extra_topk_length,
    )  # fmt: skip
    expected = case.run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {}),
        ((torch.ones(2, dtype=torch.int32), 8, 1), {}),
        ((torch.ones(2, dtype=torch.int32), 8, 1), dict(num_heads_q=8, is_fp8_kvcache=True, topk=16)),
    ],
)
def test_metadata_in_both_forms(args, kwargs):
    meta, rest = flash_mla.get_mla_metadata(*args, **kwargs)
    assert isinstance(meta, flash_mla.FlashMLASchedMeta) and rest is None
    assert not meta.have_initialized and meta.plan is None
    make_case(2, 1, 8, 16).check(meta)
    assert meta.have_initialized and meta.config.topk == 16
    assert meta.num_splits is None
    text = str(meta.plan)
    assert str(meta.plan.head_tile) in text and str(meta.plan.splits) in text
    assert meta.plan.reason and meta.plan.reason in text


def test_every_forced_plan_is_taken_or_refused():
    """Tiles of 8 or 16 rows on blocks of 32 or 64 keys, those of 64 rows on 64; 1 to 16 splits."""
    case = make_case(2, 1, 8, 16)
    for head_tile, splits, block_keys in itertools.product((8, 16, 32, 64), (1, 16, 17), (16, 32, 64)):
        meta = flash_mla.FlashMLASchedMeta()
        meta.force_plan(head_tile=head_tile, splits=splits, block_keys=block_keys)
        if (head_tile, block_keys) in [(8, 32), (8, 64), (16, 32), (16, 64), (64, 64)] and splits <= 16:
            case.check(meta)
        else:
            with pytest.raises(RuntimeError, match="tile_scheduler_metadata"):
                case.run(meta)


def test_forced_plan_is_shown():
    meta = flash_mla.FlashMLASchedMeta().force_plan(splits=5, block_keys=32)
    make_case(2, 1, 8, 16).check(meta)
    assert (meta.plan.head_tile, meta.plan.splits, meta.plan.block_keys) == (8, 5, 32)
    assert "forced" in str(meta.plan)


def test_interface_file_can_be_vendored():
    """vLLM copies that one file and replaces one line of it."""
    text = inspect.getsource(flash_mla_interface)
    lines = [line for line in text.splitlines() if "flash_mla_cuda = " in line]
    assert lines == ["flash_mla_cuda = torch.ops._flashmla_C"]
    imports = [line for line in text.splitlines() if line.lstrip().startswith(("import ", "from "))]
    modules = {line.split()[1].split(".")[0] for line in imports}
    assert modules <= {"dataclasses", "typing", "torch"}
    assert "torch.ops." not in text.replace(lines[0], "")


# ---- Tracing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("extra_topk", [0, 8])
def test_compile(record, backend, extra_topk):
    case = make_case(2, 2, 8, 16, extra_topk, record=record, lengths=[3, 16], sinks=True)

    def step(q, indices):
        out, lse = case.replace(q=q + 0, indices=indices).run()
        return out * 2, lse + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    got, expected = compiled(case.q, case.indices), step(case.q, case.indices)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_compile_with_one_sched_meta_for_two_layers():
    cases = [make_case(2, 1, 8, 16, seed=seed) for seed in range(2)]

    def step(first_q, second_q):
        meta, _ = flash_mla.get_mla_metadata()
        first, _ = cases[0].replace(q=first_q).run(meta)
        second, _ = cases[1].replace(q=second_q).run(meta)
        return first + second

    torch._dynamo.reset()
    qs = [case.q for case in cases]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*qs), step(*qs))


class Decode(torch.nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case = case

    def forward(self, q, kv, indices, topk_length):
        case = self.case.replace(q=q, kv=kv, indices=indices, topk_length=topk_length)
        return case.run()


def test_export(record):
    case = make_case(2, 1, 8, 16, record=record, lengths=[3, 16])
    arguments = (case.q, case.kv, case.indices, case.topk_length)
    program = torch.export.export(Decode(case), arguments)
    got, expected = program.module()(*arguments), case.run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_fake_tensors_have_the_shapes_of_real_ones(record):
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = make_case(2, 3, 8, 16, record=record)
    with FakeTensorMode() as mode:
        names = ("q", "kv", "indices")
        fake = case.replace(**{name: mode.from_tensor(getattr(case, name)) for name in names})
        out, lse = fake.run()
    real_out, real_lse = case.run()
    for ours, real in ((out, real_out), (lse, real_lse)):
        assert (ours.shape, ours.dtype, ours.stride()) == (real.shape, real.dtype, real.stride())
