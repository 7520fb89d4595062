"""The bfloat16 attention of CPUs against float64, masked, causal, with shared key heads and in pieces."""

import pytest
import torch
from temper.learner import attention
from temper.learner.norms import fuse_norms
from temper.learner.rotary import _Turn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def inputs(heads: int, groups: int, width: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, heads, width, 16), (5, groups, length, 16), (5, groups, length, 16)]
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def reference(q, k, v, mask, scale):
    """Plain attention in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.softmax((q @ k.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf), -1) @ v


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pieces", [False, True])
def test_output_and_gradient_are_those_of_float64_within_bfloat16(heads, groups, causal, pieces, monkeypatch):
    if pieces:
        monkeypatch.setattr(attention, "CELLS", heads * 9 * 14 * 2)  # two items at a time
    width, length = (9, 9) if causal else (9, 14)
    q, k, v = inputs(heads, groups, width, length)
    seen = torch.rand(5, 1, width, length, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[..., 0] = True
    mask = torch.ones(width, length, dtype=torch.bool).tril() if causal else seen
    bias = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, -torch.inf)
    out = attention.attend(q, k, v, None if causal else bias, 0.25)
    assert out.grad_fn is not None and out.grad_fn.name() == "_Bf16OnCpuBackward"
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = torch.autograd.grad(out, (q, k, v), upstream)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = reference(*exact, mask, 0.25)
    gradients = torch.autograd.grad(want, exact, upstream.double())
    assert float((out.double() - want).detach().abs().max()) < 2**-7
    for one, other in zip(found, gradients, strict=True):
        assert one.dtype == torch.bfloat16 and one.shape == other.shape
        assert float((one.double() - other).norm() / other.norm()) < 8e-3


def test_large_or_fp32_attention_is_torch_s_own(monkeypatch):
    q, k, v = inputs(4, 2, 9, 9)
    assert "ScaledDotProduct" in attention.attend(q.float(), k.float(), v.float(), None, 0.25).grad_fn.name()
    monkeypatch.setattr(attention, "CELLS", 1)
    assert "ScaledDotProduct" in attention.attend(q, k, v, None, 0.25).grad_fn.name()


def test_the_norm_and_its_gradient_are_transformers_own():
    config = LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config).double()
    norm = model.model.norm
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    upstream = torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = torch.nn.functional.rms_norm(x, (16,), norm.weight, norm.variance_epsilon)
    want = torch.autograd.grad(own, (x, norm.weight), upstream)
    theirs = norm(x.detach())
    fuse_norms(model)
    out = norm(x)
    assert torch.allclose(out, theirs, atol=1e-5) and torch.allclose(out, own, atol=1e-12)
    for one, other in zip(torch.autograd.grad(out, (x, norm.weight), upstream), want, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(x.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_turned_queries_and_their_gradient_are_transformers_own(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 16, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    angles = torch.rand(1, 7, 8, dtype=torch.float64, generator=generator) * 6
    cos, sin = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))
    upstream = torch.randn(7, 3, 16, dtype=torch.float64, generator=generator).to(dtype)
    wide = x.detach().double().requires_grad_()
    want, _ = apply_rotary_pos_emb(wide.transpose(0, 1)[None], wide.transpose(0, 1)[None], cos, sin)
    want = want[0].transpose(0, 1)
    out = _Turn.apply(x, cos[0, :, None, :8], sin[0, :, None, :8])
    assert out.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 2**-8  # one rounding
    assert torch.allclose(out.double(), want, rtol=tolerance, atol=1e-12)
    (found,), (exact,) = torch.autograd.grad(out, x, upstream), torch.autograd.grad(want, wide, upstream.double())
    assert torch.allclose(found.double(), exact, rtol=tolerance, atol=1e-12)
