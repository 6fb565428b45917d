"""From files and overrides to frozen dataclasses; whatever is wrong is said by file and key.

A section may be given as the path of another YAML file, relative to the file that names it:
``model: model/k3_tiny.yaml``. An override may do the same, ``model=configs/model/k3_nano.yaml``, relative to the
current folder or else to the run's file; of what the section held before, nothing is left. Nor is anything of a mapping
with keys of the user's own (``rewards={milestone: 1.0}``), when it is given as a whole.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from k3rl.config.schema import JobConfig, ModelConfig, RunConfig, SftJobConfig
from k3rl.errors import ConfigError, suggest

Job = typing.TypeVar("Job", bound=JobConfig)


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read the configuration of a ``k3rl train`` job. Raises ConfigError naming the file and key at fault."""
    return load_job(RunConfig, path, overrides)


def load_job(kind: type[Job], path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Job:
    """Read a job's configuration. Raises ConfigError naming the file and key at fault."""
    values = _read(Path(path))
    if kind is RunConfig and "stages" in values:
        raise ConfigError(f"{path}: has stages, which are for k3rl sft; k3rl train goes on from its run (init_from)")
    if kind is SftJobConfig and "environment" in values:
        raise ConfigError(f"{path}: has an environment, which is for k3rl train; k3rl sft trains on datasets (stages)")
    return _build(kind, values, list(overrides), Path(path))


def load_model_config(path: str | Path) -> ModelConfig:
    """Read one file of ``configs/model/``."""
    return _build(ModelConfig, _read(Path(path)), [], Path(path))


def to_dict(config: Any) -> dict[str, Any]:
    """Plain, JSON-able form of a config; the inverse of :func:`from_dict`."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def model_from_dict(values: dict[str, Any]) -> ModelConfig:
    """Rebuild a model's config from what :func:`to_dict` made (the manifest of a checkpoint)."""
    return _build(ModelConfig, values, [], Path("manifest.json"))


def from_dict(values: dict[str, Any]) -> RunConfig | SftJobConfig:
    """Rebuild a job's config from what :func:`to_dict` made (the ``config.json`` of a run folder)."""
    return _build(SftJobConfig if "stages" in values else RunConfig, values, [], Path("config.json"))


def _read(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError as error:
        near = suggest(path.name, [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else [])
        raise ConfigError(f"config file {path} does not exist.{near}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error.full_key or '?'}: {_first_line(error)}") from error
    except Exception as error:  # yaml's errors and the system's are unrelated; all mean that the file is not readable
        raise ConfigError(f"{path} is not a readable YAML file: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not a {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


def _build(cls: type, values: dict[str, Any], overrides: list[str], path: Path) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    origins = {"": str(path)}
    values = _expand(cls, values, "", str(path), path.parent, origins)
    changes = []
    for item in overrides:
        key, value = _parse_override(cls, item)
        if isinstance(value, Path):
            chosen = value if value.is_file() else path.parent / value
            _put(values, key, _expand(_at(cls, key), _read(chosen), f"{key}.", str(chosen), chosen.parent, origins))
            origins[key] = str(chosen)
        else:
            kind = _at(cls, key)
            if isinstance(value, dict) and typing.get_origin(kind) is dict and not _named_sections(kind):
                _put(values, key, {})  # nothing is left of what the mapping held before
            changes.append((item, key, value))
    merged = _merge(OmegaConf.structured(cls), values, origins)
    for item, key, value in changes:
        nested: dict[str, Any] = {}
        _put(nested, key, value)
        merged = _merge(merged, nested, {"": f"override {item!r}"})
    try:
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError(f"needs a value for {', '.join(repr(key) for key in missing)}")
        return OmegaConf.to_object(merged)
    except ConfigError as error:
        raise ConfigError(f"{path}{' with overrides' if overrides else ''}: {error}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error.full_key or '?'}: {_first_line(error)}") from error


def _merge(config: Any, values: dict[str, Any], origins: dict[str, str]) -> Any:
    """``values`` over ``config``; an error names the key, and the file or override that it came from."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.merge(config, OmegaConf.create(values))
    except (OmegaConfBaseException, TypeError) as error:
        key = getattr(error, "full_key", None) or _first_refused(config, values)
        origin = origins[max((at for at in origins if f"{key}.".startswith(f"{at}." if at else "")), key=len)]
        raise ConfigError(f"{origin}: {key}: {_first_line(error)}") from error


def _first_refused(config: Any, values: dict[str, Any], prefix: str = "") -> str:
    """Key of the first value that ``config`` does not take; omegaconf does not name it for lists and mappings."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key, value in values.items():
        nested: dict[str, Any] = {}
        _put(nested, f"{prefix}{key}", value)
        try:
            OmegaConf.merge(config, OmegaConf.create(nested))
        except (OmegaConfBaseException, TypeError):
            return _first_refused(config, value, f"{prefix}{key}.") if isinstance(value, dict) else f"{prefix}{key}"
    return prefix.rstrip(".")


def _first_line(error: Exception) -> str:
    """omegaconf's message without its context; where it left a value out, say what is wrong all the same."""
    first = str(error).splitlines()[0]
    if "Incompatible value 'None'" in first or "is not Optional" in first:
        return "needs a value, not null"
    if "$VALUE" in first:
        return f"an element could {first.split(' could ')[-1]}"
    return first.replace("Cannot merge incompatible container types", "must be a mapping, not a list")


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for part in above:
        values = values.setdefault(part, {})
    values[last] = value


def _expand(
    cls: type, values: dict[str, Any], prefix: str, source: str, folder: Path, origins: dict[str, str]
) -> dict[str, Any]:
    """Check that every key exists and every section is a mapping; read the sections that are given as files.

    ``source`` is the file or override that ``values`` come from; ``origins`` receives the files read, by key.
    """
    sections, hints = _sections(cls), typing.get_type_hints(cls)
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in sections:
            raise ConfigError(f"{source}: unknown key '{name}'.{_suggest_key(cls, prefix, str(key))}")
        nested = sections[key]
        if kind := _named_sections(hints[key]):
            inner = {str(k): v for k, v in _mapping(value, f"{source}: {name}").items()}
            out[key] = {
                k: _expand(kind, _mapping(v, f"{source}: {name}.{k}"), f"{name}.{k}.", source, folder, origins)
                for k, v in inner.items()
            }
        elif nested is None:
            if hints[key] is str and isinstance(value, bool | int | float):
                raise ConfigError(f"{source}: {name}: must be text, got {value!r}; put it in quotes")
            out[key] = value
        elif isinstance(value, str) and value.endswith((".yaml", ".yml")):
            file = folder / value
            origins[name] = str(file)
            try:
                inner = _read(file)
            except ConfigError as error:
                message = f"{source}: {name}: {error} A path is relative to the file that names it."
                raise ConfigError(message) from error
            out[key] = _expand(nested, inner, f"{name}.", str(file), file.parent, origins)
        else:
            inner = _mapping(value, f"{source}: {name}")
            out[key] = _expand(nested, inner, f"{name}.", source, folder, origins)
    return out


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a mapping of keys or the path of a YAML file, got {value!r}")
    return value


def _sections(cls: type) -> dict[str, type | None]:
    """Field names of a config class, with the nested config class or None for a leaf."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] if dataclasses.is_dataclass(hints[f.name]) else None for f in dataclasses.fields(cls)}


def _named_sections(hint: Any) -> type | None:
    """The config class of a mapping from names to sections; None for any other type."""
    value = typing.get_args(hint)[-1:]
    return value[0] if value and typing.get_origin(hint) is dict and dataclasses.is_dataclass(value[0]) else None  # type: ignore[return-value]


def _at(cls: type, key: str) -> Any:
    """Config class or type of the field that a dotted key names; None below a free-form mapping."""
    at: Any = cls
    prefix = ""
    for part in key.split("."):
        if kind := _named_sections(at):
            at = kind
            prefix += f"{part}."
            continue
        if not dataclasses.is_dataclass(at):
            return None
        if part not in _sections(at):  # type: ignore[arg-type]
            raise ConfigError(f"unknown key '{key}'.{_suggest_key(at, prefix, part)}")  # type: ignore[arg-type]
        at = typing.get_type_hints(at)[part]
        prefix += f"{part}."
    return at


def _parse_override(cls: type, item: str) -> tuple[str, Any]:
    """Key and value of ``key=value``; the value is a Path when it selects a section's file."""
    from omegaconf import OmegaConf

    key, equals, text = item.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {item!r} must have the form key=value")
    kind = _at(cls, key)
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
    except Exception as error:  # yaml's errors are not omegaconf's
        raise ConfigError(f"override {item!r}: the value is not readable YAML: {error}") from error
    if kind is str and isinstance(value, bool | int | float):
        return key, text  # a name such as 007 or 1e3 is kept as it was written
    if dataclasses.is_dataclass(kind):
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            return key, Path(value)
        inner = _mapping(value, f"override {item!r}: {key}")
        return key, _expand(kind, inner, f"{key}.", f"override {item!r}", Path(), {})  # type: ignore[arg-type]
    return key, value


def _suggest_key(cls: type, prefix: str, key: str) -> str:
    """Suggest the same key elsewhere in a job's tree, else a similar one here, else a similar one anywhere."""
    leaves = _leaves(RunConfig, "")
    plain = key.replace("-", "_").lower()
    elsewhere = [leaf for leaf in leaves if leaf.rsplit(".", 1)[-1] == plain and leaf != prefix + key]
    if elsewhere:
        return f" Did you mean {' or '.join(repr(leaf) for leaf in elsewhere)}?"
    near = suggest(plain, _sections(cls))
    return near.replace("mean '", f"mean '{prefix}") if near else suggest(prefix + plain, leaves)


def _leaves(cls: type, prefix: str) -> list[str]:
    out: list[str] = []
    for name, nested in _sections(cls).items():
        out += _leaves(nested, f"{prefix}{name}.") if nested is not None else [prefix + name]
    return out
