"""The library of `make vllm-lib` in the place of vLLM's: behind vLLM's interface file, under vLLM's module names.

Where there is no network, on a GPU machine say, carry these two, which git ignores:

    build/vllm/_flashmla_C.abi3.so    from `make vllm-lib`
    .cache/vllm-0.33.0/               left by a run of these tests where there is one (see vllm_wheel.py)

and flash_mla/_flashmla_C.abi3.so, as for every test.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch

import vllm_process
import vllm_wheel
from build_tools import build, check_symbols, toolchain
from vllm_process import NAMESPACE, REPLACED, REPLACEMENT, Process, make_package

LIBRARY, _ = build.LIBRARIES["vllm"]
OUR_INTERFACE = build.ROOT / "flash_mla" / "flash_mla_interface.py"

# FlashMLA's operators that have no implementation here, as they are called in the refusals.
MISSING = {
    "dense_decode_fwd": "dense decode",
    "sparse_prefill_fwd": "sparse prefill",
    "dense_prefill_fwd": "dense prefill.*SM100",
    "fused_norm_rope_attn_rope_cast_fwd": "sparse prefill fused with .*SM100",
    "fused_norm_rope_attn_rope_cast_decode": "sparse decode fused with .*SM100",
    "permute_q_b_proj": ".*permutation.*SM100",
    "permute_wv_proj": ".*permutation.*SM100",
}


# ---- Processes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Path:
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY.relative_to(build.ROOT)} is missing: run `make vllm-lib`")
    return LIBRARY


@pytest.fixture(scope="module")
def wheel() -> Path:
    """A folder with vLLM's own files."""
    return vllm_wheel.fetch()


def our_interface() -> str:
    """Our interface file as vLLM's build vendors it."""
    return OUR_INTERFACE.read_text().replace(REPLACED, REPLACEMENT)


@pytest.fixture
def start(tmp_path):
    """Start a process over a folder of its own: start(library, interface text)."""
    started = []

    def start(library, interface):
        folder = tmp_path / f"site{len(started)}"
        started.append(Process(make_package(folder, library, interface)))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture(scope="module", params=["vLLM's interface", "our interface"])
def vllm(request, library, tmp_path_factory):
    """A process with our library, for all tests that do not care what ran in it before them."""
    if request.param == "our interface":
        interface = our_interface()
    else:
        interface = (request.getfixturevalue("wheel") / vllm_wheel.INTERFACE).read_text()
    process = Process(make_package(tmp_path_factory.mktemp("site"), library, interface))
    yield process
    process.close()


# ---- Loading -------------------------------------------------------------------------------------


def test_library_loads_everywhere(library):
    """It needs torch's C shim and Python's limited API alone, and exports PyInit__flashmla_C."""
    assert check_symbols.problems_of(library) == []


def test_vllms_interface_finds_our_library(vllm):
    found = vllm.run(vllm_process.where_loaded)
    assert found["library"].endswith("/vllm/_flashmla_C.abi3.so")
    assert found["interface"].endswith("/vllm/third_party/flashmla/flash_mla_interface.py")
    assert found["operators"] == NAMESPACE


def test_our_interface_takes_vllms_replacement():
    text = OUR_INTERFACE.read_text()
    assert text.count(REPLACED) == 1 and f"\n{REPLACED}\n" in text
    assert our_interface().count("import vllm._flashmla_C\n") == 1


def schemas_in(binary: Path) -> dict:
    """The schemas that a library registers, from its bytes: it need not be loadable here."""
    found = re.findall(rb"\0(\w+\((?:Tensor|int|float|bool)[^\0]*\) -> [^\0]+)\0", binary.read_bytes())
    return {text.decode().split("(")[0]: parsed(text.decode()) for text in found}


def parsed(schema: str) -> str:
    """A schema as torch prints it: no two spellings of one."""
    return str(torch._C.parse_schema(schema if "::" in schema else f"{NAMESPACE}::{schema}"))


def test_schemas_are_those_in_vllms_binary(vllm, wheel):
    theirs = schemas_in(wheel / vllm_wheel.LIBRARY)
    assert set(theirs) == {"sparse_decode_fwd", *MISSING}
    ours = vllm.run(vllm_process.schemas)
    assert {name: ours.get(name) for name in theirs} == theirs
    assert set(ours) - set(theirs) == {"sparse_decode_plan", "sparse_decode_check", "missing_operators"}


@pytest.mark.gpu  # vLLM's binary needs libtorch_cuda
def test_schemas_are_those_that_vllms_library_registers(vllm, wheel, start):
    theirs = start(wheel / vllm_wheel.LIBRARY, (wheel / vllm_wheel.INTERFACE).read_text())
    ours = vllm.run(vllm_process.schemas)
    registered = theirs.run(vllm_process.schemas)
    assert set(registered) == {"sparse_decode_fwd", *MISSING}
    assert {name: ours.get(name) for name in registered} == registered


def test_importing_it_twice(library, start):
    process = start(library, our_interface())
    process.run(vllm_process.import_again)
    assert process.run(vllm_process.call_operator, "permute_wv_proj")[0] == "NotImplementedError"


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.skipif(not toolchain.python_include(), reason="needs Python's headers")
def test_library_without_kernels(start, tmp_path, monkeypatch):
    """Built where there is no nvcc, it imports, checks arguments and refuses tensors."""
    name = build.LIBRARY_NAME
    monkeypatch.setattr(build, "BUILD", tmp_path / "build")
    monkeypatch.setattr(build, "LIBRARIES", {"vllm": (tmp_path / "build" / "vllm" / name, NAMESPACE)})
    monkeypatch.setenv("FLASH_MLA_KERNELS", "off")
    process = start(build.build("vllm"), our_interface())
    process.run(vllm_process.load)
    assert process.run(vllm_process.call_operator, "permute_wv_proj")[0] == "NotImplementedError"
    assert process.run(vllm_process.call_on_cpu)[0] == "RuntimeError"


