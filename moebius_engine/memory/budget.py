"""The memory budget of one rank: what each component takes, and the KV tokens that are left. Pure arithmetic.

Bytes are exact where an allocation follows from the model, and estimates, marked so, where it does not. Shown in GB of
10^9 bytes; SGLang's log and the paper (arXiv 2606.26607) count in GiB of 2^30 bytes and write GB too.

Letters as in moebius_engine/layout. The column of a component says who needs it: "both" layouts, "ep" alone, or "tp"
alone, the second layout, so that column is what it costs to hold TP beside EP.
"""

from dataclasses import dataclass, replace
from typing import Literal

from moebius_engine.layout.heads import kv_heads_per_rank
from moebius_engine.layout.shape import ModelShape, check_ranks
from moebius_engine.memory.scratch_sizes import scratch_bytes

Column = Literal["both", "ep", "tp"]
GB = 10**9
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the name of its dtype."""

# Estimates, all of the paper's appendix C, table 2: per GPU, Qwen3-235B-A22B (94 layers) on 8 H200, in GiB.
_PAPER = "arXiv 2606.26607, table 2"
_GRAPH_SET_BYTES_PER_LAYER = round(0.9 * 2**30 / 2 / 94)  # 0.9 for both sets, batches of up to 256
_NCCL_BYTES, _CONTEXT_BYTES, _ACTIVATION_BYTES = (round(gib * 2**30) for gib in (0.6, 1.7, 3.0))

_VOCAB_PADDING = 64  # rows; SGLang's DEFAULT_VOCAB_PADDING_SIZE
_EXTRA_CONTEXT = 4  # columns of a request table beyond the context (model_runner_kv_cache_mixin.py:246)
_SLOT_BYTES, _SEGMENT_BYTES = 256, 2 << 20  # memory/arena.py; the driver's granularity on an H200


@dataclass(frozen=True)
class Sizes:
    """What the allocations of one rank follow from.

    tokens: KV tokens that a rank holds in EP (max_total_tokens). requests: that a rank holds in EP. context: tokens
    that a request may have. positions: the model's max_position_embeddings. itemsize, kv_itemsize: bytes of an element.
    page: tokens of a KV page. chunk: chunked_prefill_size as given, None without. overlap: overlap scheduling.
    device: "cuda" or "cpu", where nothing is estimated or rounded. transfer: "direct" or "collective".

    Raises ValueError naming the value that cannot be.
    """

    shape: ModelShape
    ranks: int
    tokens: int
    requests: int
    context: int
    positions: int
    itemsize: int
    kv_itemsize: int
    page: int = 1
    chunk: int | None = 8192
    overlap: bool = True
    device: str = "cuda"
    transfer: str = "direct"

    def __post_init__(self):
        check_ranks(self.shape, self.ranks)
        for name in ("tokens", "requests", "context", "positions", "itemsize", "kv_itemsize", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.tokens % self.page:
            raise ValueError(f"tokens={self.tokens} is no multiple of page={self.page}")
        for name, known in (("device", ("cuda", "cpu")), ("transfer", ("direct", "collective"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {known}")
        if (self.device, self.transfer) == ("cpu", "direct"):
            raise ValueError("transfer='direct' needs device='cuda': on a CPU bytes move by a collective")
        if self.device == "cuda" and _padded_vocab(self) % self.ranks:
            raise ValueError(f"ranks={self.ranks} does not divide the padded vocabulary of {_padded_vocab(self)}")


@dataclass(frozen=True)
class Component:
    """name, column: what it is and who needs it. nbytes: of one rank. source: of an estimate, "" if exact. host: in
    pinned host memory, not on the device."""

    name: str
    column: Column
    nbytes: int
    source: str = ""
    host: bool = False

    @property
    def key(self) -> str:
        return f"{self.name}.{self.column}"


@dataclass(frozen=True)
class Budget:
    """sizes: what it was made from. components: in the order of a table."""

    sizes: Sizes
    components: tuple[Component, ...]

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(component.nbytes for component in self.components if not component.host)

    @property
    def second_layout(self) -> int:
        """Bytes on the device that TP takes beside EP."""
        return sum(c.nbytes for c in self.components if c.column == "tp" and not c.host)

    @property
    def tp_tokens(self) -> int:
        """KV tokens that the ranks hold together in TP (in EP: ranks times tokens). With K < P heads are held more
        than once, so they are fewer than in EP."""
        sizes = self.sizes
        rows = sizes.tokens + sizes.page
        heads = kv_heads_per_rank(sizes.shape.kv_heads, sizes.ranks)
        return rows * sizes.shape.kv_heads // heads - sizes.page


def budget(sizes: Sizes) -> Budget:
    """What each component of one rank takes; equal on all ranks."""
    return Budget(sizes, (*_weights(sizes), *_kv(sizes), *_tables(sizes), *_transfer(sizes), *_runtime(sizes)))


def kv_token_bytes(shape: ModelShape, kv_itemsize: int) -> int:
    """Bytes of one token's KV in EP, all L layers, the spare slot not included: what SGLang divides by."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * kv_itemsize


