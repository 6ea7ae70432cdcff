"""Every refusal says which argument, what it got and what it takes; nothing is written, nothing runs.

The checks exist once, in C++, in front of the CPU and the CUDA implementation, so most run on CPU
tensors; on a GPU they run again.
"""

import re

import pytest
import torch

import flash_mla
from flash_mla.kv_cache import V32
from flash_mla.testing import make_case

REFUSALS = (RuntimeError, ValueError)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def case(request):
    return make_case(
        2, 3, 8, 16, 24, device=request.param, lengths=[16, 9], extra_lengths=[24, 1], sinks=True
    )


def refused(call, argument, got, takes):
    """``call`` is refused with "argument ...: got ...; takes ..." (regular expressions)."""
    with pytest.raises(REFUSALS) as error:
        call()
    expected = rf"\b{argument}\b[^:]*: got .*{got}.*; takes .*{takes}"
    assert re.search(expected, str(error.value), re.DOTALL), f"{error.value}\nis not: {expected}"


def unaligned(tensor):
    """The same values one byte further in memory."""
    buffer = torch.zeros(tensor.untyped_storage().nbytes() + 1, dtype=torch.uint8, device=tensor.device)
    return buffer[1:].as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def respaced(kv, stride):
    """The same shape with blocks ``stride`` bytes apart."""
    buffer = torch.zeros(kv.shape[0] * max(stride, kv.stride(0)), dtype=kv.dtype, device=kv.device)
    return buffer.as_strided(kv.shape, (stride, *kv.stride()[1:]))


CHANGED_TENSORS = [
    # tensor, what becomes of it, what the message says it got, what it takes
    ("q", lambda t: t.float(), "Float", "bfloat16"),
    ("q", lambda t: t.half(), "Half", "bfloat16"),
    ("q", lambda t: t[0], "3", "4|h_q"),
    ("q", lambda t: t[:, :, :0], r"\[2, 3, 0, 512\]", r"h_q 1\.\.128"),
    ("q", lambda t: t.repeat(1, 1, 17, 1)[:, :, :129], r"\[2, 3, 129, 512\]", r"h_q 1\.\.128"),
    ("q", lambda t: t[..., :256], r"\[2, 3, 8, 256\]", r"d_qk 512 .*576"),
    ("q", lambda t: t.repeat(1, 1, 1, 2)[..., ::2], r"strides \[.*, 2\]", "contiguous last dim"),
    ("kv", lambda t: t.to(torch.bfloat16), "BFloat16", "uint8, int8 or float8_e4m3fn"),
    ("kv", lambda t: t.to(torch.int32), "Int", "uint8, int8 or float8_e4m3fn"),
    ("k_cache", lambda t: t[:, :, 0], "3", "4|num_blocks"),
    ("kv", lambda t: t.expand(-1, -1, 2, -1), r"\[.*, 2, 584\]", "one KV head"),
    ("kv", lambda t: t[..., :583], "583", "584 bytes"),
    ("kv", lambda t: t[..., :528], r"528.*V4\.1", "584 bytes"),
    ("kv", lambda t: t[..., :288], "288.*fp4", "584 bytes"),
    ("kv", lambda t: t[..., :352], "352.*NVFP4.*SM100", "584 bytes"),
    ("kv", lambda t: make_case(1, 1, 1, 16, record=V32, device=t.device).kv, "656", "584 bytes"),
    ("kv", lambda t: t[:, :0], r"\[.*, 0, 1, 584\]", "page_block_size"),
    ("kv", lambda t: t[:, ::2], "strides", r"stride\(1\) = 584"),
    ("kv", lambda t: respaced(t, 584 * 64 - 16), "strides", "at least a block, 37376 bytes"),
    ("kv", lambda t: respaced(t, 584 * 64 + 8), "strides", "multiple of 16"),
    ("kv", unaligned, "Byte", "data that starts at a multiple of 16"),
    ("indices", lambda t: t.long(), "Long", "int32"),
    ("indices", lambda t: t[0], "2", "3|int32"),
    ("indices", lambda t: t[:1], r"\[1, 3, 16\]", r"\[2, 3, topk\]"),
    ("indices", lambda t: t[:, :2], r"\[2, 2, 16\]", r"\[2, 3, topk\]"),
    ("indices", lambda t: t[..., ::2], r"strides \[.*, 2\]", "contiguous last dim"),
    ("topk_length", lambda t: t.long(), "Long", "int32"),
    ("topk_length", lambda t: t[:1], r"\[1\]", r"int32 \[2\]"),
    ("topk_length", lambda t: t.view(2, 1), r"\[2, 1\]", r"int32 \[2\]"),
    ("topk_length", lambda t: t.repeat(2)[::2], r"strides \[2\]", "contiguous"),
    ("attn_sink", lambda t: t.bfloat16(), "BFloat16", "float32"),
    ("attn_sink", lambda t: t[:7], r"\[7\]", r"float32 \[8\]"),
    ("attn_sink", lambda t: t.repeat(2)[::2], r"strides \[2\]", "contiguous"),
    ("extra_kv", lambda t: t.to(torch.int16), "Short", "uint8, int8 or float8_e4m3fn"),
    ("extra_kv", lambda t: t[..., :288], "288.*fp4", "584 bytes"),
    ("extra_kv", unaligned, "Byte", "data that starts at a multiple of 16"),
    ("extra_kv", lambda t: None, "None", "a tensor when .*extra_indices"),
    ("extra_indices", lambda t: None, "None", "a tensor when .*extra_kv"),
    ("extra_indices", lambda t: t.long(), "Long", "int32"),
    ("extra_indices", lambda t: t[:1], r"\[1, 3, 24\]", r"\[2, 3, topk\]"),
    ("extra_topk_length", lambda t: t.long(), "Long", "int32"),
    ("extra_topk_length", lambda t: t[:1], r"\[1\]", r"int32 \[2\]"),
]


