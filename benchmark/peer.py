"""FlashMLA's own operator, from vLLM's binary: the other side of every comparison.

The file is `_flashmla_C.abi3.so` of an installed vLLM, or of an unpacked wheel
(`pip download --no-deps vllm==0.33.0`). It is never part of this repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import ROOT, console

FILE = "_flashmla_C.abi3.so"
NAMESPACE = "_flashmla_C"


@dataclasses.dataclass
class PeerSchedMeta:
    """FlashMLA's schedule: made by the first call that gets this object, reused by later ones."""

    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


class Peer:
    """FlashMLA behind the two functions that a caller of attention uses."""

    def get_mla_metadata(self) -> tuple[PeerSchedMeta, None]:
        return PeerSchedMeta(), None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: None,
        cache_seqlens: None,
        head_dim_v: int,
        tile_scheduler_metadata: PeerSchedMeta,
        *,
        softmax_scale: float,
        is_fp8_kvcache: bool = True,
        indices: Tensor,
        attn_sink: Tensor | None = None,
        extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None,
        topk_length: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse), as flash_mla.flash_mla_with_kvcache; q has 64 or 128 head rows."""
        meta = tile_scheduler_metadata
        out, lse, meta.tile_scheduler_metadata, meta.num_splits = (
            torch.ops._flashmla_C.sparse_decode_fwd(
                q,
                k_cache,
                indices,
                topk_length,
                attn_sink,
                meta.tile_scheduler_metadata,
                meta.num_splits,
                extra_k_cache,
                extra_indices_in_kvcache,
                extra_topk_length,
                head_dim_v,
                softmax_scale,
                out,
                False,
            )
        )
        return out, lse


def head_rows(heads: int) -> int:
    """Rows that FlashMLA is called with for this many heads: its kernels know 64 and 128."""
    return 64 if heads <= 64 else 128


def find(given: str | None) -> Path | None:
    """The peer's file: the given one, else .peer/ of this repository, else the part of vLLM's wheel that the
    tests have fetched into .cache/, else an installed vLLM's.

    Raises FileNotFoundError if a file is given and is not there.
    """
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise FileNotFoundError(f"--peer: {given} is not a file; takes the path of a {FILE}")
        return path
    places = [ROOT / ".peer" / FILE, *sorted(ROOT.glob(f".cache/vllm-*/vllm/{FILE}"))]
    # find_spec does not import vLLM, which would take seconds and register the same operators.
    vllm = importlib.util.find_spec("vllm")
    places += (
        [Path(place) / FILE for place in (vllm.submodule_search_locations or [])] if vllm else []
    )
    return next((place for place in places if place.is_file()), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every script that compares with FlashMLA; see `chosen`."""
    parser.add_argument(
        "--peer",
        default=None,
        metavar="FILE",
        help=f"FlashMLA's {FILE} (default: .peer/, then .cache/, then an installed vLLM)",
    )
    parser.add_argument("--no-peer", action="store_true", help="time this package alone")


def chosen(arguments: argparse.Namespace) -> Peer | None:
    """The peer that the options name; None, said on the console, where there is none."""
    peer = None if arguments.no_peer else load(arguments.peer)
    if peer is None:
        console.print("FlashMLA's library is not here: times of this package alone.")
    return peer


def load(given: str | None = None) -> Peer | None:
    """Load FlashMLA's operator; None where there is no file (see `find`)."""
    path = find(given)
    if path is None:
        return None
    torch.ops.load_library(str(path.resolve()))
    return Peer()


def load_interface(path: Path, namespace: str) -> Any:
    """vLLM's copy of `flash_mla_interface.py` as a module over the operators of `namespace`.

    The text is used as it is but for the two lines by which it reaches its operators.
    """
    text = path.read_text().replace(f"import vllm.{NAMESPACE}\n", "")
    text = text.replace(f"torch.ops.{NAMESPACE}", f"torch.ops.{namespace}")
    module = types.ModuleType(f"flash_mla_interface_over_{namespace}")
    sys.modules[module.__name__] = module  # where dataclasses look up a class's module
    exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    return module
