"""A process to which a folder looks like an installed vLLM, and what tests have it do.

vLLM's library registers the namespace ``_flashmla_C``, which a process can do only once, and several libraries are
tested. So each gets a process of its own, and pytest's never loads any.

The functions below the second line run in such a process. They return plain values, which the tests then look at.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import shutil
import sys
import types
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import torch
from torch import Tensor

NAMESPACE = "_flashmla_C"
INTERFACE_MODULE = "vllm.third_party.flashmla.flash_mla_interface"

# What vLLM's build does to the file that it vendors (cmake/external_projects/flashmla.cmake).
REPLACED = "flash_mla_cuda = torch.ops._flashmla_C"
REPLACEMENT = "import vllm._flashmla_C\n" + REPLACED


def make_package(folder: Path, library: Path, interface: str) -> Path:
    """Lay out ``library`` and the text ``interface`` in ``folder`` as vLLM has them; returns ``folder``."""
    flashmla = folder / "vllm" / "third_party" / "flashmla"
    flashmla.mkdir(parents=True)
    for package in (flashmla, flashmla.parent, flashmla.parent.parent):
        (package / "__init__.py").touch()
    shutil.copy(library, folder / "vllm" / "_flashmla_C.abi3.so")
    (flashmla / "flash_mla_interface.py").write_text(interface)
    return folder


class Process:
    """Runs functions of this module, one at a time, where ``folder`` comes first on sys.path."""

    def __init__(self, folder: Path):
        context = multiprocessing.get_context("spawn")  # nothing of pytest's process comes along
        self._pool = concurrent.futures.ProcessPoolExecutor(1, context, initializer=_look_in, initargs=(folder,))

    def run(self, function: Callable, *arguments: Any) -> Any:
        """Its result, or its exception."""
        return self._pool.submit(function, *arguments).result(timeout=300)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _look_in(folder: Path) -> None:
    sys.path.insert(0, str(folder))


# ---- In the process: loading ---------------------------------------------------------------------------------------


def interface():
    return importlib.import_module(INTERFACE_MODULE)


def load() -> None:
    interface()


def where_loaded() -> Dict[str, str]:
    """Files of the modules, and what the interface reaches its operators through."""
    return {
        "interface": interface().__file__,
        "library": sys.modules["vllm._flashmla_C"].__file__,
        "operators": str(interface().flash_mla_cuda.name),
    }


def schemas() -> Dict[str, str]:
    """The registered operators of the namespace: name without it -> schema as torch prints it."""
    interface()
    prefix = f"{NAMESPACE}::"
    found = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(prefix)]
    return {schema.name[len(prefix) :]: str(schema) for schema in found}


def import_again() -> None:
    """What happens to a module that something drops from sys.modules: its library is initialized once more."""
    interface()
    for name in ("vllm._flashmla_C", INTERFACE_MODULE):
        del sys.modules[name]
    interface()


def load_without_importing(library: str) -> None:
    torch.ops.load_library(library)


def check_flash_mla() -> None:
    """The package computes what it should, with its own library."""
    from flash_mla.testing import make_case

    make_case(2, 1, 8, 16).check()


def append_to_vllm(code: str) -> None:
    """Run ``code`` as if it stood at the end of vllm/v1/attention/ops/flashmla.py on a Hopper GPU."""
    interface()
    sm90 = types.SimpleNamespace(is_device_capability_family=lambda family: family == 90)
    exec(code, {"torch": torch, "current_platform": sm90, "_is_flashmla_available": lambda: (True, None)})


# ---- In the process: calls that are refused ------------------------------------------------------------------------

Outcome = Tuple[str, str]  # the exception's class and message


def outcome(call: Callable) -> Outcome:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def call_operator(name: str) -> Outcome:
    """Call an operator with arguments that have the types it asks for, and no other merit."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    values = {"Tensor": torch.zeros(1), "int": 1, "float": 1.0, "bool": False}
    arguments = [values.get(str(argument.type)) for argument in operator._schema.arguments]
    return outcome(lambda: operator(*arguments))


def call_dense_decode() -> Outcome:
    q, k_cache = torch.zeros(2, 1, 8, 576), torch.zeros(4, 64, 1, 576)
    block_table, lengths = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    meta, _ = interface().get_mla_metadata()
    return outcome(lambda: interface().flash_mla_with_kvcache(q, k_cache, block_table, lengths, 512, meta))


def call_sparse_prefill() -> Outcome:
    q, kv = torch.zeros(2, 8, 512), torch.zeros(16, 1, 512)
    indices = torch.zeros(2, 1, 4, dtype=torch.int32)
    return outcome(lambda: interface().flash_mla_sparse_fwd(q, kv, indices, 0.1))


def call_dense_prefill() -> Outcome:
    q, offsets = torch.zeros(2, 8, 192), torch.tensor([0, 2], dtype=torch.int32)
    return outcome(lambda: interface().flash_attn_varlen_func(q, q, q[..., :128], offsets, offsets, 2, 2))


