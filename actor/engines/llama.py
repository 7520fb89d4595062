"""Llama, Qwen2 and Qwen3 inference as plain functions over one set of fused weights.

The weights live once, in fused tensors (qkv, gate_up) whose row ranges are contiguous views under their Hugging Face
names, so that an exact delta is applied by overwriting. The math is transformers' (RMSNorm in fp32, rotary embedding by
halves, grouped-query attention, optional qkv bias and qk norm); the residual stream, attention and cached keys and values
are fp32 whatever the weights' dtype, which is faster on a CPU and more exact. Low-rank adapters are computed beside the
weights, never merged into them: what is served is what was published, and a swap costs no more than its bytes. Called by
`decoder`; nothing here knows about requests.

A prompt that several rows share is stored once: a row's own keys and values begin after its shared prefix, and a decode
step attends to both parts, the shared one for all rows of a prefix in one product.

Shapes: N rows, L layers, H query heads, K key/value heads, G = H / K, D head size, T cache length, P prompts or prefixes,
S their tokens, R rows of one prefix.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from temper.actor.engines.shape import ModelShape, inverse_frequencies
from temper.common.lora import Lora, parts
from torch import Tensor

FREED_BYTES = 1 << 16  # a smaller piece of a cache's row is not worth the call that gives it back


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter (A [r, in], B [out, r]) of the outputs start:stop of a fused linear layer."""

    down: Tensor
    up: Tensor
    start: int
    stop: int
    scale: float


