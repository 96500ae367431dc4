"""What `calibrate` measures of operations bound by memory: each kind that a training step runs.

Every case works on rows of 2,048 numbers (or heads of 64) at several sizes, with an empty cache
and, named "..._warm", with what the run before left in it: a step's next operation finds there what
the one before wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed.fsdp  # registers the copies of its gathers
from torch import Tensor
from torch.nn import functional

from runners.jobs.calibrate_case import DTYPES, Case
from runners.jobs.stopwatch import Stopwatch, Work

_WIDTH, _HEAD, _HEADS = 2048, 64, 32
_VOCABULARY = 32_768
Make = Callable[[int, torch.device, torch.dtype], Work]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of operation; `bytes_per_element` it must read and write, of `dtype`'s elements."""

    name: str
    dtype: str
    bytes_per_element: float
    make: Make


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmCase(Case):
    """A point whose operands may lie in the cache."""

    def times_s(self, watch: Stopwatch, device: torch.device) -> list[float]:
        """Measure it on the device's stream, cache as it is."""
        return watch.device_times_s(self.prepare(device), cold=False)


def kind_cases(is_cuda: bool) -> Iterator[Case]:
    """Every kind at every size, cold and warm; the CPU gets one small size."""
    sizes = [2**20, 2**22, 2**24, 2**26] if is_cuda else [2**16]
    for kind in KINDS:
        for elements in sizes:
            for is_warm in (False, True):
                if is_warm and elements > 2**24:
                    continue
                yield (WarmCase if is_warm else Case)(
                    group="kinds",
                    operation=f"kind_{kind.name}{'_warm' if is_warm else ''}",
                    shape=(elements,),
                    dtype=kind.dtype,
                    bytes=int(elements * kind.bytes_per_element),
                    flops=0.0,
                    prepare=partial(_prepared, kind, elements),
                )


def _prepared(kind: Kind, elements: int, device: torch.device) -> Work:
    return kind.make(elements, device, DTYPES[kind.dtype])


