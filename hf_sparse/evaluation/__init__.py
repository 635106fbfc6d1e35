"""Decode-true evaluation: what sparse decoding loses against dense attention, and what it reads."""
from __future__ import annotations

from .cells import Cell, CellFile, model_id
from .decoding import DenseDecodeError, Reading, answer, answers, check_sparse, divergence, prefill
from .grid import Progress, run_grid
from .policies import Policy, parse_policies, parse_policy
from .samples import Haystack, Question, Sample
from .simulated import Context, Simulation, simulate
from .summary import Row, rows, rows_table
from .tasks import TASKS
from .text import default_paragraphs, load_paragraphs
from .work import build_samples, file_work, task_work

__all__ = [
    "Cell", "CellFile", "Context", "DenseDecodeError", "Haystack", "Policy", "Progress", "Question", "Reading", "Row",
    "Sample", "Simulation", "TASKS", "answer", "answers", "build_samples", "check_sparse", "default_paragraphs", "divergence",
    "file_work", "load_paragraphs", "model_id", "parse_policies", "parse_policy", "prefill", "rows", "rows_table", "run_grid",
    "simulate", "task_work",
]
