"""The policy, of the Kimi K3 or the Kimi Linear family, and its one forward pass.

Letters: T tokens of the packed batch, N sequences, D model width, L mixture-of-experts layers, E experts, k per token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import nn

from k3rl.kernels.linear_logprob import linear_logprob
from k3rl.kernels.moe import expert_load
from k3rl.model.attn_res import AttnRes, PlainResidual, UnusedAttnRes
from k3rl.model.batch import ForwardOutput, PolicyCapabilities, TokenLogprobs
from k3rl.model.cache import ValueMemory
from k3rl.model.kda import KdaMixer, ShortConv
from k3rl.model.layers import WHOLE, Elsewhere, FeedForward, RMSNorm, activation, linear
from k3rl.model.mla import MlaMixer
from k3rl.model.moe import LatentMoE, SparseMoE
from k3rl.model.tape import Tape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import ModelConfig
    from k3rl.model.batch import TokenBatch
    from k3rl.model.cache import Cache, Memory, Past


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward, each reading a mix of the blocks so far, or the plain residual stream."""

    placements: ClassVar = {"input_layernorm.weight": WHOLE, "post_attention_layernorm.weight": WHOLE}

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        dim, eps, block = config.hidden_size, config.rms_norm_eps, config.attn_res_block
        self.starts_block = block is not None and index % block == 0
        self.self_attention_res, self.mlp_res = _residual(config, index), _residual(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        num_mla = sum(i < index for i in config.mla_layers)
        is_mla = index in config.mla_layers
        self.self_attn = MlaMixer(config, num_mla) if is_mla else KdaMixer(config, index - num_mla)
        self.route_slot = index - config.num_dense_layers  # among the layers with experts
        dense = self.route_slot < 0
        self.mlp = FeedForward(dim, config.dense_dim, activation(config)) if dense else None
        self.block_sparse_moe = None if dense else _experts(config)


def _residual(config: ModelConfig, index: int | None = None) -> nn.Module:
    if config.attn_res_block is None:
        return PlainResidual()
    return UnusedAttnRes(config.hidden_size) if index == 0 else AttnRes(config.hidden_size, config.rms_norm_eps)


def _experts(config: ModelConfig) -> SparseMoE:
    return SparseMoE(config) if config.latent_dim is None else LatentMoE(config, config.latent_dim)


class K3Model(nn.Module):
    """Embedding, layers, output head and an optional value head; equal seeds give equal weights.

    On the device ``meta`` it has shapes and no memory.
    """

    placements: ClassVar = {
        "embed_tokens.weight": WHOLE,
        "norm.weight": WHOLE,
        "lm_head.weight": WHOLE,
        "value_head.weight": WHOLE,
        "value_head.bias": WHOLE,
    }
    stages: ClassVar = {"embed_tokens": 0, "output_attn_res": -1, "norm": -1, "lm_head": -1, "value_head": -1}
    """Of a pipeline's stages, the one that holds each child but the layers (:mod:`k3rl.model.pipeline`)."""

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.capabilities = PolicyCapabilities(chunk=True, routes=True, value=config.value_head)
        with torch.device("meta"):  # every weight is filled below, from a generator of our own
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
            self.output_attn_res = _residual(config)
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = linear(config.hidden_size, config.vocab_size)
            self.value_head = nn.Linear(config.hidden_size, 1) if config.value_head else None
        if torch.device(device).type != "meta":
            self.to_empty(device="cpu")
            self.reset_parameters(seed)
            self.to(device)

    @property
    def moe_layers(self) -> list[SparseMoE]:
        return [x for x in self.modules() if isinstance(x, SparseMoE)]

    def muon_blocks(self) -> dict[str, int]:
        """Projections that Muon orthogonalises head by head (K3 report §2.5), with their number of heads."""
        per_head = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
        mixers = {n: x for n, x in self.named_modules() if isinstance(x, KdaMixer | MlaMixer)}
        names = ((f"{n}.{own}", x.heads) for n, x in mixers.items() for own, _ in x.named_parameters())
        return {name: heads for name, heads in names if name.split(".")[-2] in per_head}

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Fill all weights from a generator of their own, equal on every device: call it on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        for name, buffer in self.named_buffers():
            buffer.fill_(float(name.endswith("norm.weight")))
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, ShortConv):
                bound = module.weight.shape[-1] ** -0.5
                module.weight.uniform_(-bound, bound, generator=generator)
            else:
                for name, parameter in module.named_parameters(recurse=False):
                    if name == "A_log":
                        parameter.zero_()
                    elif name == "dt_bias":
                        _fill_dt_bias(parameter, generator)
                    else:
                        std = self.config.initializer_range or parameter.shape[-1] ** -0.5
                        parameter.normal_(0.0, std, generator=generator)
        for module in self.modules():
            if isinstance(module, AttnRes):
                module.proj.weight.zero_()
        if self.config.head_init == "embedding":
            self.lm_head.weight.copy_(self.embed_tokens.weight)
        if self.value_head is not None:
            self.value_head.weight.zero_()
            self.value_head.bias.zero_()

    def forward(self, batch: TokenBatch, cache: Past | None = None) -> ForwardOutput:
        """Run T packed tokens, each sequence continuing from its row of ``cache`` (from nothing when it is None).

        A :class:`k3rl.model.context.ContextShare` is a past too: its sequences begin on other ranks.
        """
        if cache is not None and cache.num_sequences != batch.num_sequences:
            raise ValueError(f"the batch has {batch.num_sequences} sequences and the cache {cache.num_sequences}")
        if len(batch.ids) == 0:
            return self._nothing(cache)
        memory = self.begin(batch, cache)
        sources, routes, stats = self.run_layers([self.embed_tokens(batch.ids)], batch, memory)
        return ForwardOutput(self.read_out(sources), memory.finish(), routes, stats)

    def begin(self, batch: TokenBatch, past: Past | None) -> Memory:
        """What the layers of one forward read and write."""
        return ValueMemory.fresh(self.config, batch.cu_seqlens) if past is None else past.begin(batch.cu_seqlens)

    def run_layers(
        self, sources: Sequence[torch.Tensor], batch: TokenBatch, memory: Memory
    ) -> tuple[list[torch.Tensor], torch.Tensor | None, dict[str, torch.Tensor]]:
        """Run the layers that this rank has, one after the other.

        Args:
            sources: [T, D] each: the blocks that are finished, and the stream. Before the first layer, the embedding.
            batch: all of its tokens, with the routes of all layers.
            memory: of this forward.

        Returns:
            Sources for what comes after; ``routes`` and ``stats`` as in ForwardOutput, of the layers that were run.
        """
        *bank, prefix = sources
        routes: list[torch.Tensor] = []
        monitors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in self.layers:
            if isinstance(layer, Elsewhere):
                continue
            assert isinstance(layer, DecoderLayer)
            hidden = layer.self_attention_res([*bank, prefix])
            if layer.starts_block:
                bank.append(prefix)
            mixed = layer.self_attn(layer.input_layernorm(hidden), memory)
            prefix = mixed if layer.starts_block else prefix + mixed
            normed = layer.post_attention_layernorm(layer.mlp_res([*bank, prefix]))
            if layer.mlp is not None:
                prefix = prefix + layer.mlp(normed)
            elif layer.block_sparse_moe is not None:
                replay = None if batch.routes is None else batch.routes[:, layer.route_slot]
                out, ids, scores = layer.block_sparse_moe(normed, replay)
                routes.append(ids)
                if self.training:
                    monitors.append((expert_load(ids, self.config.num_experts), _routing_entropy(scores)))
                prefix = prefix + out
        stats: dict[str, torch.Tensor] = {}
        if monitors:
            loads, entropies = zip(*monitors, strict=True)
            stats = {"moe_load": torch.stack(loads), "moe_routing_entropy": torch.stack(entropies)}
            stats["tokens"] = torch.tensor(len(batch.ids))
        return [*bank, prefix], torch.stack(routes, 1) if routes else None, stats

    def read_out(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hidden [T, D] after the final norm, from the sources after the last layer."""
        return self.norm(self.output_attn_res(sources))

    def tape(self, num_rows: int) -> Tape:
        """For a walk over a tree of so many tokens, which runs its nodes one by one."""
        weight = self.embed_tokens.weight
        return Tape(self.config, num_rows, weight.device, weight.dtype)

    def _nothing(self, cache: Past | None) -> ForwardOutput:
        num_moe = len(self.moe_layers)
        weight = self.embed_tokens.weight
        routes = torch.zeros(0, num_moe, self.config.experts_per_token, dtype=torch.int64, device=weight.device)
        hidden = weight.new_zeros(0, self.config.hidden_size)
        # A past that is no cache always comes with tokens.
        return ForwardOutput(hidden, cast("Cache | None", cache), routes if num_moe else None)

    def token_logprobs(self, hidden_MD: torch.Tensor, targets_M: torch.Tensor, temperature: float) -> TokenLogprobs:
        """Log-probability of ``targets_M`` under softmax(head(hidden) / temperature), entropy and log-sum-exp."""
        return TokenLogprobs(*linear_logprob(hidden_MD, self.lm_head.weight, targets_M, temperature))

    def values(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Value estimates [M], at least float32."""
        if self.value_head is None:
            raise ValueError("this model has no value head; set model.value_head")
        values_M = self.value_head(hidden_MD).squeeze(-1)
        return values_M.to(torch.promote_types(values_M.dtype, torch.float32))


def _routing_entropy(scores_TE: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of a token's scores over all experts, summed over the tokens."""
    share = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)
    return -torch.xlogy(share, share).sum()


def _fill_dt_bias(bias: torch.Tensor, generator: torch.Generator) -> None:
    """Inverse softplus of a step size drawn log-uniformly from 0.001 to 0.1: retention 0.62 to 0.995 a token."""
    low, high = math.log(1e-3), math.log(1e-1)
    step = bias.uniform_(low, high, generator=generator).exp().clamp(min=1e-4)
    bias.copy_(step + torch.log(-torch.expm1(-step)))
