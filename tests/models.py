"""Tiny models of every supported kind, and batches of random tokens, for parity tests."""

from typing import Any

import numpy as np

from uneven.modelspec import ExpertDivision, ModelSpec, parse_model

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
    "gemma2": {
        "model_type": "gemma2",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 5,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "granite": {
        "model_type": "granite",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "olmo2": {"model_type": "olmo2", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
    "phi3": {"model_type": "phi3", "num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": None},
    "phi": {"model_type": "phi", "num_attention_heads": 6, "num_key_value_heads": 3, "qk_layernorm": True},
    "gpt-neox": {"model_type": "gpt_neox", "num_attention_heads": 6},
    "cohere2": {
        "model_type": "cohere2",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
        "pad_token_id": 3,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 144,
        "num_local_experts": 5,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 80,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 80,
        "first_k_dense_replace": 1,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "intermediate_size": 80,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        "pad_token_id": None,
    },
}
MODELS |= {f"{name}-whole": MODELS[name] for name in ("mixtral", "qwen3-moe", "deepseek-v3")}
"""Mixtures whose experts each have one device."""


_BY_PLAN: dict[str, Any] = {
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "pad_token_id": None,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
}
"""Sizes for families that are described by their plan."""

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
    """One of MODELS, or a family of BY_PLAN by its name; with other sizes where given."""
    experts: ExpertDivision | None = "whole" if name.endswith("-whole") else None
    if name in MODELS:
        return parse_model(_COMMON | MODELS[name] | overrides, where=name, experts=experts)
    from uneven.parallel import describe_config  # here, because it loads torch

    return parse_model(_COMMON | _BY_PLAN | {"model_type": name} | overrides, where=name, by_plan=describe_config)


def token_batch(spec: ModelSpec, num_sequences: int, *, seq_len: int = 11, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random token ids, (num_sequences, seq_len + 1)."""
    return np.random.default_rng(seed).integers(0, spec.vocab_size, (num_sequences, seq_len + 1))
