"""How good probabilities are: calibration error, discrimination, and both at once, position by position."""

import dataclasses

import numpy as np

from dspark_jax.calibration.records import Records
from dspark_jax.calibration.survival import Scaling, to_survival_twin

BINS = 15


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Predictions in bins of equal width over [0, 1].

    Attributes:
      count, predicted, observed: [bins] predictions in the bin, their mean, and the share that came true (nan if none).
    """

    count: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray


def reliability(predictions: np.ndarray, outcomes: np.ndarray, bins: int = BINS) -> Reliability:
    """Bins predictions [n] within [0, 1] with their outcomes [n]."""
    where = _bin(predictions, bins)
    count = np.bincount(where, minlength=bins)
    sums = [np.bincount(where, x.astype(np.float64), minlength=bins) for x in (predictions, outcomes)]
    predicted, observed = (np.divide(s, count, out=np.full(bins, np.nan), where=count > 0) for s in sums)
    return Reliability(count, predicted, observed)


def expected_calibration_error(predictions: np.ndarray, outcomes: np.ndarray, bins: int = BINS) -> float:
    """ECE: mean over predictions of |mean predicted - share come true| of their bin, within [0, 1]; nan without any."""
    if not len(predictions):
        return float("nan")
    gaps = np.bincount(_bin(predictions, bins), predictions - outcomes, minlength=bins)
    return float(np.abs(gaps).sum() / len(predictions))


def chance_calibration_error(predictions: np.ndarray, bins: int = BINS) -> float:
    """The ECE that perfect predictions would show on as many independent outcomes, by chance alone.

    The gap of a bin is then nearly normal with variance sum p (1 - p), and E|N(0, s)| = s sqrt(2 / pi).
    """
    if not len(predictions):
        return float("nan")
    variance = np.bincount(_bin(predictions, bins), predictions * (1 - predictions), minlength=bins)
    return float(np.sqrt(2 / np.pi * variance).sum() / len(predictions))


def brier_score(predictions: np.ndarray, outcomes: np.ndarray) -> float:
    """Mean squared error of predictions; nan without any."""
    return float(np.mean((predictions - outcomes) ** 2)) if len(predictions) else float("nan")


def log_loss(predictions: np.ndarray, outcomes: np.ndarray) -> float:
    """Mean of -log of the probability given to what came true, at most 16 a prediction; nan without any."""
    if not len(predictions):
        return float("nan")
    given = np.where(outcomes > 0, predictions, 1 - predictions)
    return float(-np.log(np.maximum(given, 1e-7)).mean())


def area_under_curve(scores: np.ndarray, outcomes: np.ndarray) -> float:
    """ROC-AUC: probability that a score whose outcome is true exceeds one whose outcome is false, ties counting half.

    Depends on the order of the scores only; nan when all outcomes agree.
    """
    outcomes = np.asarray(outcomes, bool)
    good = int(outcomes.sum())
    if good in (0, len(outcomes)):
        return float("nan")
    _, where, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[where]
    return float((ranks[outcomes].sum() - good * (good + 1) / 2) / (good * (len(outcomes) - good)))


@dataclasses.dataclass(frozen=True)
class Measures:
    """Quality of survival and confidence at every draft position, over verified rounds; nan where there are none.

    Attributes:
      rounds: [g] rounds verified up to the position; tested: [g] those of them where its own test took place.
      predicted, observed: [g] mean survival predicted, and share of rounds that survived.
      ece, chance, brier, auc: [g] of survival a_k, the cumulative product; `chance` is the ECE of a perfect predictor.
      confidence_auc: [g] of c_k over the rounds tested. No scaling changes it.
    """

    rounds: np.ndarray
    tested: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray
    ece: np.ndarray
    chance: np.ndarray
    brier: np.ndarray
    auc: np.ndarray
    confidence_auc: np.ndarray

    @property
    def mean_ece(self) -> float:
        """Over the positions that have one."""
        known = self.ece[~np.isnan(self.ece)]
        return float(known.mean()) if len(known) else float("nan")


def measure(records: Records, scaling: Scaling | None = None, bins: int = BINS) -> Measures:
    """Measures survival under a scaling (None: raw) against what verification found.

    Censored positions are left out. That is unbiased when whether position k is verified depends on nothing but the
    confidences and chance, as it does for every policy that keeps the output's law.
    """
    g = records.block_size
    logits = records.confidence_logits.astype(np.float64)
    logits = logits if scaling is None else scaling(logits)
    predicted = to_survival_twin(logits)
    columns = []
    for k in range(g):
        seen, tested = records.verified[:, k], records.at_risk[:, k]
        p, y = predicted[seen, k], records.survived[seen, k].astype(np.float64)
        columns.append(
            (
                seen.sum(), tested.sum(), _mean(p), _mean(y),
                expected_calibration_error(p, y, bins), chance_calibration_error(p, bins), brier_score(p, y),
                # Logits, not probabilities: a float that is nearly 1 would tie with others.
                area_under_curve(p, y), area_under_curve(logits[tested, k], records.survived[tested, k]),
            )
        )  # fmt: skip
    rounds, tested, *others = map(np.array, zip(*columns, strict=True))
    return Measures(rounds.astype(int), tested.astype(int), *others)


def _bin(predictions: np.ndarray, bins: int) -> np.ndarray:
    if bins < 1:
        raise ValueError(f"bins must be 1 or more, got {bins}.")
    return np.minimum((predictions * bins).astype(np.int64), bins - 1)


def _mean(x: np.ndarray) -> float:
    return float(x.mean()) if len(x) else float("nan")
