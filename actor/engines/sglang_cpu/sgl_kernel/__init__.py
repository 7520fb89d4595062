"""Stands in for SGLang's compiled kernels where there is no GPU.

SGLang 0.5 imports these names at start-up on CPU too, but its kernel wheel needs CUDA libraries. None of them is called
without speculative decoding or KV moves, which the CPU path never does; one that is called says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def _absent(name: str) -> Callable[..., NoReturn]:
    def call(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU build of SGLang")

    call.__name__ = name
    return call


for _name in (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
):
    globals()[_name] = _absent(_name)
