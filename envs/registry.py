"""Find an environment by gymnasium id, plug-in name or import path."""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import gymnasium
from gymnasium.envs.registration import registry as gymnasium_registry

from k3rl.errors import ConfigError, UnknownEnvironmentError, suggest

ENTRY_POINT_GROUP = "k3rl.environments"


def make(id: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Make an environment.

    Args:
        id: a gymnasium id (``k3rl/Shop-v0``), a name of the entry-point group ``k3rl.environments``, or an import path
            ``package.module:Class``.
        options: keyword arguments of its constructor.

    Raises:
        UnknownEnvironmentError: nothing is known by that id; the message lists near ones.
        ConfigError: the plug-in or module of that id fails when it is imported.
    """
    if ":" in id:
        return _load_path(id)(**options)
    if id not in gymnasium_registry:
        importlib.import_module("k3rl.envs.tasks")
    if id in gymnasium_registry:
        return gymnasium.make(id, **options)
    plugins = entry_points(group=ENTRY_POINT_GROUP)
    if id in plugins.names:
        return _load_plugin(plugins[id])(**options)
    known = known_ids()
    near = difflib.get_close_matches(id, known, n=3, cutoff=0.4)
    hint = f"near ones: {', '.join(near)}" if near else f"k3rl's own: {', '.join(k for k in known if 'k3rl/' in k)}"
    raise UnknownEnvironmentError(f"no environment {id!r}; {hint}")


def known_ids() -> list[str]:
    """Gymnasium ids and plug-in names, sorted."""
    importlib.import_module("k3rl.envs.tasks")
    return sorted({*gymnasium_registry, *entry_points(group=ENTRY_POINT_GROUP).names})


def _load_plugin(plugin: EntryPoint) -> Any:
    try:
        return plugin.load()
    except Exception as error:  # importing a stranger's module can raise anything
        owner = f" of {plugin.dist.name}" if plugin.dist else ""
        raise ConfigError(
            f"environment {plugin.name!r}: the entry point {plugin.value!r}{owner} in the group {ENTRY_POINT_GROUP!r} "
            f"cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _load_path(path: str) -> Any:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise UnknownEnvironmentError(f"no environment {path!r}: {error}") from error
    except Exception as error:
        raise ConfigError(f"environment {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise UnknownEnvironmentError(f"no environment {path!r}: {error}.{suggest(name, vars(module))}") from error
