# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How often the intervals and the floor of fspo-verl report and calibrate are right, on simulated runs of known truth.

A scenario is a kind of run: steps, prompts, responses, what they share, the tails of S. Of each, many runs are drawn.
Where the truth is flat, an LRE should exceed its floor in 2.5% of them; intervals of 95% should hold the truth in 95%.
Writes FOLDER/coverage.json, and the table of FOLDER/results.md between its two marks.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

EXAMPLES = """examples:
  python scripts/studies/coverage/simulate_coverage.py      the published table, some ten minutes on one core
  python scripts/studies/coverage/simulate_coverage.py --runs 50 --only few --output /tmp/coverage
"""
HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- begin of what `simulate_coverage.py` writes -->", "<!-- end of what it writes -->"
RATE = 0.1  # clipped on each side, on-policy responses counted
EDGES = [1, 16, 32, 64, 128, 256, 10_000]

_BASE = {"steps": 20, "prompts": 16, "group": 8, "kappa": 0.0}
_UNEVEN = {"prompt_spread": 0.5, "step_spread": 0.43}  # log standard deviations; the second is the quickstart's
SCENARIOS = {  # arguments of tests/simulated_records.py: simulate_run
    "lengths independent": _BASE | {"alike": False, "shared": 0.0},
    "lengths alike within a prompt": _BASE | {"shared": 0.0},
    "and log ratios alike, too": _BASE | {"shared": 0.5},
    "and prompts differ in spread (log sd 0.5)": _BASE | {"prompt_spread": 0.5},
    "and steps differ in spread (log sd 0.43)": _BASE | _UNEVEN,
    "and tails are heavy (Student's t, 3)": _BASE | _UNEVEN | {"tails": 3},
    "19 steps": _BASE | _UNEVEN | {"steps": 19},
    "100 steps": _BASE | _UNEVEN | {"steps": 100},
    "few steps, many prompts": _BASE | _UNEVEN | {"steps": 5, "prompts": 64},
    "many steps, few prompts": _BASE | _UNEVEN | {"steps": 80, "prompts": 4},
    "groups of 2": _BASE | _UNEVEN | {"prompts": 64, "group": 2},
    "few data": _BASE | _UNEVEN | {"steps": 6, "prompts": 8},
}
COLUMNS = {  # of a row: what it says, and the nominal value
    "floor": ("LRE above its floor, truth flat", 0.025),
    "floor_side": ("the same, A > 0 only", 0.025),
    "floor_single": ("the same, all, if single responses were shuffled", 0.025),
    "lre": ("interval of an LRE holds it", 0.95),
    "eps": ("interval of eps_low holds it", 0.95),
    "rate": ("interval of the clip rate holds a re-run's", 0.95),
    "power": ("interval of the power of L holds it", 0.95),
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--runs", type=int, default=500, help="simulated runs per scenario (default: %(default)s)")
    add("--only", metavar="TEXT", default="", help="only scenarios with this in their names")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=HERE, metavar="FOLDER", help="default: the study's folder")
    args = parser.parse_args(argv)
    args.scenarios = {name: kwargs for name, kwargs in SCENARIOS.items() if args.only in name}
    if args.runs < 1 or not args.scenarios:
        parser.error(f"--runs={args.runs} has to be 1 or more, --only={args.only!r} to match: {', '.join(SCENARIOS)}")
    return args


def main() -> None:
    args = parse_args()
    from tqdm import tqdm  # not at the top: --help must work before anything is installed

    from fspo_verl.files import publish

    rows = []
    for name, kwargs in args.scenarios.items():
        found = list(tqdm(Scenario(kwargs, args.seed).runs(args.runs), name, total=args.runs, unit="run"))
        rows.append({"scenario": name, "settings": kwargs} | summary(found))
    result = {"runs": args.runs, "seed": args.seed, "rate": RATE, "rows": rows}
    publish(args.output / "coverage.json", result, args.output / "results.md", BEGIN, END, table(result))
    print(table(result))


