"""A benchmark's prompt, as text, in two parts: the context, which is prefilled, and the question, which decodes sparsely."""
from __future__ import annotations

from .samples import Haystack


def split(tokenizer, text: str, question: str, chat: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a prompt up to where its question begins, and of the rest.

    Together they are the ids of the whole: a token across the border belongs to the question.

    Args:
        text: the whole prompt.
        question: the end of it.
        chat: as a user's message in the tokenizer's chat template, if it has one; what the template puts behind the
            message belongs to the question.

    Raises:
        ValueError: there is nothing before the question, or the template leaves the message out.
    """
    encode = Haystack([], tokenizer)
    at = len(text) - len(question)
    if chat and tokenizer.chat_template:
        bare = text.strip()                                 # many templates strip messages
        at = max(0, min(at - (len(text) - len(text.lstrip())), len(bare)))
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        if bare not in text:
            raise ValueError("the tokenizer's chat template changes a message, so context and question can't be told apart; "
                             "set tokenizer.chat_template = None to ask without it")
        at += text.index(bare)
    bos = tokenizer.bos_token                               # templates write it themselves
    start = [] if bos and text.startswith(bos) else encode.start()
    prefix, whole = encode.encode(text[:at]), encode.encode(text)
    shared = 0
    while shared < min(len(prefix), len(whole) - 1) and prefix[shared] == whole[shared]:
        shared += 1
    if not start + whole[:shared]:
        raise ValueError("the prompt has no context before its question")
    return tuple(start + whole[:shared]), tuple(whole[shared:])
