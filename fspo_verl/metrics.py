# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of the FSPO loss in verl's metric stream.

verl reduces a metric by an unweighted mean over micro-batches, data-parallel ranks and mini-batches, which is wrong for
a rate taken over micro-batches of unequal size. The ``actor/fspo/*`` metrics therefore hold one value per row of the
batch, so that verl's mean is the mean over rows, however the batch was cut. Rows without a response token (padding that
verl adds to fill a batch) count with 0; ``actor/fspo/sequence_fraction`` is the share of rows that are sequences, and
dividing by it gives the mean over sequences.
"""

import torch
import verl.utils.metric

import fspo_verl.loss


@torch.no_grad()
def sequence_metrics(sequences: "fspo_verl.loss.SequenceLoss") -> dict:
    """Metrics of one call of the loss: ``actor/fspo/*`` with a value per row, and verl's usual three per call.

    One host-device synchronisation in all. Names must not contain "min" or "max": verl would reduce by those.
    """
    is_sequence = sequences.length > 0
    length = sequences.length.clamp(min=1)
    per_row = {
        "sequence_fraction": is_sequence,
        "clip_fraction": sequences.clipped,
        "clip_fraction_upper": sequences.clipped_upper,
        "clip_fraction_lower": sequences.clipped_lower,
        "clip_fraction_dual": sequences.clipped_dual,
        "outside_band_fraction": sequences.outside & is_sequence,
        "log_ratio": sequences.log_ratio,
        "log_ratio_per_sqrt_length": sequences.log_ratio / length.sqrt(),
        "sigma_squared": sequences.quadratic_variation / length,
        "nonfinite_fraction": ~sequences.finite,
    }
    tokens = sequences.length.sum().clamp(min=1)
    per_call = {
        "actor/pg_clipfrac": (sequences.clipped * sequences.length).sum() / tokens,
        "actor/pg_clipfrac_lower": (sequences.clipped_dual * sequences.length).sum() / tokens,
        "actor/ppo_kl": -sequences.log_ratio.sum() / tokens,
    }
    rows = torch.stack([value.to(length.dtype) for value in per_row.values()])
    flat = torch.cat([rows.flatten(), torch.stack(list(per_call.values()))]).tolist()
    n = len(sequences.length)
    metrics = dict(zip(per_call, flat[len(per_row) * n :], strict=True))
    for i, name in enumerate(per_row):
        metrics[f"actor/fspo/{name}"] = metric = verl.utils.metric.Metric("mean")
        metric.extend(flat[i * n : (i + 1) * n])
    return metrics