@pytest.mark.parametrize(
    "name, change, got, takes",
    CHANGED_TENSORS,
    ids=[f"{row[0]}-{i}" for i, row in enumerate(CHANGED_TENSORS)],
)
def test_tensors(case, name, change, got, takes):
    field = "kv" if name == "k_cache" else name
    changed = case.replace(**{field: change(getattr(case, field))})
    refused(changed.run, name, got, takes)


def test_extra_length_without_an_extra_cache(case):
    alone = case.replace(extra_kv=None, extra_indices=None)
    refused(alone.run, "extra_topk_length", "a tensor", "None when .*extra_kv")


@pytest.mark.parametrize(
    "change, got",
    [
        (lambda t: t.float(), "Float"),
        (lambda t: t[:, :, :7], r"\[2, 3, 7, 512\]"),
        (lambda t: t[..., :511], r"\[2, 3, 8, 511\]"),
        (lambda t: t[0], r"\[3, 8, 512\]"),
        (lambda t: t.repeat(1, 1, 1, 2)[..., ::2], r"strides \[.*, 2\]"),
        (lambda t: t[:1].expand(2, -1, -1, -1), r"strides \[0, "),
        (lambda t: t.as_strided(t.shape, (512, 2048, 512, 1)), r"strides \[512, 2048, 512, 1\]"),
        (lambda t: t.as_strided(t.shape, (3 * 4096, 4096, 511, 1)), r"strides \[.*, 511, 1\]"),
    ],
)
def test_out(case, change, got):
    out = torch.zeros(2, 3, 8, 512, dtype=torch.bfloat16, device=case.q.device)
    refused(lambda: case.run(out=change(out)), "out", got, r"bfloat16 \[2, 3, 8, 512\]")
    assert (out == 0).all()


