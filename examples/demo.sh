#!/usr/bin/env bash
# The demo on a fresh machine: makes .venv in the repository's root if it is not ready, and runs
# `kvflow demo` in it. Arguments are passed on, e.g. `bash examples/demo.sh --keep`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/tests/run.sh" --setup-only >&2
exec "$root/.venv/bin/kvflow" demo "$@"
