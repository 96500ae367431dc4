"""Time decode attention beside its peers: `python -m kernels.decode.bench` on a CUDA GPU.

One query token per row. Peers: torch's scaled_dot_product_attention over the same contiguous cache
(the backend it chooses), and the rate of a large copy. A step must read the whole cache once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.decode.reference import reference_decode
from kernels.decode.triton import decode_attention
from kernels.timing import Report, copy_bytes_per_s, relative_error, require, times_in_turns

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CASES = [(1, 4096), (32, 4096), (32, 8192), (32, 32768), (1, 32768)]
PAGES = (64, 16)
FP8_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache and what `decode_attention` is told about it."""

    k: Tensor
    v: Tensor
    options: dict[str, Any]

    def bytes_read(self) -> int:
        """Bytes that a step must read."""
        return self.k.nbytes + self.v.nbytes

    def call(self, q: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
        """Return a call of our kernel."""
        return lambda: decode_attention(q, self.k, self.v, lengths, **self.options)


def contiguous(batch: int, seq: int) -> Cache:
    """Random keys and values, laid out (B, S, Hkv, D)."""
    shape = (batch, seq, KV_HEADS, HEAD_DIM)
    k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)
    )
    return Cache(k, v, {})


def paged(cache: Cache, page: int) -> Cache:
    """The same keys and values in pages, out of order."""
    batch, heads, seq, head_dim = cache.k.shape
    count = batch * seq // page
    order = torch.randperm(count, device="cuda")

    def scattered(values: Tensor) -> Tensor:
        pages = values.transpose(1, 2).reshape(count, page, heads, head_dim)
        return torch.empty_like(pages).index_copy_(0, order, pages).transpose(1, 2)

    table = order.view(batch, seq // page).to(torch.int32)
    return Cache(scattered(cache.k), scattered(cache.v), {"block_table": table})


def quantised(cache: Cache, dtype: torch.dtype) -> Cache:
    """The same keys and values in one byte each, with a scale per head."""
    largest = FP8_LARGEST if dtype == torch.float8_e4m3fn else 127.0

    def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
        scale = values.abs().amax((0, 2, 3)).float() / largest
        scaled = values / scale[:, None, None].bfloat16()
        if dtype == torch.int8:
            scaled = scaled.round()
        # Laid out as `values`, by its strides.
        return torch.empty_like(values, dtype=dtype).copy_(scaled), scale

    (k, k_scale), (v, v_scale) = rounded(cache.k), rounded(cache.v)
    return Cache(k, v, {"k_scale": k_scale, "v_scale": v_scale})


def check(name: str, cache: Cache, q: Tensor, lengths: Tensor) -> None:
    """Hold the first row to float64 over the same cache."""
    options = {n: (t[:1] if n == "block_table" else t) for n, t in cache.options.items()}
    rows = (cache.k, cache.v) if "block_table" in options else (cache.k[:1], cache.v[:1])
    if "block_table" in options:
        rows = tuple(t[options["block_table"].long()[0]] for t in rows)
        options["block_table"] = torch.arange(len(rows[0]), device="cuda", dtype=torch.int32)[None]
    exact = reference_decode(q[:1], *rows, lengths[:1], **options)
    require(name, relative_error(cache.call(q, lengths)()[:1], exact), 1e-2)


def compare(report: Report, copy_rate: float, batch: int, seq: int) -> None:
    """Time one shape over every kind of cache, and torch's over the contiguous one."""
    case = {"batch": batch, "seq": seq, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    q = torch.randn(batch, HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((batch,), seq, device="cuda", dtype=torch.int32)
    plain = contiguous(batch, seq)
    caches = {"bf16": plain, **{f"page_{page}": paged(plain, page) for page in PAGES}}
    caches["fp8"] = quantised(plain, torch.float8_e4m3fn)
    caches["int8"] = quantised(plain, torch.int8)
    with report.surviving(case):
        for name, cache in caches.items():
            check(name, cache, q, lengths)
        calls: dict[str, Callable[[], object]] = {
            name: cache.call(q, lengths) for name, cache in caches.items()
        }
        calls["torch"] = lambda: scaled_dot_product_attention(q, plain.k, plain.v, enable_gqa=True)
        times = times_in_turns(calls)
        read = plain.bytes_read()
        report.add(
            case,
            **{f"{name}_s": time for name, time in times.items()},
            read_bytes_per_s=read / times["bf16"],
            share_of_copy_rate=read / times["bf16"] / copy_rate,
            ratio_to_torch=times["torch"] / times["bf16"],
            **{f"ratio_of_{name}_to_bf16": times["bf16"] / times[name] for name in [*caches][1:]},
        )


def main() -> None:
    """Print one line per shape; `--json FILE` appends rows, `--first N` stops after N shapes."""
    parser = argparse.ArgumentParser(description="Time kernels.decode beside its peers.")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    parser.add_argument("--first", type=int, default=len(CASES), help="only this many shapes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the benchmark times GPU kernels")
    report = Report("decode", arguments.json)
    rate = copy_bytes_per_s()
    print(f"copy {rate / 1e12:.3f} TB/s", flush=True)
    for case in CASES[: arguments.first]:
        compare(report, rate, *case)


if __name__ == "__main__":
    main()
