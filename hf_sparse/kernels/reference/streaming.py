"""Streaming heads (LServe, arXiv 2502.14866, section 3.3): the first tokens and the last ones, kept in a ring.

Column c of a ring of C columns holds token c if c < sink, else the newest token t with (t - sink) % (C - sink) == c - sink.
"""
from __future__ import annotations

import torch

from .dense import exact_attention


def ring_columns(tokens: torch.Tensor, sink: int, columns: int) -> torch.Tensor:
    """Columns of tokens, int64 of any shape."""
    return torch.where(tokens < sink, tokens, sink + (tokens - sink).clamp(min=0) % (columns - sink))


def ring_tokens(lengths: torch.Tensor, sink: int, columns: int) -> torch.Tensor:
    """[B, C] the token in each column of rows of `lengths` [B] tokens; negative: none yet."""
    column = torch.arange(columns, device=lengths.device)
    newest, ring = lengths[:, None] - 1, columns - sink
    last = newest - (newest - column) % ring                # newest token of this column; (newest - sink) - (column - sink)
    last = torch.where(last < sink, -1, last)
    return torch.where(column < sink, torch.where(column <= newest, column, -1), last)


def ring_step(keys, values, lengths, query, new_keys, new_values, sink: int, window: int, slack: int, min_context: int,
              scaling: float, softcap: float, sinks, valid=None) -> torch.Tensor:
    """Store one token of every row, and attend to the first `sink` tokens and the last `window`.

    Args:
        keys, values: [B, H, C, D] and [B, H, C, Dv], written; C - sink - slack >= window.
        lengths: [B, H] int64 tokens stored, counted up.
        query: [B, H * G, 1, D]. new_keys, new_values: [B, H, 1, D] and [B, H, 1, Dv].
        slack: columns that may hold tokens taken back, in place of those that were there before.
        min_context: rows that are shorter, the new token included, see all that the ring surely holds.

        valid: [B] bool, rows whose token is no padding; None: all. The others' does not count, and their queries give zeros.

    Returns:
        [B, H * G, 1, Dv]
    """
    columns, before = keys.shape[2], lengths[:, 0].clone()
    at = ring_columns(before, sink, columns)[:, None, None, None]
    # Padding goes where the row's next token will, over one that no query sees any more.
    keys.scatter_(2, at.expand(-1, keys.shape[1], -1, keys.shape[3]), new_keys.to(keys.dtype))
    values.scatter_(2, at.expand(-1, values.shape[1], -1, values.shape[3]), new_values.to(values.dtype))
    lengths += 1 if valid is None else valid[:, None]
    now = lengths[:, 0]
    token = ring_tokens(now, sink, columns)
    window = torch.where(now < min_context, columns - sink - slack, window)
    first = (now - window)[:, None]
    seen = (token >= 0) & ((token < sink) | (token >= first))
    output = exact_attention(query, keys, values, seen[:, None, None], scaling, softcap, sinks)
    return output if valid is None else output.masked_fill(~valid[:, None, None, None], 0.0)
