# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Find the band that clips a target share of the responses and treats lengths alike, from what a run has recorded.

eps_high is set so that the target share of the responses with A > 0 lies above the band, and
eps_low so that the same share of those with A < 0 lies below it. All recorded responses with an
advantage count, also those of the first mini-batch of each rollout, which have not moved and
cannot be clipped: this is the rate that a report shows, and the metrics of a run as
fspo/clip_rate/all. (Their actor/fspo/clip_fraction is of all responses.)

Several kinds of band are fitted on the earlier half of the steps and judged on the later half.
Recommended is the simplest that treats lengths alike there, as far as the records tell, and that
limits how far a response may move; where none does, the one that comes nearest.

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

import numpy as np
import pandas as pd
from omegaconf import OmegaConf
from scipy import optimize, stats

from fspo_verl.analysis import band_fit, clip_rates, resampling
from fspo_verl.analysis.band_fit import SIDES, Fit, Judgement
from fspo_verl.analysis.clip_rates import MIN_COUNT
from fspo_verl.analysis.law import LawOfS, law_of_s
from fspo_verl.analysis.resampling import Estimate
from fspo_verl.analysis.runs import Run, read_run
from fspo_verl.band import Band
from fspo_verl.observe import noise
from fspo_verl.observe.metrics import NAMES, PREFIX
from fspo_verl.observe.noise import Noise

KEY = "actor_rollout_ref.actor.policy_loss."
_NOTHING_MOVED = (
    "no recorded response has moved (Q = 0 in all of them): with one optimiser step per rollout the ratio stays 1 and "
    "no clip can act; lower actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size"
)
_FEW_CLIPPED = 50
_RARE = 0.05  # p-value below which chance does not explain a correlation
_WIDTH = 100
_SIGNS = {"upper": "A > 0", "lower": "A < 0"}
# What the choice of a shape costs.
_COSTS = {
    "sqrt(L)": "it limits the move; its rate follows the spread of S, so that the last mini-batches of a rollout, and "
    "steps that move further, are clipped more",
    "sqrt(L), -Q/2": "its centre follows the drift of each response",
    "L^p": "the power is one more number that depends on model, task and stage of training: calibrate again when these "
    "change",
    "sqrt(Q) limited, -Q/2": "eps counts standard deviations, so that large and small moves, and all mini-batches, are "
    "clipped about alike; how far a response moves counts only beyond the limit",
    "sqrt(Q), -Q/2": "it is no trust region, as it widens with the move",
}
_COSTS["L^p, -Q/2"] = f"{_COSTS['L^p']}; {_COSTS['sqrt(L), -Q/2']}"


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
    power: dict[str, Estimate]  # of L at the edge of a band with centre 0: both sides, upper, lower, earlier, later
    fits: tuple[Fit, ...]  # of each shape
    earlier: tuple[Fit, ...]  # the same from the earlier half of the steps
    judged: tuple[Judgement | None, ...]  # what those do in the later half
    halves: tuple[str, str]  # what they are
    recommended: int  # index into fits
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    noise: Noise | None  # against the recommended band; None where no response is known not to have moved

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
    """Fit the band of each shape to a target clip rate per side, judge them on later steps, and recommend one.

    eps_high is the smallest number such that at most the share ``target`` of the responses with A > 0 has
    (S − c)/s > eps_high; eps_low likewise with A < 0 and (c − S)/s. Their intervals are the quantiles at the ends of
    the rate's interval. That is Wilson's with clusters and Student's t
    (:func:`fspo_verl.analysis.clip_rates.rate_by_length`). A cluster is a training step: its responses share an update,
    and steps differ by more than their prompts do. With records of one step a cluster is a prompt, and the intervals
    hold for this update alone. The interval of the rate is for a re-run of the same size at the fitted eps, with other
    steps: its variance is twice that of a rate at a fixed eps, once for these records, which fixed the eps, and once
    for the re-run. What another seed does to the course of a whole run is in neither. How often they hold is in
    ``docs/coverage.md``.

    Args:
        records: of a run, with unmoved responses.
        target: share between 0 and 1.
        rng: source of all draws.
        bins, min_count, draws, confidence: as in :mod:`fspo_verl.analysis.clip_rates`.

    Raises:
        ValueError: nothing has moved, a sign of the advantage is missing, or no shape reaches the target.
    """
    side = clip_rates.sides(records)
    moved = records["quadratic_variation"].to_numpy() > 0
    for name, sign in (("upper", ">"), ("lower", "<")):
        if not side[name].any():
            raise ValueError(
                f"no recorded response has an advantage {sign} 0, so there is nothing to clip on that side"
            )
    if not moved[side["all"]].any():
        raise ValueError(_NOTHING_MOVED)
    fits = tuple(band_fit.fit(records, shape, target, confidence) for shape in band_fit.SHAPES)
    if not any(found.band and found.shape.bounded for found in fits):
        reasons = "; ".join(dict.fromkeys(found.refused for found in fits if found.refused))
        raise ValueError(f"no band clips {target:g} of the responses on each side: {reasons}")
    edges = clip_rates.length_edges(records["length"], bins)
    law = law_of_s(records, edges, rng, draws, min_count, confidence)
    usable = law.variation_by_length[law.variation_by_length["lower"].notna()]
    halves = band_fit.halves(records)
    earlier = tuple(band_fit.fit(halves[0], shape, target, confidence) for shape in band_fit.SHAPES)
    judging = band_fit.judging_edges(halves[1], bins, min_count)
    judged = tuple(band_fit.judge(halves[1], found, target, judging, rng, draws, min_count) for found in earlier)
    parts = {"both": (records, SIDES), "upper": (records, ["upper"]), "lower": (records, ["lower"])}
    parts |= {"earlier": (halves[0], SIDES), "later": (halves[1], SIDES)}
    power = {
        name: band_fit.power_of_log_ratio(part, "zero", target, sides, confidence)
        for name, (part, sides) in parts.items()
    }
    recommended, reasons = recommend(fits, judged)
    band = fits[recommended].band
    unmoved = noise.of_records(records, records.attrs.get("settings"), band)
    warnings = _warnings(records, side, target, law, power, fits[recommended], min_count)
    return Calibration(
        target=target,
        responses=int(side["all"].sum()),
        moved=float(moved[side["all"]].mean()),
        prompts=int(resampling.clusters(records).max()) + 1,
        steps=int(records["step"].nunique()),
        shortest=int(records["length"].min()),
        longest=int(records["length"].max()),
        clip_rate=clip_rates.clip_rate(records),
        rerun_by=band_fit.resampled(records)[0],
        law=law,
        spread={} if usable.empty else usable.iloc[-1].to_dict(),
        power=power,
        fits=fits,
        earlier=earlier,
        judged=judged,
        halves=tuple(map(_named, halves)),
        recommended=recommended,
        reasons=tuple(reasons),
        warnings=(*warnings, *_noise_warning(unmoved, band)),
        noise=unmoved,
    )


