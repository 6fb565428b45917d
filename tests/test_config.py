"""Reading configurations: typed values, named mistakes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from k3rl.config import (
    TILE_ROWS,
    RunConfig,
    SftJobConfig,
    from_dict,
    load_config,
    load_job,
    load_model_config,
    to_dict,
)
from k3rl.errors import ConfigError
from k3rl.kernels.kda.reference import TILE

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
        ("model.kda_gate_bound=-6", "model.kda_gate_bound"),
        ("model.kda_gate_bound=1", "model.kda_gate_bound"),
        ("model.mla_layers=[9]", "model.mla_layers"),
        ("model.experts_per_token=8", "model.experts_per_token"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, [override])
    assert key in str(caught.value)


def test_the_largest_gate_bound_that_cannot_overflow_is_accepted() -> None:
    assert load_config(DEMO, ["model.kda_gate_bound=-5.8"]).model.kda_gate_bound == -5.8  # 5.8 * 15 = 87


def test_a_missing_file_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"k3_tinny\.yaml does not exist\. Did you mean 'k3_tiny\.yaml'"):
        load_model_config(CONFIGS / "model" / "k3_tinny.yaml")


def refusal(path: Path, overrides: tuple[str, ...] = ()) -> str:
    """What a user is told about a file that cannot be loaded."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def names(message: str, path: Path, key: str) -> bool:
    """Whether a message names the file, and the key outside of the file's path (which holds the test's name)."""
    return (
        str(path) in message
        and re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", message.replace(str(path), "")) is not None
    )


@pytest.mark.parametrize("key", ["name", "model", "environment"])
def test_a_required_key_that_is_missing_is_named_with_its_file(tmp_path: Path, key: str) -> None:
    values = {k: v for k, v in to_dict(load_config(DEMO)).items() if k != key}
    path = tmp_path / "bad.yaml"
    path.write_text(json.dumps(values))
    assert names(refusal(path), path, key)


@pytest.mark.parametrize(("section", "key"), [("environment", "id"), ("model", "vocab_size"), ("model", "mla_layers")])
def test_a_required_key_that_is_missing_in_a_section_is_named_with_its_section(
    tmp_path: Path, section: str, key: str
) -> None:
    values = to_dict(load_config(DEMO))
    del values[section][key]
    path = tmp_path / "bad.yaml"
    path.write_text(json.dumps(values))
    assert names(refusal(path), path, f"{section}.{key}")


@pytest.mark.parametrize(
    "key", ["name", "steps", "model", "rollout", "environment.id", "learner.optimizer.lr", "rewards"]
)
def test_a_null_where_a_value_is_needed_is_refused_by_the_name_of_its_key(tmp_path: Path, key: str) -> None:
    section = values = to_dict(load_config(DEMO))
    *above, last = key.split(".")
    for part in above:
        section = section[part]
    section[last] = None
    path = tmp_path / "bad.yaml"
    path.write_text(json.dumps(values))
    assert names(refusal(path), path, key)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("steps: many", "steps"),
        ("steps: 1.5", "steps"),
        ("steps: true", "steps"),
        ("steps: [1]", "steps"),
        ("steps: {a: 1}", "steps"),
        ("run_root: [a]", "run_root"),
        ("schedule: sometimes", "schedule"),
        ("rollout: {temperature: hot}", "rollout.temperature"),
        ("learner: {optimizer: {lr: fast}}", "learner.optimizer.lr"),
        ("learner: {optimizer: {name: sgd}}", "learner.optimizer.name"),
        ("buffer: {drop_no_signal: maybe}", "buffer.drop_no_signal"),
        ("objective: {clip_low: low}", "objective.clip_low"),
        ("rewards: {outcome: lots}", "rewards.outcome"),
        ("rewards: outcome", "rewards"),
        ("seed: ${sead}", "seed"),
        ("run_root: ${oc.env:K3RL_NO_SUCH_VARIABLE}", "run_root"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_file_and_key(tmp_path: Path, text: str, key: str) -> None:
    path = write(tmp_path, f"{text}\n")
    assert names(refusal(path), path, key)


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("learner: {optimizer: {lrr: 1}}", "learner.optimizer.lrr", "learner.optimizer.lr"),
        ("rollout: {grup_size: 2}", "rollout.grup_size", "rollout.group_size"),
        ("sft: {lr: 1}", "sft.lr", "sft.optimizer.lr"),
        ("vocab_size: 3", "vocab_size", "model.vocab_size"),
    ],
)
def test_an_unknown_key_in_a_file_names_the_file_itself_and_the_key_that_was_meant(
    tmp_path: Path, text: str, key: str, hint: str
) -> None:
    path = write(tmp_path, f"{text}\n")
    message = refusal(path)
    assert names(message, path, key)
    assert f"'{hint}'" in message.split("Did you mean")[1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("seed: 1\nseed: 2\n", ("duplicate key seed", "line 5")),
        ("rollout: {group_size: 2, group_size: 3}\n", ("duplicate key group_size", "line 4")),
        ("seed: [1\n", ("line 4",)),
        ("\tseed: 1\n", ("line 4",)),
    ],
)
def test_yaml_that_cannot_be_read_is_refused_with_file_and_line(
    tmp_path: Path, text: str, found: tuple[str, ...]
) -> None:
    path = write(tmp_path, text)
    message = refusal(path)
    for part in (f"{path} is not a readable YAML file", *found):
        assert part in message


