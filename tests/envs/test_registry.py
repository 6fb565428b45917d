"""Environments are found by gymnasium id, by entry point and by import path; what is not found is answered by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import registry as gymnasium_registry

from k3rl.envs.registry import ENTRY_POINT_GROUP, known_ids, make
from k3rl.errors import ConfigError, UnknownEnvironmentError

ENVIRONMENT = """
import gymnasium

class Fishing(gymnasium.Env):
    def __init__(self, ponds=1):
        self.ponds = ponds
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a throw-away distribution: ``install(modules={name: source}, entry_points={name: value})``."""
    before = set(sys.modules)

    def install(*, modules: dict[str, str], entry_points: dict[str, str], group: str = ENTRY_POINT_GROUP) -> None:
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
        metadata = tmp_path / "angling-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: angling\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("angling"):
            del sys.modules[name]


def test_an_environment_of_an_installed_plug_in_is_found_and_gets_its_options(install: Install) -> None:
    install(modules={"angling_lake": ENVIRONMENT}, entry_points={"fishing": "angling_lake:Fishing"})
    env: Any = make("fishing", ponds=3)
    assert type(env).__module__ == "angling_lake"
    assert env.ponds == 3
    assert "fishing" in known_ids()


def test_an_entry_point_of_another_group_is_no_environment(install: Install) -> None:
    install(modules={"angling_lake": ENVIRONMENT}, entry_points={"fishing": "angling_lake:Fishing"}, group="x.tools")
    with pytest.raises(UnknownEnvironmentError, match="no environment 'fishing'"):
        make("fishing")


def test_plug_ins_that_are_not_asked_for_are_not_imported(install: Install) -> None:
    modules = {"angling_lake": ENVIRONMENT, "angling_broken": "raise RuntimeError('imported')\n"}
    install(modules=modules, entry_points={"fishing": "angling_lake:Fishing", "broken": "angling_broken:Env"})
    assert type(make("fishing")).__name__ == "Fishing"
    assert "broken" in known_ids()
    assert "angling_broken" not in sys.modules


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("angling_gone:Fishing", "No module named 'angling_gone'"),
        ("angling_lake:Fisching", "has no attribute 'Fisching'"),
        ("angling_needy:Fishing", "No module named 'angling_dependency'"),
        ("angling_rude:Fishing", "RuntimeError: no licence"),
        ("angling_garbled:Fishing", "SyntaxError"),
    ],
)
def test_a_broken_entry_point_is_a_config_error_that_names_it_and_its_owner(
    install: Install, value: str, cause: str
) -> None:
    modules = {
        "angling_lake": ENVIRONMENT,
        "angling_needy": "import angling_dependency\n",
        "angling_rude": "raise RuntimeError('no licence')\n",
        "angling_garbled": "class Fishing(:\n",
    }
    install(modules=modules, entry_points={"fishing": value})
    with pytest.raises(ConfigError) as caught:
        make("fishing")
    message = str(caught.value)
    for part in ("'fishing'", f"'{value}' of angling", ENTRY_POINT_GROUP, cause):
        assert part in message
    assert caught.value.__cause__ is not None


def test_an_error_of_the_constructor_is_not_taken_for_a_broken_entry_point(install: Install) -> None:
    install(modules={"angling_lake": ENVIRONMENT}, entry_points={"fishing": "angling_lake:Fishing"})
    with pytest.raises(TypeError, match="lakes"):
        make("fishing", lakes=2)


@pytest.fixture
def registered() -> Iterator[str]:
    """A gymnasium id that some package other than ours has registered."""
    gymnasium.register(id="angling/Fishery-v3", entry_point="angling_lake:Fishing")
    yield "angling/Fishery-v3"
    del gymnasium_registry["angling/Fishery-v3"]


def test_an_unknown_id_lists_near_ones_of_gymnasium_of_plug_ins_and_of_ours(install: Install, registered: str) -> None:
    install(modules={"angling_lake": ENVIRONMENT}, entry_points={"fisherman": "angling_lake:Fishing"})
    for unknown, near in (
        ("angling/Fishery-v2", registered),
        ("fishermann", "fisherman"),
        ("k3rl/Shop-v7", "k3rl/Shop-v0"),
    ):
        with pytest.raises(UnknownEnvironmentError) as caught:
            make(unknown)
        assert f"no environment {unknown!r}" in str(caught.value)
        assert near in str(caught.value).split("near ones: ")[1].split(", ")


def test_one_answer_can_list_near_ones_of_several_sources(install: Install, registered: str) -> None:
    install(modules={"angling_lake": ENVIRONMENT}, entry_points={"angling-fishery": "angling_lake:Fishing"})
    with pytest.raises(UnknownEnvironmentError) as caught:
        make("angling/fishery")
    assert {registered, "angling-fishery"} <= set(str(caught.value).split("near ones: ")[1].split(", "))


def test_an_id_with_no_near_one_is_answered_with_ours() -> None:
    with pytest.raises(UnknownEnvironmentError) as caught:
        make("#" * 40)
    assert {"k3rl/Shop-v0", "k3rl/Arithmetic-v0"} <= set(str(caught.value).split("k3rl's own: ")[1].split(", "))


@pytest.mark.parametrize("source", ["class Fishing(:\n", "import os\nos.no_such_thing\n", "raise RuntimeError('no')\n"])
def test_a_module_that_fails_on_import_is_a_config_error_that_names_its_path(install: Install, source: str) -> None:
    install(modules={"angling_lake": source}, entry_points={})
    with pytest.raises(
        ConfigError, match=r"environment 'angling_lake:Fishing' cannot be imported: \w+Error: "
    ) as caught:
        make("angling_lake:Fishing")
    assert not isinstance(caught.value, UnknownEnvironmentError)


def test_an_import_path_names_the_module_or_the_class_that_is_missing(install: Install) -> None:
    install(modules={"angling_lake": ENVIRONMENT}, entry_points={})
    assert type(make("angling_lake:Fishing")).__name__ == "Fishing"
    with pytest.raises(UnknownEnvironmentError, match=r"'angling_laek:Fishing': No module named 'angling_laek'"):
        make("angling_laek:Fishing")
    with pytest.raises(UnknownEnvironmentError, match=r"'angling_lake:Fisching': .*Did you mean 'Fishing'\?"):
        make("angling_lake:Fisching")
