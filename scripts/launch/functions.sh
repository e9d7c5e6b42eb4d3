# shellcheck shell=bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Functions of the launch scripts.

show_help() { # files with variables, in the order in which they are set: the comment at the top of $0, then the variables
    sed -n '/^# SPDX/,/^set -/{/^# SPDX/d;/^set -/d;s/^# \{0,1\}//;p}' "$0"
    echo "Variables, with the values that are in effect:"
    cat "$@" | sed -n 's/^\([A-Z_]*\)=\${\1:-.*}  *# \(.*\)/\1 \2/p' | awk '!seen[$1]++' |
        while read -r name text; do printf '  %s\n      %s\n' "$name=${!name}" "$text"; done
}

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# A Hydra override from a value that is not known in advance, such as a path; for Python see fspo_verl/launch/__init__.py.
quoted() { # text: the same in quotes, so that Hydra reads it as it is, whatever characters it holds
    # Backslashes count only before a quote, and the last one stands before the closing quote.
    LC_ALL=C sed -E "s/(\\\\*)'/\1\1\\\\'/g; s/(\\\\+)\$/\1\1/; s/.*/'&'/" <<<"$1"
}
