"""Decode-true evaluation: passkey, multi-key needles, verbatim copy, and KL against dense attention."""
from __future__ import annotations

from .decoding import DenseDecodeError, Reading, answer, check_sparse, divergence, prefill
from .report import Answer, Report, Summary
from .runner import TASKS, build_samples, evaluate
from .samples import Haystack, Question, Sample
from .text import default_paragraphs, load_paragraphs

__all__ = [
    "Answer", "DenseDecodeError", "Haystack", "Question", "Reading", "Report", "Sample", "Summary", "TASKS", "answer",
    "build_samples", "check_sparse", "default_paragraphs", "divergence", "evaluate", "load_paragraphs", "prefill",
]