class Scenario:
    """Runs of one kind, and what is true of them: clip rates and quantiles of an endless one."""

    def __init__(self, kwargs: dict, seed: int):
        import numpy as np
        import torch

        sys.path.insert(0, str(HERE.parents[2] / "tests"))
        import simulated_records

        from fspo_verl.analysis import band_fit, clip_rates, resampling
        from fspo_verl.band import Band
        from fspo_verl.clips import BandClip, upper_quantile

        self.np, self.clip_rates, self.band_fit, self.resampling = np, clip_rates, band_fit, resampling
        self.upper_quantile = upper_quantile
        torch.set_num_threads(1)
        self.seed, self.draw = seed, lambda rng, **more: simulated_records.simulate_run(rng, **(kwargs | more))
        endless = self.draw(np.random.default_rng([seed, 1]), steps=200_000 // (kwargs["prompts"] * kwargs["group"]))
        self.bands = {}
        for name, power in (("flat", 0.5), ("unfair", 0.0)):  # S spreads like sqrt(L): a fixed width is unfair
            eps = [
                upper_quantile(band_fit.beyond(endless, Band(length_power=power), side), RATE)
                for side in ("lower", "upper")
            ]
            self.bands[name] = BandClip(name, "", Band(None, *eps, eps_dual=math.inf, length_power=power))
        self.eps_low = self.bands["flat"].band.eps_low
        counted = endless[endless.advantage != 0]
        clipped = self.bands["unfair"].clipped(counted)
        self.unfair = clip_rates.rate_by_length(counted.length, clipped, EDGES)
        self.unfair_rate = clipped.mean()

    def runs(self, count: int) -> Iterator[dict[str, bool | float]]:
        """What is right about each of so many runs: True or False, NaN where there is nothing to judge.

        The run drawn next serves as the re-run.
        """
        rng = self.np.random.default_rng([self.seed, 2])
        records = self.draw(rng)
        for _ in range(count):
            again = self.draw(rng)
            sides = self.clip_rates.sides(records)
            yield (
                self._floors(records, {"floor": sides["all"], "floor_side": sides["upper"]}, rng)
                | self._lre(records[sides["all"]], rng)
                | self._calibration(records, again)
            )
            records = again

    def _floors(self, records, masks: dict, rng) -> dict:
        found = {}
        clipped = self.bands["flat"].clipped(records)
        cluster = self.resampling.clusters(records)
        for name, mask in masks.items():
            length, values, prompts = records.length[mask], clipped[mask], cluster[mask]
            rates = self.clip_rates.rate_by_length(length, values, EDGES, clusters=prompts)
            lre = self.clip_rates.length_reweighting_error(rates)
            for column, code in ((name, prompts), ("floor_single", self.np.arange(len(prompts)))):
                floor = self.clip_rates.chance_floor(length, values, code, EDGES, rng)
                found.setdefault(column, math.nan if math.isnan(lre) else lre > floor.upper)
        return found

    def _lre(self, counted, rng) -> dict:
        clipped = self.bands["unfair"].clipped(counted)
        estimate, _ = self.clip_rates.lre_against_chance(counted, clipped, EDGES, rng)
        rates = self.clip_rates.rate_by_length(
            counted.length, clipped, EDGES, clusters=self.resampling.clusters(counted)
        )
        bins = self.unfair[self.clip_rates.takes_part(rates)]
        truth = ((1 - bins.rate) / (1 - self.unfair_rate) - 1).abs().max()
        return {"lre": math.nan if math.isnan(estimate.value) else estimate.lower <= truth <= estimate.upper}

    def _calibration(self, records, again) -> dict:
        score, score_again = (self.band_fit.beyond(part, self.bands["flat"].band, "lower") for part in (records, again))
        eps = self.upper_quantile(score, RATE)
        cluster = self.band_fit.resampled(records)[1][self.clip_rates.sides(records)["lower"]]
        low, high = self.band_fit.eps_interval(score, eps, cluster, 0.95)
        rate = self.band_fit.rerun_rate(score > eps, cluster, 0.95)
        power = self.band_fit.power_of_log_ratio(records, "plain", RATE)
        return {
            "eps": low <= self.eps_low <= high,
            "rate": rate.lower <= (score_again > eps).mean() <= rate.upper,
            "power": power.lower <= 0.5 <= power.upper,
        }


def summary(found: list[dict]) -> dict[str, float | None]:
    """Share of the runs in which each thing was so, of those that could be judged; None without any."""
    shares = {}
    for name in COLUMNS:
        judged = [float(row[name]) for row in found if not math.isnan(row[name])]
        shares[name] = sum(judged) / len(judged) if judged else None
    return shares


def table(result: dict) -> str:
    """The table of the page, in percent."""
    from fspo_verl.files import markdown_table

    header = ["scenario", "steps x prompts x responses", *(f"{text} ({value:.1%})" for text, value in COLUMNS.values())]
    rows = []
    for row in result["rows"]:
        size = " x ".join(str(row["settings"][name]) for name in ("steps", "prompts", "group"))
        shares = ["–" if row[name] is None else f"{row[name]:.1%}" for name in COLUMNS]
        rows.append([row["scenario"], size, *shares])
    return f"{result['runs']:,} simulated runs per row, seed {result['seed']}.\n\n{markdown_table(header, rows)}"


if __name__ == "__main__":
    main()
