#!/usr/bin/env bash
# The router on a fresh machine: makes .venv in the repository's root if it is not ready, and runs
# `kvflow demo --router` in it: two producers, a consumer and the router, 60 streamed chats; one
# producer is killed in the middle, and every token is compared with a run of one engine alone.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/tests/run.sh" --setup-only >&2
exec "$root/.venv/bin/kvflow" demo --router "$@"
