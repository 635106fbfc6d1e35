"""What is stored beside the current stream, with streams that only take notes."""

from __future__ import annotations

import torch

from hf_sparse.kernels.host_link import HostLink

GPU = torch.device("cuda", 0)


class Stream:
    """A CUDA stream that notes what it waits for."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.log.append(f"on {self.name}")

    def __exit__(self, *error):
        self.log.append("back")


class Tensor:
    def __init__(self, log):
        self.log = log

    def record_stream(self, stream):
        self.log.append(f"kept for {stream.name}")


def test_what_runs_beside(monkeypatch):
    """It comes after what was launched before it; whoever joins comes after it, and so does the next that runs beside."""
    log = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main", log))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    link = HostLink(GPU)
    link.join()
    assert log == []
    launched = ["side waits for main", "kept for side", "kept for side", "on side", "work", "back"]
    link.run_beside(lambda: log.append("work"), Tensor(log), Tensor(log))
    assert log == launched
    link.run_beside(lambda: log.append("work"), Tensor(log), Tensor(log))
    assert log == [*launched, "main waits for side", *launched]
    log.clear()
    link.join()
    link.join()
    assert log == ["main waits for side"]
