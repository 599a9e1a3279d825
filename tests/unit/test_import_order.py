"""SGLang reads its platform when it is imported, so on a CPU ours must come first."""

import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang finds a GPU by itself")
def test_importing_sglang_first_is_an_error_that_says_what_to_do():
    code = (
        "import os, sys, types; os.environ.pop('SGLANG_USE_CPU_ENGINE', None)\n"
        "sys.modules['sglang.srt.environ'] = types.ModuleType('sglang.srt.environ')\n"
        "import moebius_engine.engine"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "sglang.srt.environ was imported before moebius_engine.engine" in done.stderr.splitlines()[-1]
    assert "import moebius_engine.engine first" in done.stderr.splitlines()[-1]
