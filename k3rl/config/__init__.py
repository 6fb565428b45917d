"""The whole configuration of a run: frozen and typed.

``load_config(path, overrides)`` merges a YAML file with ``key=value`` overrides and returns frozen dataclasses; no
omegaconf object leaves this package. A key that does not exist, a value of the wrong type, or an impossible combination
raises :class:`ConfigError` that names the key and, where there is one, the key that was probably meant.
"""

from k3rl.config.load import from_dict, load_config, load_job, load_model_config, model_from_dict, to_dict
from k3rl.config.schema import (
    MXFP4_BLOCK,
    TILE_ROWS,
    BufferConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JobConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    SftJobConfig,
    StageConfig,
)

__all__ = [
    "MXFP4_BLOCK",
    "TILE_ROWS",
    "BufferConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "JobConfig",
    "LearnerConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "SftJobConfig",
    "StageConfig",
    "from_dict",
    "load_config",
    "load_job",
    "load_model_config",
    "model_from_dict",
    "to_dict",
]
