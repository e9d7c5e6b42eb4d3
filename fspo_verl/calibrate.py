# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Find the band that clips a target share of the responses, from what a run has recorded.

eps_high is set so that the target share of the responses with A > 0 lies above the band, and
eps_low so that the same share of those with A < 0 lies below it. All recorded responses with an
advantage count, also those of the first mini-batch of each rollout, which have not moved and
cannot be clipped: this is the rate that the metrics of a run show as
actor/fspo/clip_fraction / actor/fspo/nonzero_advantage_fraction.

The answer is that of the recorded updates. Trained with another band, learning rate or batch
size, the policy moves otherwise: calibrate again from the records of that run.

Without records the metrics give a coarser answer, from a Gaussian law of S/sqrt(L).
"""

import argparse
import dataclasses
import json
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from omegaconf import OmegaConf
from scipy import optimize, stats

from fspo_verl import fairness
from fspo_verl.fairness import MIN_COUNT, Estimate, LawOfS, Method
from fspo_verl.loss import Band
from fspo_verl.runs import Run, read_run

KEY = "actor_rollout_ref.actor.policy_loss."
PREFIX = "actor/fspo/"  # of the live metrics, see fspo_verl/metrics.py (which imports verl)
MODES = (("zero", "length"), ("realized", "length"), ("realized", "realized"))  # band_center, band_width
NOT_OFFERED = (
    "band_center=zero with band_width=realized is not offered: where S drifts by -Q/2, it outgrows a width of sqrt(Q) "
    "on one side"
)
_NOTHING_MOVED = (
    "no recorded response has moved (Q = 0 in all of them): with one optimiser step per rollout the ratio stays 1 and "
    "no clip can act; lower actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size"
)
_DUAL = 3  # eps_dual in units of eps_high, as in the default band
_DRIFT_MATTERS = 1.0  # sigma·sqrt(L) from which the drift −Q/2 is half as large as the spread sqrt(Q)
_FEW_CLIPPED = 50
_FEW_PROMPTS = 30
_MANY_STEPS = 20
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run: its records, or else its metrics")
    parser.add_argument(
        "--target-clip-rate",
        type=float,
        default=0.1,
        metavar="RATE",
        help="share to clip of the responses with A > 0, and of those with A < 0, unmoved ones included (default: 0.1; "
        "the authors' clip rates are not known)",
    )
    parser.add_argument("--bins", type=int, default=8, help="length bins of the fairness figures (default: 8)")
    parser.add_argument(
        "--min-count", type=int, default=MIN_COUNT, help="responses a length bin needs to count (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap and the permutations (default: 0)")
    parser.add_argument(
        "--max-rows", type=int, default=1_000_000, help="records to use; of more, a random part (default: 1,000,000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that is printed as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the calibration of ``args.run``; 0, or ValueError or FileNotFoundError with what to mend."""
    if not 0 < args.target_clip_rate < 1:
        raise ValueError(f"--target-clip-rate={args.target_clip_rate:g} must lie between 0 and 1")
    for option in ("bins", "min_count", "max_rows"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')}={getattr(args, option)} must be at least 1")
    run = read_run(args.run, args.run.name, args.max_rows)
    if run.records.empty:
        result = coarse(run.metrics, run.config, args.target_clip_rate)
    else:
        rng = np.random.default_rng(args.seed)
        result = calibrate(run.records, args.target_clip_rate, rng, args.bins, args.min_count)
    print(result.text(run))
    if args.json:
        source = {"run": str(run.folder), "source": "metrics" if run.records.empty else "records"}
        args.json.write_text(json.dumps(source | _plain(result), indent=2, allow_nan=False) + "\n")
    return 0


# --- from records ----------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """What the estimates of one call of :func:`calibrate` share."""

    target: float
    rng: np.random.Generator
    edges: np.ndarray
    min_count: int
    draws: int
    confidence: float


@dataclass(frozen=True)
class Fit:
    """The band of one mode that has the target rate on both sides, or why there is none."""

    band_center: str
    band_width: str
    refused: tuple[str, ...]
    eps_low: Estimate | None = None
    eps_high: Estimate | None = None
    rates: dict[str, Estimate] | None = None
    """By side (all, upper, lower; dual: A < 0 beyond the dual clip): the rate on these records, and the interval in
    which the rate of a re-run of the same size lands."""
    lre: dict[str, dict] | None = None
    """By side (upper, lower): lre, lre_lower, lre_upper, floor, floor_upper of the band."""

    @property
    def name(self) -> str:
        center = "0" if self.band_center == "zero" else "-Q/2"
        return f"centre {center}, width sqrt({'L' if self.band_width == 'length' else 'Q'})"

    @property
    def overrides(self) -> dict[str, float | str]:
        low, high = (float(f"{estimate.value:.4g}") for estimate in (self.eps_low, self.eps_high))
        return _overrides(low, high, self.band_center, self.band_width)


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` finds."""

    target: float
    responses: int  # with an advantage
    moved: float  # share of them that have moved
    prompts: int
    steps: int
    shortest: int
    longest: int
    clip_rate: float  # of the loss that trained
    rerun_by: str  # what varies in a re-run: steps or prompts
    law: LawOfS
    spread: dict  # low, high, value, lower, upper: sigma·sqrt(L) in the longest bin with enough responses
    fits: tuple[Fit, ...]
    recommended: int  # index into fits
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    def text(self, run: Run) -> str:
        return _text(self, run)


def calibrate(
    records: pd.DataFrame,
    target: float,
    rng: np.random.Generator,
    bins: int = 8,
    min_count: int = MIN_COUNT,
    draws: int = 400,
    confidence: float = 0.95,
) -> Calibration:
    """Fit the band of each mode to a target clip rate per side, and recommend one.

    eps_high is the smallest number such that at most the share ``target`` of the responses with A > 0 has
    (S − c)/s > eps_high; eps_low likewise with A < 0 and (c − S)/s. Their intervals are the quantiles at the ends of
    the rate's interval, which is Wilson's with clusters (:func:`fspo_verl.fairness.rate_by_length`); where prompts are
    few, this covers better than percentiles of a bootstrap.

    The interval of the rate is for a re-run of the same size at the fitted eps: its variance is twice that of a rate
    at a fixed eps, once for these records, which fixed the eps, and once for the re-run. It is from a bootstrap of
    training steps where there are at least 20 of them, so that it holds what differs between updates, and of prompts
    otherwise. What another seed does to the course of a whole run is in neither.

    Args:
        records: of a run, with unmoved responses.
        target: share between 0 and 1.
        rng: source of bootstrap draws and permutations.
        bins, min_count, draws, confidence: as in :mod:`fspo_verl.fairness`.

    Raises:
        ValueError: nothing has moved, a sign of the advantage is missing, or no mode reaches the target.
    """
    side = fairness.sides(records)
    moved = records["quadratic_variation"].to_numpy() > 0
    for name, sign in (("upper", ">"), ("lower", "<")):
        if not side[name].any():
            raise ValueError(
                f"no recorded response has an advantage {sign} 0, so there is nothing to clip on that side"
            )
    if not moved[side["all"]].any():
        raise ValueError(_NOTHING_MOVED)
    edges = fairness.length_edges(records["length"], bins)
    law = fairness.law_of_s(records, edges, rng, draws, min_count, confidence)
    options = _Options(target, rng, edges, min_count, draws, confidence)
    fits = tuple(_fit(records, center, width, options) for center, width in MODES)
    if all(fit.refused for fit in fits):
        reasons = "; ".join(dict.fromkeys(reason for fit in fits for reason in fit.refused))
        raise ValueError(f"no band clips {target:g} of the responses on each side: {reasons}")
    usable = law.variation_by_length[law.variation_by_length["lower"].notna()]
    spread = {} if usable.empty else usable.iloc[-1].to_dict()
    recommended, reasons = recommend(law, spread, fits)
    return Calibration(
        target=target,
        responses=int(side["all"].sum()),
        moved=float(moved[side["all"]].mean()),
        prompts=int(fairness.clusters(records).max()) + 1,
        steps=int(records["step"].nunique()),
        shortest=int(records["length"].min()),
        longest=int(records["length"].max()),
        clip_rate=fairness.clip_rate(records),
        rerun_by=_rerun_clusters(records)[0],
        law=law,
        spread=spread,
        fits=fits,
        recommended=recommended,
        reasons=tuple(reasons),
        warnings=tuple(_warnings(records, side, target, law, fits[recommended], min_count)),
    )


def _fit(records: pd.DataFrame, center: str, width: str, options: _Options) -> Fit:
    side, cluster = fairness.sides(records), fairness.clusters(records)
    score = fairness.standardized(records, Band(band_center=center, band_width=width))
    eps, refused = {}, []
    for name, beyond in (("upper", score), ("lower", -score)):
        mask = side[name]
        value = fairness.upper_quantile(beyond[mask], options.target)
        if value > 0:
            eps[name] = Estimate(value, *_eps_interval(beyond[mask], value, cluster[mask], options.confidence))
        else:
            refused.append(_unreachable(name, records[mask], beyond[mask], options.target))
    if refused:
        return Fit(center, width, tuple(refused))
    fit = Fit(center, width, (), eps["lower"], eps["upper"])
    method = Method("band", fit.name, Band(**fit.overrides))
    clipped = method.clipped(records)
    beyond_dual = side["lower"] & (clipped > 0) & (score > 0)
    cases = [(name, mask, clipped) for name, mask in side.items()] + [("dual", side["lower"], beyond_dual)]
    rates = {name: _rerun_rate(records[mask], values[mask], options) for name, mask, values in cases}
    summary = fairness.counterfactuals(
        records,
        options.edges,
        options.rng,
        methods={"band": method},
        draws=options.draws,
        min_count=options.min_count,
        confidence=options.confidence,
    ).summary
    lre = summary.set_index("side").loc[["upper", "lower"], ["lre", "lre_lower", "lre_upper", "floor", "floor_upper"]]
    return dataclasses.replace(fit, rates=rates, lre=lre.to_dict("index"))


def _unreachable(name: str, part: pd.DataFrame, beyond: np.ndarray, target: float) -> str:
    moved = (part["quadratic_variation"] > 0).mean()
    where = "with A > 0 lie above" if name == "upper" else "with A < 0 lie below"
    text = f"only {np.mean(beyond > 0):.1%} of the responses {where} the centre, and eps must be positive"
    if moved < target:
        count = int(part["mini_batch"].max()) + 1
        text += (
            f"; {1 - moved:.1%} have not moved, as those of the first of {count} mini-batches of each rollout, "
            "which no clip can reach: lower the target, or actor_rollout_ref.actor.ppo_mini_batch_size"
        )
    return text


def _eps_interval(score: np.ndarray, eps: float, cluster: np.ndarray, confidence: float) -> tuple[float, float]:
    """The quantiles of the score at the two ends of the interval of the rate beyond eps, which is clustered."""
    rate = fairness.rate_by_length(np.ones(len(score)), score > eps, [1, 2], confidence, cluster).iloc[0]
    if math.isnan(rate["lower"]):
        return math.nan, math.nan
    return fairness.upper_quantile(score, rate["upper"]), fairness.upper_quantile(score, rate["lower"])


def _rerun_clusters(records: pd.DataFrame) -> tuple[str, np.ndarray]:
    if records["step"].nunique() >= _MANY_STEPS:
        return "steps", pd.factorize(records["step"])[0]
    return "prompts", fairness.clusters(records)


def _rerun_rate(part: pd.DataFrame, clipped: np.ndarray, options: _Options) -> Estimate:
    rate, lower, upper = fairness.clustered_bootstrap(
        _rerun_clusters(part)[1],
        np.stack([np.ones(len(part)), clipped], -1),
        lambda totals: totals[..., 1:] / totals[..., :1],
        options.rng,
        options.draws,
        options.confidence,
    )
    half = math.sqrt(2) * (upper - lower).item() / 2
    return Estimate(rate.item(), max(rate.item() - half, 0.0), min(rate.item() + half, 1.0))


# --- which mode ------------------------------------------------------------------------------------------------------


def recommend(law: LawOfS, spread: dict, fits: tuple[Fit, ...]) -> tuple[int, list[str]]:
    """Index of the mode to take, and the reasons.

    The centre: −Q/2 leaves a drift of (1 − kappa)·Q/2 and 0 one of kappa·Q/2, so −Q/2 is better where the interval of
    kappa lies above 1/2, and 0 where it lies below; it matters only where sigma·sqrt(L) reaches about 1, as the drift
    is then half as large as the spread. The width stays sqrt(L), which is a trust region; sqrt(Q) is pointed at where
    lengths are not treated alike without it.
    """
    choice = 0
    if not spread or not math.isfinite(law.kappa.value):
        reasons = ["the drift cannot be judged from so few responses; centre 0 is the paper's"]
    else:
        size = (
            f"sigma*sqrt(L) is {spread['value']:.2f} in the longest bin ({spread['low']:.0f} to {spread['high']:.0f})"
        )
        kappa = f"kappa = {_interval(law.kappa, '.2f')}"
        if spread["value"] < _DRIFT_MATTERS:
            reasons = [
                f"{size}: below about {_DRIFT_MATTERS:g} the drift is small beside the spread; the paper's centre 0"
            ]
        elif law.kappa.lower > 0.5:
            choice = 1
            reasons = [
                f"{size}, so that the drift matters, and {kappa}: S drifts by about -Q/2, nearer to it than to 0"
            ]
        elif law.kappa.upper < 0.5:
            reasons = [f"{size}, but {kappa}: S drifts by less than half of -Q/2, and that centre would overcorrect"]
        else:
            reasons = [f"{size}, but {kappa} does not tell whether S drifts by -Q/2 or not; the paper's centre 0"]
    if fits[choice].refused:
        reasons.append(f"{fits[choice].name} cannot reach the target, so the next one that can")
        choice = next(index for index, fit in enumerate(fits) if not fit.refused)
    fit, alternative = fits[choice], fits[2]
    unfair = {name: lre for name, lre in fit.lre.items() if lre["lre_lower"] > lre["floor_upper"]}
    for name, lre in unfair.items():
        reasons.append(
            f"lengths are not clipped alike on the {name} side even so: LRE {lre['lre']:.2f}, by chance up to "
            f"{lre['floor_upper']:.2f}"
        )
    if choice != 2 and not alternative.refused and law.kappa.lower > 0.5:
        better = [name for name, lre in unfair.items() if alternative.lre[name]["lre_upper"] < lre["lre_lower"]]
        if better:
            reasons.append(
                f"width sqrt(Q) with centre -Q/2 is fairer on the {' and '.join(better)} side, but it widens as the "
                "policy moves and is no trust region: take it knowingly"
            )
    if choice != 2:
        reasons.append("width sqrt(L) limits how far the policy moves; sqrt(Q) follows it")
    return choice, reasons


def _warnings(records, side, target: float, law: LawOfS, fit: Fit, min_count: int):
    recorded = records.attrs.get("rows", len(records))
    if recorded > len(records):
        yield f"{len(records):,} of {recorded:,} records are used, a random choice; --max-rows uses more"
    for name, sign in (("eps_high", "upper"), ("eps_low", "lower")):
        clipped = target * side[sign].sum()
        if clipped < _FEW_CLIPPED:
            yield f"{name} rests on {clipped:.0f} clipped responses: record more steps, or take a higher target"
    prompts = fairness.clusters(records).max() + 1
    if prompts < _FEW_PROMPTS:
        yield f"the intervals rest on {prompts} prompts; below {_FEW_PROMPTS} they are too narrow"
    table = law.variation_by_length
    usable = np.flatnonzero(table["lower"].notna())
    long = table.iloc[usable[-1] + 1 if len(usable) else 0 :]
    if long["n"].sum():
        yield (
            f"{long['n'].sum()} responses that moved have {long['low'].iloc[0]} tokens or more: too few for a bin (of "
            f"{min_count} responses and 10 prompts), so the band is not checked at these lengths"
        )
    slope = law.std_slope
    if not slope.lower <= 0.5 <= slope.upper and math.isfinite(slope.value):
        yield (
            f"std(S) grows like L^{_interval(slope, '.2f')}, not like sqrt(L) as a width of sqrt(L) assumes; "
            + _departure(law)
        )


def _departure(law: LawOfS) -> str:
    """Which terms of the variance law are beyond doubt."""
    terms = []
    if law.variance_law.constant.lower > 0:
        terms.append("a part that does not grow with L (the last tokens of a response)")
    if law.variance_law.quadratic.lower > 0:
        terms.append("a part that grows like L^2 (what all tokens of a response share, and drifts that differ)")
    return f"Var(S) has {' and '.join(terms)}" if terms else "a + b L + c L^2 does not tell why"


# --- from metrics ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coarse:
    """What :func:`coarse` finds."""

    target: float
    steps: int
    moved: float | None  # share of the responses that move at all, mean over steps; None if the metrics do not tell
    eps_low: float
    eps_high: float
    kappa: float
    spread: float  # sigma·sqrt(L) at the longest response

    @property
    def overrides(self) -> dict[str, float | str]:
        return _overrides(float(f"{self.eps_low:.2g}"), float(f"{self.eps_high:.2g}"), "zero", "length")

    def text(self, run: Run) -> str:
        moved = "not known, so all are taken to have moved" if self.moved is None else f"{self.moved:.0%}"
        lines = [
            *_wrap(
                f"{run.name}: no records, so a coarse answer without intervals, from the metrics of {self.steps} steps"
            ),
            "",
            *_wrap(
                "It takes S/sqrt(L) of the responses that move in a step for Gaussian, with the mean and spread that "
                "the metrics show, and for independent of the advantage. Real tails are heavier, the first "
                "mini-batches move less than the last, and updates push responses with A < 0 down, so that more of "
                "these may be clipped. For an answer with intervals, for the other modes and for a recommendation, "
                f"record the run: {KEY}records_dir=DIR."
            ),
            "",
            *_rows(
                [
                    ("responses that move", moved),
                    ("kappa", f"about {self.kappa:.2f} (0: S does not drift, 1: it drifts by -Q/2)"),
                    ("sigma*sqrt(L)", f"about {self.spread:.2f} at the longest response (the drift matters from 1)"),
                ]
            ),
            "",
            f"Centre 0, width sqrt(L), for a clip rate of {self.target:g} on each side:",
            *_paste(self.overrides, run),
        ]
        return "\n".join(lines)


def coarse(metrics: pd.DataFrame, config: dict | None, target: float) -> Coarse:
    """Band with centre 0 and width sqrt(L) from live metrics alone.

    Each step contributes the Gaussian that has the mean and the mean square of S/sqrt(L) of its responses; the band is
    the one beyond which the steps have the target share on average. The first mini-batch of a rollout has not moved:
    its rows are taken out of the means, where the metrics tell its share (rows of a mini-batch over rows of a step,
    these from the token counts, and over ``ppo_epochs`` of the config).

    Raises:
        ValueError: the metrics are not there, nothing moved, or too little moved for the target.
    """
    names = {"mean": f"{PREFIX}log_ratio_per_sqrt_length", "square": f"{PREFIX}log_ratio_per_sqrt_length_squared"}
    missing = [name for name in names.values() if name not in metrics]
    if missing:
        raise ValueError(
            f"there are no records, and the metrics lack {', '.join(missing)}: train with "
            f"+algorithm.policy_loss=fspo, and with {KEY}records_dir=DIR for the full answer"
        )
    metrics = metrics.dropna(subset=list(names.values()))
    if not (metrics[names["square"]] > 0).any():
        raise ValueError(_NOTHING_MOVED)
    unmoved = _unmoved_share(metrics, config)
    share = metrics.get(f"{PREFIX}sequence_fraction", 1.0) * (1 - (0.0 if unmoved is None else unmoved))
    mean = (metrics[names["mean"]] / share).to_numpy()
    spread = np.sqrt(np.maximum(metrics[names["square"]] / share - mean**2, 0)).to_numpy()
    moved = np.where(spread > 0, 1.0 if unmoved is None else 1 - unmoved.to_numpy(), 0.0)

    def fit(sign: int) -> float:
        def excess(eps: float) -> float:
            return np.mean(moved * stats.norm.sf(eps, sign * mean, np.where(spread > 0, spread, 1.0))) - target

        if excess(0.0) <= 0:
            raise ValueError(
                f"no band with centre 0 clips {target:g} of the responses {'above' if sign > 0 else 'below'} it: only "
                f"{excess(0.0) + target:.1%} lie there; lower the target, or "
                "actor_rollout_ref.actor.ppo_mini_batch_size"
            )
        return optimize.brentq(excess, 0.0, np.max(np.abs(mean) + 40 * spread))

    drift, variance = (
        metrics.get(PREFIX + name, pd.Series([math.nan])).mean() for name in ("log_ratio_per_token", "sigma_squared")
    )
    longest = metrics.get("response_length/max", pd.Series([math.nan])).max()
    return Coarse(
        target=target,
        steps=len(metrics),
        moved=None if unmoved is None else float(np.mean(moved)),
        eps_low=fit(-1),
        eps_high=fit(1),
        kappa=float(-2 * drift / variance),
        spread=math.sqrt(variance / np.mean(moved) * longest),
    )


def _unmoved_share(metrics: pd.DataFrame, config: dict | None) -> pd.Series | None:
    """Share of each step's responses that are in the first mini-batch of the rollout; None if it cannot be told.

    0 where a step has one mini-batch only: what moved there did not move by updates.
    """
    needed = [f"{PREFIX}rows", "perf/total_num_tokens", "prompt_length/mean", "response_length/mean"]
    if not set(needed) <= set(metrics):
        return None
    mini_batch, tokens, prompt, response = (metrics[name] for name in needed)
    epochs = OmegaConf.select(OmegaConf.create(config or {}), "actor_rollout_ref.actor.ppo_epochs", default=1)
    rows = tokens / (prompt + response)
    share = mini_batch / (rows * epochs)
    return share.where(share < 0.999, 0.0)


# --- text ------------------------------------------------------------------------------------------------------------


def _text(result: Calibration, run: Run) -> str:
    law, fits = result.law, result.fits
    chosen = fits[result.recommended]
    loss = (run.settings or {}).get("loss", "loss not known")
    lines = [
        *_wrap(f"{run.name}: band for a clip rate of {result.target:g} on each side"),
        "",
        *_rows(
            [
                (
                    "responses",
                    f"{result.responses:,} with an advantage, of {result.prompts:,} prompts in {result.steps:,} steps",
                ),
                ("length", f"{result.shortest:,} to {result.longest:,} tokens"),
                ("moved", f"{result.moved:.1%} of them; the others are on the policy and cannot be clipped"),
                ("clip rate", f"{result.clip_rate:.3f} in this run ({loss})"),
            ]
        ),
        "",
        "Log-ratio S of a response with L tokens; Q is the sum of its squared token log-ratios",
        *_rows(
            [
                ("sigma", f"{_interval(law.sigma, '.3g')} per token"),
                ("sigma*sqrt(L)", _spread_text(result.spread)),
                ("kappa", f"{_interval(law.kappa, '.2f')}   0: S does not drift, 1: it drifts by -Q/2"),
                ("std(S) ~ L^p", f"p = {_interval(law.std_slope, '.2f')}   a width of sqrt(L) assumes 0.5"),
                ("Var(S)", "a + b L + c L^2:"),
                *((f"  {name}", _interval(term, ".2g")) for name, term in zip("abc", law.variance_law, strict=True)),
                ("last 4 tokens", f"{_interval(law.last_share, '.2f')} of Q"),
                ("top 1% of tokens", f"{_interval(law.top_share, '.2f')} of Q: where most, S has heavy tails"),
            ]
        ),
        "",
        f"Bands (target {result.target:g} of all responses with A > 0, and of all with A < 0, unmoved ones included)",
        *_tables(fits),
        "",
        *_wrap(
            "clip rate: over both sides and the dual clip, with the interval in which a re-run of this size lands, "
            f"given other {result.rerun_by} and the same course of training. LRE: largest relative departure of a "
            "length bin's acceptance from the overall one, beside the 97.5% point of what chance gives. Intervals are "
            "95% and clustered by prompt."
        ),
        *_wrap(NOT_OFFERED + "."),
        "",
        f"Recommended: {chosen.name}",
        *(line for reason in result.reasons for line in _wrap(reason, "  - ")),
    ]
    if result.warnings:
        lines += ["", "Warnings", *(line for warning in result.warnings for line in _wrap(warning, "  - "))]
    for fit in sorted((fit for fit in fits if not fit.refused), key=lambda fit: fit is not chosen):
        lines += ["", f"{fit.name}{' (recommended)' if fit is chosen else ''}:", *_paste(fit.overrides, run)]
    return "\n".join(lines)


def _tables(fits: tuple[Fit, ...]) -> list[str]:
    bands = [("", "eps_low", "eps_high", "clip rate")]
    lres = [("", "LRE, A > 0", "by chance up to", "LRE, A < 0", "by chance up to")]
    refusals = []
    for fit in fits:
        if fit.refused:
            refusals += [line for reason in fit.refused for line in _wrap(f"{fit.name}: {reason}", "  ")]
            continue
        eps = [_interval(estimate, ".3g") for estimate in (fit.eps_low, fit.eps_high)]
        bands.append((fit.name, *eps, _interval(fit.rates["all"], ".3f")))
        lre = [_number(fit.lre[side][key], ".2f") for side in ("upper", "lower") for key in ("lre", "floor_upper")]
        lres.append((fit.name, *lre))
    return [*_aligned(bands), *refusals, "", *_aligned(lres)]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _spread_text(spread: dict) -> str:
    if not spread:
        return "no length bin has enough responses"
    number = _interval(Estimate(spread["value"], spread["lower"], spread["upper"]), ".2f")
    return f"{number} at {spread['low']:,.0f} to {spread['high']:,.0f} tokens   the drift matters from 1"


def _interval(estimate: Estimate, form: str) -> str:
    value, lower, upper = (_number(number, form) for number in estimate)
    return f"{value} [{lower}, {upper}]"


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _rows(pairs) -> list[str]:
    return [f"  {name:<20}{text}" for name, text in pairs]


def _wrap(text: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False)


def _overrides(eps_low: float, eps_high: float, center: str, width: str) -> dict[str, float | str]:
    dual = float(f"{_DUAL * eps_high:.6g}")
    return {"eps_low": eps_low, "eps_high": eps_high, "eps_dual": dual, "band_center": center, "band_width": width}


def _paste(overrides: dict, run: Run) -> list[str]:
    """Hydra overrides, one a line; with what else must change in a run that trained with another band or loss."""
    before = (run.settings or {}).get("band") or {}
    default = Band()
    reset = {
        name: getattr(default, name)
        for name in ("length_power", "drift_per_token")
        if before.get(name, getattr(default, name)) != getattr(default, name)
    }
    items = [f"  {KEY}{name}={value}" for name, value in (overrides | reset).items()]
    if (run.settings or {}).get("loss", "fspo") != "fspo":
        items.insert(0, "  +algorithm.policy_loss=fspo")
    return [f"{item} \\" for item in items[:-1]] + items[-1:]


# --- JSON ------------------------------------------------------------------------------------------------------------


def _plain(value):
    """Built-in types only; NaN as None, a NamedTuple by its fields, a table by its rows, a fit with its overrides."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Coarse) or (isinstance(value, Fit) and not value.refused):
            fields["overrides"] = {KEY + name: number for name, number in value.overrides.items()}
        return _plain(fields)
    if isinstance(value, pd.DataFrame):
        return _plain(value.to_dict("records"))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
