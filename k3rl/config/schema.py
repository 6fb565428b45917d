"""Every key of a run with its type, default and meaning: the reference manual of a configuration."""

from __future__ import annotations

import dataclasses
import math
import re
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
Ranges = dict[str, tuple[float, float]]
"""Least and largest value by key; nan lies in none."""


def _optimizer_ranges(section: str) -> Ranges:
    fractions = {"final_lr_frac": (0.0, 1.0)}
    rest = dict.fromkeys(("lr", "weight_decay", "warmup_steps", "max_grad_norm"), (0.0, _MANY))
    return {f"{section}.optimizer.{key}": limits for key, limits in {**rest, **fractions}.items()}


_JOB_RANGES: Ranges = {
    "seed": (0, 2**63 - 1),
    **dict.fromkeys(
        (
            "learner.threads",
            "learner.micro_batch_tokens",
            "learner.max_skipped_updates",
            "checkpoint_every",
            "checkpoints_kept",
        ),
        (1, _MANY),
    ),
    "learner.timeout_s": (1e-3, _MANY),
    **_optimizer_ranges("learner"),
}
_RUN_RANGES: Ranges = {
    "evaluation.seed": (0, 2**63 - 1),
    **dict.fromkeys(
        ("steps", "sft.max_steps", "sft.min_steps", "evaluation.every", "buffer.max_staleness"), (0, _MANY)
    ),
    **dict.fromkeys(
        (
            "environment.max_turns",
            "environment.max_tokens_per_turn",
            "environment.max_episode_tokens",
            "sft.batch_size",
            "sft.eval_every",
            "sft.eval_tasks",
            "rollout.num_workers",
            "rollout.threads_per_worker",
            "rollout.groups_per_step",
            "rollout.group_size",
            "rollout.max_attempts",
            "evaluation.num_tasks",
        ),
        (1, _MANY),
    ),
    **dict.fromkeys(("environment.step_timeout_s", "rollout.timeout_s", "rollout.reward_timeout_s"), (1e-3, _MANY)),
    "rollout.max_failed_frac": (0, 1),
    **_optimizer_ranges("sft"),
}