def _named(part: pd.DataFrame) -> str:
    steps = part["step"].unique()
    if len(steps) > 1 or band_fit.resampled(part)[0] == "steps":
        return f"steps {steps.min()} to {steps.max()}"
    return f"{resampling.clusters(part).max() + 1} prompts"


# --- which shape -----------------------------------------------------------------------------------------------------


def recommend(fits: tuple[Fit, ...], judged: tuple[Judgement | None, ...]) -> tuple[int, list[str]]:
    """Index of the shape to take, and the reasons.

    Of the shapes that limit the move, which are in the order of their simplicity, it is the first that treats lengths
    alike on both sides: chance explains its LRE on the records it was judged on, where that can be told, and on all
    records being clipped is not correlated with the logarithm of the length. Where there is none, it is the one whose
    LRE is the smallest multiple of what chance gives, or, where no LRE can be judged, with the weakest correlation.
    """
    bounded = [index for index, found in enumerate(fits) if found.band and found.shape.bounded]
    excess = {index: judged[index].excess if judged[index] else math.nan for index in bounded}
    flat = [index for index in bounded if not excess[index] > 1 and fits[index].trend >= _RARE]
    if flat:
        choice = flat[0]
        verdict = "treats lengths alike, as far as these records tell"
    else:
        choice = min(bounded, key=lambda index: (math.isnan(excess[index]), excess[index], -fits[index].trend))
        if math.isnan(excess[choice]):
            choice = max(bounded, key=lambda index: fits[index].trend)
        verdict = "comes nearest to treating lengths alike, and no band does"
    reasons = [f"{fits[choice].name} {verdict}: {_evidence(fits[choice], judged[choice])}"]
    for index in bounded:
        if index < choice and index not in flat:
            reasons.append(f"{fits[index].name} is simpler, but not fair: {_evidence(fits[index], judged[index])}")
    reasons.append(f"what it costs: {_COSTS[fits[choice].shape.name]}")
    alike = [fits[index].name for index in flat if index != choice]
    if alike:
        reasons.append(f"not told from it by these records: {', '.join(alike)}")
    return choice, reasons


