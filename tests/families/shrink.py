"""Shrinks the default config of any decoder family of transformers to something that builds in milliseconds.

The rules work by the names that configs use for the same thing (`hidden_size`, `d_model`, `n_embd` ...).
What they cannot know, relations between sizes in one family, is in `overrides.py`. Per-layer lists
(`layer_types`, `mlp_layer_types` ...) are cut to one layer of each kind that occurs, in their order, so
that a hybrid stays a hybrid.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 128
FIRST_SPECIAL_ID = 104  # prompts use ids below; image, audio and other marker tokens are moved above
HIDDEN_SIZE = 64
NUM_HEADS = 4
NUM_KEY_VALUE_HEADS = 2
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS
MAX_POSITIONS = 512
WINDOW = 16
MIN_LAYERS, MAX_LAYERS = 2, 6

_NAMES_BY_SIZE = [
    (VOCAB_SIZE, "vocab_size decoder_vocab_size vocab_size_per_layer_input audio_vocab_size n_vocab"),
    (HIDDEN_SIZE, "hidden_size d_model n_embd embed_dim emb_dim dim embedding_dim attention_hidden_size"),
    (HIDDEN_SIZE, "embedding_size word_embed_proj_dim input_embedding_size output_embedding_size lru_width"),
    (HIDDEN_SIZE, "backbone_hidden_size router_hidden_size"),
    (64, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_ff n_inner dim_ff dff"),
    (64, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size d_inner"),
    (64, "expert_ffn_hidden_size intermediate_size_mlp dense_intermediate_size feed_forward_size"),
    (64, "moe_shared_expert_intermediate_size shared_experts_intermediate_size"),
    (64, "prefix_dense_intermediate_size expert_intermediate_size"),
    (NUM_HEADS, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
    (NUM_HEADS, "decoder_attention_heads encoder_attention_heads linear_num_heads"),
    (NUM_HEADS, "num_encoder_attention_heads num_decoder_attention_heads"),
    (HEAD_DIM, "attention_head_size kv_channels d_head dim_head query_pre_attn_scalar swa_head_dim"),
    (HEAD_DIM, "global_head_dim v_head_dim qk_head_dim index_head_dim indexer_head_dim attention_head_dim"),
    (HEAD_DIM, "linear_head_dim swa_v_head_dim linear_key_head_dim linear_value_head_dim"),
    (HEAD_DIM // 2, "qk_rope_head_dim qk_nope_head_dim rotary_dim"),
    (16, "q_lora_rank kv_lora_rank o_lora_rank gated_norm_rank hc_lowrank adapter_rank laurel_rank"),
    (16, "loop_gate_rank mamba_d_state state_size ssm_state_size hidden_size_per_layer_input"),
    (16, "time_step_rank mamba_dt_rank"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num index_n_heads"),
    (4, "linear_num_key_heads linear_num_value_heads indexer_n_heads o_groups"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts"),
    (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (MAX_POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (MAX_POSITIONS, "max_sequence_length max_target_positions original_max_position_embeddings"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size local_attention"),
    (WINDOW, "attention_chunk_size"),
    (8, "index_topk chunk_size mamba_chunk_size"),
]
_SIZES = {name: size for size, names in _NAMES_BY_SIZE for name in names.split()}

_KEY_VALUE_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "swa_num_key_value_heads",
    "num_global_key_value_heads",
)
_LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_encoder_layers", "num_decoder_layers"),
)
# Written into every saved config; or derived by the constructor; or naming things that do not exist here.
_DROP = frozenset(
    "transformers_version architectures model_type _name_or_path id2label label2id dtype torch_dtype "
    "rope_scaling _attn_implementation attn_implementation is_encoder_decoder output_attentions "
    "output_hidden_states".split()
)


def _layer_count(entries: dict[str, Any]) -> int | None:
    return next((entries[name] for name in _LAYER_COUNTS if isinstance(entries.get(name), int)), None)


def _layers_to_keep(entries: dict[str, Any], count: int) -> list[int]:
    """Indices of the first layer of each kind; a kind is what all the per-layer lists say about a layer."""
    lists = [value for value in entries.values() if isinstance(value, list | tuple) and len(value) == count]
    exceptions = {int(index) for index in entries.get("per_layer_config") or {}}
    kinds = [str([value[i] for value in lists] + [i in exceptions]) for i in range(count)]
    first = sorted({kinds.index(kind) for kind in kinds})[:MAX_LAYERS]
    rest = [i for i in range(count) if i not in first]
    return sorted(first + rest[: max(0, MIN_LAYERS - len(first))])


def _plain_rope(value: Any) -> Any:
    """The same rope entries without length extrapolation, whose factors belong to other sizes."""
    if not isinstance(value, dict):
        return value
    if all(isinstance(v, dict | None) for v in value.values()):  # keyed by layer type; None is no rope
        return {name: _plain_rope(v) for name, v in value.items()}
    kept = {name: value[name] for name in ("rope_theta", "partial_rotary_factor") if name in value}
    return {"rope_type": "default", **kept}


def _relocate(per_layer: dict, keep: list[int]) -> dict:
    """Per-layer exceptions, keyed by layer index, for the layers that are kept, shrunk like the rest."""
    by_index = {int(index): entries for index, entries in per_layer.items()}
    return {str(new): shrink(by_index[old]) for new, old in enumerate(keep) if old in by_index}


def _special_id(name: str, value: Any, next_id: list[int]) -> Any:
    if name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        return ("pad_token_id", "bos_token_id", "eos_token_id").index(name)
    if isinstance(value, int) and not isinstance(value, bool) and value >= FIRST_SPECIAL_ID:
        next_id[0] += 1
        return next_id[0] - 1
    return value


def shrink(entries: dict[str, Any]) -> dict[str, Any]:
    """Small constructor arguments from the entries of a config (`to_dict()`). Recurses into sub-configs."""
    result: dict[str, Any] = {}
    next_id = [FIRST_SPECIAL_ID]
    count = _layer_count(entries)
    keep = _layers_to_keep(entries, count) if count else []
    for name, value in entries.items():
        if name in _DROP:
            continue
        if isinstance(value, dict) and "return_dict" in value:  # a config inside the config
            result[name] = {**shrink(value), **{key: value[key] for key in ("model_type",) if value.get(key)}}
        elif name in _LAYER_COUNTS and isinstance(value, int):
            result[name] = len(keep)
        elif name == "is_decoder":  # without it, models of the BERT kind attend in both directions
            result[name] = True
        elif name == "rope_parameters":
            result[name] = _plain_rope(value)
        elif name == "per_layer_config" and value:
            result[name] = _relocate(value, keep)
        elif name in _KEY_VALUE_HEADS:
            result[name] = 1 if value == 1 else NUM_KEY_VALUE_HEADS
        elif name == "head_dim":  # in multi-head latent attention, the part that carries the rotation
            result[name] = HEAD_DIM // 2 if value == entries.get("qk_rope_head_dim") else HEAD_DIM
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            result[name] = min(value, _SIZES[name]) if value > 0 else value
        elif name.endswith(("_token_id", "_token_index", "_id")):
            result[name] = _special_id(name, value, next_id)
        elif isinstance(value, list | tuple) and count and len(value) == count:
            result[name] = [value[i] for i in keep]
        else:
            result[name] = value
    grouped = entries.get("num_key_value_heads") != entries.get("num_attention_heads")
    if not grouped and result.get("num_key_value_heads"):
        result["num_key_value_heads"] = result["num_attention_heads"]
    return result
