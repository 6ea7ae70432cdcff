"""All attention of one decode step, as a V4.1-like model on vLLM calls it, in one CUDA graph.

40 layers, some with the sliding window only, the others with 512 top-k keys beside it; each layer
has caches of its own. Speculative decoding brings 3 tokens a request. Both libraries get the same
call: 64 head rows, of which 8 are real. Each step starts with fresh scheduling metadata, as
vLLM's does, so FlashMLA's planner runs once per layer type; its time without is printed as well.

Writes `step.csv` and `step.png` under `benchmark/results/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from rich.table import Table
from torch import Tensor

import peer as flashmla
from common import (
    RESULTS,
    Machine,
    ResultsCsv,
    add_from_csv,
    console,
    new_table,
    numbers,
    progress,
    pyplot,
    read_csv,
    ratio,
    require_sm90,
    shown,
    sign_figure,
)
from workload import D_V, PAGE, WINDOW, filled_pool, random_records, row_error

TOP_K = 512
TOKENS_PER_REQUEST = 3
ROWS, REAL_HEADS = 64, 8
COMPRESSION = 4  # tokens of context that one key of a top-k layer stands for
CONCURRENCY = [1, 2, 4, 8, 16, 32]

FIELDS = (
    "concurrency",
    "tokens",
    "layers",
    "topk_layers",
    "context",
    "flashmla_us",
    "flashmla_unplanned_us",  # planner left out
    "ours_us",
    "saved_us",
    "speedup",
    "difference",  # largest relative row difference of the outputs of the last layer
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--concurrency",
        type=numbers,
        default=CONCURRENCY,
        help="requests in the step, such as 1,2,4",
    )
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument(
        "--topk-layers",
        type=int,
        default=20,
        help="how many of them have top-k keys (spread evenly)",
    )
    parser.add_argument("--context", type=int, default=32768, help="tokens of context per request")
    parser.add_argument("--rounds", type=int, default=15)
    flashmla.add_arguments(parser)
    parser.add_argument(
        "--interface",
        type=Path,
        default=None,
        metavar="FILE",
        help="vLLM's flash_mla_interface.py: call both libraries through it",
    )
    add_from_csv(parser, "table and plot of an earlier run")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.csv")
    arguments = parser.parse_args(argv)
    if arguments.from_csv:
        rows, path = read_csv(arguments.from_csv), arguments.from_csv
    else:
        require_sm90()
        rows, path = run(arguments), arguments.out
    console.print(results_table(rows))
    plot(rows, path.with_suffix(".png"))
    return 0


# ---- The step --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's caches, for as many requests as there are at most; `topk` is None without top-k."""

    window: Tensor
    topk: Tensor | None


