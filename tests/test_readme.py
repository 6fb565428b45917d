"""What the README shows is what runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from k3rl.envs.checks import check_environment

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_environment_passes_the_conformance_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    (tmp_path / "readme_example.py").write_text(block[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        check_environment("readme_example:Capital")
    finally:
        sys.modules.pop("readme_example", None)


def test_every_linked_file_and_make_target_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) <= set(targets)
