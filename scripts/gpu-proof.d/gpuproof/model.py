"""Llama-3-8B's shape with random weights and a word-level tokenizer: enough for a load, without any download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 128256
SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")

#: sizes of the published config.json of Meta-Llama-3-8B
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def tokenizer(size: int = VOCABULARY) -> dict[str, Any]:
    """A tokenizer that knows ``size`` words apart by spaces: any ids decode to words that encode to the same ids."""
    words = {**{name: index for index, name in enumerate(SPECIAL)}}
    words.update({f"w{index}": index for index in range(len(SPECIAL), size)})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for index, name in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": SPECIAL[3]},
    }  # fmt: skip


def write_shape(folder: Path) -> None:
    """Write ``config.json`` and the tokenizer; a folder that is there stays as it is."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2], "unk_token": SPECIAL[3], "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    ids = {key: SHAPE[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    (folder / "config.json").write_text(json.dumps(SHAPE, indent=1))


#: Run by the interpreter that holds torch: weights as a fresh model would have them, one file a few layers. With the
#: engine's own dummy weights (+-0.001) attention hardly moves the answer, and a wrong KV cache would go unseen.
_WEIGHTS = r"""
import json, os, sys, torch
from concurrent.futures import ThreadPoolExecutor
from safetensors.torch import save_file
folder, shape, device, per_file = sys.argv[1], json.load(open(sys.argv[1] + "/config.json")), sys.argv[2], 4
torch.manual_seed(20261129)
hidden, inner, words = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
kv = shape["num_key_value_heads"] * shape["head_dim"]
def normal(rows, columns):
    return (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * shape["initializer_range"]).cpu()
def ones():
    return torch.ones(hidden, dtype=torch.bfloat16)
def layer(index):
    name = "model.layers.%d." % index
    return {
        name + "self_attn.q_proj.weight": normal(hidden, hidden), name + "self_attn.k_proj.weight": normal(kv, hidden),
        name + "self_attn.v_proj.weight": normal(kv, hidden), name + "self_attn.o_proj.weight": normal(hidden, hidden),
        name + "mlp.gate_proj.weight": normal(inner, hidden), name + "mlp.up_proj.weight": normal(inner, hidden),
        name + "mlp.down_proj.weight": normal(hidden, inner), name + "input_layernorm.weight": ones(),
        name + "post_attention_layernorm.weight": ones(),
    }
groups = [range(first, min(first + per_file, shape["num_hidden_layers"]))
          for first in range(0, shape["num_hidden_layers"], per_file)]
total = len(groups) + 1
places, size = {}, 0
with ThreadPoolExecutor(4) as pool:
    pending = []
    for number in range(total):
        if number < len(groups):
            tensors = {key: value for index in groups[number] for key, value in layer(index).items()}
        else:
            tensors = {"model.embed_tokens.weight": normal(words, hidden), "model.norm.weight": ones(),
                       "lm_head.weight": normal(words, hidden)}
        name = "model-%05d-of-%05d.safetensors" % (number + 1, total)
        places.update(dict.fromkeys(tensors, name))
        size += sum(value.numel() * value.element_size() for value in tensors.values())
        pending.append(pool.submit(save_file, tensors, os.path.join(folder, name), {"format": "pt"}))
    for one in pending:
        one.result()
with open(folder + "/model.safetensors.index.json", "w") as index:
    json.dump({"metadata": {"total_size": size}, "weight_map": places}, index)
print(size)
"""


def weights_command(folder: Path, python: str, device: str) -> list[str]:
    """The command that fills ``folder`` (with ``config.json``) with random weights; 16 GB for the whole shape."""
    return [python, "-c", _WEIGHTS, str(folder), device]


def has_weights(folder: Path) -> bool:
    """Whether a checkpoint lies there; its index is written last."""
    return any(folder.glob("*.safetensors.index.json"))
