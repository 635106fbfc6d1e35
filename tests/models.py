"""Tiny random causal language models, one per attention pattern that the library has to serve.

Every entry of `FAMILIES` builds a float32 model in eval mode from a config written here: no hub access, no
downloads. Sliding windows are 16 tokens, so that they bite in prompts of about 100 tokens. The weights are
redrawn by `energise` because the default initialisation of a tiny model gives almost uniform attention and
a constant greedy output, and a test on such a model passes whatever the attention does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 101
PAD_TOKEN_ID = 0
SLIDING_WINDOW = 16

# Names of the projections and norms whose scale sets how peaked attention is.
_QUERY_KEY_NAMES = ("q_proj", "k_proj", "qkv", "query", "key", "q_norm", "k_norm", "c_attn", "q_lin", "k_lin")
_COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=PAD_TOKEN_ID,
    bos_token_id=None,
    eos_token_id=None,
    tie_word_embeddings=False,
)


def energise(model: PreTrainedModel, seed: int = 0, query_key_gain: float = 1.6) -> PreTrainedModel:
    """Redraws the weights so that attention is peaked and the output depends on all of the context.

    Matrices get a standard deviation of gain / sqrt(fan in), with a larger gain for queries and keys
    (attention logits then have a standard deviation of about 2.5); vectors (norm weights, biases) are
    perturbed around what the architecture initialised them to; attention sinks are raised until they take a
    visible share. Embeddings are scaled so that they enter the first layer with a standard deviation of
    about 1, whatever the architecture multiplies them with, and the output head is untied from them: tied
    random embeddings repeat the last token for ever.
    """
    generator = torch.Generator().manual_seed(seed)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            is_query_key = any(part in name for part in _QUERY_KEY_NAMES)
            if name.endswith("sinks"):
                parameter.copy_(3.0 + noise)
            elif id(parameter) in tables:
                parameter.copy_(noise)
            elif parameter.ndim < 2:
                if is_query_key and name.endswith("weight"):
                    parameter.add_(query_key_gain - 1.0)
                parameter.add_(0.1 * noise)
            else:
                gain = query_key_gain if is_query_key else 1.0
                parameter.copy_(noise * gain / math.sqrt(parameter.shape[-1]))
        _scale_embeddings(model, embedding)
    return model


def _scale_embeddings(model: PreTrainedModel, embedding: torch.nn.Module) -> None:
    """Gives what enters the first layer a standard deviation of at most 1, if the model shows it."""
    ids = torch.arange(3, 35)[None]
    try:
        states = model.eval()(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    except (TypeError, AttributeError, ValueError, RuntimeError):
        return  # wrappers with inputs or outputs of their own
    if states:
        embedding.weight.div_(max(1.0, states[0].std().item()))


def build(model_type: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A tiny model of `model_type` (a name that AutoConfig knows): float32, eager attention, eval mode."""
    config = AutoConfig.for_model(model_type, **{**_COMMON, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return prepare(energise(model, seed))


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Eval mode, and a generation config that never stops early by itself."""
    model.eval()
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    model.generation_config.eos_token_id = None
    model.generation_config.bos_token_id = None
    model.generation_config.do_sample = False
    return model


def _layers(*kinds: str) -> dict:
    """Config entries for an explicit layer pattern: "f" is full attention, "s" is sliding attention."""
    names = {"f": "full_attention", "s": "sliding_attention"}
    return dict(
        num_hidden_layers=len(kinds),
        layer_types=[names[kind] for kind in kinds],
        sliding_window=SLIDING_WINDOW,
    )


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: build("llama"),
    "mistral": lambda: build("mistral", sliding_window=SLIDING_WINDOW),
    "qwen2": lambda: build("qwen2", hidden_size=48, num_attention_heads=6),
    "qwen2_sliding": lambda: build(
        "qwen2",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=SLIDING_WINDOW,
        max_window_layers=1,
    ),
    "qwen3": lambda: build("qwen3", head_dim=16, num_key_value_heads=1),
    "qwen3_moe": lambda: build(
        "qwen3_moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
    ),
    "gemma2": lambda: build(
        "gemma2", head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=4.0, **_layers("s", "f")
    ),
    "gemma3": lambda: build("gemma3_text", head_dim=16, query_pre_attn_scalar=16, **_layers("s", "f", "s")),
    "phi3": lambda: build("phi3", num_key_value_heads=4),
    "gpt_oss": lambda: build(
        "gpt_oss",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **_layers("s", "f"),
    ),
    "cohere2": lambda: build("cohere2", logit_scale=0.5, **_layers("s", "f")),
    "olmo2": lambda: build("olmo2"),
    "granite": lambda: build(
        "granite", attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=2.0
    ),
    "glm4": lambda: build("glm4", head_dim=24),
}

# Families in which some layer has a sliding window, and those in which no layer attends to everything.
SLIDING = frozenset({"mistral", "qwen2_sliding", "gemma2", "gemma3", "gpt_oss", "cohere2"})
WITHOUT_FULL_ATTENTION = frozenset({"mistral"})


@functools.cache
def get_model(family: str) -> PreTrainedModel:
    """The model of `family`, built once per process. Tests must leave it unpatched, as they found it."""
    return FAMILIES[family]()


@functools.cache
def get_draft_model(family: str, noise: float = 0.15) -> PreTrainedModel:
    """A draft for assisted decoding: the same model with noise on its weights, so that it is partly right."""
    draft = FAMILIES[family]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return draft


def family_of(model: PreTrainedModel) -> str:
    """The family whose `get_model` returned `model`."""
    for family in FAMILIES:
        if get_model(family) is model:
            return family
    raise LookupError(f"{type(model).__name__} did not come from get_model")