Adapters = tuple[Adapter, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's tensors; absent biases and norms are None."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    qkv_adapters: Adapters = ()
    out_adapters: Adapters = ()
    gate_up_adapters: Adapters = ()
    down_adapters: Adapters = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors, and `named`: the canonical Hugging Face name of each parameter -> contiguous view of its storage."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    named: Mapping[str, Tensor]


def empty_weights(shape: ModelShape, dtype: torch.dtype, lora: Lora | None = None) -> Weights:
    """Zeroed weights of `shape`; tied heads share the embedding and have no name of their own."""
    named: dict[str, Tensor] = {}

    def new(name: str, *size: int) -> Tensor:
        named[name] = torch.zeros(*size, dtype=dtype)
        return named[name]

    def fused(prefix: str, sizes: Mapping[str, int], columns: int, kind: str) -> Tensor:
        rows = sum(sizes.values())
        whole = torch.zeros((rows, columns) if kind == "weight" else (rows,), dtype=dtype)
        start = 0
        for part, size in sizes.items():
            named[f"{prefix}.{part}.{kind}"] = whole[start : start + size]
            start += size
        return whole

    def adapters(prefix: str, sizes: Mapping[str, int], columns: int) -> Adapters:
        found, start = [], 0
        for part, size in sizes.items():
            if lora is not None and lora.on(part):
                down, up = parts(f"{prefix}.{part}.weight")
                tensors = new(down, lora.rank, columns), new(up, size, lora.rank)
                found.append(Adapter(*tensors, start, start + size, lora.scale))
            start += size
        return tuple(found)

    h, d, inner = shape.hidden_size, shape.head_dim, shape.intermediate_size
    heads = {"q_proj": shape.heads * d, "k_proj": shape.kv_heads * d, "v_proj": shape.kv_heads * d}
    mlp = {"gate_proj": inner, "up_proj": inner}
    embed = new("model.embed_tokens.weight", shape.vocab_size, h)
    layers = []
    for index in range(shape.layers):
        at = f"model.layers.{index}"
        layers.append(
            Layer(
                input_norm=new(f"{at}.input_layernorm.weight", h),
                qkv=fused(f"{at}.self_attn", heads, h, "weight"),
                qkv_bias=fused(f"{at}.self_attn", heads, h, "bias") if shape.qkv_bias else None,
                q_norm=new(f"{at}.self_attn.q_norm.weight", d) if shape.qk_norm else None,
                k_norm=new(f"{at}.self_attn.k_norm.weight", d) if shape.qk_norm else None,
                out=new(f"{at}.self_attn.o_proj.weight", h, shape.heads * d),
                out_bias=new(f"{at}.self_attn.o_proj.bias", h) if shape.out_bias else None,
                post_norm=new(f"{at}.post_attention_layernorm.weight", h),
                gate_up=fused(f"{at}.mlp", mlp, h, "weight"),
                gate_up_bias=fused(f"{at}.mlp", mlp, h, "bias") if shape.mlp_bias else None,
                down=new(f"{at}.mlp.down_proj.weight", h, inner),
                down_bias=new(f"{at}.mlp.down_proj.bias", h) if shape.mlp_bias else None,
                qkv_adapters=adapters(f"{at}.self_attn", heads, h),
                out_adapters=adapters(f"{at}.self_attn", {"o_proj": h}, shape.heads * d),
                gate_up_adapters=adapters(f"{at}.mlp", mlp, h),
                down_adapters=adapters(f"{at}.mlp", {"down_proj": h}, inner),
            )
        )
    norm = new("model.norm.weight", h)
    head = embed if shape.tied else new("lm_head.weight", shape.vocab_size, h)
    return Weights(embed, tuple(layers), norm, head, named)


class Cache:
    """Keys and values, f32[L, 2, N, K, T, D]; position p of row n is valid once written. T is made odd: rows that lie a
    power of two apart would fight for the same lines of the processor's caches (ten times the time of a write).

    Memory is taken page by page as it is written, and given back by `free` and `clear`."""

    def __init__(self, shape: ModelShape, rows: int, length: int) -> None:
        self.rows, self.kv_heads, self.head_dim, self.layers = rows, shape.kv_heads, shape.head_dim, shape.layers
        self.length = 0
        self.all = torch.zeros(0)
        self.grow(length)

    def grow(self, length: int, rows: int | None = None) -> None:
        """Have room for `length` positions at least; what is there in the first `rows` rows (None: all) stays."""
        if length <= self.length:
            return
        before, kept = self.length, self.all
        self.length = length | 1
        self._memory, self.all = _lazy_zeros(self.layers, 2, self.rows, self.kv_heads, self.length, self.head_dim)
        if before and rows != 0:
            self.all[:, :, :rows, :, :before] = kept[:, :, :rows]
        merged = (self.rows * self.kv_heads, self.length, self.head_dim)
        self.flat = [(layer[0].view(-1, self.head_dim), layer[1].view(-1, self.head_dim)) for layer in self.all]
        self.merged = [(layer[0].view(merged), layer[1].view(merged)) for layer in self.all]
        self.first = torch.arange(self.rows * self.kv_heads).view(self.rows, self.kv_heads) * self.length

    def copy_rows(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of rows `source` i64[M] over rows `target` i64[M]."""
        self.all[:, :, target, :, :length] = self.all[:, :, source, :, :length]

    def write(self, row: int, begin: int, found: Tensor) -> None:
        """Keys and values f32[L, 2, K, S, D] as positions begin..begin+S-1 of `row`."""
        self.all[:, :, row, :, begin : begin + found.shape[3]] = found

    def free(self, row: int) -> None:
        """Give the memory of `row` back, as far as it fills whole pages; what it held is undefined from here on."""
        block, page = 4 * self.kv_heads * self.length * self.head_dim, mmap.PAGESIZE
        if block < FREED_BYTES:
            return
        for index in range(2 * self.layers):
            begin = (index * self.rows + row) * block
            first, last = -(-begin // page) * page, (begin + block) // page * page
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def clear(self) -> None:
        """Give all memory back: everything is 0."""
        self._memory.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows of a decode step and the prefixes that they share.

    `cache` holds prefix p in its row p; `size` S: positions attended to. `members` i64[M]: the rows; `rows` i64[P, R]:
    which of the members have each prefix, padded with any; member m is `rows[prefix[m], rank[m]]`, i64[M] both.
    """

    cache: Cache
    size: int
    members: Tensor | slice
    rows: Tensor
    prefix: Tensor
    rank: Tensor


@dataclass(frozen=True, slots=True)
class Prefixed:
    """All prefixes of a decode step. `lengths` i64[N]: tokens of each row's prefix, 0 without one: its own keys and
    values begin at that position. `bare` i64[B]: the rows without one; None if there are none."""

    lengths: Tensor
    parts: tuple[Shared, ...]
    bare: Tensor | None


@dataclass(frozen=True, slots=True)
class Past:
    """What a prefill continues: prompt p goes on after the first lengths[p] positions of row rows[p] of `cache`."""

    cache: Cache
    rows: Tensor  # i64[P]
    lengths: Tensor  # i64[P]


class Llama:
    """The forward passes. Must be called under ``torch.inference_mode``."""

    def __init__(self, shape: ModelShape, weights: Weights, length: int) -> None:
        self.shape, self.weights = shape, weights
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(shape)[None, :]
        sine = angles.sin()
        self.cos_TD = torch.cat([angles.cos()] * 2, -1)
        self.sin_TD = torch.cat([-sine, sine], -1)
        self.position_T = torch.arange(length)

    def decode(
        self, tokens_N: Tensor, positions_N: Tensor, cache: Cache, length: int, shared: Prefixed | None = None
    ) -> Tensor:
        """One token a row: f32 logits [N, V] after `tokens_N` at `positions_N`, rows 0..N-1 of `cache`.

        Writes their keys and values; attends to positions <= its own among the first `length` of `cache`, after those
        of the row's prefix.
        """
        s = self.shape
        n, heads, kv, d = tokens_N.shape[0], s.heads, s.kv_heads, s.head_dim
        x = F.embedding(tokens_N, self.weights.embed).float()
        dtype = self.weights.embed.dtype
        cos, sin = self.cos_TD[positions_N].unsqueeze(1), self.sin_TD[positions_N].unsqueeze(1)
        own_N = positions_N if shared is None else positions_N - shared.lengths
        mask = _mask(self.position_T[:length] > own_N.unsqueeze(1))
        masks: list[Tensor] = []
        if shared is None:
            mask = mask.unsqueeze(1).expand(n, kv, length).reshape(n * kv, 1, length)
        else:
            for part in shared.parts:
                beyond = _mask(self.position_T[: part.size] >= shared.lengths[part.members].unsqueeze(1))
                masks.append(torch.cat((beyond, mask[part.members]), 1)[:, None, None])
            if shared.bare is not None:
                masks.append(mask[shared.bare][:, None, None])
        slots = (cache.first[:n] + own_N.unsqueeze(1)).view(-1)
        scale = d**-0.5
        for index, layer in enumerate(self.weights.layers):
            keys, values = cache.flat[index]
            all_k, all_v = (part[: n * kv, :length] for part in cache.merged[index])
            qkv = self._qkv(layer, _norm(x, layer.input_norm, s.rms_eps), (n, heads + 2 * kv, d))
            turned = self._rotate(qkv[:, : heads + kv], cos, sin)
            keys.index_copy_(0, slots, turned[:, heads:].reshape(n * kv, d))
            values.index_copy_(0, slots, qkv[:, heads + kv :].reshape(n * kv, d).float())
            query = turned[:, :heads].reshape(n * kv, heads // kv, d)
            if shared is None:
                scores = torch.baddbmm(mask, query, all_k.transpose(1, 2), alpha=scale)
                mixed = torch.bmm(torch.softmax(scores, -1), all_v)
            else:
                mixed = _attend(query.mul_(scale), all_k, all_v, masks, shared, index)
            x = _linear_add(x, mixed.view(n, heads * d).to(dtype), layer.out, layer.out_bias, layer.out_adapters)
            x = self._mlp(layer, x)
        return self._head(x)

    def prefill(self, tokens_PS: Tensor, past: Past | None = None) -> Tensor:
        """Keys and values f32[L, 2, P, K, S, D] of prompts from position 0, or of what follows `past`; right-padded to S
        (causal, so the padding reaches nothing before it)."""
        return self._whole(tokens_PS, past)[0]

    def logits(self, tokens_PS: Tensor) -> Tensor:
        """f32[P, S, V] of whole prompts from position 0."""
        return self._head(self._whole(tokens_PS, None, through=True)[1])

    def _whole(self, tokens_PS: Tensor, past: Past | None, *, through: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values, and the residual stream after the last layer (`through`) or before it."""
        s = self.shape
        prompts, size = tokens_PS.shape
        heads, kv, d = s.heads, s.kv_heads, s.head_dim
        x = F.embedding(tokens_PS, self.weights.embed).float()
        dtype = self.weights.embed.dtype
        seen: Tensor | None = None
        positions, before = self.position_T[:size], 0
        if past is not None:
            before = int(past.lengths.max())
            positions = (past.lengths.unsqueeze(1) + positions).clamp_(max=len(self.position_T) - 1)  # of padding only
            seen = torch.cat(
                (
                    (self.position_T[:before] < past.lengths.unsqueeze(1)).unsqueeze(1).expand(-1, size, -1),
                    torch.ones(size, size, dtype=torch.bool).tril_().expand(prompts, -1, -1),
                ),
                2,
            ).unsqueeze(1)
        cos, sin = self.cos_TD[positions].unsqueeze(-2), self.sin_TD[positions].unsqueeze(-2)
        found = torch.empty(s.layers, 2, prompts, kv, size, d)
        last = s.layers - 1
        for index, layer in enumerate(self.weights.layers):
            normed = _norm(x, layer.input_norm, s.rms_eps)
            qkv = self._qkv(layer, normed, (prompts, size, heads + 2 * kv, d))
            turned = self._rotate(qkv[:, :, : heads + kv], cos, sin)
            found[index, 0] = turned[:, :, heads:].transpose(1, 2)
            found[index, 1] = qkv[:, :, heads + kv :].transpose(1, 2)
            if index == last and not through:
                break
            query = turned[:, :, :heads].transpose(1, 2)
            keys, values = found[index, 0], found[index, 1]
            if past is not None:
                old = past.cache.all[index][:, past.rows, :, :before]
                keys, values = torch.cat((old[0], keys), 2), torch.cat((old[1], values), 2)
            mixed = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=seen, is_causal=seen is None, enable_gqa=heads != kv
            )
            mixed = mixed.transpose(1, 2).reshape(prompts, size, heads * d).to(dtype)
            x = self._mlp(layer, _linear_add(x, mixed, layer.out, layer.out_bias, layer.out_adapters))
        return found, x

    def _qkv(self, layer: Layer, normed: Tensor, size: tuple[int, ...]) -> Tensor:
        qkv = _linear(normed, layer.qkv, layer.qkv_bias, layer.qkv_adapters).view(size)
        if layer.q_norm is None or layer.k_norm is None:
            return qkv
        s = self.shape
        cut = s.heads + s.kv_heads
        query, key, value = qkv[..., : s.heads, :], qkv[..., s.heads : cut, :], qkv[..., cut:, :]
        query = _norm(query, layer.q_norm, s.rms_eps)
        key = _norm(key, layer.k_norm, s.rms_eps)
        return torch.cat((query, key, value), -2)

    def _rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding by halves, in f32."""
        heads = heads.float()
        return torch.addcmul(heads * cos, heads.roll(self.shape.head_dim // 2, -1), sin)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        s = self.shape
        normed = _norm(x, layer.post_norm, s.rms_eps)
        both = _linear(normed, layer.gate_up, layer.gate_up_bias, layer.gate_up_adapters)
        gate, up = both[..., : s.intermediate_size], both[..., s.intermediate_size :]
        return _linear_add(x, F.silu(gate).mul_(up), layer.down, layer.down_bias, layer.down_adapters)

    def _head(self, x: Tensor) -> Tensor:
        s = self.shape
        return F.linear(_norm(x, self.weights.norm, s.rms_eps), self.weights.head).float()


def _lazy_zeros(*size: int) -> tuple[mmap.mmap, Tensor]:
    """Zeros, f32, that take up memory page by page as they are written (torch.zeros writes all of it), and the memory."""
    memory = mmap.mmap(-1, 4 * math.prod(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, torch.frombuffer(memory, dtype=torch.float32).view(size)


def _mask(hidden: Tensor) -> Tensor:
    """0 where visible, -inf where `hidden`, f32."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _attend(
    query: Tensor, own_k: Tensor, own_v: Tensor, masks: Sequence[Tensor], shared: Prefixed, layer: int
) -> Tensor:
    """Attention of scaled `query` f32[N*K, G, D] over prefix and own positions; f32[N*K, G, D]. `masks`: f32[M, 1, 1, S + T]
    of each part's members, at last f32[B, 1, 1, T] of the bare rows.

    The products with a prefix are one for all of its rows: [R*G, D] x [D, S] for each of P*K.
    """
    n = len(shared.lengths)
    merged, groups, d = query.shape
    kv = merged // n
    by_row = query.view(n, kv, groups, d)
    own = torch.bmm(query, own_k.transpose(1, 2)).view(n, kv, groups, -1)
    mixed, weights = query.new_zeros(n, kv, groups, d), torch.empty_like(own)
    for part, mask in zip(shared.parts, masks, strict=False):
        prefixes, size = len(part.rows), part.size
        keys, values = (half[: prefixes * kv, :size] for half in part.cache.merged[layer])
        by_prefix = by_row[part.members][part.rows].transpose(1, 2).reshape(prefixes * kv, -1, d)
        scores = torch.bmm(by_prefix, keys.transpose(1, 2)).view(prefixes, kv, -1, groups, size)
        seen = torch.cat((scores[part.prefix, :, part.rank], own[part.members]), 3).add_(mask).softmax(-1)
        weights[part.members] = seen[..., size:]
        of_prefix = seen[..., :size][part.rows].transpose(1, 2).reshape(prefixes * kv, -1, size)
        found = torch.bmm(of_prefix, values).view(prefixes, kv, -1, groups, d)
        mixed[part.members] = found[part.prefix, :, part.rank]
    if shared.bare is not None:
        weights[shared.bare] = (own[shared.bare] + masks[-1]).softmax(-1)
    return torch.baddbmm(mixed.view(merged, groups, d), weights.view(merged, groups, -1), own_v)


def _linear(value: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters) -> Tensor:
    """value @ weight.T (+ bias) with adapters: the same operations as the learner's, so the same rounding."""
    out = F.linear(value, weight, bias)
    for adapter in adapters:
        extra = F.linear(F.linear(value, adapter.down), adapter.up)
        out[..., adapter.start : adapter.stop].add_(extra, alpha=adapter.scale)
    return out


def _linear_add(x: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters) -> Tensor:
    """x + value @ weight.T (+ bias, adapters), f32."""
    return x + _linear(value, weight, bias, adapters)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in f32, rounded to the weight's dtype before the weight is applied."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(weight.dtype).mul_(weight)
