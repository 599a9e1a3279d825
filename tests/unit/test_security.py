"""Each place of ours that unpickles or evaluates what it is given (docs/security.md says who gives it).

torch's collectives of objects unpickle too: they are among an engine's ranks, and not listed here.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Calls that run what their argument says: by name, and as a method of whatever object.
FUNCTIONS = {"eval", "exec", "compile", "torch.load", "pickle.load", "dill.load", "yaml.load", "yaml.unsafe_load"}
METHODS = {"loads", "recv_pyobj", "deserialize", "Unpickler", "system", "popen"}
HARMLESS = {"json.loads"}

KNOWN = {
    "moebius_engine/sglang/delivery.py: self._socket.recv_pyobj",
    "moebius_engine/exchange.py: pickle.loads",
    "moebius_engine/sglang/intake.py: socket.recv_pyobj",
    "moebius_engine/sglang/cpu/controller.py: self.recv_from_tokenizer.recv_pyobj",
    "moebius_engine/sglang/worker.py: MultiprocessingSerializer.deserialize",
}


def dangerous(source: str) -> set[str]:
    """Calls of a source text that run what they are given, and any with shell=True."""
    found = set()
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        shell = any(word.arg == "shell" and not _is_false(word.value) for word in call.keywords)
        _, dot, method = name.rpartition(".")
        if shell or name in FUNCTIONS or (dot and method in METHODS and name not in HARMLESS):
            found.add(name)
    return found


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_every_such_place_is_known():
    files = [path for folder in ("moebius_engine", "rollout", "recipes") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = {f"{path.relative_to(ROOT)}: {name}" for path in files for name in dangerous(path.read_text())}
    assert found == KNOWN


@pytest.mark.parametrize(
    "source",
    ["pickle.loads(x)", "torch.load(x)", "eval(x)", "yaml.load(x)", "sock.recv_pyobj()", "run(x, shell=True)"],
)
def test_what_is_dangerous_is_found(source):
    assert dangerous(source)
    assert not dangerous("json.loads(x); yaml.safe_load(x); re.compile(x); run(x, shell=False)")