@pytest.mark.parametrize(
    "keywords, argument, got, takes",
    [
        (dict(head_dim_v=256), "head_dim_v", "256", "512"),
        (dict(head_dim_v=576), "head_dim_v", "576", "512"),
        (dict(softmax_scale=float("nan")), "softmax_scale", "nan", "finite"),
        (dict(softmax_scale=float("inf")), "softmax_scale", "inf", "finite"),
        (dict(softmax_scale=3e38), "softmax_scale", "3", "finite in float32"),
        (dict(causal=True), "causal", "True", "False"),
        (dict(is_fp8_kvcache=False), "is_fp8_kvcache", "False", "True"),
        (dict(num_splits=torch.zeros(1)), "num_splits", "Tensor", "None"),
        (dict(tile_scheduler_metadata=None), "tile_scheduler_metadata", "None", "FlashMLASchedMeta"),
        (dict(indices=None), "attn_sink", "tensor", "None"),
        (
            dict(indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
                 topk_length=None, extra_topk_length=None),
            "block_table", "None", "tensor",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_other_arguments(case, keywords, argument, got, takes):
    refused(lambda: case.run(**keywords), argument, got, takes)


@pytest.mark.parametrize("name", ["q", "indices", "extra_indices", "out"])
def test_strides_of_2_to_the_32(case, name):
    """They would not fit the kernels' parameters. (Of the memory in between, nothing is touched.)"""
    like = case.q.new_empty(2, 3, 8, 512) if name == "out" else getattr(case, name)
    storage = torch.empty(2**32 + like.numel(), dtype=like.dtype, device=like.device)
    far = storage.as_strided(like.shape, (2**32, *like.stride()[1:]))
    run = (lambda: case.run(out=far)) if name == "out" else case.replace(**{name: far}).run
    refused(run, name, "strides \\[4294967296, ", "strides below 2\\^32")


@pytest.mark.parametrize("name", ["q", "kv", "extra_kv"])
def test_out_in_the_memory_of_an_input(case, name):
    """A CTA would read what another one has overwritten."""
    old, out_bytes = getattr(case, name), 2 * 3 * 8 * 512 * 2
    elements = 1 + sum((n - 1) * stride for n, stride in zip(old.shape, old.stride()))
    last_16_bytes = (elements * old.element_size() - 1) // 16 * 16
    memory = torch.zeros(last_16_bytes + 16 + out_bytes, dtype=torch.uint8, device=old.device)
    field = memory.view(old.dtype).as_strided(old.shape, old.stride())
    out = memory[last_16_bytes:][:out_bytes].view(torch.bfloat16).view(2, 3, 8, 512)
    refused(lambda: case.replace(**{name: field}).run(out=out), "out", "BFloat16", f"memory that does not lie .* {name}")


@pytest.mark.parametrize(
    "name", ["indices", "topk_length", "attn_sink", "extra_indices", "extra_topk_length"]
)
def test_out_over_what_is_read_along_with_the_keys(case, name):
    """An early CTA's result would be a later one's lengths."""
    tensor = getattr(case, name)
    out = torch.empty(2, 3, 8, 512, dtype=torch.bfloat16, device=case.q.device)
    inside = out.view(-1).view(torch.uint8)[: tensor.numel() * 4].view(tensor.dtype)
    inside = inside.view(tensor.shape).copy_(tensor)
    call = case.replace(**{name: inside}).run
    refused(lambda: call(out=out), "out", "BFloat16", f"memory that does not lie .* {name}")


def test_operator_takes_no_num_splits(case):
    def call():
        torch.ops.flash_mla.sparse_decode_fwd(
            case.q, case.kv, case.indices, None, None, None, torch.zeros(1), None, None, None, 512, 1.0
        )

    refused(call, "num_splits", "a tensor", "None")


# ---- Plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, got",
    [
        (dict(splits=0), "8, 0, 64"),
        (dict(splits=17), "8, 17, 64"),
        (dict(splits=-1), "8, -1, 64"),
        (dict(splits=1, block_keys=48), "8, 1, 48"),
        (dict(splits=1, head_tile=32), "32, 1, 64"),
        (dict(splits=1, head_tile=64, block_keys=32), "64, 1, 32"),
        (dict(splits=17, head_tile=64), "64, 17, 64"),
    ],
)
def test_forced_plans(case, plan, got):
    meta = flash_mla.FlashMLASchedMeta().force_plan(**plan)
    refused(lambda: case.run(meta), "tile_scheduler_metadata", got, r"1\.\.16.*64, or 32 with head_tile 8 or 16")


@pytest.mark.parametrize("splits", ["2", None, 2.5, 2**31])
def test_forced_plans_of_no_ints(splits):
    call = flash_mla.FlashMLASchedMeta().force_plan
    refused(lambda: call(splits=splits), "splits", re.escape(repr(splits)), "an int")


@pytest.mark.parametrize("got", [None, [1.0]], ids=["None", "list"])
@pytest.mark.parametrize("name", ["q", "kv"])
def test_what_is_no_tensor(name, got):
    argument = "k_cache" if name == "kv" else name
    case = make_case(2, 1, 8, 16)
    refused(case.replace(**{name: got}).run, argument, type(got).__name__, "a tensor")


def test_forced_plan_that_is_no_plan(case):
    meta, _ = flash_mla.get_mla_metadata()
    meta.tile_scheduler_metadata = torch.zeros(132, 8, dtype=torch.int32, device=case.q.device)
    refused(lambda: case.run(meta), "tile_scheduler_metadata", r"\[132, 8\]", "int32 CPU tensor")


def test_batch_invariance_takes_one_split(case):
    meta = flash_mla.FlashMLASchedMeta().force_plan(splits=2)
    refused(
        lambda: case.run(meta, enable_batch_invariant=True),
        "tile_scheduler_metadata", "2 splits", "1 split when enable_batch_invariant",
    )  # fmt: skip


def test_a_plan_is_forced_before_the_first_use(case):
    meta, _ = flash_mla.get_mla_metadata()
    case.run(meta)
    refused(lambda: meta.force_plan(splits=2), "force_plan", "already used", "fresh")


@pytest.mark.parametrize(
    "arguments, argument, got, takes",
    [
        ((-1, 64, 8, 132), "tokens", "-1", r"0\.\.67108863"),
        ((2**26, 64, 8, 132), "tokens", "67108864", r"0\.\.67108863"),
        ((1, 2**31, 8, 132), "width", "2147483648", r"0\.\.2147483647"),
        ((1, -1, 8, 132), "width", "-1", r"0\.\.2147483647"),
        ((1, 64, 0, 132), "heads", "0", r"1\.\.128"),
        ((1, 64, 129, 132), "heads", "129", r"1\.\.128"),
        ((1, 64, 8, 0), "num_sms", "0", "1"),
    ],
)
def test_plan_operator(arguments, argument, got, takes):
    refused(lambda: torch.ops.flash_mla.sparse_decode_plan(*arguments), argument, got, takes)


# ---- Reuse of a sched_meta ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, other",
    [
        ("b", dict(b=3)),
        ("s_q", dict(s_q=2)),
        ("h_q", dict(h_q=16)),
        ("page_block_size", dict(page=32)),
        ("topk", dict(topk=17)),
        ("extra_page_block_size", dict(extra_page=32)),
        ("extra_topk", dict(extra_topk=25)),
    ],
)
def test_sched_meta_of_other_shapes_names_field_both_values_and_remedy(field, other):
    shape = dict(b=2, s_q=1, h_q=8, topk=16, extra_topk=24, page=64, extra_page=64)
    meta, _ = flash_mla.get_mla_metadata()
    make_case(**shape).run(meta)
    changed = {**shape, **other}
    had, got = (
        {**s, "page_block_size": s["page"], "extra_page_block_size": s["extra_page"]}[field]
        for s in (shape, changed)
    )
    with pytest.raises(REFUSALS, match=rf"{field}\b.*\b{had}\b.*\b{got}\b.*get_mla_metadata"):
        make_case(**changed).run(meta)
    make_case(**shape).run(meta)  # and the object still serves its own shapes


def test_sched_meta_of_a_call_without_an_extra_cache():
    meta, _ = flash_mla.get_mla_metadata()
    make_case(2, 1, 8, 16, 24).run(meta)
    with pytest.raises(REFUSALS, match=r"extra_.*64.*None.*get_mla_metadata"):
        make_case(2, 1, 8, 16).run(meta)


def test_a_refused_call_leaves_the_sched_meta_unused(case):
    meta, _ = flash_mla.get_mla_metadata()
    with pytest.raises(REFUSALS):
        case.replace(q=case.q.float()).run(meta)
    assert not meta.have_initialized and meta.plan is None
    case.run(meta)
    assert meta.have_initialized


# ---- What is not here ----------------------------------------------------------------------------------


def test_dense_decode_is_refused_by_name(case):
    keywords = dict.fromkeys(
        ["indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length",
         "extra_topk_length"]
    )  # fmt: skip
    table = torch.zeros(2, 1, dtype=torch.int32, device=case.q.device)
    lengths = torch.ones(2, dtype=torch.int32, device=case.q.device)
    with pytest.raises(NotImplementedError, match="dense decode.*FlashMLA"):
        case.run(block_table=table, cache_seqlens=lengths, **keywords)


def test_sparse_prefill_is_refused_by_name(case):
    kv = torch.zeros(16, 1, 512, dtype=torch.bfloat16, device=case.q.device)
    with pytest.raises(NotImplementedError, match="sparse prefill.*FlashMLA"):
        flash_mla.flash_mla_sparse_fwd(case.q[0], kv, case.indices[0, :, None], 1.0)


@pytest.mark.parametrize(
    "name",
    ["flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"],
)
def test_sm100_functions_are_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"{name}.*SM100"):
        getattr(flash_mla, name)(None, None)