def tokens_that_fit(sizes: Sizes, gpu_bytes: int, mem_fraction: float) -> int:
    """KV tokens a rank gets if max_total_tokens is left to SGLang. `sizes.tokens` is not read.

    gpu_bytes: of one GPU. mem_fraction: SGLang's mem_fraction_static. It applies to what is free when the EP runner
    begins: after the arena's experts, before the other weights (model_runner_kv_cache_mixin.py:62). TP's shards and the
    KV's spare slot come out of that part too (sglang/runner.py), tables and graphs out of the rest. Zero or less: not
    even one token.
    """
    parts = {component.key: component.nbytes for component in budget(replace(sizes, tokens=sizes.page)).components}
    free = gpu_bytes - parts["experts.both"] - parts["spare expert slot.tp"]
    free -= sum(parts[key] for key in ("NCCL.both", "CUDA context, cuBLAS.both"))
    loaded = ("attention.ep", "embedding.ep", "norms, router, head.both", "rotary table.both")
    shards = ("attention.tp", "embedding.tp")
    available = int(free * mem_fraction) - sum(parts[key] for key in (*loaded, *shards))
    layers = sizes.shape.layers
    return (
        available * layers // (layers + 1) // kv_token_bytes(sizes.shape, sizes.kv_itemsize) // sizes.page * sizes.page
    )


