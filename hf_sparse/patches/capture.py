"""One call of a function, recorded as a CUDA graph and replayed with other inputs."""
from __future__ import annotations

import itertools

import torch
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, str, type(None))


def record(function, device: torch.device):
    """Capture what `function` enqueues on the GPU, without running it: a function that replays it and returns what
    `function` returned, the same memory each time."""
    graph = torch.cuda.CUDAGraph()
    # Other threads (streamers, data loaders) may use the GPU meanwhile.
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()

    def replay():
        graph.replay()
        return result

    return replay


class CapturedCall:
    """Calls of `function(**inputs)` with inputs of one signature.

    The first call runs the function (which compiles it), the second captures it, the others replay. A replay costs the
    host one copy an input and one launch, where a compiled function checks hundreds of guards first; what a guard
    would notice, `fingerprint` does.
    """

    def __init__(self, function, inputs: dict, device: torch.device):
        self.function, self.device = function, device
        self.fixed = dict(inputs)
        self.buffers = {name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)}
        self.fixed.update(self.buffers)
        self.calls = 0
        self.replay = None

    def __call__(self, inputs: dict):
        """The function's result, in memory of its own."""
        for name, buffer in self.buffers.items():
            buffer.copy_(inputs[name])
        self.calls += 1
        if self.calls == 1:
            return self.function(**self.fixed)
        if self.replay is None:
            self.replay = record(lambda: self.function(**self.fixed), self.device)
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.replay())


def signature(inputs: dict) -> tuple | None:
    """What must be equal for one capture to serve two calls; None if an input can't be given to a capture."""
    if not all(torch.is_tensor(value) or isinstance(value, _PLAIN) for value in inputs.values()):
        return None
    return tuple((name, value.shape, value.dtype) if torch.is_tensor(value) else (name, value)
                 for name, value in inputs.items())


def fingerprint(model) -> int:
    """A number that changes when weights move or modules, their hooks or plain settings change (adapters switched on or
    off, `train()`): what a captured call of the model has taken for granted."""
    seen: list = [tensor.data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())]
    for module in model.modules():
        seen += (id(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, value in module.__dict__.items():
            if isinstance(value, _PLAIN):
                seen += (name, value)
            elif isinstance(value, (list, tuple, set, dict)) and not name.startswith(("_forward", "_backward", "_modules")):
                seen.append(repr([item for item in (value.items() if isinstance(value, dict) else value)
                                  if _is_plain(item)]))
    return hash(tuple(seen))


def _is_plain(item) -> bool:
    return isinstance(item, _PLAIN) or isinstance(item, tuple) and all(isinstance(part, _PLAIN) for part in item)
