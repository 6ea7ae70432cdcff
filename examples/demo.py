"""One decode step of DeepSeek V4 attention, as a serving engine would make it: ``make demo``.

Four requests, one token each, 8 heads (what one of 8 tensor-parallel GPUs has of V4's 64). A token
attends to its sliding window, 128 keys of the main cache, and to 512 keys that an indexer picked
from 32k of context in the extra cache. Runs the kernel on a Hopper GPU, else the CPU.
"""

import sys
import time

import torch

import flash_mla
from flash_mla import kv_cache, timing
from flash_mla.kv_cache import V4
from flash_mla.reference import sparse_decode

TOKENS, HEADS = 4, 8
WINDOW, TOPK = 128, 512
CONTEXT = 32 * 1024
PAGE = 64  # tokens per block of a cache
TOLERANCE = 5e-3  # of a row's norm, what the package promises on inputs of any magnitude


def main():
    on_gpu = has_hopper_gpu()
    device = "cuda" if on_gpu else "cpu"
    print(f"flash_mla {flash_mla.__version__}, torch {torch.__version__}, on {device_name(device)}")
    torch.manual_seed(0)

    # More requests are in flight on a GPU than one step serves, so that the steps that are timed
    # find their keys in memory and not in the L2 cache.
    requests = 32 if on_gpu else TOKENS
    print(f"filling the caches: {requests} requests of {CONTEXT} tokens ...", flush=True)
    window_cache = PagedCache(requests, 4 * PAGE, device)  # only the last pages are kept
    context_cache = PagedCache(requests, CONTEXT, device)

    q = torch.randn(TOKENS, 1, HEADS, V4.d_qk, device=device).clamp(-1, 1).bfloat16()
    sink = torch.randn(HEADS, device=device)
    scale = V4.d_qk**-0.5
    sched_meta, _ = flash_mla.get_mla_metadata()

    def draw_keys():
        """The slots that one step reads: [tokens, 1, 128] and [tokens, 1, 512], int32."""
        request = torch.randperm(requests, device=device)[:TOKENS]
        last = torch.randint(WINDOW, 4 * PAGE, (TOKENS, 1), device=device)
        window = window_cache.slots(request, last - torch.arange(WINDOW, device=device))
        chosen = torch.rand(TOKENS, CONTEXT, device=device).topk(TOPK).indices
        return window, context_cache.slots(request, chosen)

    def step(keys):
        window, chosen = keys
        return flash_mla.flash_mla_with_kvcache(
            q,
            window_cache.kv,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=V4.dim_v,
            tile_scheduler_metadata=sched_meta,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=window,
            attn_sink=sink,
            extra_k_cache=context_cache.kv,
            extra_indices_in_kvcache=chosen,
        )

    keys = draw_keys()
    out, lse = step(keys)
    print(f"plan      {sched_meta.plan}")

    exact, exact_lse = sparse_decode(
        q, window_cache.kv, keys[0], sm_scale=scale, attn_sink=sink,
        extra_kv=context_cache.kv, extra_indices=keys[1],
        out=torch.empty(out.shape, device=device),
    )  # fmt: skip
    error = (out.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    lse_error = (lse - exact_lse).abs().max()
    print(f"error     out {error.max():.1e} of a row's norm, lse {lse_error:.1e}, against float32")
    if not error.max() < TOLERANCE:
        sys.exit(f"the error is larger than {TOLERANCE} of a row's norm")

    bytes_read = TOKENS * (WINDOW + TOPK) * V4.bytes_per_token
    if on_gpu:
        calls = timing.calls_per_graph(bytes_read)
        drawn = [draw_keys() for _ in range(calls)]
        took = timing.time_graphs({"step": lambda i: step(drawn[i])}, calls)["step"].median * 1e-6
        print(f"time      {took * 1e6:.1f} us a step, in a CUDA graph, keys from HBM")
        print(f"bandwidth {bytes_read / took / 1e9:.0f} GB/s: {bytes_read / 1e6:.1f} MB of keys a step")
    else:
        start = time.perf_counter()
        step(keys)
        print(f"time      {(time.perf_counter() - start) * 1e3:.1f} ms a step, float32 on the CPU")


class PagedCache:
    """Keys of several requests in one pool of V4 records, their pages shuffled over it."""

    def __init__(self, requests: int, tokens_per_request: int, device: str):
        pages_per_request = tokens_per_request // PAGE
        pages = requests * pages_per_request
        self.kv = kv_cache.empty_pool(pages, PAGE, V4, device=device)
        # Quantizing takes the CPU a while, and the values are random anyway: one request's keys,
        # given to all.
        keys = (torch.randn(pages_per_request, PAGE, V4.d_qk, device=device) / 10).clamp(-1, 1)
        filled = kv_cache.pack(keys, V4)
        self.kv.view(requests, pages_per_request, -1).copy_(filled.view(pages_per_request, -1))
        self.block_table = torch.randperm(pages, device=device).view(requests, pages_per_request)

    def slots(self, request, position):
        """Slots of positions [tokens, n] of the requests [tokens]: int32 [tokens, 1, n]."""
        page = self.block_table[request[:, None], position // PAGE]
        return (page * PAGE + position % PAGE).int().unsqueeze(1)


def has_hopper_gpu() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("no Hopper GPU here: the same step on CPU tensors, by the float32 reference")
        return False
    if not flash_mla.HAS_KERNELS:
        print("built without GPU kernels: the same step on CPU tensors, by the float32 reference")
        return False
    return True


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
