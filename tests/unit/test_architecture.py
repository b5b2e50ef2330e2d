"""Rules about who may import what that import-linter cannot express."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSES = ("cluster", "router", "prefill", "decode")
SOURCES = sorted(path for house in HOUSES for path in (ROOT / house).rglob("*.py"))

TORCH_HOMES = (
    "cluster/kv/",
    "cluster/model/",
    "prefill/engine",
    "decode/engine",
    "cluster/bench/rivals/plain_transformers.py",
)
DISTRIBUTED_HOMES = ("cluster/kv/fabric.py", "cluster/model/parallel.py")


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
    return names


def users_of(package: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(name == package or name.startswith(package + ".") for name in imported_names(path))
    }


@pytest.mark.parametrize("module", ["router.flow", "router.ingress"])
def test_request_path_leaves_torch_unloaded(module: str):
    code = (
        f"import sys, {module}; "
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=60)
    assert loaded.strip() == "[]"


def test_torch_stays_in_the_engine_rooms():
    outside = {path for path in users_of("torch") if not path.startswith(TORCH_HOMES)}
    assert not outside


def test_process_groups_stay_in_one_module():
    assert users_of("torch.distributed") <= set(DISTRIBUTED_HOMES)


def test_environment_is_read_in_one_module():
    readers = users_of("os.environ") | users_of("os.getenv")
    # app.py sets variables that Ray reads at import; it takes none for itself
    assert readers <= {"cluster/config.py", "router/app.py"}


def test_files_stay_readable():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_opens_with_a_docstring(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    if path.name == "__init__.py":
        assert len(tree.body) == 1
