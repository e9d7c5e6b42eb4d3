#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# bash scripts/test_versions.sh [verl ...]
#
# Tests the built wheel beside several verls and prints a table in Markdown. A verl is a version, a folder with a
# checkout, or whatever else pip installs ('verl @ git+https://...'); default: 0.8.0 0.9.0 0.9.1 and the newest that pip
# finds. All other packages are those of requirements/cpu.txt. Not part of scripts/test.sh.
#   VENV   virtual environment that everything runs in (default .venv); it is left as it is
#   LOGS   folder for the output of each cell (default runs/test-versions)
#
# `version`: tested, untested (a warning), or named as unsupported when the plugin is imported. `registered`: `import
# verl` alone registers the loss; verl before 0.9 loads no plugins. The other columns are pytest's counts: what is taken
# for granted of verl (tests/verl_contract), composition and checks of launches (tests/launch/test_launch.py), the loss in
# verl's ppo_loss, aggregation and metrics (tests/test_policy_loss.py).
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
VENV=${VENV:-.venv}
LOGS=$(realpath -m "${LOGS:-runs/test-versions}")

[[ ${1:-} != --help ]] || { sed -n '5,/^set -/s/^# \{0,1\}//p' "$0"; exit; }
bash scripts/install.sh "$VENV" requirements/cpu.txt report,test,docs
python=$(realpath -s "$VENV/bin/python")
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$LOGS"
mkdir "$scratch/source"
cp -r fspo_verl hydra_plugins setup.py pyproject.toml README.md LICENSE "$scratch/source"
pip wheel --no-deps --no-build-isolation --wheel-dir "$scratch" "$scratch/source"

# What pip is to install for an argument. A checkout is copied: a build leaves files in its folder.
spec() {
    if [[ -d $1 ]]; then
        mkdir "$scratch/checkout"
        tar -C "$1" --exclude=./.git -cf - . | tar -C "$scratch/checkout" -xf -
        echo "$scratch/checkout"
    elif [[ $1 == newest ]]; then
        echo verl
    elif [[ $1 =~ ^[0-9] ]]; then
        echo "verl==$1"
    else
        echo "$1"
    fi
}

# One folder per verl goes before the environment's own packages. In $scratch the checkout is not on the path.
inside() {
    (cd "$scratch" && env PYTHONPATH="$folder" "$@")
}

cell() { # name, tests and options: pytest's last line
    local log=$LOGS/$found-$1.log
    shift
    # Left out: the comparison of the checkout's configs/ with the package, which here is a wheel.
    inside "$python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -p no:cacheprovider \
        --rootdir "$repository" -c "$repository/pyproject.toml" \
        --deselect "tests/launch/test_launch.py::test_the_configs_shown_at_the_top_are_the_packaged_ones" \
        "$@" >"$log" 2>&1 || true
    tail -n 1 "$log" | sed 's/ in .*//; s/^=* *//'
}

row() { printf '| %s ' "$@"; echo '|'; }
row verl version registered contract "composition and checks" "loss in verl"
row --- --- --- --- --- ---
(($#)) || set -- 0.8.0 0.9.0 0.9.1 newest
seen=' ' number=0
for verl in "$@"; do
    folder=$scratch/verl-$((number += 1))
    pip install --no-deps --no-build-isolation --target "$folder" "$(spec "$verl")" "$scratch"/fspo_verl-*.whl
    rm -rf "$scratch/checkout"
    found=$(inside "$python" -c 'import importlib.metadata as m; print(m.version("verl"))')
    [[ $seen != *" $found "* ]] || continue # the newest may be one of the others
    seen+="$found "
    supported=$(inside "$python" -c 'from fspo_verl.launch import installation
found = [finding.id for finding in installation.verl_version()]
print({"verl_version": "named", "untested_verl": "untested"}[found[0]] if found else "tested")')
    registered=$(inside "$python" -c 'import verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
print("yes" if "fspo" in POLICY_LOSS_REGISTRY else "no")' 2>"$LOGS/$found-import.log" | tail -n 1)
    contract=$(cell contract "$repository/tests/verl_contract")
    composed=$(cell launch "$repository/tests/launch/test_launch.py")
    loss=$(cell loss "$repository/tests/test_policy_loss.py")
    row "$found" "$supported" "$registered" "$contract" "$composed" "$loss"
done