def _evidence(found: Fit, judgement: Judgement | None) -> str:
    lre = "too few responses in the judged half for an LRE"
    if judgement and not math.isnan(judgement.excess):
        lre = "LRE " + " and ".join(
            f"{_number(judgement.lre[side]['lre'], '.2f')} with {sign} (by chance up to "
            f"{_number(judgement.lre[side]['floor_upper'], '.2f')})"
            for side, sign in _SIGNS.items()
        )
    trend = "; clips do not depend on log length"
    if found.trend < _RARE:
        side = min(_SIGNS, key=lambda side: found.trends[side])
        trend = f"; clips depend on log length with {_SIGNS[side]} (p = {found.trends[side]:.2g})"
    return lre + trend


def _warnings(records, side, target: float, law: LawOfS, power: dict[str, Estimate], found: Fit, min_count: int):
    recorded = records.attrs.get("rows", len(records))
    if recorded > len(records):
        yield f"{len(records):,} of {recorded:,} records are used, a random choice; --max-rows uses more"
    for name, sign in (("eps_high", "upper"), ("eps_low", "lower")):
        clipped = target * side[sign].sum()
        if clipped < _FEW_CLIPPED:
            yield f"{name} rests on {clipped:.0f} clipped responses: record more steps, or take a higher target"
    if band_fit.resampled(records)[0] == "prompts":
        yield "all records are of one step: eps and clip rate hold for its update, and another may move further or less"
    table = law.variation_by_length
    usable = np.flatnonzero(table["lower"].notna())
    long = table.iloc[usable[-1] + 1 if len(usable) else 0 :]
    if long["n"].sum():
        yield (
            f"{long['n'].sum()} responses that moved have {long['low'].iloc[0]} tokens or more: too few for a bin (of "
            f"{min_count} responses and 10 prompts), so the band is not checked at these lengths"
        )
    both, upper, lower = (power[name] for name in ("both", "upper", "lower"))
    if upper.upper < lower.lower or lower.upper < upper.lower:
        yield (
            f"the two sides ask for different powers of L, {_interval(upper, '.2f')} with A > 0 and "
            f"{_interval(lower, '.2f')} with A < 0; a band has one, here {both.value:.2f} for both together"
        )


def _noise_warning(unmoved: Noise | None, band: Band) -> list[str]:
    text = unmoved and noise.warning(unmoved, band)
    return [text] if text else []