def _rows(elements: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(elements // _WIDTH, _WIDTH, device=device, dtype=dtype)


def _heads(elements: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1, heads, tokens, head size] as a projection leaves it: heads beside each other in memory."""
    tokens = elements // (_HEADS * _HEAD)
    rows = torch.randn(1, tokens, _HEADS, _HEAD, device=device, dtype=dtype)
    return rows.transpose(1, 2)


def _unary(function: Callable[[Tensor], object]) -> Make:
    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
        x = _rows(elements, device, dtype)
        return lambda: function(x)

    return make


def _binary(function: Callable[[Tensor, Tensor], object]) -> Make:
    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
        x, y = _rows(elements, device, dtype), _rows(elements, device, dtype)
        return lambda: function(x, y)

    return make


def _mixed(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    x, y = _rows(elements, device, dtype), _rows(elements, device, torch.bfloat16)
    return lambda: x * y


def _times_row_factor(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    x = _rows(elements, device, dtype)
    factor = x[:, :1].contiguous()
    return lambda: x * factor


def _times_weight(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    x = _rows(elements, device, dtype)
    weight = x[0].clone()
    return lambda: weight * x


def _on_heads(function: Callable[[Tensor], object]) -> Make:
    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
        x = _heads(elements, device, dtype)
        return lambda: function(x)

    return make


def _times_angles(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    x = _heads(elements, device, dtype)
    angles = torch.randn(1, 1, x.shape[2], _HEAD, device=device, dtype=dtype)
    return lambda: x * angles


def _rotated(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    x = _heads(elements, device, dtype)
    first, second = x[..., : _HEAD // 2], x[..., _HEAD // 2 :].clone()
    return lambda: torch.cat((second, first), dim=-1)


def _repeated(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    x = _heads(elements // 4, device, dtype)
    batch, heads, tokens, size = x.shape
    wide = x[:, :, None].expand(batch, heads, 4, tokens, size)
    return lambda: wide.reshape(batch, heads * 4, tokens, size)


def _normalised(backward: bool) -> Make:
    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
        x, weight = _rows(elements, device, dtype), torch.ones(_WIDTH, device=device, dtype=dtype)
        if not backward:
            return lambda: functional.layer_norm(x, (_WIDTH,), weight, weight)
        x.requires_grad_()
        scale, bias = weight.requires_grad_(), torch.zeros_like(weight, requires_grad=True)
        out = functional.layer_norm(x, (_WIDTH,), scale, bias)
        up = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (x, scale, bias), up, retain_graph=True)

    return make


def _scores(elements: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(elements // 4096, 4096, device=device, dtype=dtype)


def _softmax(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    scores = _scores(elements, device, dtype)
    return lambda: functional.softmax(scores, dim=-1, dtype=torch.float32)


def _softmax_backward(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    scores = _scores(elements, device, dtype).softmax(-1)
    return lambda: torch._softmax_backward_data(scores, scores, -1, dtype)


def _logits(elements: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(elements // _VOCABULARY, _VOCABULARY, device=device, dtype=dtype)


def _log_softmax(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    logits = _logits(elements, device, dtype)
    return lambda: functional.log_softmax(logits, dim=-1)


def _log_softmax_backward(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    out = _logits(elements, device, dtype).log_softmax(-1)
    return lambda: torch._log_softmax_backward_data(out, out, -1, dtype)


def _loss_backward(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    """The gradient of the chosen logits: zeros, and one number a row."""
    out = _logits(elements, device, dtype).log_softmax(-1).requires_grad_()
    labels = torch.zeros(len(out), dtype=torch.long, device=device)
    loss = functional.nll_loss(out, labels)
    return lambda: torch.autograd.grad(loss, out, retain_graph=True)


def _embedded(backward: bool) -> Make:
    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
        table = torch.randn(_VOCABULARY, _WIDTH, device=device, dtype=dtype)
        tokens = torch.randint(_VOCABULARY, (elements // _WIDTH,), device=device)
        if not backward:
            return lambda: functional.embedding(tokens, table)
        up = _rows(elements, device, dtype)
        return lambda: torch.ops.aten.embedding_dense_backward(up, tokens, _VOCABULARY, -1, False)

    return make


def _gathered_rows(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    x = _rows(elements, device, dtype)
    order = torch.randperm(len(x), device=device)
    return lambda: x[order]


def _scattered_rows(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    x = _rows(elements, device, dtype)
    order = torch.randint(len(x), (len(x),), device=device)
    total = torch.zeros_like(x)
    return lambda: total.index_add_(0, order, x)


def _foreach(function: Callable[[list[Tensor], list[Tensor]], object]) -> Make:
    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
        parts = 8
        a = [torch.randn(elements // parts, device=device, dtype=dtype) for _ in range(parts)]
        b = [torch.randn_like(x) for x in a]
        return lambda: function(a, b)

    return make


def _cast_together(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    """FSDP2's parameters into the buffer of a gather, cast from fp32."""
    sources = [torch.randn(elements // 8, device=device) for _ in range(8)]
    targets = [torch.empty_like(x, dtype=dtype) for x in sources]
    return lambda: torch._foreach_copy_(targets, sources)


def _chunks_joined(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    """FSDP2's gradients into the buffer of a reduction, cast to fp32."""
    parts = [torch.randn(elements // 8 // 64, 64, device=device, dtype=dtype) for _ in range(8)]
    out = torch.empty(8, elements // 8, device=device)
    return lambda: torch.ops.aten._chunk_cat.out(parts, 0, 8, out=out)


def _parts_copied(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    """FSDP2's gathered buffer out to its parameters."""
    buffer = torch.randn(8, elements // 8, device=device, dtype=dtype)
    sizes = [elements // 64] * 8
    out = [torch.empty(8, size, device=device, dtype=dtype) for size in sizes]
    return lambda: torch.ops.fsdp.split_with_sizes_copy(buffer, sizes, dim=1, out=out)


def _expanded(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
    """One shard to all places of a buffer, as a rank alone fills what it would gather."""
    shard = torch.randn(elements // 8, device=device, dtype=dtype)
    out = torch.empty(8, elements // 8, device=device, dtype=dtype)
    return lambda: out.copy_(shard.expand_as(out))


def _updated(fused: bool) -> Make:
    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Work:
        parts = 8
        every = [
            torch.nn.Parameter(torch.randn(elements // parts, device=device, dtype=dtype))
            for _ in range(parts)
        ]
        for one in every:
            one.grad = torch.randn_like(one)
        return torch.optim.AdamW(every, lr=1e-4, fused=fused, foreach=not fused).step

    return make


def _float(x: Tensor) -> Tensor:
    return x.float()


KINDS = (
    Kind("cast_up", "bf16", 6, _unary(_float)),
    Kind("cast_down", "fp32", 6, _unary(lambda x: x.to(torch.bfloat16))),
    Kind("unary", "bf16", 4, _unary(torch.neg)),
    Kind("unary", "fp32", 8, _unary(torch.neg)),
    Kind("power", "fp32", 8, _unary(lambda x: x.pow(2))),
    Kind("power", "bf16", 4, _unary(lambda x: x.pow(3.0))),
    Kind("tanh", "bf16", 4, _unary(torch.tanh)),
    Kind("silu", "bf16", 4, _unary(functional.silu)),
    Kind("silu_backward", "bf16", 6, _binary(torch.ops.aten.silu_backward)),
    Kind("gelu", "bf16", 4, _unary(functional.gelu)),
    Kind("gelu_backward", "bf16", 6, _binary(torch.ops.aten.gelu_backward)),
    Kind("binary", "bf16", 6, _binary(torch.mul)),
    Kind("binary", "fp32", 12, _binary(torch.mul)),
    Kind("mixed_binary", "fp32", 10, _mixed),
    Kind("add_in_place", "bf16", 6, _binary(lambda x, y: x.add_(y))),
    Kind("fill", "bf16", 2, _unary(lambda x: x.zero_())),
    Kind("row_factor", "fp32", 8, _times_row_factor),
    Kind("weight", "bf16", 4, _times_weight),
    Kind("row_mean", "fp32", 4, _unary(lambda x: x.mean(-1, keepdim=True))),
    Kind("row_sum", "bf16", 2, _unary(lambda x: x.sum(-1, keepdim=True))),
    Kind("column_sum", "bf16", 2, _unary(lambda x: x.sum(0))),
    Kind("column_sum", "fp32", 4, _unary(lambda x: x.sum(0))),
    Kind("angles", "bf16", 4, _times_angles),
    Kind("half_negated", "bf16", 2, _on_heads(lambda x: -x[..., _HEAD // 2 :])),
    Kind("concatenate", "bf16", 4, _rotated),
    Kind("strided_copy", "bf16", 4, _on_heads(lambda x: x.contiguous())),
    Kind("repeat", "bf16", 2.5, _repeated),
    Kind("layer_norm", "bf16", 4, _normalised(backward=False)),
    Kind("layer_norm_backward", "bf16", 6, _normalised(backward=True)),
    Kind("softmax", "bf16", 6, _softmax),
    Kind("softmax", "fp32", 8, _softmax),
    Kind("softmax_backward", "fp32", 12, _softmax_backward),
    Kind("softmax_backward", "bf16", 6, _softmax_backward),
    Kind("log_softmax", "fp32", 8, _log_softmax),
    Kind("log_softmax_backward", "fp32", 12, _log_softmax_backward),
    Kind("loss_backward", "fp32", 4, _loss_backward),
    Kind("embedding", "bf16", 4, _embedded(backward=False)),
    Kind("embedding_backward", "bf16", 4, _embedded(backward=True)),
    Kind("row_gather", "bf16", 4, _gathered_rows),
    Kind("row_scatter", "bf16", 6, _scattered_rows),
    Kind("foreach_cast", "bf16", 6, _cast_together),
    Kind("chunk_cat", "bf16", 6, _chunks_joined),
    Kind("split_copy", "bf16", 4, _parts_copied),
    Kind("expanded_copy", "bf16", 2, _expanded),
    Kind("foreach_copy", "bf16", 4, _foreach(torch._foreach_copy_)),
    Kind("foreach_add", "bf16", 6, _foreach(torch._foreach_add_)),
    Kind("adamw_fused", "bf16", 14, _updated(fused=True)),
    Kind("adamw_foreach", "bf16", 14, _updated(fused=False)),
    Kind("adamw_foreach", "fp32", 28, _updated(fused=False)),
)