# ---- Devices ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["q", "kv", "indices", "topk_length", "attn_sink", "extra_kv", "extra_indices", "extra_topk_length"],
)
def test_tensors_on_cpu_and_gpu(name, device):
    case = make_case(
        2, 1, 8, 16, 24, device=device, lengths=[16, 9], extra_lengths=[24, 1], sinks=True
    )
    changed = case.replace(**{name: getattr(case, name).cpu()})
    argument = "kv" if name == "q" else name  # q decides; the first that differs is named
    refused(changed.run, argument, "cpu|cuda", "the device of q")


@pytest.mark.parametrize(
    "name",
    ["kv", "indices", "topk_length", "attn_sink", "extra_kv", "extra_indices", "extra_topk_length"],
)
def test_one_tensor_on_meta(name):
    """PyTorch takes such a call for one that is traced, where nothing is computed."""
    case = make_case(2, 1, 8, 16, 24, lengths=[16, 9], extra_lengths=[24, 1], sinks=True)
    changed = case.replace(**{name: getattr(case, name).to("meta")})
    refused(changed.run, name, "meta", "the device of q, cpu")


def test_out_and_plan_on_meta():
    case = make_case(2, 1, 8, 16)
    out = torch.zeros(2, 1, 8, 512, dtype=torch.bfloat16, device="meta")
    refused(lambda: case.run(out=out), "out_", "meta", "the device of q, cpu")
    meta = flash_mla.FlashMLASchedMeta()
    meta.tile_scheduler_metadata = torch.tensor([8, 1, 64], dtype=torch.int32, device="meta")
    refused(lambda: case.run(meta), "tile_scheduler_metadata", "meta", "on the CPU")


def test_a_plan_is_forced_on_the_cpu_whatever_the_default_device():
    case = make_case(2, 1, 8, 16)
    with torch.device("meta"):
        meta = flash_mla.FlashMLASchedMeta().force_plan(splits=3)
    case.check(meta)


@pytest.mark.gpu
def test_out_on_cpu(device):
    case = make_case(2, 1, 8, 16, device=device)
    out = torch.zeros(2, 1, 8, 512, dtype=torch.bfloat16)
    refused(lambda: case.run(out=out), "out", "cpu", "the device of q")


@pytest.mark.gpu
def test_a_refusal_leaves_the_gpu_usable(device):
    case = make_case(2, 1, 8, 16, device=device)
    with pytest.raises(REFUSALS):
        case.run(head_dim_v=256)
    case.check()