def test_what_is_no_text_and_what_is_no_mapping_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "list.yaml").write_text("[1, 2]\n")
    (tmp_path / "number.yaml").write_text("3\n")
    assert f"{tmp_path / 'binary.yaml'} is not a readable YAML file" in refusal(tmp_path / "binary.yaml")
    assert f"{tmp_path / 'list.yaml'} must hold a mapping of keys, not a list" in refusal(tmp_path / "list.yaml")
    assert str(tmp_path / "number.yaml") in refusal(tmp_path / "number.yaml")
    assert f"{tmp_path} is not a readable YAML file" in refusal(tmp_path)


def test_a_section_given_as_the_path_of_a_missing_file_names_that_file_and_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("{}")
    path = tmp_path / "run.yaml"
    path.write_text("name: t\nmodel: tinny.yaml\nenvironment: {id: k3rl/Shop-v0}\n")
    message = refusal(path)
    assert f"{tmp_path / 'tinny.yaml'} does not exist" in message
    assert "Did you mean 'tiny.yaml'?" in message


def test_a_mistake_in_a_sections_own_file_is_named_by_its_place_in_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: t\nmodel: tiny.yaml\nenvironment: {id: k3rl/Shop-v0}\n")
    text = (CONFIGS / "model" / "k3_tiny.yaml").read_text()
    (tmp_path / "tiny.yaml").write_text(text.replace("hidden_size", "hiden_size"))
    assert re.search(r"unknown key 'model\.hiden_size'\. Did you mean 'model\.hidden_size'\?", refusal(path))
    (tmp_path / "tiny.yaml").write_text(re.sub(r"hidden_size: \d+", "hidden_size: wide", text))
    assert re.search(r"model\.hidden_size: .*'wide'", refusal(path))
    (tmp_path / "tiny.yaml").write_text(text + "hidden_size: [\n")
    assert f"{tmp_path / 'tiny.yaml'} is not a readable YAML file" in refusal(path)


def test_a_section_may_be_written_out_and_a_yaml_path_inside_options_is_left_alone(tmp_path: Path) -> None:
    tiny = to_dict(load_config(DEMO))["model"]
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: t\nmodel: {json.dumps(tiny)}\nenvironment: {{id: k3rl/Shop-v0, options: {{menu: {{at: menu.yaml}}}}}}\n"
    )
    config = load_config(path)
    assert config.model == load_config(DEMO).model
    assert config.environment.options == {"menu": {"at": "menu.yaml"}}


