"""Host tiers that kernels reach, and the stream on which prompts are written to them, or blocks fetched ahead."""
from __future__ import annotations

import torch


class HostLink:
    """A host tier that kernels on `device` reach.

    Prompts are stored on a stream of its own, so that the way to the host overlaps with the layer's attention. At most
    one layer's keys and values are held by it: whoever comes next waits (`join`).
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.outstanding = False

    def run_beside(self, function, *tensors: torch.Tensor) -> None:
        """Call `function()`, on the stream of its own where there are streams.

        Args:
            tensors: what it reads or writes that may be freed before `join`.
        """
        if self.device.type != "cuda":
            function()
            return
        self.join()
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.outstanding = True                             # also of a call that is interrupted
        for tensor in tensors:
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            function()

    def join(self) -> None:
        """What is launched from now on comes after what was run beside."""
        if self.outstanding:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            self.outstanding = False


# By the address of the host tier: ops are given nothing but its tensor.
LINKS: dict[int, HostLink] = {}


def link_of(host: torch.Tensor) -> HostLink | None:
    """The link of a host tier that kernels reach, else None."""
    return LINKS.get(host.data_ptr())
