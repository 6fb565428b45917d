"""Every key of a run with its type, default and meaning: the reference manual of a configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from k3rl.errors import ConfigError, suggest

TILE_ROWS = 16
"""Rows of the sub-tile in which KDA forms exp(-cumulative decay) directly; see ``ModelConfig.kda_gate_bound``."""
MXFP4_BLOCK = 32
"""Columns that share a scale; see ``ModelConfig.expert_format``."""
RECORDED_REWARDS = ("outcome", "milestone")
"""Components that environments record; every other one needs an entry in ``reward_functions``."""


_MANY = 1e9
_RANGES = {
    "steps": (0, _MANY),
    "sft.max_steps": (0, _MANY),
    "sft.min_steps": (0, _MANY),
    "evaluation.every": (0, _MANY),
    "buffer.max_staleness": (0, _MANY),
    "rollout.max_failed_frac": (0, 1),
    "environment.step_timeout_s": (1e-3, _MANY),
    "rollout.timeout_s": (1e-3, _MANY),
    "rollout.reward_timeout_s": (1e-3, _MANY),
    "learner.timeout_s": (1e-3, _MANY),
    **{
        f"{phase}.optimizer.{key}": limits
        for phase in ("sft", "learner")
        for key, limits in {
            "lr": (0, _MANY),
            "weight_decay": (0, _MANY),
            "warmup_steps": (0, _MANY),
            "final_lr_frac": (0, 1),
            "max_grad_norm": (0, _MANY),
        }.items()
    },
}
"""Least and largest value of what has a range; nan lies in none."""


def _require(condition: bool, key: str, message: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: {message}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a model of the Kimi K3 or the Kimi Linear family. Every layer is KDA except those in ``mla_layers``.

    The defaults are K3's choices; where Kimi Linear differs, the key says so.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]
    """0-based indices of the gated-MLA layers."""
    num_heads: int
    kda_key_dim: int = 128
    kda_value_dim: int = 128
    kda_gate_rank: int = 128
    kda_gate_bound: float | None = -5.0
    """Per-token log decay lies in (bound, 0); exp(15 |bound|) must be finite in float32. None: Kimi Linear's unbounded
    softplus decay."""
    kda_output_gate_rank: int | None = None
    """Rank of KDA's output gate, None for full rank. Kimi Linear: the value width."""
    conv_kernel: int = 4
    q_lora_rank: int | None = 1536
    """None: queries are projected directly, as in Kimi Linear."""
    kv_lora_rank: int = 512
    qk_nope_dim: int = 128
    qk_rope_dim: int = 64
    """Named after the checkpoint; no rotation is ever applied to it."""
    v_head_dim: int = 128
    mla_output_gate: bool = True
    """Kimi Linear: false."""
    num_dense_layers: int = 1
    """Leading layers with a dense feed-forward in place of the mixture of experts."""
    dense_dim: int
    num_experts: int
    experts_per_token: int
    routed_scale: float = 1.0
    """Factor on the routed experts' weights. Kimi-Linear-48B: 2.446."""
    latent_dim: int | None
    """Width in which the experts live, with a norm after they are combined. None: the full width, as in Kimi Linear."""
    expert_dim: int
    shared_dim: int
    """Width of all shared experts together (they are one feed-forward)."""
    expert_format: Literal["plain", "mxfp4"] = "plain"
    """``mxfp4``: quantisation-aware training. Sampling, training and export all round the routed experts to MXFP4 in
    blocks of 32 inputs, so the width outside and inside an expert must be multiples of 32; what is trained stays
    float32."""
    attn_res_block: int | None
    """Layers per block of Block Attention Residuals. None: a plain residual stream, as in Kimi Linear."""
    activation: Literal["situ", "swiglu"] = "situ"
    """Kimi Linear: swiglu."""
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    mla_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    head_init: Literal["normal", "embedding"] = "normal"
    """``embedding`` starts the untied output head as a copy of the embedding: small models learn to copy sooner."""
    state_tile: Literal[16, 64] = 16
    """KDA checkpoints its state at multiples of this many tokens from the sequence's start."""
    value_head: bool = False

    def __post_init__(self) -> None:
        for name in (f.name for f in dataclasses.fields(self) if f.type in ("int", "int | None")):
            least = 0 if name == "num_dense_layers" else 1
            value = getattr(self, name)
            _require(value is None or value >= least, f"model.{name}", f"must be at least {least}, got {value}")
        if self.kda_gate_bound is not None:
            worst = abs(self.kda_gate_bound) * (TILE_ROWS - 1)
            _require(self.kda_gate_bound < 0, "model.kda_gate_bound", f"must be negative, got {self.kda_gate_bound}")
            _require(
                worst < 88,
                "model.kda_gate_bound",
                f"|{self.kda_gate_bound}| * {TILE_ROWS - 1} = {worst:g} overflows exp in float32; it must stay under "
                f"88 (bound above {-88 / (TILE_ROWS - 1):.3f})",
            )
        layers = set(self.mla_layers)
        _require(
            len(layers) == len(self.mla_layers) and all(0 <= i < self.num_layers for i in layers),
            "model.mla_layers",
            f"must be distinct layer indices from 0 to {self.num_layers - 1}, got {list(self.mla_layers)}",
        )
        _require(
            0 < self.experts_per_token < self.num_experts,
            "model.experts_per_token",
            f"must be from 1 to num_experts - 1 = {self.num_experts - 1}, got {self.experts_per_token}",
        )
        if self.expert_format == "mxfp4":
            for name in ("hidden_size" if self.latent_dim is None else "latent_dim", "expert_dim"):
                width = getattr(self, name)
                _require(
                    width % MXFP4_BLOCK == 0,
                    f"model.{name}",
                    f"must be a multiple of {MXFP4_BLOCK} for model.expert_format mxfp4, got {width}",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentConfig:
    """Where episodes come from and what cuts them."""

    id: str
    """Gymnasium id, name from the entry-point group ``k3rl.environments``, or import path ``package.module:Class``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    max_turns: int = 8
    max_tokens_per_turn: int = 64
    max_episode_tokens: int = 1024
    step_timeout_s: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """One optimiser with its schedule: linear warm-up, then ``decay`` down to ``final_lr_frac`` of the peak."""

    name: Literal["adamw", "muon"] = "muon"
    lr: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 5
    decay: Literal["none", "linear", "cosine"] = "linear"
    final_lr_frac: float = 0.1
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig:
    """Supervised fine-tuning on the environment's demonstrator."""

    max_steps: int = 0
    """0 switches this phase off."""
    batch_size: int = 32
    eval_every: int = 25
    eval_tasks: int = 128
    patience: int = 3
    """Stop after this many evaluations without a new best success rate."""
    min_steps: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of trajectories."""

    num_workers: int = 1
    threads_per_worker: int = 1
    groups_per_step: int = 16
    group_size: int = 8
    temperature: float = 1.0
    max_attempts: int = 3
    """How often an episode is played that infrastructure fails (the environment, say); then it has no reward."""
    reward_timeout_s: float = 60.0
    """Deadline of one reward function on one trajectory; past it that reward is absent."""
    max_failed_frac: float = 0.5
    """Stop when more than this share of a step's episodes was failed by the environment or other infrastructure."""
    timeout_s: float = 300.0
    """Deadline of one round of rollouts; past it the run stops and says which worker did not answer."""

    def __post_init__(self) -> None:
        _require(
            self.temperature > 0,
            "rollout.temperature",
            f"must be positive to train (the ratio needs log-probabilities), got {self.temperature}; "
            "greedy decoding is for evaluation",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """A preset and what it lets you change. None means: what the preset says. A key the preset ignores is an error."""

    preset: str = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    normaliser: Literal["tokens", "sequences", "trajectories", "constant"] | None = None
    std: Literal["none", "sample", "population"] | None = None
    baseline: Literal["mean", "leave_one_out"] | None = None
    gamma: float | None = None
    gae_lambda: float | None = None
    value_coef: float | None = None
    value_clip: float | None = None
    kl_coef: float | None = None
    entropy_coef: float | None = None
    epochs: int | None = None
    """Optimiser passes over one batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """The update."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    micro_batch_tokens: int = 2048
    """Real tokens in one forward of the learner; samples are sorted by length and never split."""
    threads: int = 2
    max_skipped_updates: int = 3
    """Stop after this many updates in a row that the non-finite guard refused."""
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferConfig:
    """What may enter a batch."""

    max_staleness: int = 1
    drop_no_signal: bool = True
    """Drop (and count) groups of equal rewards, when the objective learns from differences within a group."""
    signal: str = "total"
    """Reward component that must vary within a group: a component's name, or ``total`` for the weighted sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out tasks, the same ones every time."""

    num_tasks: int = 512
    split: Literal["train", "validation", "test"] = "test"
    seed: int = 0
    every: int = 0
    """Evaluate after every so many learner steps; 0 only at the end."""
    sft_only_baseline: bool = False
    """After RL, spend RL's wall time on more SFT instead, and evaluate that too.

    It goes on from the weights and optimiser that SFT ended with, at the last learning rate of its schedule.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One job."""

    name: str
    seed: int = 0
    run_root: str = "runs"
    model: ModelConfig
    tokenizer: str = "tiny"
    """``tiny``, made from the words of the environment and the format, ``bytes``, or a published tokenizer's folder."""
    chat_format: Literal["compact", "xtml"] = "compact"
    chat_options: dict[str, Any] = field(default_factory=dict)
    """Options of the format: ``thinking``, ``effort`` (low, medium, high, max) and ``wording`` (a file) of ``xtml``."""
    environment: EnvironmentConfig
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of each reward component; none given means ``{outcome: 1.0}``."""
    reward_functions: dict[str, str] = field(default_factory=dict)
    """Import path ``package.module:name`` of what gives a component, a function or class; see ``k3rl.rewards.base``."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    steps: int = 0
    """Learner steps of RL; 0 switches this phase off."""
    schedule: Literal["synchronous", "one_step_async"] = "synchronous"
    checkpoint_every: int = 10
    checkpoints_kept: int = 3

    def __post_init__(self) -> None:
        if not self.rewards:
            object.__setattr__(self, "rewards", {"outcome": 1.0})
        _require(
            self.schedule == "synchronous" or self.buffer.max_staleness >= 1,
            "buffer.max_staleness",
            "the one_step_async schedule trains on rollouts one step old, so it must be at least 1",
        )
        components = (*RECORDED_REWARDS, *self.reward_functions)
        unknown = set(self.rewards) - set(components)
        _require(
            not unknown,
            "rewards",
            f"no component {sorted(unknown)}; there are {', '.join(components)}, and what reward_functions names."
            + "".join(suggest(name, components) for name in sorted(unknown)),
        )
        unused = set(self.reward_functions) - set(self.rewards)
        _require(not unused, "reward_functions", f"{', '.join(sorted(unused))} has no weight in rewards (0 logs it)")
        signals = (*self.rewards, "total")
        _require(
            self.buffer.signal in signals,
            "buffer.signal",
            f"no component {self.buffer.signal!r} in rewards; there are {', '.join(signals)}",
        )
        _require(
            self.name not in ("", "..") and Path(self.name).name == self.name,
            "name",
            f"must be the name of one folder inside run_root, got {self.name!r}",
        )
        for key, value in self._counts().items():
            _require(value >= 1, key, f"must be at least 1, got {value}")
        for key, (low, high) in _RANGES.items():
            value = attrgetter(key)(self)
            _require(low <= value <= high, key, f"must be from {low:g} to {high:g}, got {value}")

    def _counts(self) -> dict[str, int]:
        """Everything that must be at least 1 for a run to make sense."""
        return {
            "environment.max_turns": self.environment.max_turns,
            "environment.max_tokens_per_turn": self.environment.max_tokens_per_turn,
            "environment.max_episode_tokens": self.environment.max_episode_tokens,
            "sft.batch_size": self.sft.batch_size,
            "sft.eval_every": self.sft.eval_every,
            "sft.eval_tasks": self.sft.eval_tasks,
            "rollout.num_workers": self.rollout.num_workers,
            "rollout.threads_per_worker": self.rollout.threads_per_worker,
            "rollout.groups_per_step": self.rollout.groups_per_step,
            "rollout.group_size": self.rollout.group_size,
            "rollout.max_attempts": self.rollout.max_attempts,
            "learner.threads": self.learner.threads,
            "learner.micro_batch_tokens": self.learner.micro_batch_tokens,
            "learner.max_skipped_updates": self.learner.max_skipped_updates,
            "evaluation.num_tasks": self.evaluation.num_tasks,
            "checkpoint_every": self.checkpoint_every,
            "checkpoints_kept": self.checkpoints_kept,
        }

    @property
    def run_dir(self) -> Path:
        return Path(self.run_root) / self.name