@pytest.mark.parametrize("item", ["steps", "", "rollout.group_size", "~steps"])
def test_an_override_without_an_equals_sign_is_quoted_and_the_form_is_said(item: str) -> None:
    assert refusal(DEMO, (item,)) == f"override {item!r} must have the form key=value"


@pytest.mark.parametrize(
    "key", ["steps", "name", "rollout.temperature", "environment.id", "rollout", "rewards.outcome"]
)
def test_an_override_with_an_empty_value_names_its_key(key: str) -> None:
    for item in (f"{key}=", f"{key}=null"):
        assert re.search(rf"(?<![\w.]){re.escape(key)}: ", refusal(DEMO, (item,)))


def test_an_empty_override_of_an_optional_value_unsets_it(tmp_path: Path) -> None:
    path = write(tmp_path, "objective: {clip_low: 0.1}\n")
    assert load_config(path).objective.clip_low == 0.1
    assert load_config(path, ["objective.clip_low="]).objective.clip_low is None


@pytest.mark.parametrize(
    "item", ["=3", "=", ".steps=3", "rollout.=3", "rollout..temperature=2", " steps=3", "--steps=3", "+steps=3"]
)
def test_an_override_whose_key_is_empty_or_decorated_is_quoted(item: str) -> None:
    message = refusal(DEMO, (item,))
    key = item.split("=")[0]
    assert repr(key) in message or repr(item) in message


def test_the_last_of_equal_overrides_wins_and_a_value_may_hold_an_equals_sign() -> None:
    config = load_config(DEMO, ["steps=3", "run_root=a=b", "steps=4"])
    assert (config.steps, config.run_root) == (4, "a=b")


def test_an_override_reaches_below_a_free_form_mapping_and_leaves_its_neighbours() -> None:
    before = load_config(DEMO).environment.options["slips"]
    after = load_config(DEMO, ["environment.options.slips.guess=0.1"]).environment.options["slips"]
    assert after == {**before, "guess": 0.1}
    assert before["guess"] != 0.1


def test_overrides_of_one_section_leave_its_other_keys() -> None:
    before, after = load_config(DEMO).rollout, load_config(DEMO, ["rollout={group_size: 3}"]).rollout
    assert after == dataclasses.replace(before, group_size=3)
    assert before.num_workers == 2  # as the file says, and not the default


def test_the_bound_of_the_gate_is_checked_against_the_sub_tile_that_the_kernel_uses() -> None:
    assert TILE_ROWS == TILE


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


@pytest.mark.parametrize("key", ["rollout", "learner.optimizer", "model", "environment", "objective"])
@pytest.mark.parametrize(("text", "value"), [("[1]", [1]), ("3", 3), ("fast", "fast"), ("null", None)])
def test_a_section_that_is_no_mapping_is_refused_by_its_name_in_file_and_override(
    tmp_path: Path, key: str, text: str, value: object
) -> None:
    values = to_dict(load_config(DEMO))
    *above, last = key.split(".")
    section = values
    for part in above:
        section = section[part]
    section[last] = value
    path = tmp_path / "bad.yaml"
    path.write_text(json.dumps(values))
    assert names(refusal(path), path, key)
    assert "must be a mapping of keys or the path of a YAML file" in refusal(path)
    assert f"override '{key}={text}': {key}: must be a mapping" in refusal(DEMO, (f"{key}={text}",))


@pytest.mark.parametrize("value", [["outcome"], 3, "outcome"])
def test_a_free_form_mapping_that_is_no_mapping_is_refused_by_its_name(tmp_path: Path, value: object) -> None:
    values = to_dict(load_config(DEMO))
    path = tmp_path / "bad.yaml"
    path.write_text(json.dumps({**values, "rewards": value}))
    assert names(refusal(path), path, "rewards")
    path.write_text(json.dumps({**values, "environment": {"id": "x", "options": value}}))
    assert names(refusal(path), path, "environment.options")


def test_an_element_of_the_wrong_type_names_its_list(tmp_path: Path) -> None:
    values = to_dict(load_config(DEMO))
    values["model"]["mla_layers"] = [3, "last"]
    path = tmp_path / "bad.yaml"
    path.write_text(json.dumps(values))
    for message in (refusal(path), refusal(DEMO, ("model.mla_layers=[3, last]",))):
        assert "model.mla_layers: " in message
        assert "$" not in message


