"""What `calibrate` measures on one device: operations at shapes, and the sizes for GPU and CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.dispatch import Direction, last_choice
from planner.attention.problem import AttentionProblem
from planner.units import GIB_BYTES, KIB_BYTES, MIB_BYTES
from runners.jobs.attention_kernels import KERNELS, reason_to_skip
from runners.jobs.calibrate_case import DTYPES, Case, HostCase, PaceCase, Prepare, SustainedCase
from runners.jobs.calibrate_kinds import kind_cases
from runners.jobs.calibrate_offload import offload_cases
from runners.jobs.stopwatch import Work

# A backward computes five products of scores' size where the forward computes two.
_BACKWARD_FLOPS_FACTOR = 2.5
_NORM_WIDTH = 4096
_LAUNCHES = 200
# One number is read and written.
_SMALLEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAttentionCase(Case):
    """One direction of our attention, which chooses among its kernels by itself."""

    direction: Direction

    @property
    def measured_operation(self) -> str:
        """What was measured, with the kernel that ran last."""
        ran = last_choice(self.direction)
        return self.operation if ran is None else f"attention_{self.direction}_{ran.backend}"


def local_cases(device: torch.device) -> list[Case]:
    """Return every case of one device, the quick groups first; a CPU gets small sizes."""
    is_cuda = device.type == "cuda"
    cases = [*_launches(), *_paces(), *(_copies_to_host() if is_cuda else ())]
    groups = (
        *(_memory_bound(is_cuda), _matrix_products(is_cuda), kind_cases(is_cuda)),
        *(offload_cases(is_cuda), _attention(device)),
    )
    for group in groups:
        cases += [*group, *(_paces() if is_cuda else ())]
    return cases


def _draw(device: torch.device, dtype: str, *size: int) -> Tensor:
    return torch.randn(size, device=device, dtype=DTYPES[dtype])


def _launches() -> Iterator[Case]:
    def small(device: torch.device) -> Work:
        tensor = _draw(device, "fp32", 1)
        return lambda: tensor.add_(1)

    def product(device: torch.device) -> Work:
        a, b = _draw(device, "bf16", 16, 16), _draw(device, "bf16", 16, 16)
        return lambda: torch.mm(a, b)

    def nothing(device: torch.device) -> Work:
        return lambda: None

    def host(operation: str, dtype: str, prepare: Prepare, *, calls: int, waits: bool) -> HostCase:
        return HostCase(
            group="launch",
            operation=operation,
            shape=(1,),
            dtype=dtype,
            bytes=_SMALLEST_BYTES,
            flops=0.0,
            prepare=prepare,
            calls=calls,
            waits=waits,
        )

    yield host("launch_elementwise", "fp32", small, calls=_LAUNCHES, waits=False)
    yield host("launch_matmul", "bf16", product, calls=_LAUNCHES, waits=False)
    yield host("synchronize", "fp32", nothing, calls=1, waits=True)
    # What passes between the two events around no work is part of every other point's time.
    for operation, prepare in (("kernel_none", nothing), ("kernel_smallest", small)):
        yield Case(
            group="launch",
            operation=operation,
            shape=(1,),
            dtype="fp32",
            bytes=_SMALLEST_BYTES,
            flops=0.0,
            prepare=prepare,
        )


def _paces() -> Iterator[Case]:
    """The host's pace, which differs from second to second: asked for between groups of cases."""
    for way in ("forward", "backward"):
        yield PaceCase(
            group="launch",
            operation=f"launch_module_{way}",
            shape=(1,),
            dtype="fp32",
            bytes=_SMALLEST_BYTES,
            flops=0.0,
            prepare=lambda device: lambda: None,
            figure=f"{way}_us",
        )


