# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A clip range whose eps follows a wished clip rate, as verl's adaptive KL controller follows a wished KL.

After each training step, the eps of each side moves towards the clip rate that ``target_clip_rate`` asks for. A
training step ends where verl sends the weights to the rollout engines; asynchronous trainers make several updates in
one. Within a step eps is constant, and it is the same on every rank: the counts of a step are summed over all ranks
once, at its end. Checkpoints keep it.

:mod:`fspo_verl.verl_patches` calls the controller around an update, at a weight sync, and where verl saves and loads a
checkpoint.
"""

import contextlib
import json
import logging
import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch

from fspo_verl.band import Band, is_positive, require
from fspo_verl.output import Once, write_whole

logger = logging.getLogger("fspo_verl")

DUAL = 3  # the dual clip, in units of the wider half-width: on the upper edge it alone may clip more than the target
GAIN = 0.5  # each step closes this share of the gap to the target, and changes log eps by at most this much
FEWEST = 2.0  # lower bound of the expected count that the surplus of a step is divided by
TOO_FEW = 0.1  # expected clipped responses of a side and step below which eps needs more than 40 steps to follow
EPS_MIN = 1e-6  # below it the rounding of float32 alone moves a response further
MOST_UPDATES = 32  # without a weight sync, after which a warning says that eps stays as it is
EPS_MAX_FACTOR = 10  # the default upper bound, in units of the eps that a run starts with
FILE = "fspo_eps.json"  # the eps in force and their unit, in the actor's folder of a checkpoint


def next_eps(eps: float, clipped: float, counted: float, target: float, eps_max: float) -> float:
    """Return the eps of one side for the next step: stochastic approximation of a quantile (Robbins and Monro, 1951).

        log eps ← log eps + min(GAIN / e · (clipped − target·counted) / max(target·counted, FEWEST), GAIN)

    kept between EPS_MIN and eps_max. The step is linear in the count. So it is 0 in the mean only where the rate is the
    target, however few responses a step has: an average over steps comes to the target, as in adaptive conformal
    inference (arXiv 2106.00170). e = q·φ(q)/target, with q = Φ⁻¹(1 − target), is −d log rate / d log eps for normal S:
    2 at 10%, 6 at 1% and 10 at 0.1%, and at least 1 here. Without e small targets would overshoot. FEWEST keeps a
    single clipped response from moving eps far. (e and FEWEST: derived here.)

    Args:
        eps: in force until now, above 0.
        clipped, counted: the side's responses that were clipped in the step, and all of them.
        target: the share to be clipped, between 0 and 1.
        eps_max: upper bound.
    """
    normal = NormalDist()
    q, expected = normal.inv_cdf(1 - target), target * counted
    slope = max(q * normal.pdf(q) / target, 1.0)
    surplus = min((clipped - expected) / max(expected, FEWEST) / slope, 1.0)
    return max(EPS_MIN, min(eps * math.exp(GAIN * surplus), eps_max))


@dataclass
class AdaptiveBand(Band):
    """A range whose eps may follow a clip rate.

    Raises:
        ValueError: a field has a bad value, or no effect.
    """

    target_clip_rate: float | None = None
    """Share of the responses with an advantage to be clipped, for example 0.1; null keeps eps as it is set.
    A run starts from eps_low and eps_high. After each training step each side moves towards the target, by a factor of
    at most 1.65: the upper side by the responses with A > 0, the lower one by those with A < 0, dual clips included;
    see docs/measure.md. Unless eps_dual is set, the dual clip is at three times the wider side.

    Source: this project; the authors' clip rates are not known."""

    eps_max: float | None = None
    """Largest half-width that target_clip_rate may set; null takes ten times the one that the side starts with.

    Source: this project."""

    def __post_init__(self):
        super().__post_init__()
        target, widest, start = self.target_clip_rate, self.eps_max, max(self.low, self.high)
        if target is None:
            require(widest is None, self, "eps_max", "null without target_clip_rate, as it has no effect")
            return
        allowed = "null (eps stays as it is set) or a share between 0 and 1"
        require(isinstance(target, float) and 0 < target < 1, self, "target_clip_rate", allowed)
        allowed = "null where a side of eps is inf: a run starts from a finite eps, eps_low and eps_high"
        require(math.isfinite(start), self, "target_clip_rate", allowed)
        allowed = f"null (ten times the start) or a finite number of at least the start, {start:g}"
        require(widest is None or start <= widest < math.inf, self, "eps_max", allowed)

    @property
    def dual(self) -> float:
        """Distance of the dual clip from the centre, in units of s; with a target it moves with the wider side."""
        if self.target_clip_rate is None or self.eps_dual is not None:
            return super().dual
        return DUAL * max(self.low, self.high)


