# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Clipped policy losses of whole responses, written down once more: value and gradient from S, L and A.

Nothing here is of fspo_verl, so that a fault there is not a fault here. Sources: FSPO, arXiv 2509.09177; GSPO, arXiv
2507.18071; aggregation, verl's ``agg_loss``. Log-ratios are in nats, arrays in float64.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
LARGEST = 20.0  # an exponent that is larger is cut, by verl and by fspo_verl


@dataclass(frozen=True)
class Method:
    """A loss −A·e^x of each token, x = S or S/L, where S is held in a range; beyond it there is no gradient.

    Attributes:
        low, high, dual: of the range, in units of L^power; the dual clip is for A < 0 alone.
        power: 0.5 is FSPO, 0 a fixed range, 1 GSPO.
        weight: what x is: "S", "S/L", or "0".
        drifts: the range is around −Q/2, not 0.
        mode: of verl's ``agg_loss``.
    """

    low: float
    high: float
    dual: float
    power: float = 0.5
    weight: str = "S"
    drifts: bool = False
    mode: str = "seq-mean-token-sum-norm"

    def applied(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Value and gradient of each response, as they add up to those of the batch.

        Args:
            rows: length, log_ratio, variation; better and worse, the sums of the advantages above and below 0; ranks,
                tokens, responses and divisor, what ``agg_loss`` divides by.

        Returns:
            Columns ``value``; ``gradient_better`` and ``gradient_worse``, sums over the tokens of either sign, and
            ``unclipped_better`` and ``unclipped_worse``, what they would be without a clip; the clip that has taken
            gradient, ``decision``; and ``distance``, of S from the nearest edge.
        """
        s, length = rows.log_ratio, rows.length.clip(lower=1)
        unit, center = length**self.power, rows.variation / -2 if self.drifts else 0.0
        low, high, dual = center - self.low * unit, center + self.high * unit, center + self.dual * unit

        def weight(held: pd.Series) -> pd.Series:
            return np.exp({"S": held, "S/L": held / length, "0": held * 0}[self.weight].clip(upper=LARGEST))

        parts = {
            "token-mean": rows.tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": rows.responses,
            "seq-mean-token-sum-norm": rows.responses * rows.divisor,
            "seq-mean-token-mean": rows.responses * length,
        }
        share = -rows.ranks / parts[self.mode]
        better, worse = share * rows.better, share * rows.worse
        upper, lower = (s > high) & (better != 0), (s < low) & (worse != 0)
        beyond_dual = (s > dual) & (worse != 0)
        return pd.DataFrame(
            {
                "value": better * weight(np.minimum(s, high)) + worse * weight(s.clip(low, dual)),
                "gradient_better": (better * weight(s)).where(~upper, 0.0),
                "gradient_worse": (worse * weight(s)).where(~(lower | beyond_dual), 0.0),
                "unclipped_better": better * weight(s),
                "unclipped_worse": worse * weight(s),
                "decision": np.select([upper, lower, beyond_dual], ["upper", "lower", "dual"], "kept"),
                "distance": np.minimum.reduce([(s - edge).abs() for edge in (low, high, dual)]),
            }
        )

    @property
    def widths(self) -> dict[str, float]:
        """Distance of each edge from the centre, in units of L^power, by the decision that it takes."""
        return {"upper": self.high, "lower": self.low, "dual": self.dual}

    @property
    def variants(self) -> dict[str, "Method"]:
        """Faults that a broken loss may have, by what its range, weight or clip is then."""
        no_edge, shape = math.inf, {0.0: "eps", 0.5: "eps √L", 1.0: "eps L"}
        own = shape.get(self.power, f"eps L^{self.power:g}")
        variants = {
            "clip is missing": replace(self, low=no_edge, high=no_edge, dual=no_edge),
            "clip above the range is missing": replace(self, high=no_edge),
            "clip below the range is missing": replace(self, low=no_edge),
            "dual clip is missing": replace(self, dual=no_edge),
            "sides are exchanged": replace(self, low=self.high, high=self.low),
        }
        variants |= {f"range is {text}, not {own}": replace(self, power=power) for power, text in shape.items()}
        variants |= {f"weight is e^({x}), not e^({self.weight})": replace(self, weight=x) for x in ("S", "S/L", "0")}
        variants |= {f"aggregation is {mode}, not {self.mode}": replace(self, mode=mode) for mode in MODES}
        return {text: method for text, method in variants.items() if method != self}

    def __str__(self) -> str:
        unit = {0.0: "", 0.5: " √L", 1.0: " L"}.get(self.power, f" L^{self.power:g}")
        if math.isinf(self.low) and math.isinf(self.high):
            return f"no range, weight e^({self.weight}), {self.mode}"
        dual = "no dual clip" if math.isinf(self.dual) else f"dual clip {self.dual:g}{unit}"
        return f"range -{self.low:.3g}{unit} to {self.high:.3g}{unit}, {dual}, weight e^({self.weight}), {self.mode}"


def asked(loss: str, mode: str, config: Mapping) -> Method | None:
    """Return what a worker's config asks of fspo; None for another loss, and where the range moves."""
    if loss != "fspo" or config["target_clip_rate"] is not None:
        return None
    low, high = (config["eps"] if config[side] is None else config[side] for side in ("eps_low", "eps_high"))
    dual = high if config["eps_dual"] is None else config["eps_dual"]
    return Method(low, high, dual, config["length_power"], "S", config["normalization"] != "plain", mode)
