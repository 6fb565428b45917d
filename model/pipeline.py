"""Layers spread over processes, and micro-batches that run through them. Letters: T tokens, D width, L layers.

Each rank has a stage: consecutive layers, the first stage also the embedding, the last also the final norm and heads
(:attr:`k3rl.model.transformer.K3Model.stages`). With attention residuals a stage begins where a block does. What goes
from stage to stage is what the layers read, [T, D] each: the blocks that are finished and the stream. Every rank has
the batches, so that their shapes are known before they come. Gradients go back the same way.

Stages take turns as in 1F1B (PipeDream-Flush, https://arxiv.org/abs/2006.09503): first one forward for each stage that
is still to come, then a backward after every forward. The schedules of torch.distributed.pipelining are not used: they
want micro-batches of one shape, and at least as many as there are stages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from k3rl.errors import ConfigError
from k3rl.model.config import active_parameters
from k3rl.model.context import ContextShare
from k3rl.model.layers import Elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from k3rl.config import ModelConfig
    from k3rl.model.batch import TokenBatch
    from k3rl.model.transformer import K3Model

Result = TypeVar("Result")


def stage_borders(config: ModelConfig, stages: int) -> list[int]:
    """First layer of each stage, and L: cut so that the dearest stage costs as little as it may.

    The cost is the parameters that a token's forward reads; attention's growth with length is left out.

    Raises:
        ConfigError: there are fewer blocks, or layers where there are no blocks, than stages.
    """
    *costs, after = active_parameters(config)
    costs[-1] += after
    block = config.attn_res_block or 1
    starts = range(0, len(costs), block)
    if len(starts) < stages:
        key, what = (
            ("num_layers", "layers") if config.attn_res_block is None else ("attn_res_block", "blocks of layers")
        )
        raise ConfigError(f"model.{key}: {len(starts)} {what} cannot be cut into {stages} stages")

    @functools.cache
    def cut(first: int, left: int) -> tuple[int, ...]:
        """Cost of the dearest of the last ``left`` stages, which begin at layer ``first``, and where each begins."""
        if left == 1:
            return sum(costs[first:]), first
        found: list[tuple[int, ...]] = []
        for border in starts[first // block + 1 : len(starts) - left + 2]:
            dearest, *others = cut(border, left - 1)
            found.append((max(sum(costs[first:border]), dearest), first, *others))
        return min(found)

    return [*cut(0, stages)[1:], len(costs)]


def keep_stage(model: K3Model, stage: int, stages: int) -> None:
    """Release all of a model but one stage. What stays keeps its names.

    Raises:
        ConfigError: as :func:`stage_borders`.
    """
    borders = stage_borders(model.config, stages)
    for name, _ in list(model.named_children()):
        if name != "layers" and range(stages)[model.stages[name]] != stage:
            setattr(model, name, Elsewhere())
    for index in range(model.config.num_layers):
        if index not in range(*borders[stage : stage + 2]):
            model.layers[index] = Elsewhere()


def gather_stages(state: dict[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The state of the whole model, on every rank, from that of each stage: what a checkpoint holds.

    Args:
        state: of this stage, as in ``state_dict``; :func:`k3rl.model.parallel.gather_state` gives it if it is cut too.
        group: the stages.
    """
    shapes: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(shapes, {name: (x.shape, x.dtype) for name, x in state.items()}, group=group)
    device = next(iter(state.values())).device
    whole: dict[str, torch.Tensor] = {}
    for stage, held in enumerate(shapes):
        for name, (shape, dtype) in held.items():
            mine = stage == dist.get_rank(group)
            whole[name] = state[name].contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(whole[name], group=group, group_src=stage)
    return whole


class Step(NamedTuple):
    """A stage's forward or backward of one micro-batch."""

    forward: bool
    part: int


def one_forward_one_backward(stage: int, stages: int, parts: int) -> list[Step]:
    """The order in which a stage works on ``parts`` micro-batches; at most ``stages - stage`` wait for a backward."""
    ahead = min(stages - 1 - stage, parts)
    forwards, backwards = ([Step(forward, i) for i in range(parts)] for forward in (True, False))
    turns = zip(forwards[ahead:], backwards[: parts - ahead], strict=True)
    return [*forwards[:ahead], *(step for turn in turns for step in turn), *backwards[parts - ahead :]]


@dataclass(frozen=True, slots=True)
class StageOutput(Generic[Result]):
    """What a stage found in one micro-batch."""

    result: Result | None  # on the last stage
    routes: torch.Tensor | None  # as in ForwardOutput, of this stage's layers
    stats: dict[str, torch.Tensor]  # the same


