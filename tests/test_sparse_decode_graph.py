"""CUDA graphs, streams and repetition: nothing about values is frozen, nothing depends on timing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_mla
from flash_mla.testing import assert_close_flashmla, make_case

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [(1, 8, 128, 512), (5, 16, 100, 70), (40, 64, 128, 64), (150, 8, 64, 0)]


def capture(case, meta=None, warm_up=True):
    """A graph of one call, and the tensors that a replay writes."""
    meta = meta or flash_mla.get_mla_metadata()[0]
    if warm_up:
        side = torch.cuda.Stream(case.q.device)
        side.wait_stream(torch.cuda.current_stream(case.q.device))
        with torch.cuda.stream(side):
            case.run(meta)
        torch.cuda.current_stream(case.q.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.run(meta)
    return graph, out, lse


def refill(case, seed):
    """Other q, indices and lengths in the same tensors."""
    b, s_q, h_q, _ = case.q.shape
    extra_topk = 0 if case.extra_kv is None else case.extra_indices.shape[-1]
    other = make_case(
        b, s_q, h_q, case.indices.shape[-1], extra_topk, record=case.record, device=case.q.device,
        seed=seed, lengths="random", extra_lengths="random", invalid_fraction=0.1, sinks=True,
    )  # fmt: skip
    names = ["q", "indices", "topk_length", "attn_sink"]
    if extra_topk:
        names += ["extra_indices", "extra_topk_length"]
    for name in names:
        getattr(case, name).copy_(getattr(other, name))


def check_replays(case, graph, out, lse):
    for seed in 11, 12, 13:
        refill(case, seed)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert_close_flashmla(out, lse, *case.reference())


@pytest.mark.usefixtures("any_tile")
@pytest.mark.parametrize("tokens, h_q, topk, extra_topk", SHAPES)
def test_replay_with_other_q_indices_and_lengths(record, tokens, h_q, topk, extra_topk, device):
    case = make_case(
        tokens, 1, h_q, topk, extra_topk, record=record, device=device,
        lengths="random", extra_lengths="random", sinks=True,
    )  # fmt: skip
    check_replays(case, *capture(case))


@pytest.mark.parametrize("tokens, h_q, topk, extra_topk", SHAPES)
def test_capture_with_all_lengths_zero(record, tokens, h_q, topk, extra_topk, device):
    """As a serving engine's warm-up does, with indices that name nothing."""
    case = make_case(
        tokens, 1, h_q, topk, extra_topk, record=record, device=device,
        lengths=[0] * tokens, extra_lengths=[0] * tokens, sinks=True,
    )  # fmt: skip
    case.indices.fill_(-1)
    graph, out, lse = capture(case)
    graph.replay()
    assert (out == 0).all() and (lse == torch.inf).all()
    check_replays(case, graph, out, lse)


