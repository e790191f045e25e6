"""Tiny models of every supported kind, and batches of random tokens, for parity tests."""

from typing import Any

import numpy as np

from uneven.modelspec import ModelSpec, parse_model

_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "vocab_size": 1003,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
    "llama-bias-tied-pad": {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "pad_token_id": 7,
    },
    "mistral-8kv-window": {
        "model_type": "mistral",
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 4,
        "sliding_window": 5,
    },
    "qwen2-14q-2kv": {
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "hidden_size": 56,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
}


PICTURED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 5,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 16,
    "vocab_size": 320,
}
"""The model of tests that state numbers and labels of pictures."""


def model_spec(name: str, **overrides: Any) -> ModelSpec:
    """One of MODELS, with other sizes where given."""
    return parse_model(_COMMON | MODELS[name] | overrides, where=name)


def token_batch(spec: ModelSpec, num_sequences: int, *, seq_len: int = 11, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random token ids, (num_sequences, seq_len + 1)."""
    return np.random.default_rng(seed).integers(0, spec.vocab_size, (num_sequences, seq_len + 1))
