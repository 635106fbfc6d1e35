"""The evaluation's copy of the kernels' choice of blocks against the kernels themselves, interpreted."""
from __future__ import annotations

import math

import pytest
import torch

from hf_sparse import PSAConfig
from hf_sparse.evaluation.choosing import Seen, choose
from hf_sparse.evaluation.policies import parse_policy
from tests.triton.test_decode_kernels import make_twins

P = 16


def masses(layer, query):
    """The scaled query [B, H, G, D], and the true log mass of every block [B, H, G, N]."""
    keys, _ = layer._compact()
    query = query.float().squeeze(2).unflatten(1, (layer.heads, -1)) * layer.key_dim**-0.5
    logits = torch.einsum("bhgd,bhtd->bhgt", query, keys.float())
    beyond = torch.arange(keys.shape[2]) >= layer.lengths[:, None]
    return query, logits.masked_fill(beyond[:, None, None], -math.inf).unflatten(-1, (-1, P)).logsumexp(-1)


@pytest.mark.parametrize(
    ("name", "seed", "extends"),
    [
        ("psa@0.7", 0, True),
        ("psa@0.7/group_stop=min", 0, True),
        ("topp@0.6", 0, False),
        ("psa@0.8/max_blocks=20", 0, False),
        ("psa@0.5/min_blocks=24", 2, False),
    ],
    ids=lambda value: str(value).replace("/", "_"),
)
def test_the_same_blocks_are_read(name, seed, extends):
    policy = parse_policy(name, PSAConfig(min_context=0, block_size=P))
    assert policy.reading == "cut"
    fields = ("threshold", "policy", "top_p", "top_k", "group_stop", "min_blocks", "max_blocks")
    twins = make_twins(tokens=517, pads=(0,), seed=seed,
                       **{field: getattr(policy.config, field) for field in fields})
    ours, layer = twins.ours, twins.reference
    before, more = 0.0, 0
    for _ in range(2):
        query, _, _ = twins.step(check_reference=False)
        (work,) = ours.state.step().work.values()
        read, planned = ours.stats.counters[0].item() - before, int(work.info[..., 0].sum())
        before = ours.stats.counters[0].item()
        query, true = masses(layer, query)
        start, total = layer.tail_start(layer.lengths), (layer.lengths + P - 1) // P
        block = torch.arange(true.shape[-1])
        forced = (block < total[:, None]) & ((block < 1) | (block >= start[:, None]))
        forced_mass = torch.where(forced[:, None, None], true, -math.inf).logsumexp(-1)
        estimate = ours.digests.score(query, int(layer.lengths[0] - 1) // ours.digests.digest.unit_tokens, 0.0)
        count = estimate.shape[-1]
        seen = Seen(estimate, true[..., :count], forced_mass, None, layer.lengths, start, forced.sum(1), total)
        chosen, _ = choose(policy, seen)
        every = torch.nn.functional.pad(chosen, (0, true.shape[-1] - count)) | forced[:, None]
        assert int(every.sum()) == read
        more += read - int(forced.sum()) * layer.heads - planned
        captured = torch.where(every[:, :, None], true, -math.inf).logsumexp(-1)
        assert torch.allclose(captured, ours.stats.captured[..., : captured.shape[-1]], atol=1e-5)
    assert (more > 0) == extends
