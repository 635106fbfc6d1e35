"""Drives a cache without a model: invented queries, keys and values go through it as a model's forward would send them.

Shapes that no small model has (value dim unlike key dim, odd groups, single KV heads) and exact control of what every
row holds are possible this way; tests/test_parity.py does the same with real model classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig

from hf_sparse import PSACache
from hf_sparse.patches.attention import psa_attention
from hf_sparse.sizes import parse_bytes


def model_config(layers: int = 2, heads: int = 2, group: int = 2, key_dim: int = 16, **more) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=heads * group * key_dim,
        head_dim=key_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads * group,
        num_key_value_heads=heads,
        **more,
    )


class Text:
    """Queries, keys and values of `layers` layers for `rows` rows of `length` tokens.

    Queries are scaled so that logits have a standard deviation of about `sharpness`: attention is peaked, as in real
    models, and blocks differ in mass.
    """

    def __init__(
        self,
        rows=1,
        length=100,
        layers=2,
        heads=2,
        group=2,
        key_dim=16,
        value_dim=None,
        dtype=torch.float32,
        seed=0,
        sharpness=2.5,
    ):
        value_dim = value_dim or key_dim
        self.rows, self.length, self.layers, self.heads, self.group = rows, length, layers, heads, group
        self.key_dim, self.value_dim, self.scaling = key_dim, value_dim, key_dim**-0.5
        generator = torch.Generator().manual_seed(seed)

        def draw(count, dim, gain=1.0):
            return [
                (gain * torch.randn(rows, count, length, dim, generator=generator)).to(dtype)
                for _ in range(layers)
            ]

        self.queries = draw(heads * group, key_dim, sharpness)
        self.keys, self.values = draw(heads, key_dim), draw(heads, value_dim)

    def config(self) -> LlamaConfig:
        return model_config(self.layers, self.heads, self.group, self.key_dim)

    def cache(self, **settings) -> PSACache:
        """A PSACache of small blocks that fits this text; `settings` are fields of PSAConfig."""
        return PSACache(self.config(), **{"block_size": 4, "min_context": 0, **settings})

    def select(self, rows, low: int = 0, high: int | None = None) -> Text:
        """The same tokens of some rows (a list of indices), and of positions low..high only."""
        new = object.__new__(Text)
        new.__dict__.update(self.__dict__)
        for name in ("queries", "keys", "values"):
            setattr(new, name, [part[rows, :, low:high] for part in getattr(self, name)])
        new.rows, new.length = len(rows), new.keys[0].shape[2]
        return new


def attention_module(group: int) -> torch.nn.Module:
    """What transformers' attention functions look at beside tensors."""
    module = torch.nn.Module().eval()
    module.num_key_value_groups = group
    return module


@torch.no_grad()
def feed(
    cache, text: Text, low: int, high: int, valid: Tensor | None = None, softcap=0.0, sinks=None
) -> Tensor:
    """One forward over positions low..high of `text`, through all layers.

    Args:
        valid: [B, high] bool, which tokens of everything so far are no padding; None: all.

    Returns:
        [layers, B, high - low, Hq, Dv]
    """
    outputs, module = [], attention_module(text.group)
    count = high - low
    mask = None
    if valid is not None and not bool(valid[:, low:high].all()):
        mask = valid[:, None, None, :high]
    elif count > 1:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(text.rows, 1, 1, high)
    for layer in range(text.layers):
        part = slice(low, high)
        keys, values = cache.update(text.keys[layer][:, :, part], text.values[layer][:, :, part], layer)
        output, _ = psa_attention(
            module,
            text.queries[layer][:, :, part],
            keys,
            values,
            mask,
            scaling=text.scaling,
            softcap=softcap or None,
            s_aux=sinks,
        )
        outputs.append(output)
    return torch.stack(outputs)


def decode(cache, text: Text, low: int, high: int, valid: Tensor | None = None, **kwargs) -> Tensor:
    """Positions low..high one token at a time: [layers, B, high - low, Hq, Dv]."""
    return torch.cat([feed(cache, text, i, i + 1, valid, **kwargs) for i in range(low, high)], 2)


def run(cache, text: Text, prompt: int, end: int, **kwargs) -> Tensor:
    """A prompt in one forward, then the rest token by token; returns what the decoded tokens gave."""
    feed(cache, text, 0, prompt, **kwargs)
    return decode(cache, text, prompt, end, **kwargs)


def required(error: ValueError) -> int:
    """The size that an error names."""
    return parse_bytes(re.search(r"at least ([\d.]+\w*B)", str(error)).group(1))


def smallest_budget(attempt: Callable[[int], object]) -> int:
    """The smallest budget that `attempt` takes, found as a user would: by taking the number that the last refusal named."""
    budget = 1
    for _ in range(3):  # at construction, which only knows the config; at the prompt, which knows the batch
        try:
            attempt(budget)
            return budget
        except ValueError as error:
            assert "gpu_memory=" in str(error) and "too small" in str(error)
            assert required(error) > budget
            budget = required(error)
    raise RuntimeError("the numbers in the errors do not lead to a working budget")
