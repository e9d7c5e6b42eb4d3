#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# bash scripts/test_versions.sh [verl version ...]
#
# Tests the built wheel beside several versions of verl and prints a table in Markdown; default: 0.8.0 0.9.0 0.9.1 and
# the newest that pip finds. All other packages are those of requirements/cpu.txt. Not part of scripts/test.sh.
#   VENV   virtual environment that everything runs in (default .venv); it is left as it is
#   LOGS   folder for the output of each cell (default runs/test-versions)
#
# `version`: supported, or named as unsupported when the plugin is imported. `registered`: `import verl` alone registers
# the loss; verl before 0.9 loads no plugins. The other columns are pytest's counts: composition and checks of launches
# (tests/test_launch.py), and the loss in verl's ppo_loss, aggregation and metrics (tests/test_policy_loss.py).
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
VENV=${VENV:-.venv}
LOGS=$(realpath -m "${LOGS:-runs/test-versions}")

[[ ${1:-} != --help ]] || { sed -n '5,/^set -/s/^# \{0,1\}//p' "$0"; exit; }
bash scripts/install.sh "$VENV" requirements/cpu.txt cpu,report,test
python=$(realpath -s "$VENV/bin/python")
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$LOGS"
mkdir "$scratch/source"
cp -r fspo_verl hydra_plugins setup.py pyproject.toml README.md LICENSE "$scratch/source"
pip wheel --no-deps --no-build-isolation --wheel-dir "$scratch" "$scratch/source"

# One folder per version goes before the environment's own packages. In $scratch the checkout is not on the path.
inside() {
    local version=$1
    shift
    (cd "$scratch" && env PYTHONPATH="$scratch/$version" "$@")
}

cell() { # version, name, test file: pytest's last line
    # One test compares the checkout's configs/ with the package, which here is a wheel.
    inside "$1" "$python" -m pytest -q -p no:cacheprovider --rootdir "$repository" -c "$repository/pyproject.toml" \
        -k "not shown_at_the_top" "$repository/tests/$3" >"$LOGS/$1-$2.log" 2>&1 || true
    tail -n 1 "$LOGS/$1-$2.log" | sed 's/ in .*//; s/^=* *//'
}

echo "| verl | version | registered | composition and checks | loss in verl |"
echo "|---|---|---|---|---|"
(($#)) || set -- 0.8.0 0.9.0 0.9.1 newest
seen=' '
for version in "$@"; do
    spec=verl==$version
    [[ $version != newest ]] || spec=verl
    pip install --no-deps --target "$scratch/$version" "$spec" "$scratch"/fspo_verl-*.whl
    found=$(inside "$version" "$python" -c 'import importlib.metadata as m; print(m.version("verl"))')
    [[ $seen != *" $found "* ]] || continue # the newest may be one of the others
    seen+="$found "
    named=$(inside "$version" env VERL_USE_EXTERNAL_MODULES=fspo_verl.plugin "$python" -c 'import verl' 2>&1 |
        grep -c 'is not supported by fspo_verl' || true)
    registered=$(inside "$version" "$python" -c 'import verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
print("yes" if "fspo" in POLICY_LOSS_REGISTRY else "no")' 2>"$LOGS/$version-import.log" | tail -n 1)
    launches=$(cell "$version" launch test_launch.py)
    losses=$(cell "$version" loss test_policy_loss.py)
    echo "| $found | $([[ $named == 0 ]] && echo supported || echo named) | $registered | $launches | $losses |"
done
