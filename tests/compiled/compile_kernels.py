"""Compile every Triton kernel ahead of time for the cards that matter, without one: a line of JSON per kernel.

Run by ``tests/unit/test_kernels_triton.py`` in a process without the interpreter. Spills are local-memory loads and
stores in the machine code (NVIDIA), or vector registers and private memory that the assembler reports (AMD; scalar
registers spill into vector lanes, not into memory).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from temper.kernels import (
    advantages_triton,
    linear_logprob_triton,
    policy_loss_triton,
    segments_triton,
    selective_logprob_triton,
    support_triton,
    weight_delta_triton,
)
from temper.kernels.flags import KL_LIMIT, LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT
from temper.learner.objectives import TABLE, compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MATRIX = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}  # mma, wgmma, tcgen05.mma in machine code
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DIVISIBLE = [["tt.divisibility", 16]]


def compile_one(
    kernel: Any,
    target: str,
    pointers: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    floats: tuple[str, ...] = (),
) -> Any:
    """Signature: `pointers` by name, other ``_ptr`` fp32, `floats` fp32, every other argument an i32 divisible by 16."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name], attributes[(i,)] = pointers.get(name, "*fp32"), DIVISIBLE
        elif name in floats:
            signature[name] = "fp32"
        else:
            signature[name], attributes[(i,)] = "i32", DIVISIBLE
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=TARGETS[target], options=options)