def _noise_text(unmoved: Noise | None) -> str:
    if unmoved is None:
        return "not known: no response is known not to have moved"
    return f"{unmoved.sigma:.2g} per token, of {unmoved.responses:,} responses that have not moved"


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
    noise: Noise | None

    @property
    def band(self) -> Band:
        low, high = (float(f"{eps:.2g}") for eps in (self.eps_low, self.eps_high))
        return Band(low, high, float(f"{3 * high:.6g}"))

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
                    ("numerical noise", _noise_text(self.noise)),
                ]
            ),
            "",
            f"Centre 0, width sqrt(L), for a clip rate of {self.target:g} on each side:",
            *_paste(overrides(self.band), run),
        ]
        floor = 0.0 if self.noise is None else noise.EPS_IN_SIGMA * self.noise.sigma
        if min(self.eps_low, self.eps_high) < floor:
            lines += [
                "",
                *_wrap(
                    f"eps lies below the numerical noise, {floor:.2g}. What helps: a wider eps, {noise.HELP}",
                    "Warning: ",
                ),
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

    drift, variance, longest = (metrics.reindex(columns=NAMES[key]) for key in ("drift", "sigma_squared", "longest"))
    drift, variance, longest = drift.mean().item(), variance.mean().item(), longest.max().item()
    return Coarse(
        target=target,
        steps=len(metrics),
        moved=None if unmoved is None else float(np.mean(moved)),
        eps_low=fit(-1),
        eps_high=fit(1),
        kappa=float(-2 * drift / variance),
        spread=math.sqrt(variance / np.mean(moved) * longest),
        noise=noise.of_metrics(metrics),
    )


def _unmoved_share(metrics: pd.DataFrame, config: dict | None) -> pd.Series | None:
    """Share of each step's responses that are in the first mini-batch of the rollout; None if it cannot be told.

    0 where a step has one mini-batch only: what moved there did not move by updates.
    """
    needed = [f"{PREFIX}rows", *(name for key in ("tokens", "prompt_length", "response_length") for name in NAMES[key])]
    if not set(needed) <= set(metrics):
        return None
    mini_batch, tokens, prompt, response = (metrics[name] for name in needed)
    epochs = OmegaConf.select(OmegaConf.create(config or {}), "actor_rollout_ref.actor.ppo_epochs", default=1)
    rows = tokens / (prompt + response)
    share = mini_batch / (rows * epochs)
    return share.where(share < 0.999, 0.0)


# --- text ------------------------------------------------------------------------------------------------------------


def _text(result: Calibration, run: Run) -> str:
    chosen = result.fits[result.recommended]
    lines = [
        *_wrap(f"{run.name}: recommended is {chosen.name}, which clips {result.target:g} on each side"),
        "",
        *_paste(overrides(chosen.band), run),
        "",
        "Why",
        *(line for reason in result.reasons for line in _wrap(reason, "  - ")),
    ]
    if result.warnings:
        lines += ["", "Warnings", *(line for warning in result.warnings for line in _wrap(warning, "  - "))]
    lines += [
        "",
        f"Judged on {result.halves[1]}, fitted on {result.halves[0]}",
        *_judged(result),
        "",
        *_wrap(
            f"Bands fitted on all records (target {result.target:g} of all responses with A > 0, and of all with "
            "A < 0, unmoved ones included)"
        ),
        *_bands(result.fits),
        "",
        "Clip rate from the first to the last mini-batch of a rollout",
        *_mini_batches(result.fits),
        "",
        "Responses",
        *_rows(_response_rows(result, run)),
        "",
        "Log-ratio S of a response with L tokens; Q is the sum of its squared token log-ratios",
        *_rows(_law_rows(result)),
        "",
        *_wrap(
            "A band is named by its width and, unless that is 0, its centre. Clip rate: over both sides and the dual "
            f"clip, with the interval in which a re-run of the same size lands, given other {result.rerun_by} and the "
            "same course of training. LRE: largest relative departure of a length bin's acceptance from the overall "
            "one, with eps scaled to the target there, beside what chance gives in 97.5% of draws at most. Edge: the "
            "quantile of S that a band of this clip rate has to follow. Intervals are 95%; those of eps, clip rate and "
            f"edge resample {result.rerun_by}, the others prompts."
        ),
    ]
    for found in result.fits:
        if found.band and found is not chosen:
            lines += ["", f"{found.name}:", *_paste(overrides(found.band), run)]
    return "\n".join(lines)


def _response_rows(result: Calibration, run: Run) -> list[tuple[str, str]]:
    loss = run.settings.loss if run.settings else "loss not known"
    return [
        (
            "responses",
            f"{result.responses:,} with an advantage, of {result.prompts:,} prompts in {result.steps:,} steps",
        ),
        ("length", f"{result.shortest:,} to {result.longest:,} tokens"),
        ("moved", f"{result.moved:.1%} of them; the others are on the policy and cannot be clipped"),
        ("clip rate", f"{result.clip_rate:.3f} in this run ({loss})"),
    ]


def _law_rows(result: Calibration) -> list[tuple[str, str]]:
    law = result.law
    return [
        ("sigma", f"{_interval(law.sigma, '.3g')} per token"),
        ("numerical noise", _noise_text(result.noise)),
        ("sigma*sqrt(L)", _spread_text(result.spread)),
        ("kappa", f"{_interval(law.kappa, '.2f')}   0: S does not drift, 1: it drifts by -Q/2"),
        ("edge ~ L^p", f"p = {_interval(result.power['both'], '.2f')}   {_powers(result.power)}"),
        ("std(S) ~ L^p", f"p = {_interval(law.std_slope, '.2f')}   a width of sqrt(L) assumes 0.5"),
        ("Var(S)", "a + b L + c L^2:"),
        *((f"  {name}", _interval(term, ".2g")) for name, term in zip("abc", law.variance_law, strict=True)),
        ("last 4 tokens", f"{_interval(law.last_share, '.2f')} of Q"),
        ("top 1% of tokens", f"{_interval(law.top_share, '.2f')} of Q: where most, S has heavy tails"),
    ]


def _powers(power: dict[str, Estimate]) -> str:
    return ", ".join(f"{name} {_number(power[name].value, '.2f')}" for name in ("upper", "lower", "earlier", "later"))


def _judged(result: Calibration) -> list[str]:
    rows = [("", "clip rate predicted", "found", "LRE, A > 0", "chance", "LRE, A < 0", "chance")]
    lengths = [("found, from length", *_bin_names(result.judged))]
    for found, earlier, judgement in zip(result.fits, result.earlier, result.judged, strict=True):
        if judgement is None:
            continue
        lre = [_number(judgement.lre[side][key], ".2f") for side in SIDES for key in ("lre", "floor_upper")]
        name = earlier.name if found.shape.power else found.name
        rows.append((name, _interval(earlier.rates["all"], ".3f"), f"{judgement.rates['all']:.3f}", *lre))
        lengths.append((name, *(_number(rate, ".2f") for rate in judgement.by_length["rate"])))
    if len(rows) == 1:
        return ["  no band reaches the target in both halves"]
    return [*_aligned(rows), "", *_aligned(lengths)]


def _bin_names(judged: tuple[Judgement | None, ...]) -> list[str]:
    tables = [judgement.by_length for judgement in judged if judgement]
    return [f"{low:,}" for low in tables[0]["low"]] if tables else []


def _bands(fits: tuple[Fit, ...]) -> list[str]:
    rows, refusals = [("", "eps_low", "eps_high", "clip rate")], []
    for found in fits:
        if found.refused:
            refusals += _wrap(f"{found.name}: {found.refused}", "  ")
        else:
            eps = [_interval(estimate, ".3g") for estimate in (found.eps_low, found.eps_high)]
            rows.append((found.name, *eps, _interval(found.rates["all"], ".3f")))
    return [*_aligned(rows), *refusals]


def _mini_batches(fits: tuple[Fit, ...]) -> list[str]:
    fitted = [found for found in fits if found.band]
    table = fitted[0].by_mini_batch
    names = [str(row.first) if row.first == row.last else f"{row.first}-{row.last}" for row in table.itertuples()]
    rows = [(found.name, *(_number(rate, ".3f") for rate in found.by_mini_batch["rate"])) for found in fitted]
    return _aligned([("", *names), *rows])


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


def overrides(band: Band) -> dict[str, float | str]:
    """Fields of the policy loss that give this band: eps always, the others where they are not the default."""
    default, always = Band(), ("eps_low", "eps_high", "eps_dual", "band_center", "band_width")
    return {name: value for name, value in band.values().items() if name in always or value != getattr(default, name)}


def _paste(items: dict, run: Run) -> list[str]:
    """Hydra overrides, one a line; with what else must change in a run that trained with another band or loss."""
    default = Band()
    before = run.settings and run.settings.band or default
    reset = {
        name: "null" if (value := getattr(default, name)) is None else value
        for name in ("length_power", "realized_limit", "drift_per_token")
        if getattr(before, name) != getattr(default, name)
    }
    lines = [f"  {KEY}{name}={value}" for name, value in (reset | items).items()]
    if run.settings is not None and run.settings.loss != "fspo":
        lines.insert(0, "  +algorithm.policy_loss=fspo")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


# --- JSON ------------------------------------------------------------------------------------------------------------


def _plain(value):
    """Built-in types only; NaN as None, a NamedTuple by its fields, a table by its rows, a fit with its overrides."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Coarse) or (isinstance(value, Fit) and value.band):
            fields["overrides"] = {KEY + name: number for name, number in overrides(value.band).items()}
        if isinstance(value, Fit):
            fields["name"] = value.name
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