# ---- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MISSING)
def test_missing_operator(vllm, name):
    vllm.run(vllm_process.load)
    error, message = vllm.run(vllm_process.call_operator, name)
    assert error == "NotImplementedError"
    assert re.match(rf"{name}: {MISSING[name]}", message) and "FlashMLA has it" in message


def test_missing_operator_of_a_library_that_was_not_imported(library, start):
    """torch.ops.load_library does not run PyInit, so the message is the dispatcher's."""
    process = start(library, our_interface())
    process.run(vllm_process.load_without_importing, str(library))
    error, message = process.run(vllm_process.call_operator, "sparse_prefill_fwd")
    assert error == "NotImplementedError" and f"{NAMESPACE}::sparse_prefill_fwd" in message


@pytest.mark.parametrize(
    "call, says",
    [
        (vllm_process.call_dense_decode, "dense decode is not implemented.*FlashMLA"),
        (vllm_process.call_sparse_prefill, "sparse prefill is not implemented.*FlashMLA"),
        (vllm_process.call_dense_prefill, "SM100 only"),
    ],
)
def test_missing_function(vllm, call, says):
    error, message = vllm.run(call)
    assert error == "NotImplementedError" and re.search(says, message)


@pytest.mark.parametrize("label", vllm_process.BAD_ARGUMENTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bad_argument(vllm, device, label):
    error, message = vllm.run(vllm_process.call_with_bad_argument, label, device)
    assert error == "RuntimeError"
    assert re.search(vllm_process.BAD_ARGUMENTS[label][1], message, re.DOTALL), message


def test_cpu_tensors(vllm):
    error, message = vllm.run(vllm_process.call_on_cpu)
    assert error == "RuntimeError" and re.search(r"\bq: got .*CPU; takes .*SM90 GPU", message)


@pytest.mark.gpu
def test_other_shapes_with_the_same_metadata(vllm):
    error, message = vllm.run(vllm_process.call_with_other_shapes, "cuda")
    assert error in ("AssertionError", "ValueError") and "topk" in message


# ---- Decoding ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 24])
@pytest.mark.parametrize("real_heads, rows", [(8, 8), (8, 64), (16, 64), (128, 128)])
@pytest.mark.parametrize("extra_topk", [0, 512], ids=["SWA only", "SWA and top-k"])
def test_v4_decode(vllm, extra_topk, real_heads, rows, tokens):
    vllm.run(vllm_process.decode_v4, tokens, extra_topk, real_heads, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("b, s_q", [(1, 24), (24, 1), (4, 2)])
@pytest.mark.parametrize("real_heads, rows", [(8, 8), (16, 64)])
def test_v32_decode(vllm, real_heads, rows, b, s_q):
    vllm.run(vllm_process.decode_v32, b, s_q, real_heads, rows)


@pytest.mark.gpu
def test_decode_in_a_graph(vllm):
    vllm.run(vllm_process.decode_in_graph)


# ---- Beside the package --------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["vllm", "flash_mla"])
def test_beside_flash_mla(library, start, first):
    """Each keeps its namespace, whichever comes first."""
    process = start(library, our_interface())
    steps = [vllm_process.load, vllm_process.check_flash_mla]
    for step in steps if first == "vllm" else reversed(steps):
        process.run(step)
    assert "takes one on an SM90 GPU" in process.run(vllm_process.call_on_cpu)[1]
    process.run(vllm_process.check_flash_mla)


def routing() -> str:
    """The Python that docs/vllm.md has appended to vllm/v1/attention/ops/flashmla.py."""
    text = (build.ROOT / "docs" / "vllm.md").read_text()
    (code,) = re.findall(r"^```python\n(# SM90: .*?)^```", text, re.DOTALL | re.MULTILINE)
    return code


def test_routing_to_flash_mla(library, wheel, start):
    """Behind vLLM's interface sparse decoding is the package's, which serves CPU tensors too, and nothing else is."""
    process = start(library, (wheel / vllm_wheel.INTERFACE).read_text())
    assert "takes one on an SM90 GPU" in process.run(vllm_process.call_on_cpu)[1]
    process.run(vllm_process.append_to_vllm, routing())
    process.run(vllm_process.check_decode, "V4", 8, "cpu")
    error, message = process.run(vllm_process.call_sparse_prefill)
    assert error == "NotImplementedError" and message.startswith("sparse_prefill_fwd: ")


@pytest.mark.gpu
@pytest.mark.parametrize("record", ["V4", "V32"])
def test_vllms_own_library_beside_flash_mla(wheel, start, record):
    """With vLLM's own library: its decoding of 64 heads, then, after the routing, ours of 64 and of 8."""
    process = start(wheel / vllm_wheel.LIBRARY, (wheel / vllm_wheel.INTERFACE).read_text())
    process.run(vllm_process.check_decode, record, 64, "cuda")
    process.run(vllm_process.append_to_vllm, routing())
    process.run(vllm_process.check_decode, record, 64, "cuda")
    process.run(vllm_process.check_decode, record, 8, "cuda")
