"""Multi-head latent attention without positions: the expanded and the absorbed form of the same function.

Letters: N sequences (padded), Q new queries, L keys, H heads, R latent width, A pe width, K nope width, V value width.
"""

from __future__ import annotations

import torch


def _causal_softmax(scores_NHQL: torch.Tensor, offsets_N: torch.Tensor) -> torch.Tensor:
    num_queries, num_keys = scores_NHQL.shape[-2:]
    device = scores_NHQL.device
    position_NQ = offsets_N.unsqueeze(1) + torch.arange(num_queries, device=device)
    hidden_NQL = torch.arange(num_keys, device=device) > position_NQ.unsqueeze(-1)
    wide = scores_NHQL.float() if scores_NHQL.dtype in (torch.bfloat16, torch.float16) else scores_NHQL
    return torch.softmax(wide.masked_fill(hidden_NQL.unsqueeze(1), float("-inf")), dim=-1)


def mla_expanded(
    q_NQHX: torch.Tensor, latent_NLX: torch.Tensor, kv_b_HXR: torch.Tensor, key_dim: int, offsets_N: torch.Tensor
) -> torch.Tensor:
    """Attention over keys and values expanded from the latents; query i of sequence n sees keys 0..offsets[n]+i.

    Args:
        q_NQHX: [N, Q, H, K + A], nope part first.
        latent_NLX: [N, L, R + A], normalised latent and k_pe.
        kv_b_HXR: [H, K + V, R], rows of a head: keys, then values.
        key_dim: K.
        offsets_N: [N] int64, tokens before the first query.

    Returns:
        [N, Q, H, V], softmax in float32.
    """
    rank = kv_b_HXR.shape[-1]
    expanded_NLHX = torch.einsum("nlr,hxr->nlhx", latent_NLX[..., :rank], kv_b_HXR)
    k_NLHK, v_NLHV = expanded_NLHX[..., :key_dim], expanded_NLHX[..., key_dim:]
    pe_NLA = latent_NLX[..., rank:]
    scores = torch.einsum("nqhk,nlhk->nhql", q_NQHX[..., :key_dim], k_NLHK)
    scores = scores + torch.einsum("nqha,nla->nhql", q_NQHX[..., key_dim:], pe_NLA)
    weights_NHQL = _causal_softmax(scores * q_NQHX.shape[-1] ** -0.5, offsets_N)
    return torch.einsum("nhql,nlhv->nqhv", weights_NHQL, v_NLHV.to(weights_NHQL.dtype)).to(q_NQHX.dtype)


def mla_weights(
    q_NQHX: torch.Tensor, latent_NLX: torch.Tensor, kv_b_HXR: torch.Tensor, key_dim: int, offsets_N: torch.Tensor
) -> torch.Tensor:
    """The attention weights [N, H, Q, L], at least float32, by the absorbed form. Arguments as :func:`mla_expanded`."""
    num, queries, heads, width = q_NQHX.shape
    q_lat_NQHR = torch.einsum("nqhk,hkr->nqhr", q_NQHX[..., :key_dim], kv_b_HXR[:, :key_dim])
    q_all = torch.cat([q_lat_NQHR, q_NQHX[..., key_dim:]], dim=-1).transpose(1, 2)
    q_all = q_all.reshape(num, heads * queries, latent_NLX.shape[-1])
    scores = torch.bmm(q_all, latent_NLX.transpose(1, 2)).view(num, heads, queries, latent_NLX.shape[1])
    return _causal_softmax(scores * width**-0.5, offsets_N)


def mla_absorbed(
    q_NQHX: torch.Tensor, latent_NLX: torch.Tensor, kv_b_HXR: torch.Tensor, key_dim: int, offsets_N: torch.Tensor
) -> torch.Tensor:
    """The same as :func:`mla_expanded` without expanding the latents: one key head of width R + A, value width R."""
    rank = kv_b_HXR.shape[-1]
    num, queries, heads, _ = q_NQHX.shape
    weights_NHQL = mla_weights(q_NQHX, latent_NLX, kv_b_HXR, key_dim, offsets_N)
    flat = weights_NHQL.reshape(num, heads * queries, latent_NLX.shape[1])
    o_lat = torch.bmm(flat, latent_NLX[..., :rank].to(flat.dtype)).view(num, heads, queries, rank)
    return torch.einsum("nhqr,hvr->nqhv", o_lat, kv_b_HXR[:, key_dim:].to(o_lat.dtype)).to(q_NQHX.dtype)
