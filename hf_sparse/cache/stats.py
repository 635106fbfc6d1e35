"""Counters of a layer. Kept as tensors on its device; only `as_dict` synchronises."""
from __future__ import annotations

import torch


class LayerStats:
    """What the decode steps of one layer read and gathered."""

    def __init__(self, record_steps: int):
        self.steps = self.sparse_steps = self.materialized = 0
        self.record_steps = record_steps
        self.read = self.held = self.coverage = self.true_coverage = None
        self.captured = self.history = None

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
        self.read += read.sum()
        self.held += held.sum() * heads
        self.coverage += coverage.double().mean()
        self.captured = mass
        if true_mass is not None:
            if sinks is not None:
                mass, true_mass = torch.logaddexp(mass, sinks), torch.logaddexp(true_mass, sinks)
            self.true_coverage += torch.exp(mass.double() - true_mass.double()).clamp(max=1.0).mean()

    def as_dict(self, index: int, kind: str, verify: bool) -> dict:
        read, held = (0.0, 0.0) if self.read is None else (float(self.read), float(self.held))
        steps = self.sparse_steps
        return {
            "layer": index, "kind": kind, "steps": self.steps, "sparse_steps": steps,
            "blocks_read": read, "blocks_held": held, "kv_fraction": read / held if held else None,
            "captured_log_mass": None if self.captured is None else self.captured.flatten(1).tolist(),
            "coverage": float(self.coverage) / steps if steps else None,
            "coverage_true": float(self.true_coverage) / steps if steps and verify else None,
            "history": [] if self.history is None else self.history[:steps].tolist(),
        }
