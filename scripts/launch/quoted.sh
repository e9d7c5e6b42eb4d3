# shellcheck shell=bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Hydra overrides from values that are not known in advance, such as paths; for Python see fspo_verl/preflight/overrides.py.

quoted() { # text: the same in quotes, so that Hydra reads it as it is, whatever characters it holds
    # Backslashes count only before a quote, and the last one stands before the closing quote.
    LC_ALL=C sed -E "s/(\\\\*)'/\1\1\\\\'/g; s/(\\\\+)\$/\1\1/; s/.*/'&'/" <<<"$1"
}