def _require(condition: bool, key: str, message: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: {message}")


def _require_finite(values: dict[str, Any], prefix: str = "") -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _require_finite(value, f"{prefix}{key}.")
        _require(not isinstance(value, float) or math.isfinite(value), f"{prefix}{key}", f"must be finite, got {value}")


def _require_ranges(config: Any, ranges: Ranges) -> None:
    for key, (low, high) in ranges.items():
        value = attrgetter(key)(config)
        message = f"must be at least {low:g}" if high == _MANY and low >= 1 else f"must be from {low:g} to {high:g}"
        _require(low <= value <= high, key, f"{message}, got {value}")


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
        for name in ("situ_beta", "situ_linear_beta", "rms_norm_eps", "mla_norm_eps"):
            value = getattr(self, name)
            _require(value > 0, f"model.{name}", f"must be positive, got {value}")
        _require(
            self.initializer_range >= 0, "model.initializer_range", f"must be 0 or more, got {self.initializer_range}"
        )
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
    """Longer gradients are scaled down to it; 0: none is."""


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
    # rows of the objective's tables; `k3rl train CONFIG --dry-run` prints what they make
    advantage: str | None = None
    ratio: str | None = None
    trust_region: str | None = None
    correction: str | None = None
    rejection: str | None = None
    normaliser: str | None = None
    # advantage
    baseline: Literal["mean", "leave_one_out"] | None = None
    std: Literal["none", "sample", "population"] | None = None
    """The deviation that divides, with n - 1 or n."""
    spread: Literal["group", "batch"] | None = None
    """Whose deviation: that of the group's scores or of all."""
    gamma: float | None = None
    gae_lambda: float | None = None
    step_weight: float | None = None
    same_state: Literal["observation", "path"] | None = None
    """What two turns must have in common to be compared."""
    teacher_cap: float | None = None
    """Largest advantage that a teacher gives or takes, in nats."""
    # ratio and trust region
    anchor: Literal["rollout", "initial"] | None = None
    """Whom the policy's ratio is taken against: what sampled, or the learner before its first step on the batch."""
    clip_low: float | None = None
    clip_high: float | None = None
    """Widths: a ratio is held from ``1 - clip_low`` to ``1 + clip_high``."""
    dual_clip: float | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    divergence: float | None = None
    """How far the probability of a token may move."""
    # correction and rejection, of weights that are initial / rollout
    truncate_low: float | None = None
    truncate_high: float | None = None
    keep_low: float | None = None
    keep_high: float | None = None
    count_rejected: bool | None = None
    """Rejected tokens stay in the denominators and in the other terms; else it is as if they were not trained."""
    # terms
    value_coef: float | None = None
    value_clip: float | None = None
    kl: str | None = None
    kl_coef: float | None = None
    reward_kl: Literal["k1", "k2", "k3"] | None = None
    reward_kl_coef: float | None = None
    drift_coef: float | None = None
    """Weight of the squared log-ratio."""
    entropy_coef: float | None = None
    epochs: int | None = None
    """Optimiser passes over one batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """The update."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    micro_batch_tokens: int = 2048
    """Tokens in one forward of the learner. A longer sample is computed in pieces, exactly; best a multiple of 64."""
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
class JobConfig:
    """What every job says."""

    name: str
    seed: int = 0
    run_root: str = "runs"
    model: ModelConfig
    init_from: str | None = None
    """Weights to start from, of this very model: a run's folder or one of its checkpoints, or a published folder. None:
    drawn from ``seed``."""
    tokenizer: str = "tiny"
    """``tiny``, made from the words of the environment and the format, ``bytes``, or a published tokenizer's folder."""
    chat_format: Literal["compact", "xtml"] = "compact"
    chat_options: dict[str, Any] = field(default_factory=dict)
    """Options of the format: ``thinking``, ``effort`` (low, medium, high, max) and ``wording`` (a file) of ``xtml``."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    checkpoint_every: int = 10
    """Learner steps."""
    checkpoints_kept: int = 3

    def __post_init__(self) -> None:
        _require(
            self.name not in ("", "..") and Path(self.name).name == self.name,
            "name",
            f"must be the name of one folder inside run_root, got {self.name!r}",
        )
        _require_ranges(self, _JOB_RANGES)
        _require_finite(dataclasses.asdict(self))

    @property
    def run_dir(self) -> Path:
        return Path(self.run_root) / self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(JobConfig):
    """A job of ``k3rl train``: imitation of the environment's demonstrator, then RL."""

    environment: EnvironmentConfig
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of each reward component; none given means ``{outcome: 1.0}``."""
    reward_functions: dict[str, str] = field(default_factory=dict)
    """Import path ``package.module:name`` of what gives a component, a function or class; see ``k3rl.rewards.base``."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    steps: int = 0
    """Learner steps of RL; 0 switches this phase off."""
    schedule: Literal["synchronous", "one_step_async"] = "synchronous"

    def __post_init__(self) -> None:
        JobConfig.__post_init__(self)  # super() does not know the class that slots made
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
        _require_ranges(self, _RUN_RANGES)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """A part of supervised training: one dataset, one length of context."""

    dataset: str
    """Parquet or JSON-lines files (``documents/*.parquet``), a folder of ``Dataset.save_to_disk``, or a name on the
    Hugging Face Hub. Rows have ``text``, ``prompt`` and ``completion``, or ``messages`` (and ``tools``)."""
    validation: str | None = None
    """Held out, given in the same way."""
    length: int
    """Most tokens of a sequence. Longer texts are cut; longer conversations are left out, and counted."""
    batch_tokens: int
    """Tokens of an update; sequences are never padded."""
    steps: int
    lr: float | None = None
    """Peak of this stage; ``learner.optimizer``'s schedule runs anew over its steps. None: ``learner.optimizer.lr``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftJobConfig(JobConfig):
    """A job of ``k3rl sft``: training on datasets, from scratch or on, in stages that share weights and optimiser."""

    tokenizer: str = "bytes"
    """``bytes``, or a published tokenizer's folder."""
    stages: dict[str, StageConfig]
    """By name, in the order in which they are trained."""
    balancing: Literal["none", "quantile", "load_quantile"] = "none"
    """What moves the experts' selection biases; ``quantile`` is K3's, for training from scratch."""
    eval_every: int = 0
    """Learner steps between two looks at a stage's validation set; it is looked at after its last step anyway."""

    def __post_init__(self) -> None:
        JobConfig.__post_init__(self)
        _require(bool(self.stages), "stages", "there is none")
        _require(self.tokenizer != "tiny", "tokenizer", "tiny is made of an environment's words, which a dataset lacks")
        _require_ranges(self, {"eval_every": (0, _MANY)})
        for name, stage in self.stages.items():
            key = f"stages.{name}"
            _require(re.fullmatch(r"[\w-]+", name) is not None, key, "a name has letters, digits, _ and - only")
            _require(stage.length >= 2, f"{key}.length", f"must be at least 2, got {stage.length}")
            _require(stage.steps >= 1, f"{key}.steps", f"must be at least 1, got {stage.steps}")
            _require(stage.lr is None or 0 <= stage.lr < _MANY, f"{key}.lr", f"must be at least 0, got {stage.lr}")
            least = f"must hold one sequence of length {stage.length}"
            _require(stage.batch_tokens >= stage.length, f"{key}.batch_tokens", f"{least}, got {stage.batch_tokens}")

    @property
    def steps(self) -> int:
        """Learner steps of all stages."""
        return sum(stage.steps for stage in self.stages.values())
