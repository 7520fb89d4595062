"""Which path computes an operation: torch anywhere, Triton on a GPU (or, in tests, in its interpreter).

Called by every operation that has both.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
HALF_TO_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


def use_triton(backend: str, tensors: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    """True for Triton: `backend` asks for it, or is auto, and all tensors are on a GPU and of one of `dtypes`.

    ValueError for an unknown backend, and where Triton is asked for and cannot.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend: found {backend!r}, expected auto, torch or triton")
    fitting = all(t.dtype in dtypes for t in tensors)
    on_gpu = all(t.is_cuda for t in tensors)
    if backend != "triton":
        return backend == "auto" and fitting and on_gpu
    import triton

    if not fitting or not (on_gpu or triton.knobs.runtime.interpret):
        found = ", ".join(sorted({f"{t.dtype} on {t.device}" for t in tensors}))
        wanted = [NAMES.get(dtype, str(dtype)) for dtype in dtypes]
        names = f"{', '.join(wanted[:-1])} or {wanted[-1]}" if len(wanted) > 1 else wanted[0]
        raise ValueError(f"backend: found 'triton' with {found}, expected {names} on a GPU")
    return True
