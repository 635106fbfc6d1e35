"""A tiny random model that reads text: a byte-level tokenizer made here, and a llama of two layers.

It answers nothing right, but everything that surrounds the answers (samples, decoding, reports, commands, examples) runs
on it in milliseconds and without a download.
"""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.models import build

CONTEXT = 2048
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def text_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte. `bos`: put a token before every text, as llama and gemma do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )


@functools.cache
def text_model() -> PreTrainedModel:
    """Unpatched, float32, for `text_tokenizer`; every test must leave it as it was."""
    return build("llama", vocab_size=259, max_position_embeddings=CONTEXT)
