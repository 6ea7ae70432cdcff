"""The device of q decides, whatever the current device is."""

import pytest
import torch

from flash_mla.testing import assert_close_flashmla, make_case

pytestmark = pytest.mark.multi_gpu


def test_tensors_on_a_device_that_is_not_the_current_one(record):
    with torch.cuda.device(0):
        case = make_case(5, 1, 8, 128, 512, record=record, device="cuda:1", lengths="random")
        out, lse = case.run()
        assert out.device == lse.device == torch.device("cuda", 1)
        assert torch.cuda.current_device() == 0
        assert_close_flashmla(out, lse, *case.reference())


def test_both_devices_in_one_process(record):
    """In turn and at once; what is set once a device (function attributes) is set on both."""
    cases = [
        make_case(4, 1, h_q, 640, record=record, device=f"cuda:{i}", seed=h_q)
        for h_q in (8, 16)
        for i in (0, 1)
    ]
    for _ in range(3):
        results = [case.run() for case in cases]
    for case, result in zip(cases, results):
        assert_close_flashmla(*result, *case.reference())


def test_current_stream_of_the_device_of_q(record):
    """Not the current device's: the write that q waits for lies on device 1's current stream."""
    case = make_case(4, 1, 8, 128, record=record, device="cuda:1")
    reference = case.reference()
    good, stream = case.q.clone(), torch.cuda.Stream(1)
    case.run()
    case.q.fill_(torch.nan)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(stream), torch.cuda.device(1):
        torch.cuda._sleep(20_000_000)
        case.q.copy_(good)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        out, lse = case.run()
    stream.synchronize()
    assert_close_flashmla(out, lse, *reference)


@pytest.mark.parametrize("name", ["kv", "indices", "topk_length", "attn_sink", "extra_kv"])
def test_tensors_on_two_devices_are_refused(name):
    case = make_case(
        2, 1, 8, 16, 16, device="cuda:0", lengths=[3, 4], extra_lengths=[1, 2], sinks=True
    )
    moved = case.replace(**{name: getattr(case, name).to("cuda:1")})
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{name}\b.*cuda:1.*cuda:0"):
        moved.run()