class PipelineStage:
    """This rank's stage of a model, which all ranks of ``group`` have alike; the rest of it is released.

    An optimiser is made afterwards. All parameters are of one type, which what stages send has too. Experts and tensors
    may be cut as well, before or after, over ranks that have the same stage; over those, gradients and balancers'
    counts are summed. A rank that raises leaves the others to the group's timeout.
    """

    def __init__(self, model: K3Model, group: dist.ProcessGroup) -> None:
        """ConfigError: the model has too few blocks, or layers where it has no blocks."""
        self._model, self._group = model, group
        self._stage, self._stages = dist.get_rank(group), dist.get_world_size(group)
        first = stage_borders(model.config, self._stages)[self._stage]
        self._num_sources = 1 if model.config.attn_res_block is None else 1 + first // model.config.attn_res_block
        keep_stage(model, self._stage, self._stages)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self._stage == self._stages - 1

    def forward_backward(
        self,
        parts: Sequence[TokenBatch | ContextShare],
        loss: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> list[StageOutput[torch.Tensor]]:
        """Add the gradient of the sum of all micro-batches' losses to ``.grad``.

        Args:
            parts: micro-batches, the same on all ranks of the group, each of at least one token.
            loss: from i and the hidden [T, D] of micro-batch i to a scalar; called on the last stage. It must read the
                hidden, if only times zero.

        Returns:
            For each micro-batch; the result is its loss, detached.

        Raises:
            ValueError: the ranks' micro-batches differ in number or length, or one is empty.
        """
        steps = one_forward_one_backward(self._stage, self._stages, len(parts))
        return self._run(steps, parts, loss)

    @torch.no_grad()
    def forward(
        self, parts: Sequence[TokenBatch | ContextShare], read: Callable[[int, torch.Tensor], Result]
    ) -> list[StageOutput[Result]]:
        """Run without gradients. ``read``, errors and what is returned are as in :meth:`forward_backward`."""
        return self._run([Step(True, i) for i in range(len(parts))], parts, read)

    def _run(
        self,
        steps: Sequence[Step],
        parts: Sequence[TokenBatch | ContextShare],
        head: Callable[[int, torch.Tensor], Any],
    ) -> list[StageOutput[Any]]:
        self._agree([len(_batch(part).ids) for part in parts])
        outputs: list[StageOutput[Any]] = []
        waiting: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # for their backward: inputs and outputs
        sends: list[dist.P2POp] = []
        for forward, i in steps:
            # What one step gives goes out with what the next one needs: neighbours that send to each other at the same
            # time would else both wait (NCCL).
            if forward:
                inputs = self._blank(len(_batch(parts[i]).ids))
                self._exchange(sends + self._ops(dist.irecv, inputs, self._stage - 1))
                given, output = self._forward(i, parts[i], inputs, head)
                outputs.append(output)
                if torch.is_grad_enabled():
                    waiting[i] = inputs, given
                sends = self._ops(dist.isend, (x.contiguous() for x in given), self._stage + 1)
            else:
                inputs, given = waiting.pop(i)
                # A loss's own; others are written over by what comes from the next stage.
                grads = [torch.ones_like(x, memory_format=torch.contiguous_format) for x in given]
                self._exchange(sends + self._ops(dist.irecv, grads, self._stage + 1))
                torch.autograd.backward(given, grads)
                sends = self._ops(dist.isend, (_gradient(x) for x in inputs), self._stage - 1)
        self._exchange(sends)
        return outputs

    def _agree(self, lengths: list[int]) -> None:
        found: list[list[int]] = [[]] * self._stages
        dist.all_gather_object(found, lengths, group=self._group)
        if any(other != lengths for other in found):
            raise ValueError(f"the stages were given micro-batches of different lengths: {found}")
        if 0 in lengths:
            raise ValueError(f"a micro-batch has no token: {lengths}")

    def _blank(self, tokens: int) -> list[torch.Tensor]:
        """Room for what comes from the stage before; nothing on the first."""
        like = next(self._model.parameters())
        num = 0 if self._stage == 0 else self._num_sources
        return [like.new_empty(tokens, self._model.config.hidden_size) for _ in range(num)]

    def _forward(
        self,
        index: int,
        part: TokenBatch | ContextShare,
        inputs: list[torch.Tensor],
        head: Callable[[int, torch.Tensor], Any],
    ) -> tuple[list[torch.Tensor], StageOutput[Any]]:
        """What the backward starts from, which is also what the next stage gets; and what is reported."""
        model, batch = self._model, _batch(part)
        memory = model.begin(batch, part if isinstance(part, ContextShare) else None)
        sources = inputs or [model.embed_tokens(batch.ids)]
        for source in sources:
            source.requires_grad_(torch.is_grad_enabled())  # a frozen embedding's too: each has a gradient to send
        sources, routes, stats = model.run_layers(sources, batch, memory)
        assert {x.dtype for x in sources} == {next(model.parameters()).dtype}, (
            "the next stage expects its parameters' type"
        )
        if not self.is_last:
            return sources, StageOutput(None, routes, stats)
        result = head(index, model.read_out(sources))
        reported = result.detach() if torch.is_grad_enabled() else result
        return [result], StageOutput(reported, routes, stats)

    def _ops(self, op: Callable[..., Any], tensors: Iterable[torch.Tensor], peer: int) -> list[dist.P2POp]:
        """To or from a neighbour; nothing where there is none."""
        if peer not in range(self._stages):
            return []
        return [dist.P2POp(op, x.detach(), group=self._group, group_peer=peer) for x in tensors]

    def _exchange(self, ops: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()


def _batch(part: TokenBatch | ContextShare) -> TokenBatch:
    return part.batch if isinstance(part, ContextShare) else part


def _gradient(source: torch.Tensor) -> torch.Tensor:
    assert source.grad is not None, "a loss must read its hidden, if only times zero"
    return source.grad.contiguous()
