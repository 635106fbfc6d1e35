"""The text of the evaluation's tests, and the tokenizer that reads it."""
from __future__ import annotations

import pytest

from hf_sparse.evaluation import Haystack, default_paragraphs
from tests.text_model import text_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return text_tokenizer()


@pytest.fixture(scope="session")
def haystack(tokenizer):
    return Haystack(default_paragraphs(), tokenizer)
