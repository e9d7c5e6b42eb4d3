# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What happens before Ray starts: a launch is composed, checked, and refused where another loss would train."""

from pathlib import Path


def override(key: str, text: str | Path) -> str:
    """``key='text'``, a Hydra override quoted so that Hydra reads the text as it is; for bash see scripts/launch.

    Unquoted, any of ``( ) = { [ ' # & ~ ,`` or a letter beyond ASCII ends the launch, or changes what is read. Only
    ``${...}`` still has its meaning.
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    return f"{key}={QuotedString(str(text), Quote.single).with_quotes()}"