@pytest.mark.parametrize("item", ["steps=[1", "steps={", "environment.options.x='a"])
def test_an_override_whose_value_is_no_yaml_is_quoted(item: str) -> None:
    assert f"override {item!r}: the value is not readable YAML" in refusal(DEMO, (item,))


@pytest.mark.parametrize("item", ["=3", "=", ".steps=3", "rollout.=3", "rollout..temperature=2"])
def test_an_override_with_an_empty_part_in_its_key_is_told_the_form(item: str) -> None:
    assert refusal(DEMO, (item,)) == f"override {item!r} must have the form key=value"


def test_a_wrong_override_is_blamed_on_the_override_and_not_on_the_file() -> None:
    message = refusal(DEMO, ("seed=1", "steps=many"))
    assert message.startswith("override 'steps=many': steps: ")
    assert str(DEMO) not in message
    assert "'rollout.group_size'" in refusal(DEMO, ("rollout={grup_size: 3}",))


def test_all_missing_keys_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("seed: 1\n")
    assert "needs a value for 'environment', 'model', 'name'" in refusal(tmp_path / "bad.yaml")


def test_a_missing_section_file_is_named_with_the_file_and_key_that_name_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: t\nmodel: tinny.yaml\nenvironment: {id: k3rl/Shop-v0}\n")
    assert refusal(path).startswith(f"{path}: model: config file {tmp_path / 'tinny.yaml'} does not exist")


def test_a_mistake_in_a_sections_own_file_names_that_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: t\nmodel: tiny.yaml\nenvironment: {id: k3rl/Shop-v0}\n")
    text = (CONFIGS / "model" / "k3_tiny.yaml").read_text()
    for wrong in (text.replace("hidden_size", "hiden_size"), re.sub(r"hidden_size: \d+", "hidden_size: wide", text)):
        (tmp_path / "tiny.yaml").write_text(wrong)
        assert refusal(path).startswith(f"{tmp_path / 'tiny.yaml'}: ")


def test_a_section_within_a_section_may_be_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "adamw.yaml").write_text("{name: adamw, lr: 3e-4}\n")
    optimizer = load_config(write(tmp_path, "learner: {optimizer: adamw.yaml}\n")).learner.optimizer
    assert (optimizer.name, optimizer.lr) == ("adamw", 3e-4)
    item = f"learner={{optimizer: {tmp_path / 'adamw.yaml'}}}"
    assert load_config(write(tmp_path, ""), [item]).learner.optimizer == optimizer


def test_a_value_that_ends_like_a_file_is_only_a_file_where_a_section_stands(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "run_root: runs.yaml\n")).run_root == "runs.yaml"


def test_an_override_selects_a_sections_file_from_here_or_from_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nano = load_model_config(CONFIGS / "model" / "k3_nano.yaml")
    assert load_config(DEMO, ["model=model/k3_nano.yaml"]).model == nano
    monkeypatch.chdir(CONFIGS.parent)
    assert load_config(DEMO, ["model=configs/model/k3_nano.yaml"]).model == nano
    assert load_config(DEMO, [f"model={CONFIGS / 'model' / 'k3_nano.yaml'}"]).model == nano
    assert "Did you mean 'k3_nano.yaml'" in refusal(DEMO, ("model=model/k3_nanno.yaml",))


def test_a_selected_file_leaves_nothing_of_the_section_before_and_single_keys_go_on_top() -> None:
    nano = load_model_config(CONFIGS / "model" / "k3_nano.yaml")
    for order in (1, -1):
        got = load_config(DEMO, ["model=model/k3_nano.yaml", "model.value_head=true"][::order]).model
        assert got == dataclasses.replace(nano, value_head=True)


