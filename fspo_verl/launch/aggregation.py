# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How verl's losses aggregate over tokens and responses, whatever ``loss_agg_mode`` says: read in verl's sources.

tests/verl_contract/test_loss.py calls every loss of the verl that is installed with two modes.
"""

_GSPO_OBEYS = ("0.9.1",)  # 0.9.0 does not, nor does main of August 2026
_OWN = {
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "geo_mean": "the mean over the responses of a micro-batch",
}


def of_its_own(loss: str, verl: str | None) -> str | None:
    """The aggregation that a loss has of its own; None where it takes the one of ``loss_agg_mode``.

    Args:
        loss: verl's name of it.
        verl: the version of verl.
    """
    return None if loss == "gspo" and verl in _GSPO_OBEYS else _OWN.get(loss)


def in_effect(loss: str, mode: str, verl: str | None) -> str:
    """Name what aggregates, in words for a list of settings."""
    own = of_its_own(loss, verl)
    if own is None or own == mode:
        return f"loss_agg_mode={mode}"
    return f"aggregation {own} ({loss} of verl {verl} ignores loss_agg_mode={mode})"
