"""Config entries that the general rules of `shrink.py` cannot know, per model type."""

from __future__ import annotations

from typing import Any

_MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_expand=2, mamba_d_state=16, mamba_chunk_size=8)
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"

_QWEN4_INDEXER = dict(
    indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4
)

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1], num_hidden_layers=3, **_MAMBA),
    "blt": dict(encoder_hash_byte_group_vocab=97, encoder_hash_byte_group_size=[3, 4]),
    "cohere_compass_text": dict(
        rope_parameters={_FULL: dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2])}
    ),
    "dbrx": dict(attn_config=dict(rope_theta=10000.0, kv_n_heads=2, clip_qkv=8.0)),
    "deepseek_v2": dict(num_experts_per_tok=2, n_group=1, topk_group=1),
    "dory": dict(
        num_hidden_layers=4,
        layer_types=[_SLIDING, _FULL, _SLIDING, _FULL],
        n_input_layers=1,
        n_recurrent_layers=2,
        n_output_layers=1,
    ),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "dots3_note": dict(
        audio_config=dict(adapter_input_size=64, adapter_out_dim=64),
        vision_config=dict(adapter_in_dim=64, adapter_out_dim=64),
    ),
    "gemma3n_text": dict(
        num_hidden_layers=4,
        layer_types=[_SLIDING, _FULL, _SLIDING, _FULL],
        num_kv_shared_layers=2,
        intermediate_size=[64] * 4,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "granitemoehybrid": dict(layer_types=["mamba", "attention", "mamba"], num_hidden_layers=3, **_MAMBA),
    "hrm_text": dict(num_layers_per_stack=None, num_hidden_layers=1, L_cycles=2, L_bp_cycles=[1]),
    "inkling2_loop_text": dict(
        unpadded_vocab_size=128,
        num_hidden_layers=6,
        layer_types=["hybrid", "hybrid_sliding"] * 3,
        n_layers_per_attn_res_block=2,
        loop_layer_index_start=2,
        loop_layer_index_end=4,
        loop_num_passes=2,
    ),
    "inkling2_text": dict(unpadded_vocab_size=128),
    "inkling_text": dict(unpadded_vocab_size=128),
    "jamba": dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1),
    "lfm2": dict(layer_types=["conv", _FULL, "conv", _FULL], num_hidden_layers=4, full_attn_idxs=[1, 3]),
    "lfm2_moe": dict(layer_types=["conv", _FULL, "conv", _FULL], num_hidden_layers=4, num_dense_layers=1),
    "mamba2": dict(num_heads=8, head_dim=16, expand=2, n_groups=1, state_size=16, chunk_size=8),
    "ministral": dict(layer_types=[_SLIDING, _FULL, _SLIDING], num_hidden_layers=3),
    "ministral3": dict(rope_parameters=dict(llama_4_scaling_beta=0.1, original_max_position_embeddings=16)),
    "mistral": dict(
        sliding_window=None
    ),  # as in every release since 7B v0.2; with a window no layer would be full
    "mpt": dict(max_seq_len=2048),
    "qwen4_exp": dict(text_config=_QWEN4_INDEXER),
    "qwen4_exp_text": _QWEN4_INDEXER,
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": dict(axial_pos_embds=False),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(
        num_hidden_layers=6,
        layers_block_type=[_LINEAR, _LINEAR, "hybrid", _LINEAR, "hybrid", _LINEAR],
        attention_hidden_size=128,
        attention_head_dim=32,
    ),
    "zamba2": dict(
        num_hidden_layers=6,
        layers_block_type=[_LINEAR, _LINEAR, "hybrid", _LINEAR, "hybrid", _LINEAR],
        hybrid_layer_ids=[2, 4],
        mamba_headdim=16,
        attention_hidden_size=128,
        attention_head_dim=32,
        num_query_groups=4,
    ),
}

# Families that no tiny decoder can be made of, and why. A family that fails to build without being named
# here is reported with the error it raised.
UNBUILDABLE: dict[str, str] = {
    "gemma4_assistant": "drafts from the keys and values of another model; it cannot generate alone",
    "gemma4_unified_assistant": "drafts from the keys and values of another model; it cannot generate alone",
    "musicgen": "reads audio codebooks, not tokens",
    "musicgen_melody": "reads audio codebooks, not tokens",
}
