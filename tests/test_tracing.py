"""torch.compile and torch.export of calls on CPU tensors: FlashMLA's schema returns its arguments,
which tracing does not allow by itself (see flash_mla/_operators.py)."""

import pytest
import torch

import flash_mla
from flash_mla.testing import make_case

CASE = make_case(2, 1, 8, topk=96, extra_topk=33, sinks=True, lengths=[96, 5], extra_lengths=[0, 33])
TENSORS = (CASE.q, CASE.kv, CASE.indices, CASE.extra_kv, CASE.extra_indices)
FILL = 7.0


def operator(q, kv, indices, extra_kv, extra_indices, out=None):
    return torch.ops.flash_mla.sparse_decode_fwd(
        q, kv, indices, CASE.topk_length, CASE.attn_sink, None, None,
        extra_kv, extra_indices, CASE.extra_topk_length, 512, CASE.sm_scale, out,
    )  # fmt: skip


def without_out(*tensors):
    out, lse, _, _ = operator(*tensors)
    return out * 2, lse


def with_out(*tensors_and_buffer):
    *tensors, buffer = tensors_and_buffer
    out, lse, _, _ = operator(*tensors, out=buffer)
    return out * 2, lse


def with_slice_as_out(*tensors_and_buffer):
    *tensors, buffer = tensors_and_buffer
    operator(*tensors, out=buffer[:, :, :8])
    return buffer + 1


def buffers(function):
    """New arguments for ``out``; nothing of them but the slice may change."""
    heads = {without_out: None, with_out: 8, with_slice_as_out: 24}[function]
    return [] if heads is None else [torch.full((2, 1, heads, 512), FILL, dtype=torch.bfloat16)]


def assert_same(function, traced):
    eager_buffers, traced_buffers = buffers(function), buffers(function)
    expected = function(*TENSORS, *eager_buffers)
    result = traced(*TENSORS, *traced_buffers)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    torch.testing.assert_close(traced_buffers, eager_buffers, rtol=0, atol=0)


FUNCTIONS = pytest.mark.parametrize("function", [without_out, with_out, with_slice_as_out])


@FUNCTIONS
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_traces_the_operator(function, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_same(function, compiled)


@FUNCTIONS
def test_export_traces_the_operator(function):
    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    exported = torch.export.export(Model(), (*TENSORS, *buffers(function)))
    assert_same(function, exported.module())
    # The form that a compiler takes it in: without mutation, so without the schema's aliases
    assert_same(function, exported.run_decompositions().module())


def test_compile_traces_the_public_function():
    sched_meta, _ = flash_mla.get_mla_metadata()

    def layer(q, kv, indices):
        out, lse = flash_mla.flash_mla_with_kvcache(
            q, kv, None, None, 512, sched_meta, is_fp8_kvcache=True, indices=indices
        )
        return out + 1, lse

    torch._dynamo.reset()
    expected = layer(*TENSORS[:3])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*TENSORS[:3]), expected, rtol=0, atol=0)


def test_opcheck():
    q, kv, indices, extra_kv, extra_indices = TENSORS
    arguments = (
        q, kv, indices, CASE.topk_length, CASE.attn_sink, None, None,
        extra_kv, extra_indices, CASE.extra_topk_length, 512, CASE.sm_scale,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flash_mla.sparse_decode_fwd.default, arguments)
    out = torch.zeros(2, 1, 8, 512, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.flash_mla.sparse_decode_out.default, (*arguments, out, False))


def test_meta_tensors_give_shapes():
    meta = [tensor.to("meta") for tensor in TENSORS[:3]]
    arguments = (*meta, None, None, None, None, None, None, None, 512, 1.0)
    out, lse, _, _ = torch.ops.flash_mla.sparse_decode_fwd(*arguments)
    assert (out.shape, out.dtype, out.device.type) == ((2, 1, 8, 512), torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype, lse.device.type) == ((2, 8, 1), torch.float32, "meta")


@pytest.mark.parametrize(
    "change, name, got",
    [
        (dict(q=lambda t: t[:, 0]), "q", r"\[2, 8, 512\]"),
        (dict(q=lambda t: t.float()), "q", "float32"),
        (dict(q=lambda t: t[..., :100]), "q", "100"),
        (dict(kv=lambda t: t[:, :, 0]), "kv", r"\[\d+, 64, 584\]"),
        (dict(indices=lambda t: t.long()), "indices", "int64"),
        (dict(extra_indices=lambda t: t[0]), "extra_indices", r"\[1, 33\]"),
        (dict(out=lambda t: t[..., :64]), "out", "64"),
    ],
)
def test_traced_calls_refuse_what_shapes_cannot_follow_from(change, name, got):
    names = ("q", "kv", "indices", "extra_kv", "extra_indices", "out")
    tensors = dict(zip(names, (*TENSORS, torch.empty_like(CASE.q))))
    tensors |= {key: make(tensors[key]) for key, make in change.items()}
    meta = [None if t is None else t.to("meta") for t in tensors.values()]
    lengths = [CASE.topk_length.to("meta"), CASE.attn_sink.to("meta")]
    *inputs, out = meta
    with pytest.raises(RuntimeError, match=rf"flash_mla: {name}.*: got .*{got}.*; takes"):
        torch.ops.flash_mla.sparse_decode_fwd(
            *inputs[:3], *lengths, None, None, *inputs[3:],
            CASE.extra_topk_length.to("meta"), 512, CASE.sm_scale, out,
        )  # fmt: skip


def test_results_have_no_gradients():
    """Whatever requires them, and however the call is made: the kernels have no backward."""
    sink = torch.zeros(8, requires_grad=True)

    def call(sink):
        return torch.ops.flash_mla.sparse_decode_fwd(
            CASE.q, CASE.kv, CASE.indices, None, sink, None, None, None, None, None, 512, 0.04
        )[:2]

    assert not any(result.requires_grad for result in call(sink))


def test_a_forced_plan_may_be_on_the_cpu():
    """Its tensor is, and q on the GPU: a fake implementation must not want one device for both."""
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 1, 8, 512, dtype=torch.bfloat16, device="cuda")
        kv = torch.empty(4, 64, 1, 584, dtype=torch.uint8, device="cuda")
        indices = torch.empty(2, 1, 128, dtype=torch.int32, device="cuda")
        plan = torch.tensor([16, 4, 64], dtype=torch.int32)
        arguments = (q, kv, indices, None, None, plan, None, None, None, None, 512, 1.0)
        out, lse, plan_returned, _ = torch.ops.flash_mla.sparse_decode_fwd(*arguments)
    assert out.device == lse.device == q.device
    assert plan_returned is plan
