"""torch.compile of a function that calls the operator; tests/test_cpu_operator.py has the rest."""

import pytest
import torch

import flash_mla
from flash_mla.kv_cache import V4, V32
from flash_mla.testing import make_case


@pytest.mark.gpu
@pytest.mark.parametrize(
    "record, backend", [(V4, "aot_eager"), (V32, "aot_eager"), (V4, "inductor")]
)
def test_compiled_function_gives_the_same_bits(record, backend, device):
    case = make_case(4, 1, 8, 128, 64, record=record, device=device, lengths="random", sinks=True)

    def step(q, indices):
        meta, _ = flash_mla.get_mla_metadata()
        out, lse = case.replace(q=q * 1, indices=indices + 0).run(meta)
        return out * 2, lse + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for _ in range(2):
        got, expected = compiled(case.q, case.indices), step(case.q, case.indices)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_function_with_an_output_buffer(device):
    case = make_case(4, 1, 8, 128, device=device)
    buffer = torch.full((4, 1, 64, 512), 7.0, dtype=torch.bfloat16, device=device)

    def step(q, buffer):
        return case.replace(q=q).run(out=buffer[:, :, :8])[1]

    torch._dynamo.reset()
    lse = torch.compile(step, backend="aot_eager", fullgraph=True)(case.q, buffer)
    expected, expected_lse = case.run()
    assert torch.equal(lse, expected_lse) and torch.equal(buffer[:, :, :8], expected)
    assert (buffer[:, :, 8:] == 7.0).all()