def requests_per_rank(max_running_requests: int | None, tokens: int, context: int, ranks: int) -> int:
    """Requests that a rank holds in EP, by SGLang's rule (model_runner_kv_cache_mixin.py:817)."""
    most = max(min(int(tokens / context * 512), 4096), 2048)
    return min(most, tokens // 2) if max_running_requests is None else min(most, max_running_requests // ranks)


def _weights(sizes: Sizes) -> list[Component]:
    shape, size, ranks = sizes.shape, sizes.itemsize, sizes.ranks
    hidden, head_dim, q_heads = shape.hidden, shape.head_dim, shape.q_heads
    slot, layers = _expert_slots(sizes)

    def attention(q_heads: int, kv_heads: int) -> int:
        return shape.layers * hidden * head_dim * (q_heads + 2 * kv_heads + q_heads) * size  # q, k and v, o

    norms = shape.layers * (2 * hidden + 2 * head_dim) + hidden
    equal = norms + shape.layers * shape.experts * hidden + _padded_vocab(sizes) // ranks * hidden
    rotary_size = 4 if sizes.device == "cuda" else size  # SGLang keeps it in fp32 on CUDA (rotary_embedding/base.py:71)
    # utils/common.py:3982 makes it longer where the context, a margin and rounding go beyond the model's positions.
    rotary_rows = max(sizes.positions, -(-(sizes.context + 256) // 128) * 128)
    full_vocab = -(-shape.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    return [
        Component("experts", "both", layers),
        Component("spare expert slot", "tp", slot),
        Component("attention", "ep", attention(q_heads, shape.kv_heads)),
        Component("attention", "tp", attention(q_heads // ranks, kv_heads_per_rank(shape.kv_heads, ranks))),
        Component("embedding", "ep", full_vocab * hidden * size),
        Component("embedding", "tp", _padded_vocab(sizes) // ranks * hidden * size),
        Component("norms, router, head", "both", equal * size),
        Component("rotary table", "both", rotary_rows * head_dim * rotary_size),
    ]


def _kv(sizes: Sizes) -> list[Component]:
    row = sizes.shape.kv_heads * sizes.shape.head_dim
    slot, layers = _slots(sizes, (sizes.tokens + sizes.page) * row, sizes.kv_itemsize)
    return [Component("KV cache", "both", 2 * layers), Component("spare KV slot", "tp", 2 * slot)]


def _tables(sizes: Sizes) -> list[Component]:
    shape, tp_tokens = sizes.shape, Budget(sizes, ()).tp_tokens
    columns = sizes.context + _EXTRA_CONTEXT
    chunks = (sizes.chunk and sizes.chunk // sizes.ranks, sizes.chunk)  # SGLang divides it among EP's ranks

    def future_map(requests: int, chunk: int | None) -> int:
        pieces = -(-sizes.context // chunk) if chunk else 0
        return 8 * requests * (5 + pieces) if sizes.overlap else 0  # overlap_utils.py:44

    # Where experts lie (eplb/expert_location.py), and addresses and strides of the KV pool.
    fixed = 8 * shape.layers * shape.experts * (shape.experts + 2) + 4 * 8 * shape.layers
    sides: tuple[tuple[Column, int, int, int | None], ...] = (
        ("ep", sizes.requests, sizes.tokens, chunks[0]),
        ("tp", sizes.requests * sizes.ranks, tp_tokens, chunks[1]),  # TP holds what the EP ranks hold together
    )
    return [
        *(Component("request table", column, 4 * (requests + 1) * columns) for column, requests, _, _ in sides),
        *(Component("free KV pages", column, 8 * (tokens // sizes.page)) for column, _, tokens, _ in sides),
        *(Component("other tables", side[0], future_map(side[1], side[3]) + fixed) for side in sides),
    ]


def _transfer(sizes: Sizes) -> list[Component]:
    """What a switch needs: rows, and staging of one layer (collective) or the copy kernel's tables (direct)."""
    shape, ranks = sizes.shape, sizes.ranks
    elements = shape.experts // ranks * 3 * shape.intermediate * shape.hidden  # of one layer's experts
    rows = scratch_bytes(Budget(sizes, ()).tp_tokens) if sizes.device == "cuda" else 0
    scratch = Component("switch scratch", "tp", rows)
    if sizes.transfer == "collective":
        return [scratch, Component("transfer scratch", "tp", 2 * -(-elements // 2) * sizes.itemsize)]
    # transfer/direct.py: DirectTransfer.reserve; tables of both directions' experts; segments of fence and probes.
    kv = 2 * (sizes.tokens + sizes.page) * shape.head_dim * max(shape.kv_heads, ranks)
    tiles = max(elements, kv) // 2048 + 1 + 4 * ranks**2
    buffer = max(1 << 16, 8 * tiles + 4 * ranks**2 * 72 + 4 * 256 * 8 * (1 + ranks))
    words = elements * sizes.itemsize // 16
    prepared = 8 * (words // 2048 + 3 * ranks) + 72 * 3 * ranks + 2 * shape.layers * 8 * (1 + ranks)
    return [
        scratch,
        Component("transfer scratch", "tp", buffer + 2 * prepared + 3 * _SEGMENT_BYTES),
        Component("transfer tables (host)", "tp", buffer + 2 * prepared, host=True),
    ]


def _runtime(sizes: Sizes) -> list[Component]:
    if sizes.device == "cpu":
        return [Component("CUDA graphs", "ep", 0), Component("CUDA graphs", "tp", 0)]
    graphs = sizes.shape.layers * _GRAPH_SET_BYTES_PER_LAYER
    return [
        Component("CUDA graphs", "ep", graphs, _PAPER),
        Component("CUDA graphs", "tp", graphs, _PAPER),
        Component("NCCL", "both", _NCCL_BYTES, _PAPER),
        Component("CUDA context, cuBLAS", "both", _CONTEXT_BYTES, _PAPER),
        Component("activations", "both", _ACTIVATION_BYTES, _PAPER),
    ]


def _padded_vocab(sizes: Sizes) -> int:
    """Rows of an embedding or head that is cut among the ranks."""
    padding = _VOCAB_PADDING
    padded = -(-sizes.shape.vocab_size // padding) * padding
    if sizes.device == "cpu" and padded % sizes.ranks:  # vocab_parallel_embedding.py:237
        padding *= sizes.ranks
    return -(-sizes.shape.vocab_size // padding) * padding


def _expert_slots(sizes: Sizes) -> tuple[int, int]:
    """Bytes of the spare slot of w13 and w2, and of the other L slots."""
    shape = sizes.shape
    w2 = shape.experts // sizes.ranks * shape.hidden * shape.intermediate
    parts = [_slots(sizes, elements, sizes.itemsize) for elements in (2 * w2, w2)]
    return sum(slot for slot, _ in parts), sum(layers for _, layers in parts)


def _slots(sizes: Sizes, elements: int, itemsize: int) -> tuple[int, int]:
    """Bytes of one slot, and of the other L of an allocation of L + 1, the allocation's rounding included."""
    slot, total = elements * itemsize, (sizes.shape.layers + 1) * elements * itemsize
    if sizes.device == "cuda":
        slot = -(-slot // _SLOT_BYTES) * _SLOT_BYTES
        total = -(-(sizes.shape.layers + 1) * slot // _SEGMENT_BYTES) * _SEGMENT_BYTES
    return slot, total - slot
