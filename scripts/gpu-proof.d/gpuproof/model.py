"""Llama-3-8B's shape with a word-level tokenizer: enough for a load with random weights, without any download."""

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