def test_many_layers_in_one_graph(record, device):
    """One plan, one graph, eight layers in a row; the buffers of a layer are reused by later ones."""
    meta, _ = flash_mla.get_mla_metadata()
    cases = [
        make_case(6, 1, 8, 128, 64, record=record, device=device, seed=seed, lengths="random",
                  extra_lengths="random", sinks=True)
        for seed in range(8)
    ]  # fmt: skip
    for case in cases:
        case.run(meta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [case.run(meta) for case in cases]
    for seed in 20, 21:
        for i, case in enumerate(cases):
            refill(case, seed + 100 * i)
        graph.replay()
        for case, result in zip(cases, results):
            assert_close_flashmla(*result, *case.reference())


_FIRST_CALL_IN_A_CAPTURE = """
import torch, flash_mla
from flash_mla.testing import make_case, assert_close_flashmla
from flash_mla.kv_cache import RECORDS
for record in RECORDS:
    for h_q in 8, 16, 24, 128:
        case = make_case(3, 1, h_q, 128, 64, record=record, device="cuda")
        expected = case.reference()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = case.run()
        graph.replay()
        assert_close_flashmla(out, lse, *expected)
"""


def test_first_call_of_a_process_inside_a_capture():
    """Whatever is set up once, function attributes among it, is allowed while capturing."""
    subprocess.run([sys.executable, "-c", _FIRST_CALL_IN_A_CAPTURE], cwd=ROOT, check=True)


# ---- Streams ----------------------------------------------------------------------------------------


def test_runs_on_the_current_stream(record, device):
    """Behind a write that its stream delays: on another stream it would read what was there before."""
    case = make_case(4, 1, 8, 128, record=record, device=device)
    reference = case.reference()
    good, stream = case.q.clone(), torch.cuda.Stream(device)
    case.run()
    case.q.fill_(torch.nan)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        case.q.copy_(good)
        out, lse = case.run()
    stream.synchronize()
    assert_close_flashmla(out, lse, *reference)


def test_the_host_does_not_wait(record, device):
    """A call returns while the GPU is still busy with what came before."""
    case = make_case(4, 1, 8, 128, 64, record=record, device=device, lengths="random")
    case.run()
    torch.cuda.synchronize(device)
    torch.cuda._sleep(400_000_000)  # some 0.2 s
    before = torch.cuda.Event()
    before.record()
    case.run()
    assert not before.query()


def test_two_streams_at_once(record, device):
    """Clusters of two calls share the SMs; each result is what it is alone, bit for bit."""
    cases = [
        make_case(20, 1, 8, 128, 512, record=record, device=device, seed=1),
        make_case(7, 1, 16, 640, record=record, device=device, seed=2),
    ]
    alone = [case.run() for case in cases]
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in cases]
    results = []
    for _ in range(50):
        for stream, case, expected in zip(streams, cases, alone):
            with torch.cuda.stream(stream):
                results.append((case.run(), expected))
    torch.cuda.synchronize(device)
    for got, expected in results:
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.usefixtures("any_tile")
def test_a_call_reads_what_the_call_before_it_wrote(device):
    """Kernels may begin before their predecessor ends, but see its results whole.

    The out of one call is the q of the next, in two buffers that take turns; with a
    synchronization after each call it gives the same bits.
    """
    cases = [make_case(6, 1, 8, 128, 64, device=device, seed=seed) for seed in range(6)]
    buffers = [cases[0].q.clone(), torch.empty_like(cases[0].q)]

    def chain(synchronize):
        buffers[0].copy_(cases[0].q)
        for i, case in enumerate(cases * 5):
            case.replace(q=buffers[i % 2], sm_scale=3.0).run(out=buffers[(i + 1) % 2])
            if synchronize:
                torch.cuda.synchronize(device)
        return buffers[0].clone()

    expected = chain(True)
    for _ in range(5):
        assert torch.equal(chain(False), expected)


# ---- Repetition -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("any_tile")
@pytest.mark.parametrize("tokens, h_q, topk, extra_topk", SHAPES)
def test_repeated_runs_are_bit_identical(record, tokens, h_q, topk, extra_topk, device):
    case = make_case(
        tokens, 1, h_q, topk, extra_topk, record=record, device=device, lengths="random", sinks=True
    )
    out, lse = case.run()
    for _ in range(10):
        again, lse_again = case.run()
        assert torch.equal(again, out) and torch.equal(lse_again, lse)


@pytest.mark.parametrize("h_q", [8, 16, 20, 128])
@pytest.mark.parametrize("how", [(8, 4, 32), (8, 4, 64), (16, 4, 64), "batch-invariant"], ids=str)
def test_a_token_does_not_depend_on_the_others(record, how, h_q, device):
    """Under one plan a token alone gives the bits that it gives in a batch."""
    case = make_case(9, 1, h_q, 300, record=record, device=device, lengths="random")

    def run(case):
        meta = flash_mla.FlashMLASchedMeta()
        if how != "batch-invariant":
            meta.force_plan(head_tile=how[0], splits=how[1], block_keys=how[2])
        return case.run(meta, enable_batch_invariant=how == "batch-invariant")

    out, lse = run(case)
    for i in range(9):
        names = ("q", "indices", "topk_length")
        alone = case.replace(**{name: getattr(case, name)[i : i + 1] for name in names})
        one, one_lse = run(alone)
        assert torch.equal(one[0], out[i]) and torch.equal(one_lse[0], lse[i])