@pytest.mark.parametrize("text", ["007", "1e3", "true", "2026"])
def test_text_that_looks_like_a_number_is_kept_from_the_command_line_and_refused_unquoted_in_a_file(
    tmp_path: Path, text: str
) -> None:
    assert load_config(DEMO, [f"name={text}"]).name == text
    path = write(tmp_path, f"run_root: {text}\n")
    assert re.search(r"run_root: must be text, .*quotes", refusal(path))


@pytest.mark.parametrize("name", ["''", ".", "..", "a/b", "/tmp/a", "../a"])
def test_a_name_is_one_folder_inside_the_root_of_runs(name: str) -> None:
    assert "name: must be the name of one folder" in refusal(DEMO, (f"name={name}",))


@pytest.mark.parametrize(
    "item",
    [
        "steps=-3",
        "sft.max_steps=-1",
        "evaluation.every=-1",
        "learner.optimizer.lr=-1",
        "learner.optimizer.lr=nan",
        "sft.optimizer.lr=inf",
        "learner.timeout_s=-1",
        "rollout.max_failed_frac=2",
        "model.num_layers=0",
        "model.hidden_size=0",
        "model.num_heads=-1",
    ],
)
def test_a_number_out_of_its_range_is_refused_before_the_run_starts(item: str) -> None:
    assert f"{item.split('=')[0]}: must be " in refusal(DEMO, (item,))


def load_stages(*overrides: str) -> SftJobConfig:
    return load_job(SftJobConfig, CONFIGS / "long_context.yaml", overrides)


def test_the_schedule_of_context_lengths_is_k3s_and_reads_back() -> None:
    config = load_stages()
    assert [stage.length for stage in config.stages.values()] == [2**13, 2**16, 2**18, 2**20]
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert list(config.stages) == ["8k", "64k", "256k", "1m"]
    assert load_stages("stages.8k.steps=3").steps == config.steps - config.stages["8k"].steps + 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.8k.stepz=3", "unknown key 'stages.8k.stepz'. Did you mean 'stages.8k.steps'?"),
        ("stages.2m.steps=3", "needs a value for 'stages.2m.batch_tokens', 'stages.2m.dataset', 'stages.2m.length'"),
        ("stages.8k.length=1", "stages.8k.length: must be at least 2, got 1"),
        ("stages={a/b: {dataset: x, length: 2, batch_tokens: 2, steps: 1}}", "stages.a/b: a name has letters, digits"),
        ("stages.8k.steps=0", "stages.8k.steps: must be at least 1, got 0"),
        ("stages.8k.lr=nan", "stages.8k.lr: must be finite, got nan"),
        ("stages.1m.batch_tokens=1000", "stages.1m.batch_tokens: must hold one sequence of length 1048576, got 1000"),
        ("stages.8k=3", "stages.8k: must be a mapping of keys or the path of a YAML file, got 3"),
        ("stages.8k.steps=abc", "stages.8k.steps: Value 'abc'"),
        ("tokenizer=tiny", "tokenizer: tiny is made of an environment's words, which a dataset lacks"),
        ("balancing=auxiliary", "balancing: Invalid value 'auxiliary'"),
        ("checkpoint_every=0", "checkpoint_every: must be at least 1, got 0"),
    ],
)
def test_a_wrong_stage_is_named_by_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_stages(override)
    assert message in str(caught.value)


def test_each_command_says_which_one_a_file_is_for() -> None:
    with pytest.raises(ConfigError, match="has stages, which are for k3rl sft"):
        load_config(CONFIGS / "long_context.yaml")
    with pytest.raises(ConfigError, match="has an environment, which is for k3rl train"):
        load_job(SftJobConfig, DEMO)


def test_a_mapping_given_as_a_whole_replaces_what_was_there_and_a_key_in_it_does_not() -> None:
    assert load_config(DEMO, ["rewards={milestone: 1.0}"]).rewards == {"milestone": 1.0}
    assert load_config(DEMO, ["rewards.milestone=0.5"]).rewards == {"outcome": 1.0, "milestone": 0.5}
    assert load_config(DEMO, ["environment.options={}"]).environment.options == {}