def _copies_to_host() -> Iterator[Case]:
    for size_bytes in (64 * KIB_BYTES, MIB_BYTES, 16 * MIB_BYTES, 256 * MIB_BYTES):
        for to_device in (True, False):
            for pinned in (True, False):
                way = "host_to_device" if to_device else "device_to_host"
                yield HostCase(
                    group="copies",
                    operation=f"{way}_{'pinned' if pinned else 'pageable'}",
                    shape=(size_bytes // 4,),
                    dtype="fp32",
                    bytes=size_bytes,
                    flops=0.0,
                    prepare=partial(_host_copy, size_bytes // 4, to_device, pinned),
                    waits=True,
                )


def _host_copy(elements: int, to_device: bool, pinned: bool, device: torch.device) -> Work:
    host = torch.zeros(elements, pin_memory=pinned)
    there = torch.zeros(elements, device=device)
    if to_device:
        return lambda: there.copy_(host, non_blocking=pinned)
    return lambda: host.copy_(there, non_blocking=pinned)


def _memory_bound(is_cuda: bool) -> Iterator[Case]:
    """Sizes are those of one tensor; from 256 MiB on nothing of it fits any cache."""
    sizes = [64 * KIB_BYTES * 4**k for k in range(8 if is_cuda else 3)]
    for size_bytes in sizes:
        elements = size_bytes // 2
        for operation, passes, prepare in (
            ("copy", 2, _copy),
            ("add", 3, _add),
            ("layer_norm", 2, _layer_norm),
        ):
            yield Case(
                group="memory",
                operation=operation,
                shape=(elements,),
                dtype="bf16",
                bytes=passes * size_bytes,
                flops=0.0,
                prepare=partial(prepare, elements),
            )
        # Reads parameter, gradient and two states, writes all but the gradient.
        yield Case(
            group="memory",
            operation="adamw",
            shape=(size_bytes // 4,),
            dtype="fp32",
            bytes=7 * size_bytes,
            flops=0.0,
            prepare=partial(_adamw, size_bytes // 4),
        )


def _copy(elements: int, device: torch.device) -> Work:
    source = _draw(device, "bf16", elements)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _add(elements: int, device: torch.device) -> Work:
    a, b = _draw(device, "bf16", elements), _draw(device, "bf16", elements)
    target = torch.empty_like(a)
    return lambda: torch.add(a, b, out=target)


def _layer_norm(elements: int, device: torch.device) -> Work:
    rows = _draw(device, "bf16", elements // _NORM_WIDTH, _NORM_WIDTH)
    weight = _draw(device, "bf16", _NORM_WIDTH)
    return lambda: functional.layer_norm(rows, (_NORM_WIDTH,), weight)


def _adamw(elements: int, device: torch.device) -> Work:
    parameter = torch.nn.Parameter(_draw(device, "fp32", elements))
    parameter.grad = _draw(device, "fp32", elements)
    return torch.optim.AdamW([parameter], lr=1e-4, fused=True).step


def _matrix_products(is_cuda: bool) -> Iterator[Case]:
    """Squares, and a layer's products: y = x Wᵀ (nt), x's gradient (nn) and W's gradient (tn)."""
    squares = (256, 512, 1024, 2048, 4096, 8192, 16384) if is_cuda else (64, 128, 256)
    for size in squares:
        yield _product("nt", size, size, size, "bf16")
    for size in [s for s in squares if s <= 8192]:
        yield _product("nt", size, size, size, "fp32")
    yield from _batched_products(is_cuda)
    if not is_cuda:
        yield from (_product(layout, 64, 32, 128, "bf16") for layout in ("nn", "tn"))
        return
    for hidden, inner in ((896, 4864), (2048, 6144), (4096, 14336), (8192, 28672)):
        for tokens in (1024, 4096, 16384):
            for outer in (hidden, inner):
                yield _product("nt", tokens, outer, hidden, "bf16")
                yield _product("nn", tokens, hidden, outer, "bf16")
                yield _product("tn", outer, hidden, tokens, "bf16")
        yield _product("nt", 4096, 128256, hidden, "bf16")
    yield from _unaligned_products()
    for hidden, inner in ((896, 4864), (2048, 6144), (4096, 14336)):
        for tokens in (1024, 4096):
            yield _product("nt", tokens, inner, hidden, "fp32")
            yield _product("nn", tokens, hidden, inner, "fp32")
            yield _product("tn", inner, hidden, tokens, "fp32")
    for layout, m, n, k in (("nt", 2048, 32000, 896), ("nn", 2048, 896, 32000)):
        yield _product(layout, m, n, k, "fp32")
    yield _product("tn", 32000, 896, 2048, "fp32")
    for layout, m, n, k in (("nt", 4096, 14336, 4096), ("nn", 4096, 4096, 14336)):
        alone = _product(layout, m, n, k, "bf16")
        lasting = {"operation": f"{alone.operation}_sustained"}
        yield SustainedCase(**{f.name: getattr(alone, f.name) for f in fields(alone)} | lasting)
    yield from _mixtures()


def _unaligned_products() -> Iterator[Case]:
    """A head and its gradients over GPT-2's vocabulary: rows that do not begin at multiples of 16 bytes."""
    vocabulary = 50257
    for tokens, hidden in ((1024, 1280), (8192, 1280), (4096, 4096)):
        yield _product("nt", tokens, vocabulary, hidden, "bf16")
        yield _product("nn", tokens, hidden, vocabulary, "bf16")
        yield _product("tn", vocabulary, hidden, tokens, "bf16")


def _mixtures() -> Iterator[Case]:
    """A product and additions in turns: what a GPU at its power limit makes of a step's mixture."""
    m, n, k, elements = 4096, 14336, 4096, 2**26
    for additions in (1, 3, 9):
        yield SustainedCase(
            group="matmul",
            operation="mixture_sustained",
            shape=(m, n, k, elements, additions),
            dtype="bf16",
            bytes=6 * elements * additions,
            flops=2.0 * m * n * k,
            prepare=partial(_mix, (m, n, k), elements, additions),
        )


def _mix(sizes: tuple[int, int, int], elements: int, additions: int, device: torch.device) -> Work:
    multiply, add = _multiply("nt", *sizes, "bf16", device), _add(elements, device)

    def work() -> None:
        multiply()
        for _ in range(additions):
            add()

    return work


def _batched_products(is_cuda: bool) -> Iterator[Case]:
    """Scores and their use as eager attention computes them, and products of groups of rows."""
    shapes = ((1024, 64), (2048, 64), (1024, 128), (2048, 128), (4096, 128))
    for length, size in shapes if is_cuda else ((64, 16),):
        dtypes = ("bf16", "fp32") if length in (1024, 2048) else ("bf16",)
        for dtype in dtypes:
            yield _batched("nt", length, length, size, dtype)
            yield _batched("nn", length, size, length, dtype)
            yield _batched("tn", length, size, length, dtype)
    if not is_cuda:
        return
    for rows, n, k, experts in (
        (8192, 28672, 4096, 8),
        (8192, 4096, 14336, 8),
        (32768, 1536, 2048, 128),
        (32768, 2048, 768, 128),
        (8192, 1536, 2048, 128),
        (8192, 5760, 2880, 32),
        (8192, 2880, 2880, 32),
        (2048, 28672, 4096, 8),
    ):
        for layout in ("nn", "nt", "tn"):
            yield Case(
                group="matmul",
                operation=f"grouped_{layout}",
                shape=(rows, n, k, experts),
                dtype="bf16",
                bytes=2 * (rows * k + experts * k * n + rows * n),
                flops=2.0 * rows * n * k,
                prepare=partial(_multiply_groups, layout, rows, n, k, experts),
            )


def _batched(layout: str, m: int, n: int, k: int, dtype: str) -> Case:
    batch = 32
    return Case(
        group="matmul",
        operation=f"bmm_{layout}",
        shape=(m, n, k, batch),
        dtype=dtype,
        bytes=batch * (m * k + k * n + m * n) * DTYPES[dtype].itemsize,
        flops=2.0 * batch * m * n * k,
        prepare=partial(_multiply_batch, layout, (m, n, k), batch, dtype),
    )


def _multiply_batch(
    layout: str, sizes: tuple[int, int, int], batch: int, dtype: str, device: torch.device
) -> Work:
    m, n, k = sizes
    a = _draw(device, dtype, batch, *((k, m) if layout[0] == "t" else (m, k)))
    b = _draw(device, dtype, batch, *((n, k) if layout[1] == "t" else (k, n)))
    left = a.transpose(1, 2) if layout[0] == "t" else a
    right = b.transpose(1, 2) if layout[1] == "t" else b
    return lambda: torch.bmm(left, right)


def _multiply_groups(
    layout: str, rows: int, n: int, k: int, experts: int, device: torch.device
) -> Work:
    """Experts' forward (nn), and the gradients of their rows (nt) and of their weights (tn)."""
    given, weights = _draw(device, "bf16", rows, k), _draw(device, "bf16", experts, k, n)
    results, share = _draw(device, "bf16", rows, n), rows // experts
    ends = torch.arange(share, rows + 1, share, device=device, dtype=torch.int32)
    left, right = {
        "nn": (given, weights),
        "nt": (results, weights.transpose(1, 2)),
        "tn": (given.t(), results),
    }[layout]
    return lambda: torch._grouped_mm(left, right, offs=ends)


def _product(layout: str, m: int, n: int, k: int, dtype: str) -> Case:
    elements = m * k + k * n + m * n
    return Case(
        group="matmul",
        operation=f"matmul_{layout}",
        shape=(m, n, k),
        dtype=dtype,
        bytes=elements * DTYPES[dtype].itemsize,
        flops=2.0 * m * n * k,
        prepare=partial(_multiply, layout, m, n, k, dtype),
    )


def _multiply(layout: str, m: int, n: int, k: int, dtype: str, device: torch.device) -> Work:
    a = _draw(device, dtype, k, m).t() if layout[0] == "t" else _draw(device, dtype, m, k)
    b = _draw(device, dtype, n, k).t() if layout[1] == "t" else _draw(device, dtype, k, n)
    target = torch.empty((m, n), device=device, dtype=DTYPES[dtype])
    return lambda: torch.mm(a, b, out=target)


def _attention(device: torch.device) -> Iterator[Case]:
    """Causal attention of 16,384 tokens, hidden size 2,048, four query heads to a key head."""
    tokens, hidden = (16384, 2048) if device.type == "cuda" else (128, 64)
    lengths = (1024, 4096, 16384) if device.type == "cuda" else (64,)
    shapes = [
        AttentionProblem(
            batch=tokens // length,
            heads=hidden // head_dim,
            kv_heads=hidden // head_dim // 4,
            head_dim=head_dim,
            sequence_length=length,
            causal=True,
        )
        for head_dim in ((64, 128) if device.type == "cuda" else (16,))
        for length in lengths
    ]
    for shape in shapes:
        yield Case(**_attend_fields("sdpa", shape, backward=False))
        yield Case(**_attend_fields("sdpa", shape, backward=True))
    for shape in shapes:
        if shape.sequence_length <= 4096:
            yield from _masked_attention(shape)
    # In fp32 SDPA has a fused kernel where every query head has its own keys and values.
    in_fp32 = [replace(s, dtype="fp32") for s in shapes if s.sequence_length <= 4096]
    for shape in in_fp32:
        alone = replace(shape, kv_heads=shape.heads)
        yield Case(**_attend_fields("sdpa", alone, backward=False))
        yield Case(**_attend_fields("sdpa", alone, backward=True))
    # Ours last of all: it is compiled first.
    for shape in (*shapes, *in_fp32):
        if reason_to_skip("triton", shape, DTYPES[shape.dtype], device) is None:
            forward, backward = Direction.FORWARD, Direction.BACKWARD
            fields = _attend_fields("triton", shape, backward=False)
            yield OwnAttentionCase(direction=forward, **fields)
            fields = _attend_fields("triton", shape, backward=True)
            yield OwnAttentionCase(direction=backward, **fields)


def _masked_attention(shape: AttentionProblem) -> Iterator[Case]:
    """SDPA with a mask of numbers, as a window or several documents need it: it computes every pair."""
    for is_backward in (False, True):
        fields = _attend_fields("sdpa", shape, backward=is_backward)
        fields["operation"] = f"{fields['operation']}_masked"
        yield Case(**fields | {"prepare": partial(_attend_masked, shape, is_backward)})


def _attend_masked(shape: AttentionProblem, backward: bool, device: torch.device) -> Work:
    size = (shape.batch, shape.heads, shape.sequence_length, shape.head_dim)
    mask = torch.zeros(
        (shape.batch, 1, shape.sequence_length, shape.sequence_length),
        device=device,
        dtype=DTYPES["bf16"],
    )
    inputs = [_draw(device, "bf16", *size).requires_grad_() for _ in range(3)]

    def attend() -> Tensor:
        q, k, v = inputs
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    if not backward:
        return torch.no_grad()(attend)
    output, upstream = attend(), _draw(device, "bf16", *size)
    return lambda: torch.autograd.grad(output, inputs, upstream, retain_graph=True)


def _attend_fields(kernel: str, shape: AttentionProblem, *, backward: bool) -> dict[str, Any]:
    tokens = shape.batch * shape.sequence_length
    token_bytes = tokens * shape.head_dim * DTYPES[shape.dtype].itemsize
    query_bytes, key_bytes = token_bytes * shape.heads, token_bytes * shape.kv_heads
    # Q, K, V, O; the backward reads these and O's gradient and writes those of Q, K, V.
    moved = 4 * query_bytes + 4 * key_bytes if backward else 2 * query_bytes + 2 * key_bytes
    return {
        "group": "attention",
        "operation": f"attention_{'backward' if backward else 'forward'}_{kernel}",
        "shape": (
            *(shape.batch, shape.heads, shape.kv_heads),
            *(shape.sequence_length, shape.head_dim),
        ),
        "dtype": shape.dtype,
        "bytes": moved,
        "flops": shape.forward_flops() * (_BACKWARD_FLOPS_FACTOR if backward else 1.0),
        "prepare": partial(_attend, kernel, shape, backward),
    }


def _attend(kernel: str, shape: AttentionProblem, backward: bool, device: torch.device) -> Work:
    size = (shape.batch, shape.heads, shape.sequence_length, shape.head_dim)
    key_size = (shape.batch, shape.kv_heads, shape.sequence_length, shape.head_dim)
    inputs = [_draw(device, shape.dtype, *s).requires_grad_() for s in (size, key_size, key_size)]
    attend = KERNELS[kernel](shape)
    if not backward:
        return torch.no_grad()(lambda: attend(*inputs))
    output, upstream = attend(*inputs), _draw(device, shape.dtype, *size)
    return lambda: torch.autograd.grad(output, inputs, upstream, retain_graph=True)


def collective_sizes(is_cuda: bool) -> list[int]:
    """Return the bytes of the full buffers that collectives are measured with."""
    largest = GIB_BYTES if is_cuda else 64 * KIB_BYTES
    sizes = [8 * KIB_BYTES * 8**k for k in range(7)]
    return [*(size for size in sizes if size < largest), largest]
