#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# bash scripts/install.sh VENV [REQUIREMENTS=requirements/cpu.txt] [EXTRAS=report]
#
# Makes the virtual environment VENV, if need be, and installs the pinned REQUIREMENTS (one file, or several separated by
# spaces), a CPU build of torch, and this package with EXTRAS and that in cpu/, both editable. Run again with the same files
# and no further EXTRAS it returns at once.
# PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "install: $*" >&2
    exit 1
}

case ${1:-} in
    --help | -h) sed -n '5,/^set -/s/^# \{0,1\}//p' scripts/install.sh; exit ;;
    '' | -*) fail "usage: bash scripts/install.sh VENV [REQUIREMENTS] [EXTRAS], see --help" ;;
esac
VENV=$1
read -ra REQUIREMENTS <<<"${2:-requirements/cpu.txt}"
EXTRAS=${3:-report}
for file in "${REQUIREMENTS[@]}"; do
    [[ -f $file ]] || fail "no file $file; there are $(echo requirements/*.txt)"
done

hash=$(cat "${REQUIREMENTS[@]}" requirements/{test,docs}.txt {.,cpu}/setup.py <(echo "$PWD") | sha256sum | cut -c1-16)
stamps=() missing=
for extra in ${EXTRAS//,/ }; do
    stamp=$VENV/.installed-$hash-$extra
    stamps+=("$stamp")
    [[ -f $stamp ]] || missing=1
done
[[ $missing ]] || exit 0

if [[ ! -x $VENV/bin/python ]]; then
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    [[ -n ${python:-} ]] || fail "Python 3.10, 3.11 or 3.12 is needed (python3 is $(python3 --version 2>&1))"
    "$python" -m venv "$VENV" || fail "could not make $VENV; on Debian and Ubuntu: apt install python3-venv"
fi
export VIRTUAL_ENV=$PWD/$VENV
[[ $VENV == /* ]] && export VIRTUAL_ENV=$VENV
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet --quiet "$@"; }
uv() { "$VENV/bin/python" -m uv --quiet "$@"; }

pip install uv==0.13.8

# torch first, in a CPU build: PyPI's own brings gigabytes of CUDA packages. pip's configuration may offer one (as a
# mirror or a folder of wheels), uv knows where PyTorch keeps its own.
torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "${REQUIREMENTS[@]}")
if ! "$VENV/bin/python" -c "import importlib.metadata as m; assert m.version('torch').split('+')[0] == '$torch'" 2>/dev/null; then
    pip install --no-deps "torch==$torch+cpu" 2>/dev/null ||
        uv pip install --no-deps --torch-backend cpu "torch==$torch" 2>/dev/null ||
        { echo "install: no CPU build of torch $torch found, installing the CUDA build (several GB)"; pip install "torch==$torch"; }
fi
# The requirements are complete; resolving them again would bring back what they leave out.
pinned=("${REQUIREMENTS[@]/#/--requirement=}")
uv pip install --no-deps "${pinned[@]}" || pip install --no-deps "${pinned[@]}"
constraints=("${REQUIREMENTS[@]/#/--constraint=}" --constraint=requirements/{test,docs}.txt)
packages=(-e ./cpu -e ".[$EXTRAS]")
uv pip install "${constraints[@]}" "${packages[@]}" || pip install "${constraints[@]}" "${packages[@]}"
touch "${stamps[@]}"
