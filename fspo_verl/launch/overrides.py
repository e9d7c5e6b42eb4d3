# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Hydra overrides from values that are not known in advance, such as paths; for bash see scripts/launch."""

from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString


def override(key: str, text: str | Path) -> str:
    """``key='text'``, quoted so that Hydra reads the text as it is.

    Unquoted, any of ``( ) = { [ ' # & ~ ,`` or a letter beyond ASCII ends the launch, or changes what is read. Only
    ``${...}`` still has its meaning.
    """
    return f"{key}={QuotedString(str(text), Quote.single).with_quotes()}"