# Changes to a call of _small_case, and what the refusal says.
BAD_ARGUMENTS: Dict[str, Tuple[Callable, str]] = {
    "q is float32": (lambda c: dict(q=c.q.float()), r"\bq: got Float .*; takes bfloat16"),
    "129 heads": (
        lambda c: dict(q=c.q.repeat(1, 1, 17, 1)[:, :, :129]),
        r"\bq: got .*129, 512.*; takes .*h_q 1\.\.128",
    ),
    "the record of V4.1": (lambda c: dict(k_cache=c.kv[..., :528]), r"k_cache\): got .*528.*V4\.1.*; takes 584 bytes"),
    "NVFP4, for SM100": (lambda c: dict(k_cache=c.kv[..., :352]), r"k_cache\): got .*352.*SM100.*; takes 584 bytes"),
    "indices are int64": (lambda c: dict(indices=c.indices.long()), r"\bindices: got Long .*; takes int32"),
    "one length too few": (
        lambda c: dict(topk_length=c.topk_length[:1]),
        r"topk_length: got .*\[1\].*; takes int32 \[2\]",
    ),
    "a sink too many": (
        lambda c: dict(attn_sink=torch.zeros(9, device=c.q.device)),
        r"attn_sink: got .*\[9\].*; takes float32 \[8\]",
    ),
    "no extra indices": (
        lambda c: dict(extra_indices_in_kvcache=None, extra_topk_length=None),
        r"extra_indices_in_kvcache\): got None; takes a tensor",
    ),
    "out of another shape": (
        lambda c: dict(out=torch.empty(2, 3, 8, 256, dtype=torch.bfloat16, device=c.q.device)),
        r"out\): got .*256.*; takes bfloat16 \[2, 3, 8, 512\]",
    ),
    "head_dim_v is 576": (lambda c: dict(head_dim_v=576), r"head_dim_v\): got 576; takes 512"),
}


def call_with_bad_argument(label: str, device: str) -> Outcome:
    case = _small_case(device)
    return outcome(lambda: decode(case, **BAD_ARGUMENTS[label][0](case)))


def call_on_cpu() -> Outcome:
    case = _small_case("cpu")
    return outcome(lambda: decode(case))


def call_with_other_shapes(device: str) -> Outcome:
    """A second call with the FlashMLASchedMeta of a first one, and another number of keys."""
    case = _small_case(device)
    meta, _ = interface().get_mla_metadata()
    decode(case, meta)
    return outcome(lambda: decode(case.replace(indices=case.indices[..., :8].contiguous()), meta))


def _small_case(device: str):
    from flash_mla.testing import make_case

    return make_case(2, 3, 8, 16, 24, device=device, lengths=[16, 9], extra_lengths=[24, 1], sinks=True)


# ---- In the process: decoding --------------------------------------------------------------------------------------


def decode(case, meta=None, **changes) -> Tuple[Tensor, Tensor]:
    """(out, lse) of a flash_mla.testing.Case through the interface, with the keywords that vLLM uses."""
    if meta is None:
        meta, _ = interface().get_mla_metadata()
    return interface().flash_mla_with_kvcache(**{**case.keywords(meta), **changes})


def decode_v4(tokens: int, extra_topk: int, real_heads: int, rows: int) -> None:
    """A layer of DeepSeek V4 as vLLM calls it: a token is a batch entry, heads are padded with zeros, out is given.

    Two layers share the FlashMLASchedMeta, as all of a type do in vLLM.
    """
    from flash_mla.testing import assert_close_flashmla, make_case

    meta, _ = interface().get_mla_metadata()
    for seed in range(2):
        case = make_case(
            tokens, 1, real_heads, 128, extra_topk, device="cuda", seed=seed, sinks=True,
            lengths="random", extra_lengths="random" if extra_topk else None, invalid_fraction=0.1,
        )  # fmt: skip
        padded = case.replace(
            q=torch.nn.functional.pad(case.q, (0, 0, 0, rows - real_heads)),
            attn_sink=torch.nn.functional.pad(case.attn_sink, (0, rows - real_heads), value=-torch.inf),
        )
        buffer = torch.full((tokens, 1, rows, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
        out, lse = decode(padded, meta, out=buffer)
        assert out.data_ptr() == buffer.data_ptr(), "out: a new tensor, although one was given"
        assert_close_flashmla(out, lse, *padded.reference())


def decode_v32(b: int, s_q: int, real_heads: int, rows: int) -> None:
    """A layer of DeepSeek V3.2 as vLLM calls it: dummies for the dense arguments, no lengths, sinks or out."""
    from flash_mla.kv_cache import V32
    from flash_mla.testing import assert_close_flashmla, make_case

    case = make_case(b, s_q, real_heads, 2048, record=V32, device="cuda", invalid_fraction=0.1)
    padded = case.replace(q=torch.nn.functional.pad(case.q, (0, 0, 0, rows - real_heads)))
    dummies = dict(
        block_table=torch.empty(b, 1, dtype=torch.int32, device="cuda"),
        cache_seqlens=torch.full((b,), 4096, dtype=torch.int32, device="cuda"),
    )
    assert_close_flashmla(*decode(padded, **dummies), *padded.reference())


def decode_in_graph() -> None:
    """Lengths change between replays; the interface's object is the one that was made at capture."""
    from flash_mla.testing import assert_close_flashmla, make_case

    case = make_case(4, 1, 8, 128, 512, device="cuda", lengths=[0] * 4, extra_lengths=[0] * 4)
    decode(case)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    meta, _ = interface().get_mla_metadata()
    with torch.cuda.graph(graph):
        out, lse = decode(case, meta)
    for lengths in ([128, 0, 5, 77], [0, 0, 128, 1]):
        case.topk_length.copy_(torch.tensor(lengths))
        case.extra_topk_length.copy_(torch.tensor(lengths) * 4)
        graph.replay()
        assert_close_flashmla(out, lse, *case.reference())


def check_decode(record_name: str, heads: int, device: str) -> None:
    """One call, whatever computes it."""
    from flash_mla import kv_cache
    from flash_mla.testing import assert_close_flashmla, make_case

    case = make_case(8, 1, heads, 640, record=getattr(kv_cache, record_name), device=device)
    assert_close_flashmla(*decode(case), *case.reference())
