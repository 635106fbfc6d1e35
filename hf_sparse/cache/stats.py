"""Counters of a layer. Kept as tensors on its device; only `as_dict` synchronises."""
from __future__ import annotations

import torch


class LayerStats:
    """What the decode steps of one layer read and gathered."""

    def __init__(self, record_steps: int):
        self.steps = self.sparse_steps = self.reference_steps = self.materialized = 0
        self.record_steps, self.group = record_steps, 0     # query heads of a KV head
        self.sums = self.true_coverage = None               # of the reference: see `device_buffers`
        self.captured = self.history = self.counters = None

    def record(self, read, held, mass, coverage, true_mass, sinks, fresh=None) -> None:
        """One sparse step.

        Args:
            read: [B, H] blocks read; held: [B] blocks there are; mass: [B, H, G] captured log mass;
            coverage: [B, H, G] estimated; true_mass: [B, H, G] log mass of everything, or None.
            fresh: [B, H] whether the selection is this token's own, and the coverage known; None: all are.
        """
        if self.sums is None:
            self.sums = torch.zeros(5, dtype=torch.float64, device=read.device)
            self.true_coverage = torch.zeros((), dtype=torch.float64, device=read.device)
            if self.record_steps:
                self.history = torch.zeros(self.record_steps, device=read.device)
        fresh = torch.ones_like(read, dtype=torch.bool) if fresh is None else fresh
        if self.sparse_steps < self.record_steps:
            self.history[self.sparse_steps] = read.float().mean()
        self.sparse_steps += 1
        self.reference_steps += 1
        covered = torch.where(fresh, coverage.double().mean(-1), 0.0)
        count = torch.ones_like(read).sum()
        self.sums += torch.stack([read.sum(), held.sum() * read.shape[1], covered.sum(), count, fresh.sum()])
        self.group = mass.shape[2]
        if self.captured is not None and self.captured.shape[:2] == mass.shape[:2] and self.captured.shape[2] >= self.group:
            self.captured[..., :self.group].copy_(mass)     # kernels know its address
        else:
            self.captured = mass
        if true_mass is not None:
            if sinks is not None:
                mass, true_mass = torch.logaddexp(mass, sinks), torch.logaddexp(true_mass, sinks)
            self.true_coverage += torch.exp(mass.double() - true_mass.double()).clamp(max=1.0).mean()

    def device_buffers(self, batch: int, heads: int, group: int, group_pad: int, device):
        """Counters fp64 [5] (blocks read, blocks held, coverage where a row and head has selected, rows and heads, those that
        have selected) and captured log mass fp32 [batch, heads, group_pad] that kernels write. They stay where they are as long as
        these sizes do."""
        self.group = group
        if self.counters is None:
            self.counters = torch.zeros(5, dtype=torch.float64, device=device)
        if self.captured is None or self.captured.shape != (batch, heads, group_pad):
            self.captured = torch.zeros(batch, heads, group_pad, device=device)
        return self.counters, self.captured

    def as_dict(self, index: int, kind: str, verify: bool) -> dict:
        steps, found = self.sparse_steps, [sums.tolist() for sums in (self.sums, self.counters) if sums is not None]
        read, held, coverage, count, selected = map(sum, zip(*found)) if found else [0.0] * 5
        return {
            "layer": index, "kind": kind, "steps": self.steps, "sparse_steps": steps,
            "blocks_read": int(read), "blocks_held": int(held), "kv_fraction": read / held if held else None,
            "captured_log_mass": None if self.captured is None else self.captured[..., :self.group].flatten(1).tolist(),
            "coverage": coverage / selected if selected else None,
            "coverage_true": float(self.true_coverage) / steps if steps and verify else None,
            "selected": selected / count if count else None,
            "history": [] if self.history is None else self.history[:steps].tolist(),
        }
