"""The layout that packaging, Ray workers and type checkers rely on; CONTRIBUTING says why."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("kernels", "model", "envs", "rewards", "rollout")


@pytest.mark.parametrize("name", LINKED)
def test_each_top_level_folder_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "k3rl" / name
    assert link.is_symlink()
    assert link.resolve() == (ROOT / name).resolve()


def test_the_kernels_folder_holds_packages_only_so_that_it_never_shadows_hugging_face_kernels() -> None:
    assert [p.name for p in (ROOT / "kernels").glob("*.py")] == []
    code = (
        "import importlib.util as u; s = u.find_spec('kernels'); "
        "print(s is None or s.origin is None or 'site-packages' in s.origin)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "True"


def test_no_package_below_tests_can_shadow_ours() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("folder", sorted(p.parent.name for p in (ROOT / "kernels").glob("*/reference.py")))
def test_the_mathematics_of_an_operation_names_each_of_its_public_functions(folder: str) -> None:
    text = (ROOT / "kernels" / folder / "README.md").read_text()
    public = importlib.import_module(f"k3rl.kernels.{folder}").__all__
    assert [name for name in public if f"`{name}`" not in text] == []


HELP = """
import sys
from k3rl.__main__ import main
sys.argv = ["k3rl", "--help"]
try:
    main()
except SystemExit:
    pass
assert not {"torch", "ray"} & set(sys.modules)
"""


def test_help_answers_within_a_second_and_without_torch() -> None:
    def ask() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )

    ask()  # warm the disk
    start = time.perf_counter()
    done = ask()
    assert "train" in done.stdout
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("module", ["config", "trajectory", "errors", "metrics", "envs.base", "rewards.base"])
def test_the_lower_layers_import_without_torch_or_ray(module: str) -> None:
    code = f"import sys, k3rl.{module}; assert not {{'torch', 'ray'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)