class Controller:
    """The range in force of one run, on one rank.

    Args:
        config: the start of the run, and its target, which is set.
    """

    def __init__(self, config: AdaptiveBand):
        assert config.target_clip_rate is not None
        self.target = config.target_clip_rate
        self._start = AdaptiveBand(**Band.fields_in(vars(config)), target_clip_rate=self.target)
        self.eps = {"eps_low": config.low, "eps_high": config.high}  # the half-widths in force
        self._unit = {"length_power": config.length_power}
        self._largest = {name: config.eps_max or EPS_MAX_FACTOR * start for name, start in self.eps.items()}
        # A dual clip inside the range would undo it.
        self._largest["eps_high"] = min(self._largest["eps_high"], config.eps_dual or math.inf)
        # Clipped and counted responses of each side, ``[2, 2]``: of the update that goes on, and of those before it in
        # this training step; None where there is none.
        self._of_update: np.ndarray | None = None
        self._of_step: np.ndarray | None = None
        self._updates = 0  # in this training step
        self._device = "cpu"  # of the tensor that is summed over the ranks
        self._once = Once()

    @property
    def band(self) -> Band:
        """The range in force."""
        return replace(self._start, eps=None, eps_low=self.eps["eps_low"], eps_high=self.eps["eps_high"])

    def count(self, columns: Mapping[str, np.ndarray]) -> None:
        """Count the responses of one micro-batch, ``[B]`` columns of :mod:`fspo_verl.observe.columns`.

        The dual clip counts for the lower side, as it clips responses with A < 0.

        Raises:
            RuntimeError: outside :meth:`update`, where nobody would ever move eps.
        """
        if self._of_update is None:
            raise RuntimeError(
                "target_clip_rate cannot be followed: this trainer calls the loss outside verl's "
                "TrainingWorker.train_mini_batch, after which eps moves; set target_clip_rate=null"
            )
        below, above = columns["advantage"] < 0, columns["advantage"] > 0
        lower = below & (columns["clipped_lower"] + columns["clipped_dual"] > 0)
        upper = above & (columns["clipped_upper"] > 0)
        self._of_update += [[lower.sum(), below.sum()], [upper.sum(), above.sum()]]

    @contextlib.contextmanager
    def update(self, device: str = "cpu", counts_here: bool = True) -> Iterator[None]:
        """Count an update of verl, a part of a training step. One inside another is a part of it.

        An update that ends with an error counts nothing.

        Args:
            device: of the tensor that is summed over the ranks.
            counts_here: whether this rank's responses count. Of ranks that share responses one does.
        """
        if self._of_update is not None:
            yield
            return
        self._of_update, self._device = np.zeros((2, 2), dtype=np.int64), device
        try:
            yield
            before = 0 if self._of_step is None else self._of_step
            self._of_step = before + self._of_update * counts_here
            self._updates += 1
            if self._updates == MOST_UPDATES:
                self._once.warn(
                    "still",
                    "target_clip_rate=%g has not moved eps in %d updates: eps moves where a trainer calls verl's "
                    "ActorRolloutRefWorker.update_weights, and this one has not since. If its training steps have as "
                    "many updates, eps moves at their end; if it never calls that, set target_clip_rate=null.",
                    *(self.target, MOST_UPDATES),
                )
        finally:
            self._of_update = None

    def end_step(self) -> None:
        """Move eps after the updates since the last call, if there were any. All ranks take part."""
        if self._of_step is not None:
            self.move(self._summed())
            self._of_step, self._updates = None, 0

    def _summed(self) -> np.ndarray:
        """The counts of this training step on all ranks, ``[2, 2]``."""
        counts = torch.from_numpy(self._of_step).to(self._device)
        torch.distributed.all_reduce(counts)
        return counts.cpu().numpy()

    def move(self, counts: np.ndarray) -> None:
        """Set the eps of the next step from the clipped and counted responses of each side, ``[2, 2]``."""
        self.eps = self._moved(counts)
        for (name, eps), (clipped, counted) in zip(self.eps.items(), counts.tolist(), strict=True):
            if counted and counted * self.target < TOO_FEW:
                self._once.warn(
                    "few",
                    "target_clip_rate=%g asks for %.2g clipped of the %d responses of a side in this step: %s needs "
                    "some %d such steps to follow. A larger target or more responses a step make it fewer.",
                    *(self.target, counted * self.target, counted, name, FEWEST / GAIN / (counted * self.target)),
                )
            if counted and eps in (EPS_MIN, self._largest[name]):
                self._once.warn(
                    name,
                    "%s has reached its bound %g: %.1f%% of the responses of its side are clipped, instead of %g%%. "
                    "Training goes on. The upper bounds are eps_max and, if it is set, eps_dual.",
                    *(name, eps, 100 * clipped / counted, 100 * self.target),
                )

    def _moved(self, counts: np.ndarray) -> dict[str, float]:
        """The eps after a step with these counts."""
        sides = zip(self.eps.items(), counts.tolist(), strict=True)
        return {
            name: next_eps(eps, clipped, counted, self.target, self._largest[name]) if counted else eps
            for (name, eps), (clipped, counted) in sides
        }

    def save(self, folder: str | Path) -> None:
        """Write beside a checkpoint the eps of the next training step; the first rank does, as all have the same.

        verl saves a checkpoint after the updates of a step, and before its end.

        Raises:
            OSError: the folder cannot be written.
        """
        eps = self.eps if self._of_step is None else self._moved(self._summed())
        if torch.distributed.get_rank() == 0:
            write_whole([(Path(folder) / FILE, json.dumps(eps | self._unit).encode())])

    def load(self, folder: str | Path) -> None:
        """Go on with the eps of a checkpoint, read by the first rank for all.

        Without that file, or if its eps is in units of another power of the length, eps starts from the config. A
        warning says so.

        Raises:
            ValueError: the file does not hold an eps for each side; on every rank.
        """
        file = Path(folder) / FILE
        found: list[dict | str | None] = [None]
        if torch.distributed.get_rank() == 0:
            found = [_read(file)]
        torch.distributed.broadcast_object_list(found, src=0)
        (eps,) = found
        if isinstance(eps, str):
            raise ValueError(eps)
        if eps is None:
            logger.warning("%s is not there: target_clip_rate starts from the eps of the config", file)
            return
        unit = {name: value for name, value in eps.items() if name not in self.eps and value is not None}
        if unit != self._unit:
            logger.warning(
                "%s is in units of another power of the length (%s): target_clip_rate starts from the eps of "
                "the config",
                *(file, ", ".join(f"{name}={json.dumps(value)}" for name, value in unit.items()) or "it names none"),
            )
            return
        self.eps = {name: min(eps[name], largest) for name, largest in self._largest.items()}
        if torch.distributed.get_rank() == 0:
            in_force = ", ".join(f"{name}={value:.3g}" for name, value in self.eps.items())
            text = "target_clip_rate goes on with %s of %s; to start from the eps of the config, remove the file"
            logger.warning(text, in_force, file)


def _read(file: Path) -> dict | str | None:
    """Return the eps in a file with its unit; None without a file, and a text that says what is wrong with it."""
    content = ""
    try:
        content = file.read_text()
        found = json.loads(content)
        if all(is_positive(found[name]) and math.isfinite(found[name]) for name in ("eps_low", "eps_high")):
            return found
        wrong = f"it holds {reprlib.repr(content)}"
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong, the other ranks wait for an answer
        wrong = f"{type(error).__name__}: {error}"
    return (
        f"{file} has no eps_low and eps_high above 0, from which target_clip_rate could go on ({wrong}); restore it, "
        "or remove it to start from the eps of the config"
    )
