"""Counters of a layer. Kept as tensors on its device; only `as_dict` synchronises."""
from __future__ import annotations

import torch


class LayerStats:
    """What the decode steps of one layer read and gathered."""

    def __init__(self, record_steps: int):
        self.steps = self.sparse_steps = self.reference_steps = self.materialized = 0
        self.record_steps, self.group = record_steps, 0     # query heads of a KV head
        self.read = self.held = self.coverage = self.true_coverage = None
        self.captured = self.history = self.counters = None

    def record(self, read, held, mass, coverage, true_mass, sinks) -> None:
        """One sparse step.

        Args:
            read: [B, H] blocks read; held: [B] blocks there are; mass: [B, H, G] captured log mass;
            coverage: [B, H, G] estimated; true_mass: [B, H, G] log mass of everything, or None.
        """
        if self.read is None:
            self.read, self.held, self.coverage, self.true_coverage = (
                torch.zeros((), dtype=torch.float64, device=read.device) for _ in range(4))
            if self.record_steps:
                self.history = torch.zeros(self.record_steps, device=read.device)
        heads = read.shape[1]
        if self.sparse_steps < self.record_steps:
            self.history[self.sparse_steps] = read.float().mean()
        self.sparse_steps += 1
        self.reference_steps += 1
        self.read += read.sum()
        self.held += held.sum() * heads
        self.coverage += coverage.double().mean()
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
        """Counters fp64 [4] (blocks read, blocks held, coverage, rows and heads) and captured log mass
        fp32 [batch, heads, group_pad] that kernels write. They stay where they are as long as these sizes do."""
        self.group = group
        if self.counters is None:
            self.counters = torch.zeros(4, dtype=torch.float64, device=device)
        if self.captured is None or self.captured.shape != (batch, heads, group_pad):
            self.captured = torch.zeros(batch, heads, group_pad, device=device)
        return self.counters, self.captured

    def as_dict(self, index: int, kind: str, verify: bool) -> dict:
        read, held = (0.0, 0.0) if self.read is None else (float(self.read), float(self.held))
        steps = self.sparse_steps
        coverage = 0.0 if self.coverage is None else float(self.coverage)
        if self.counters is not None:
            more = self.counters.tolist()
            read, held = read + more[0], held + more[1]
            # Kernels add each row and head; a step is their mean.
            counted = steps - (self.reference_steps if self.coverage is not None else 0)
            coverage += more[2] / more[3] * counted if more[3] else 0.0
        return {
            "layer": index, "kind": kind, "steps": self.steps, "sparse_steps": steps,
            "blocks_read": read, "blocks_held": held, "kv_fraction": read / held if held else None,
            "captured_log_mass": None if self.captured is None else self.captured[..., :self.group].flatten(1).tolist(),
            "coverage": coverage / steps if steps else None,
            "coverage_true": float(self.true_coverage) / steps if steps and verify else None,
            "history": [] if self.history is None else self.history[:steps].tolist(),
        }
