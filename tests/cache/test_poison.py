"""NaN wherever nothing was written: results are finite and bit for bit what they are without."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cache.drive import Text, decode, feed


def poison(cache) -> int:
    """Overwrite all that no token is in: pool slots, host blocks, ends of blocks, digests to come, unused table entries.

    Returns how many floats became NaN.
    """
    count = 0

    def fill(tensor, where):
        nonlocal count
        if tensor.is_floating_point():
            tensor[where] = math.nan
            count += int(torch.as_tensor(where).sum()) if where.dtype == torch.bool else where.numel()
        else:
            tensor[where] = torch.iinfo(tensor.dtype).max

    layers = cache.sparse_layers
    pool = layers[0].pool
    used = torch.zeros(pool.ids, dtype=torch.bool)
    for layer in layers:
        blocks = -(-layer.lengths // layer.config.block_size)
        column = torch.arange(layer.table.shape[2])
        written = (column < blocks[:, None])[:, None].expand_as(layer.table)
        used[layer.table[written]] = True
        # Ids that are handed out but not written yet stay; entries without an id point at the poisoned scratch block.
        assert (layer.table[:, :, layer.columns :] == 0).all()
    if pool.tiered:
        fill(pool.host[: pool.ids], ~used)
        # A block that is being filled is ahead in its slot; closed ones are the same in both tiers.
        held = pool.block_in > 0
        fill(pool.kv, ~(held & used[pool.block_in]))
    else:
        fill(pool.kv, ~used)
    for layer in layers:
        P, D, Dv = layer.config.block_size, layer.key_dim, layer.value_dim
        for b, length in enumerate(layer.lengths.tolist()):
            if length % P:
                for h in range(layer.heads):
                    block = layer.table[b, h, length // P]
                    slot = pool.slot_of[block] if pool.tiered else block
                    row = pool.kv[slot]
                    row[: P * D].view(P, D)[length % P :] = math.nan
                    row[P * D : P * (D + Dv)].view(P, Dv)[length % P :] = math.nan
            store = layer.digests
            if store.unit and store.units_done is not None:
                for part in store.unit:
                    done = int(store.units_done[b])
                    rest = part[b, :, done:]
                    rest.fill_(math.nan if part.is_floating_point() else torch.iinfo(part.dtype).max)
                    count += rest.numel() if part.is_floating_point() else 0
    return count


SETTINGS = {
    "channel_codes": dict(threshold=0.7),
    "key_bits": dict(digest="key_bits", threshold=0.7),
    "min_max": dict(digest="min_max", stop_rule="window", threshold=0.7),
    "cuboid_mean": dict(digest="cuboid_mean", stop_rule="nleft", threshold=0.7),
    "centroid": dict(digest="centroid", stop_rule="paper", threshold=0.9),
    "top_k": dict(digest="centroid", policy="top_k", top_k=9),
    "top_p": dict(policy="top_p", top_p=0.7),
    "verify": dict(digest="key_bits", threshold=0.7, verify=True),
    "exact": dict(threshold=1.0),
    "dense": dict(min_context=10_000),
}


@pytest.mark.parametrize("pads", [[0, 0], [0, 41]], ids=["even", "ragged"])
@pytest.mark.parametrize("tiered", [False, True], ids=["resident", "tiered"])
@pytest.mark.parametrize("name", SETTINGS)
def test_decoding(name, tiered, pads):
    prompt = 263 if name in ("channel_codes", "top_p") else 70
    text = Text(rows=2, length=prompt + 8, layers=2, key_dim=8)
    settings = dict(
        round_blocks=2, **SETTINGS[name], **(dict(gpu_memory="200KiB", host_memory="2MiB") if tiered else {})
    )
    valid = torch.arange(prompt) >= torch.tensor(pads)[:, None] if any(pads) else None
    outputs = []
    for with_poison in (False, True):
        cache = text.cache(**settings)
        feed(cache, text, 0, prompt, valid)
        steps = []
        for position in range(prompt, prompt + 6):
            if with_poison:
                assert poison(cache) > 100
            steps.append(decode(cache, text, position, position + 1))
        if with_poison:
            poison(cache)
        steps.append(feed(cache, text, prompt + 6, prompt + 8))
        outputs.append(torch.cat(steps, 2))
    assert torch.isfinite(outputs[1]).all()
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("tiered", [False, True], ids=["resident", "tiered"])
@pytest.mark.parametrize("operation", ["reorder", "crop", "fork", "select", "repeat"])
def test_operations(operation, tiered):
    text = Text(rows=2, length=80, layers=2, key_dim=8)
    settings = dict(
        digest="key_bits",
        threshold=0.7,
        round_blocks=2,
        **(dict(gpu_memory="200KiB", host_memory="2MiB") if tiered else {}),
    )
    outputs = []
    for with_poison in (False, True):
        cache = text.cache(**settings)
        feed(cache, text, 0, 66)
        decode(cache, text, 66, 68)
        if with_poison:
            poison(cache)
        rows, start = [0, 1], 68
        if operation == "reorder":
            rows = [1, 1]
            cache.reorder_cache(torch.tensor(rows))
        elif operation == "crop":
            cache.crop(-9)
            start = 59
        elif operation == "fork":
            original, cache = cache, cache.fork()
            assert original.get_seq_length() == cache.get_seq_length()
        elif operation == "select":
            rows = [1]
            cache.batch_select_indices(torch.tensor(rows))
        else:
            rows = [0, 0, 1, 1]
            cache.batch_repeat_interleave(2)
        mine = text.select(rows)
        steps = []
        for position in range(start, start + 8):
            if (
                with_poison and operation != "fork"
            ):  # the other half of a fork still needs what looks unused from here
                poison(cache)
            steps.append(decode(cache, mine, position, position + 1))
        outputs.append(torch.cat(steps, 2))
    assert torch.isfinite(outputs[1]).all()
    assert torch.equal(outputs[0], outputs[1])
