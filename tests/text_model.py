"""A tiny random model that reads text: a small byte-pair tokenizer trained here, and a llama of two layers.

It answers nothing right, but everything that surrounds the answers (samples, decoding, reports, commands, examples)
runs on it in milliseconds and without a download.
"""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_sparse.evaluation import default_paragraphs
from tests.models import build

CONTEXT = 2048
VOCABULARY = 1024
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(default_paragraphs(), trainer)
    return tokenizer.to_str()


def text_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """`bos`: put a token before every text, as llama and gemma do."""
    tokenizer = Tokenizer.from_str(_trained())
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
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
    return build("llama", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)


def save_text_model(path) -> None:
    """A model directory as anyone would have it: model and tokenizer."""
    text_model().save_pretrained(path)
    text_tokenizer().save_pretrained(path)
