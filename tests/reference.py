# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSPO in float64, as plain Python loops written from the formulas; shares no code with the package.

Everything is a list of lists indexed ``[sequence][token]``. Returns value and gradient, the latter written out by hand.
"""

import math

MAX_LOG_RATIO = 20.0
AGG_MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def edges(log_ratios, band):
    """Band edges (low, high, dual) of one sequence, from its token log-ratios; ``band`` holds the fields as set."""
    low, high = (band["eps"] if band[side] is None else band[side] for side in ("eps_low", "eps_high"))
    dual = high if band["eps_dual"] is None else band["eps_dual"]
    length = max(len(log_ratios), 1)
    q = sum(d * d for d in log_ratios)
    scale = length ** band["length_power"]
    center = 0.0 if band["normalization"] == "plain" else -q / 2
    return tuple(eps if math.isinf(eps) else center + eps * scale for eps in (-low, high, dual))


def token_weights(mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor):
    """d(aggregated loss) / d(loss of token t of sequence i) under verl's aggregation modes."""
    weights = []
    for row in mask:
        length = sum(row)
        if loss_agg_mode == "token-mean":
            weight = dp_size / batch_num_tokens
        elif loss_agg_mode == "token-sum":
            weight = dp_size
        elif loss_agg_mode == "seq-mean-token-sum":
            weight = dp_size / global_batch_size
        elif loss_agg_mode == "seq-mean-token-sum-norm":
            weight = dp_size / global_batch_size / (loss_scale_factor or len(row))
        elif loss_agg_mode == "seq-mean-token-mean":
            weight = dp_size / global_batch_size / (length + 1e-8)  # verl's guard against empty rows
        weights.append([weight * m for m in row])
    return weights


def fspo(log_prob, old_log_prob, advantages, mask, band, weights):
    """Value of Σ weights·token terms, its gradient with respect to ``log_prob``, and the sequences' S, edges."""
    value, gradient, log_ratio, band_edges = 0.0, [], [], []
    for lp, old, adv, row, weight in zip(log_prob, old_log_prob, advantages, mask, weights, strict=True):
        d = [a - b for a, b, m in zip(lp, old, row, strict=True) if m]
        s = math.fsum(d)
        low, high, dual = edges(d, band)
        log_ratio.append(s)
        band_edges.append((low, high, dual))
        row_gradient = []
        for a, m, w in zip(adv, row, weight, strict=True):
            if not m:
                row_gradient.append(0.0)
                continue
            if a > 0:
                clipped = s > high
                log_w = min(s, high)
            else:
                clipped = s < low or s > dual
                log_w = min(max(s, low), dual)
            ratio = math.exp(min(log_w, MAX_LOG_RATIO))
            value += w * (-a * ratio)
            row_gradient.append(0.0 if clipped else w * (-a * ratio))
        gradient.append(row_gradient)
    return value, gradient, log_ratio, band_edges
