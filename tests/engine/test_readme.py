"""README.md and docs/design.md against the code: no engine is started."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from moebius_engine.config import SwitchConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of `name(...)` or `anything.name(...)`, through `.remote(...)` too."""
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "remote":
            function = function.value.func if isinstance(function.value, ast.Call) else function.value
        if name in (getattr(function, "attr", None), getattr(function, "id", None)):
            found.append(call)
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0])
def test_code_blocks_compile_and_import(block):
    tree = ast.parse(block)
    compile(tree, "README.md", "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.slow
def test_the_first_code_block_runs(tmp_path):
    """As a script: its ranks import it once more."""
    script = tmp_path / "first.py"
    script.write_text(BLOCKS[0])
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "OMP_"))}
    own["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr
    assert done.stdout.splitlines()[-1] == f"{[16 * (row + 1) for row in range(8)]} tp"


def test_calls_in_the_code_blocks_fit_their_signatures():
    from moebius_engine.engine import Engine, SwitchingEngine
    from recipes.tiny_moe import make_tiny_moe
    from rollout.actor import RolloutActor

    python, ray = map(ast.parse, BLOCKS)
    checked = [(python, make_tiny_moe, "make_tiny_moe", 0), (python, SwitchingEngine, "SwitchingEngine", 0)]
    checked += [(python, SwitchingEngine.health, "health", 1), (python, SwitchingEngine.shutdown, "shutdown", 1)]
    checked += [(python, inspect.unwrap(Engine.generate), "generate", 1)]
    checked += [(ray, RolloutActor, "remote_actor", 0)]
    checked += [
        (ray, getattr(RolloutActor, name), name, 1) for name in ("begin_step", "generate_batch", "end_step", "shutdown")
    ]
    for tree, function, name, bound in checked:
        # The call that takes the arguments is the outermost: remote_actor(...).remote(...).
        call, *_ = calls(tree, name)
        arguments = [None] * (len(call.args) + bound)
        inspect.signature(function).bind(*arguments, **{word.arg: None for word in call.keywords})


def test_the_settings_table_lists_every_field_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", README, re.MULTILINE)
    assert rows == [(field.name, repr(_plain(field.default))) for field in fields(SwitchConfig)]


def _plain(value):
    return str(value) if isinstance(value, str) else value


def test_links_and_folders_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    for path in re.findall(r"`((?:moebius_engine|rollout|recipes|tests|docs|requirements)/[\w./]*)`", README):
        assert (ROOT / path).exists(), path


def test_the_picture_is_what_its_script_draws():
    script = importlib.util.spec_from_file_location("architecture", ROOT / "docs/architecture.py")
    module = importlib.util.module_from_spec(script)
    script.loader.exec_module(module)
    assert (ROOT / "docs/architecture.svg").read_text(encoding="utf-8") == module.draw()


def hook_table() -> str:
    """The table of docs/design.md, made from the hook tables."""
    from moebius_engine.sglang.cpu.grammar import XGRAMMAR_HOOKS
    from moebius_engine.sglang.cpu.table import CPU_HOOKS
    from moebius_engine.sglang.dispatch import DISPATCH_HOOKS
    from moebius_engine.sglang.fp32 import FP32_HOOKS
    from moebius_engine.sglang.heartbeat import heartbeat_hooks
    from moebius_engine.sglang.seeds import SEED_HOOKS
    from moebius_engine.sglang.table import STATIC_HOOKS, switching_hooks

    groups = {
        "switching": (*switching_hooks(None, SwitchConfig()), *DISPATCH_HOOKS),
        "policy `off`": STATIC_HOOKS,
        "every policy": heartbeat_hooks(()),
        "`seeded`": SEED_HOOKS,
        "float32 on a GPU": FP32_HOOKS,
        "CPU": CPU_HOOKS,
        "xgrammar on a CPU": XGRAMMAR_HOOKS,
    }
    lines = ["| upstream function | kind | needed for | why |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{hook.target.removeprefix('sglang.srt.')}` | {hook.kind.name.lower()} | {group} | {hook.why} |"
        for group, hooks in groups.items()
        for hook in hooks
    ]
    return "\n".join(lines)


def test_the_hook_table_is_that_of_the_code():
    table = hook_table()
    assert table in DESIGN, f"docs/design.md must hold this table:\n{table}"