def facts(compiled: Any, target: str) -> dict[str, Any]:
    """Spills, shared memory and the target's own matrix instructions of one compiled kernel."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        counts = re.findall(r"(?:\.vgpr_spill_count|\.private_segment_fixed_size):\s+(\d+)", text)
        return {
            "spills": sum(map(int, counts)),
            "shared": compiled.metadata.shared,
            "matrix": len(re.findall("v_mfma", text)),
        }
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout
    return {
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", text)),
        "shared": compiled.metadata.shared,
        "matrix": len(re.findall(rf"\b{MATRIX[target]}\b", text)),
    }


def head_case(target: str, kernel: Any, dtype: torch.dtype, aligned: bool, entropy: bool) -> tuple[str, Any]:
    kernels, short = linear_logprob_triton, TYPES[dtype]
    backward = kernel is kernels._gradient
    tile = kernels.tile_of("gradient" if backward else "forward", dtype, target, aligned)
    constants = {
        "FLOOR": -1e3, "BM": tile.rows, "BN": tile.columns, "BK": tile.inner, "DESCRIBED": tile.described, "EVEN": True,
        "BIAS": False, "CAP": False, "UPCAST": False, "ENTROPY": entropy, "GROUP": kernels.GROUP, "HALVES": tile.halves,
        "h_inner": 1, "w_inner": 1,
    }  # fmt: skip
    inputs = dict.fromkeys(("h_ptr", "w_ptr", "b_ptr", "d_ptr"), f"*{short}")
    inputs |= {"target_ptr": "*i64", "row_ptr": "*i64"}
    if tile.described:
        inputs["h_ptr"] = f"tensordesc<{short}[{tile.rows},{tile.inner}]>"
        inputs["w_ptr"] = f"tensordesc<{short}[{tile.columns},{tile.inner}]>"
        inputs["d_ptr"] = f"tensordesc<{short}[{tile.rows},{tile.columns // (1 + tile.halves)}]>"
    if backward:
        constants |= {"ROUNDED": dtype != torch.float32, "TYPE": kernels.TYPES[dtype]}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = compile_one(kernel, target, inputs, constants, options, ("softcap", "scale"))
    how = f"{short}{' described' if tile.described else ''}{' entropy' if entropy else ''}"
    return f"linear_logprob{kernel.__name__} {how}", facts(compiled, target) | {"tensor_cores": dtype != torch.float32}


def head_cases(target: str) -> list[tuple[str, Any]]:
    kernels = linear_logprob_triton
    cases = [(torch.bfloat16, True, False), (torch.bfloat16, True, True)]
    if target in ("sm_90", "sm_100"):  # there tiles of aligned inputs are read through descriptors
        cases.append((torch.bfloat16, False, True))
    if target == "sm_90":
        cases += [(torch.float16, True, True), (torch.float32, False, False)]
    return [head_case(target, kernel, *case) for case in cases for kernel in (kernels._forward, kernels._gradient)]


def loss_case(target: str, row: str) -> tuple[str, Any]:
    flags = compile(TABLE[row])
    constants = {
        "LOSS": flags.loss, "SEQUENCE": flags.level == "sequence", "BASE_MU": flags.base == "mu",
        "LOGLINEAR": flags.loglinear_prox, "PROX": True, "DUAL": flags.dual_clip > 0, "WEIGHT": flags.weight,
        "WEIGHT_PI": flags.weight_of == "pi", "WEIGHT_LEVEL": flags.weight_level, "GEOMETRIC": True, "VETO": True, "TV": True,
        "M2": True, "KL": "k3_weighted", "REF": True, "ENTROPY": True, "TOKEN_MEAN": True, "LIMIT": LOG_RATIO_LIMIT,
        "SEQUENCE_LIMIT": SEQUENCE_LOG_RATIO_LIMIT, "KL_LIMIT": KL_LIMIT, "COLUMNS": policy_loss_triton.COLUMNS,
        "BLOCK": policy_loss_triton.BLOCK,
    }  # fmt: skip
    kernel = policy_loss_triton._loss
    floats = tuple(name for name in kernel.arg_names if not name.endswith("_ptr") and name not in constants)
    pointers = {"mask_ptr": "*u8", "lag_ptr": "*i32", "cu_ptr": "*i64"}
    compiled = compile_one(kernel, target, pointers, constants, {"num_warps": 4}, floats)
    return f"policy_loss {row}", facts(compiled, target)


def small_cases(target: str) -> list[tuple[str, Any]]:
    rows = selective_logprob_triton
    wide = {"z_ptr": "*bf16", "grad_ptr": "*bf16", "row_ptr": "*i64", "index_ptr": "*i64"}
    logits = {"FLOOR": -1e3, "BLOCK": rows.BLOCK, "inner": 1}
    delta = {"base_ptr": "*i16", "new_ptr": "*i16", "value_ptr": "*i16", "bits_ptr": "*i16"}
    delta |= dict.fromkeys(("count_ptr", "start_ptr", "index_ptr", "part_ptr"), "*i64")
    size = {"BLOCK": weight_delta_triton.BLOCK}
    short = {"mask_ptr": "*u8", "cu_ptr": "*i64", "scored_ptr": "*u8"}
    group = short | dict.fromkeys(("reward_ptr", "length_ptr", "knob_ptr", "out_ptr"), "*fp64")
    block = {"BLOCK": segments_triton.BLOCK}
    limit = block | {"LIMIT": LOG_RATIO_LIMIT}
    own = {"BS": support_triton.IDS, "BK": support_triton.CHANNELS}
    gather = own | {"FLOOR": -1e3, "BIAS": True, "CAP": True, "h_inner": 1, "w_inner": 1}
    pairs = dict.fromkeys(("h_ptr", "w_ptr", "b_ptr"), "*bf16") | {"ids_ptr": "*i32", "cu_ptr": "*i64"}
    longs = (
        "target_ptr",
        "row_ptr",
        "offset_ptr",
        "pair_id_ptr",
        "pair_row_ptr",
        "order_ptr",
        "unique_ptr",
        "edge_ptr",
    )
    pairs |= dict.fromkeys(longs, "*i64")
    table = [
        (rows._forward, wide, logits, {"num_warps": rows.WARPS}),
        (rows._backward, wide, {**logits, "ENTROPY": True}, {"num_warps": rows.WARPS}),
        *((segments_triton._reduce, short, {**block, "OP": op}, {}) for op in ("sum", "max")),
        (segments_triton._broadcast, short, block, {}),
        (segments_triton._scan, short, block, {}),
        *(
            (advantages_triton._group, group, {"KIND": k, "BLOCK": advantages_triton.MEMBERS}, {})
            for k in ("grpo", "passk")
        ),
        (advantages_triton._gae, short, block, {}),
        (advantages_triton._vtrace, short, limit, {}),
        (support_triton._stats, pairs, gather, {}),
        (support_triton._gradient, pairs, {**gather, "ENTROPY": True}, {}),
        (support_triton._d_hidden, {**pairs, "out_ptr": "*bf16"}, {**own, "w_inner": 1}, {}),
        (support_triton._d_weight, pairs, {**own, "WEIGHT": True, "BIAS": True, "h_inner": 1}, {}),
        (weight_delta_triton._count, delta, size, {}),
        (weight_delta_triton._gather, delta, size, {}),
        (weight_delta_triton._overwrite, {**delta, "target_ptr": "*i16"}, size, {}),
        (weight_delta_triton._fingerprint, delta, {**size, "WIDTH": 65535}, {}),
    ]
    floats = ("gamma", "decay", "lam", "rho_bar", "c_bar", "softcap")
    return [
        (
            f"{kernel.__module__.rsplit('.', 1)[1]}{kernel.__name__}",
            facts(compile_one(kernel, target, pointers, constants, options, floats), target),
        )
        for kernel, pointers, constants, options in table
    ]


def main(targets: list[str]) -> None:
    for target in targets:
        rows = ["decoupled_ppo", "gmpo"] if target == "sm_90" else ["decoupled_ppo"]
        for name, found in [*head_cases(target), *(loss_case(target, row) for row in rows), *small_cases(target)]:
            print(json.dumps({"target": target, "kernel": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
