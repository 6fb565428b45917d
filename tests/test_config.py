"""Reading configurations: typed values, named mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3rl.config import RunConfig, from_dict, load_config, load_model_config, to_dict
from k3rl.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
DEMO = CONFIGS / "demo.yaml"


def write(tmp_path: Path, text: str) -> Path:
    """A run's file with the given lines on top of the least that a run needs."""
    path = tmp_path / "run.yaml"
    path.write_text(f"name: t\nmodel: {CONFIGS / 'model' / 'k3_tiny.yaml'}\nenvironment: {{id: k3rl/Shop-v0}}\n{text}")
    return path


def test_every_committed_model_config_loads() -> None:
    for path in (CONFIGS / "model").glob("*.yaml"):
        assert load_model_config(path).num_layers > 0


def test_a_section_given_as_a_path_is_read_relative_to_the_file_that_names_it() -> None:
    assert load_config(DEMO).model == load_model_config(CONFIGS / "model" / "k3_tiny.yaml")


def test_a_config_survives_json() -> None:
    config = load_config(DEMO)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1e6", "0.5"])
def test_b60_numbers_in_scientific_notation_are_numbers(tmp_path: Path, text: str) -> None:
    config = load_config(write(tmp_path, f"learner: {{optimizer: {{lr: {text}}}}}\n"))
    assert config.learner.optimizer.lr == float(text)
    assert load_config(write(tmp_path, ""), [f"learner.optimizer.lr={text}"]).learner.optimizer.lr == float(text)


@pytest.mark.parametrize("text", ["0123", "12:30:45", "no", "1e3x"])
def test_b60_a_string_field_keeps_what_was_quoted(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, f"run_root: '{text}'\n")).run_root == text


def test_b60_a_bool_given_as_false_is_false(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), ["buffer.drop_no_signal=false"]).buffer.drop_no_signal is False


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learner.optimizer.lrr=1", "learner.optimizer.lr"),
        ("rollout.grup_size=4", "rollout.group_size"),
        ("group_size=4", "rollout.group_size"),
        ("lr=1", "learner.optimizer.lr"),
        ("max-steps=3", "sft.max_steps"),
    ],
)
def test_b60_an_unknown_override_names_itself_and_the_key_that_was_meant(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, [override])
    assert override.split("=", 1)[0] in str(caught.value)
    assert f"'{hint}'" in str(caught.value)


def leaves(values: dict[str, object], prefix: str = "") -> list[str]:
    out = []
    for key, value in values.items():
        is_section = isinstance(value, dict) and prefix + key not in {"environment.options", "rewards"}
        out += leaves(value, f"{prefix}{key}.") if is_section and isinstance(value, dict) else [prefix + key]
    return out


@pytest.mark.parametrize("key", leaves(to_dict(load_config(DEMO))))
def test_every_key_misspelt_once_is_refused_in_file_and_on_the_command_line(tmp_path: Path, key: str) -> None:
    misspelt = key[:-1] + ("x" if key[-1] != "x" else "y")
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(DEMO, [f"{misspelt}=1"])
    values = to_dict(load_config(DEMO))
    section = values
    *path, last = key.split(".")
    for part in path:
        section = section[part]
    section[misspelt.rsplit(".", 1)[-1]] = section.pop(last)
    (tmp_path / "bad.yaml").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("steps=many", "steps"),
        ("steps=1.5", "steps"),
        ("learner.optimizer.lr=fast", "learner.optimizer.lr"),
        ("schedule=sometimes", "schedule"),
        ("rollout.temperature=0", "rollout.temperature"),
        ("model.gate_lower_bound=-6", "model.gate_lower_bound"),
        ("model.gate_lower_bound=1", "model.gate_lower_bound"),
        ("model.mla_layers=[9]", "model.mla_layers"),
        ("model.experts_per_token=8", "model.experts_per_token"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, [override])
    assert key in str(caught.value)


def test_the_largest_gate_bound_that_cannot_overflow_is_accepted() -> None:
    assert load_config(DEMO, ["model.gate_lower_bound=-5.8"]).model.gate_lower_bound == -5.8  # 5.8 * 15 = 87


def test_a_missing_file_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"k3_tinny\.yaml does not exist\. Did you mean 'k3_tiny\.yaml'"):
        load_model_config(CONFIGS / "model" / "k3_tinny.yaml")


def test_a_required_key_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: t\n")
    with pytest.raises(ConfigError, match="model"):
        load_config(tmp_path / "bad.yaml")


def test_configs_are_frozen() -> None:
    config: RunConfig = load_config(DEMO)
    with pytest.raises(AttributeError):
        config.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "key",
    [
        "checkpoint_every",
        "checkpoints_kept",
        "rollout.num_workers",
        "rollout.group_size",
        "sft.eval_every",
        "evaluation.num_tasks",
        "learner.threads",
        "environment.max_turns",
    ],
)
def test_a_count_of_zero_is_refused_before_the_run_starts(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: must be at least 1"):
        load_config(DEMO, [f"{key}=0"])


def test_reward_components_are_checked_and_given_ones_replace_the_default(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")).rewards == {"outcome": 1.0}
    assert load_config(write(tmp_path, "rewards: {milestone: 1.0}\n")).rewards == {"milestone": 1.0}
    with pytest.raises(ConfigError, match=r"rewards: no component \['outcom'\].*Did you mean 'outcome'"):
        load_config(write(tmp_path, "rewards: {outcom: 1.0}\n"))
    with pytest.raises(ConfigError, match=r"buffer\.signal: no component 'xx'"):
        load_config(DEMO, ["buffer.signal=xx"])
