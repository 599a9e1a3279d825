#!/usr/bin/env bash
# Resolve pyproject.toml into gpu.txt, then cpu.txt at the same versions without what needs CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
compile() {
  uv pip compile pyproject.toml --extra verl --group dev --universal --python-version 3.11 \
    --generate-hashes --no-annotate --no-header --quiet "$@"
}
compile --output-file requirements/gpu.txt
compile --output-file requirements/cpu.txt --constraint requirements/gpu.txt --excludes requirements/cpu-excludes.txt