@dataclasses.dataclass(frozen=True)
class Paged:
    """The pages of every request in one kind of cache, [requests, pages], in shuffled order."""

    pages: Tensor

    @classmethod
    def shuffled(cls, requests: int, slots_per_request: int, device: str) -> Paged:
        pages = -(-slots_per_request // PAGE)
        return cls(torch.randperm(requests * pages, device=device).view(requests, pages))

    @property
    def blocks(self) -> int:
        return self.pages.numel()

    def slots(self, positions: Tensor) -> Tensor:
        """Positions [requests, ...] within each request -> int32 slots of the same shape."""
        request = torch.arange(len(positions), device=positions.device)
        page = self.pages[request.view(-1, *[1] * (positions.dim() - 1)), positions // PAGE]
        return (page * PAGE + positions % PAGE).to(torch.int32)


class Model:
    """Caches of all layers, and the step's inputs for a number of requests."""

    def __init__(
        self, requests: int, layers: int, topk_layers: int, context: int, device: str = "cuda"
    ):
        from flash_mla.kv_cache import V4

        torch.manual_seed(3)
        self.record, self.device = V4, device
        # vLLM keeps the window and what the step appends, and frees the pages behind them.
        self.window_paging = Paged.shuffled(requests, WINDOW + TOKENS_PER_REQUEST, device)
        self.keys = context // COMPRESSION
        self.topk_paging = Paged.shuffled(requests, self.keys, device)
        template = random_records(V4, device)
        self.layers = [
            Layer(
                filled_pool(self.window_paging.blocks, V4, template),
                filled_pool(self.topk_paging.blocks, V4, template)
                if has_topk(i, layers, topk_layers)
                else None,
            )
            for i in range(layers)
        ]

    def step(
        self, api: Any, requests: int, *, plan_once: bool = False
    ) -> tuple[Callable[[int], None], Tensor]:
        """The function that runs the attention of all layers through `api`, and its output buffer.

        `plan_once`: keep the scheduling metadata of the first step, instead of fresh ones a step.
        """
        tokens = requests * TOKENS_PER_REQUEST
        generator = torch.Generator(self.device).manual_seed(4)
        q = torch.zeros(tokens, 1, ROWS, self.record.d_qk, dtype=torch.bfloat16, device=self.device)
        q[:, :, :REAL_HEADS].normal_(generator=generator).clamp_(-1, 1)
        sink = torch.full((ROWS,), -torch.inf, device=self.device)
        sink[:REAL_HEADS].normal_(generator=generator)
        out = torch.empty(tokens, 1, ROWS, D_V, dtype=torch.bfloat16, device=self.device)
        # All layers share the window's slots; each top-k layer has its own choice of keys.
        window = self._window_slots(requests)
        topk = [
            self._topk_slots(requests, generator) if layer.topk is not None else None
            for layer in self.layers
        ]
        window_length = torch.full((tokens,), WINDOW, dtype=torch.int32, device=self.device)
        topk_length = torch.full((tokens,), TOP_K, dtype=torch.int32, device=self.device)

        def fresh() -> dict[bool, Any]:
            return {with_topk: api.get_mla_metadata()[0] for with_topk in (False, True)}

        kept = fresh()

        def run_step(_: int) -> None:
            metas = kept if plan_once else fresh()
            for layer, extra in zip(self.layers, topk):
                api.flash_mla_with_kvcache(
                    q,
                    layer.window,
                    None,
                    None,
                    D_V,
                    metas[extra is not None],
                    softmax_scale=self.record.d_qk**-0.5,
                    is_fp8_kvcache=True,
                    indices=window,
                    attn_sink=sink,
                    extra_k_cache=layer.topk,
                    extra_indices_in_kvcache=extra,
                    topk_length=window_length,
                    extra_topk_length=None if extra is None else topk_length,
                    out=out,
                )

        return run_step, out

    def _window_slots(self, requests: int) -> Tensor:
        """[tokens, 1, WINDOW]: token j of a request sees the window that ends with itself."""
        token = torch.arange(TOKENS_PER_REQUEST, device=self.device)[:, None]
        positions = token + 1 + torch.arange(WINDOW, device=self.device)
        return self.window_paging.slots(positions.expand(requests, -1, -1)).reshape(-1, 1, WINDOW)

    def _topk_slots(self, requests: int, generator: torch.Generator) -> Tensor:
        """[tokens, 1, TOP_K]: distinct keys of the request, drawn anew for every token.

        Neighbouring tokens of a real model share many of theirs, so this reads more from HBM.
        """
        order = torch.rand(
            requests, TOKENS_PER_REQUEST, self.keys, generator=generator, device=self.device
        )
        positions = order.topk(TOP_K, dim=-1).indices
        return self.topk_paging.slots(positions).reshape(-1, 1, TOP_K)


def has_topk(layer: int, layers: int, topk_layers: int) -> bool:
    """Whether this layer is one of the `topk_layers` that lie evenly among all."""
    return (layer + 1) * topk_layers // layers > layer * topk_layers // layers


# ---- The run ---------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every concurrency and write the CSV."""
    import flash_mla
    from flash_mla.timing import time_graphs

    peer = flashmla.chosen(arguments)
    ours: Any = flash_mla
    if arguments.interface:
        ours = flashmla.load_interface(arguments.interface, "flash_mla")
        peer = peer and flashmla.load_interface(arguments.interface, flashmla.NAMESPACE)
    machine = Machine.here()
    console.print(str(machine), markup=False)
    model = Model(
        max(arguments.concurrency), arguments.layers, arguments.topk_layers, arguments.context
    )
    rows = []
    with ResultsCsv(arguments.out, FIELDS, machine) as results, progress() as bar:
        for requests in bar.track(arguments.concurrency, description="requests"):
            steps = {"ours": model.step(ours, requests)}
            if peer is not None:
                steps["flashmla"] = model.step(peer, requests)
                steps["unplanned"] = model.step(peer, requests, plan_once=True)
            times = time_graphs(
                {name: step for name, (step, _) in steps.items()}, 1, rounds=arguments.rounds
            )
            median = {name: timing.median for name, timing in times.items()}
            outputs = {name: out[:, :, :REAL_HEADS] for name, (_, out) in steps.items()}
            row = dict(
                concurrency=requests,
                tokens=requests * TOKENS_PER_REQUEST,
                layers=arguments.layers,
                topk_layers=arguments.topk_layers,
                context=arguments.context,
                flashmla_us=median.get("flashmla"),
                flashmla_unplanned_us=median.get("unplanned"),
                ours_us=median["ours"],
                saved_us=None if peer is None else median["flashmla"] - median["ours"],
                speedup=ratio(median.get("flashmla"), median["ours"]),
                difference=None
                if peer is None
                else row_error(outputs["ours"], outputs["flashmla"]),
            )
            rows.append(results.write(row))
    console.print(f"wrote {arguments.out}", markup=False)
    return rows


def results_table(rows: Sequence[dict[str, Any]]) -> Table:
    first = rows[0]
    table = new_table(
        "requests",
        "tokens",
        "FlashMLA us",
        "without planner",
        "ours us",
        "saved us",
        "speed-up",
        "difference",
        title=f"Attention of one step: {first['layers']} layers, {first['topk_layers']} of them with top-k",
    )
    for row in rows:
        table.add_row(
            str(row["concurrency"]),
            str(row["tokens"]),
            shown(row["flashmla_us"]),
            shown(row["flashmla_unplanned_us"]),
            shown(row["ours_us"]),
            shown(row["saved_us"]),
            shown(row["speedup"], 2, "x"),
            "–" if row["difference"] is None else f"{row['difference']:.1e}",
        )
    return table


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Two bars a concurrency, microseconds per step."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for offset, field, label in (
        (-0.2, "flashmla_us", "FlashMLA"),
        (0.2, "ours_us", "this library"),
    ):
        bars = [(i + offset, row[field]) for i, row in enumerate(rows) if row[field] is not None]
        if bars:
            drawn = axis.bar(*zip(*bars), width=0.38, label=label)
            axis.bar_label(drawn, fmt="%.0f", fontsize=7)
    axis.set_xticks(range(len(rows)), [str(row["concurrency"]) for row in rows])
    axis.set_xlabel(f"requests ({TOKENS_PER_REQUEST} tokens each)")
    axis.set_ylabel("attention, microseconds per step")
    axis.legend()
    axis.grid(axis="y", alpha=0.3)
    sign_figure(figure, Machine.of_row(rows[0]))
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    console.print(f"wrote {path}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
