"""calibrate_heads: a profile of a model, measured on long text.

Prose alone under-rates the heads that retrieval needs: those look far back only where something in the text comes back. So
the end of every text is made of copies of passages of it, and queries are taken from both, from the second half of the prose
and from the copies. A head's gate is the larger of the two means, because it must stay whole if either needs it; for the same
reason a KV head gets the gate of its query head that loses most.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..cache.layer import PSALayer
from ..cache.psa_cache import PSACache
from ..compat import CACHE_ARGUMENT
from ..patches import support
from ..patches.model import patched
from .left_out import METHODS, left_out
from .profile import HeadProfile, fingerprint, full_attention_heads

PASSAGES = 4
# Queries of a text, of its prose and of its copies each.
QUERIES = 256
LEAST_TOKENS = 128
# No step of a calibration is sparse.
DENSE = dict(threshold=1.0, min_context=2**31)


@torch.no_grad()
def calibrate_heads(model, texts: Sequence[Sequence[int]], *, method: str = "mass", sink: int = 128, window: int = 256,
                    chunk: int = 1024, progress: Callable[[int, int], None] | None = None) -> HeadProfile:
    """Measure which KV heads of a model need the whole context.

    The model reads every text once, exactly, and for some hundred queries of each layer what they would lose is computed. That
    takes as long as a prefill of the texts, and memory for the keys and values of one text.

    Args:
        model: a transformers model that `patch_model` would serve sparse, patched or not; it is left as it was.
        texts: token ids, one sequence a text, all measured alike. The longer, the better: what is read in the end should not
            be much longer. The last eighth of each is replaced by copies of passages from all over it.
        method: what gates are. "mass": mean attention mass outside of sink and window; "output": mean relative error of a
            head's output without it, at most 1 for a query. Both are in [0, 1] by themselves and are not scaled.
        sink, window: tokens at the start, and newest ones, that a streaming head reads.
        chunk: tokens a forward.
        progress: called with (tokens done, tokens in all) after every forward.

    Returns:
        A HeadProfile; `about` says model, method, sink, window, texts and tokens.

    Raises:
        ValueError: texts too short or too long for the model, settings that make no sense, no full-attention layer.
        TypeError: texts that are not token ids. NotImplementedError: a model that can't be served sparse.
        FloatingPointError: attention that is not finite.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not known; choose one of {', '.join(METHODS)}.")
    for name, value, least in (("sink", sink, 0), ("window", window, 1), ("chunk", chunk, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}.")
    layers, heads = full_attention_heads(model.config)
    verdict = support.check(model)
    if verdict.kind == "dense":
        raise NotImplementedError(f"{type(model).__name__} is served dense, so none of its heads can stream: "
                                  f"{'; '.join(verdict.reasons)}.")
    contexts = [_ids(text, model, sink, window) for text in texts]
    if not contexts:
        raise ValueError("No text to calibrate on was given.")
    total, done = sum(map(len, contexts)), 0
    sums: dict[int, Tensor] = {}
    forward = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with patched(model, **DENSE):
        for ids in contexts:
            ids, *rows = repeat_passages(ids, sink, window)
            cache = PSACache(model.config, **DENSE)
            for layer in cache.sparse_layers:
                _Watched(layer, rows, sums, dict(sink=sink, window=window, method=method))
            for part in ids.to(model.device)[None].split(chunk, dim=1):
                model(input_ids=part, **{CACHE_ARGUMENT: cache}, use_cache=True, **forward)
                done += part.shape[1]
                if progress is not None:
                    progress(done, total)
    missing = sorted(set(layers) - set(sums))
    if missing:
        raise NotImplementedError(f"Attention of layer {missing[0]} of {type(model).__name__} does not go through its cache, "
                                  "so it can't be measured.")
    # [kind, Hq, 2] sums and counts -> the larger mean of a query head -> the largest of a KV head's
    means = [(sums[layer][..., 0] / sums[layer][..., 1]).amax(0).view(heads, -1).amax(-1).float().cpu() for layer in layers]
    gates = torch.stack(means)
    if not bool(torch.isfinite(gates).all()):
        row = int((~torch.isfinite(gates)).any(1).nonzero()[0])
        raise FloatingPointError(f"Attention of layer {layers[row]} is not finite; try a wider dtype.")
    about = {"model": fingerprint(model.config), "method": method, "sink": sink, "window": window, "texts": len(contexts),
             "tokens": total}
    return HeadProfile(gates.clamp(0, 1), layers, about)


def repeat_passages(ids: Tensor, sink: int, window: int) -> tuple[Tensor, list[int], list[int]]:
    """A text whose last eighth is copies of passages of it, and the queries to measure.

    Args:
        ids: [n] token ids, n at least LEAST_TOKENS and 4 * (sink + window).

    Returns:
        (ids [n], positions of at most QUERIES tokens of the second half of the prose, and of as many of the copies). No token
        of a passage is in the sink, or in the window of its copy.
    """
    size = len(ids) // (8 * PASSAGES)
    prose = len(ids) - PASSAGES * size
    room = prose - window - sink
    starts = [sink + (2 * i + 1) * room // (2 * PASSAGES) - size // 2 for i in range(PASSAGES)]
    ids = torch.cat([ids[:prose], *(ids[start:start + size] for start in starts)])
    skipped = min(8, size // 4)                             # a copy is not known as one from its first token
    copied = [prose + i * size + j for i in range(PASSAGES) for j in range(skipped, size)]
    return ids, _spread(list(range(prose // 2, prose))), _spread(copied)


def _spread(positions: list[int]) -> list[int]:
    count = min(QUERIES, len(positions))
    return [positions[i * len(positions) // count] for i in range(count)]


class _Watched:
    """A layer of one cache, which computes exact attention and adds up what the chosen queries would lose.

    Args:
        rows: positions of prose and of copies.
        sums: by layer, [2 kinds, Hq, 2] fp64: what was lost, and by how many queries.
    """

    def __init__(self, layer: PSALayer, rows: Sequence[list[int]], sums: dict[int, Tensor], settings: dict):
        self.layer, self.rows, self.sums, self.settings = layer, rows, sums, settings
        self.inner = layer.attend
        layer.attend = self.attend

    def attend(self, query, pending, valid, mask, scaling: float, softcap: float, sinks, dense_step):
        """See `PSALayer.attend`."""
        if mask is not None or valid is not None:
            raise NotImplementedError("This model attends by a pattern of its own, which a calibration does not know.")
        start = pending.start
        output = self.inner(query, pending, valid, mask, scaling, softcap, sinks, dense_step)
        chosen = [[row - start for row in rows if start <= row < start + query.shape[2]] for rows in self.rows]
        if any(chosen):
            keys, values = self.layer.padded()
            sums = self.sums.setdefault(self.layer.index, torch.zeros(2, query.shape[1], 2, dtype=torch.float64,
                                                                      device=query.device))
            for kind, rows in zip(sums, chosen):
                if rows:
                    places = torch.tensor(rows, device=query.device)
                    lost = left_out(query[0, :, places], keys[0], values[0], places + start, scaling=scaling, softcap=softcap,
                                    sinks=sinks, **self.settings)
                    kind += torch.stack([lost.double().sum(-1), lost.new_full(lost.shape[:1], len(rows)).double()], -1)
        return output


def _ids(text, model, sink: int, window: int) -> Tensor:
    """[n] int64 on the CPU."""
    try:
        ids = torch.as_tensor(text, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"texts are sequences of token ids, one a text; got a {type(text).__name__}.") from error
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError("texts are sequences of token ids, one a text (a single text is [ids]); "
                        f"got a {type(text).__name__} of shape {list(ids.shape)}.")
    least = max(LEAST_TOKENS, 4 * (sink + window))
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if len(ids) < least:
        raise ValueError(f"A text of {len(ids)} tokens is too short to tell heads apart with sink={sink} and window={window}; "
                         f"it takes {least}, and should be as long as what the model will read.")
    if limit is not None and len(ids) > limit:
        raise ValueError(f"A text has {len(ids)} tokens but the model's context is {limit}; cut it.")
    return ids.long()
