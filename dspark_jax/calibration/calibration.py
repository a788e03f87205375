"""A calibration: temperatures, what they did on prompts they never saw, and the JSON that SGLang reads too."""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.calibration.metrics import BINS, Measures, measure
from dspark_jax.calibration.records import Records
from dspark_jax.calibration.scaling import MINIMUM, Objective, fit_scaling
from dspark_jax.calibration.survival import Scaling
from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.whole_file import whole_file

KEYS = ("temperatures", "sts_temperatures")
"""The name SGLang, sglang-jax and this library write, and the one TensorRT-LLM writes."""

ALL = "all domains"
"""The mix of all domains."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Split:
    """How prompts were divided into those fitted on and those measured on."""

    held_out: float
    seed: int
    prompts_fitted: int
    prompts_measured: int


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A scaling and its provenance.

    Attributes:
      temperatures: [g], positive, fitted without shifts: what servers read that know no others.
      platt: temperatures and shifts fitted together, None if they were not; takes the place of `temperatures` here.
      dataset: what they were fitted on; num_samples: rounds fitted on.
      ece_before, ece_after: ECE of survival by position on held-out prompts, raw and under `temperatures`; shorter than
        g where the last positions were never verified, empty if unknown.
      objective: what `temperatures` minimise, "" if unknown; bins: of the ECE.
      split: how prompts were divided, None if unknown.
      drafter: fingerprint of the drafter, "" if unknown.
      measures: {domain: (raw, under `scaling`)} on held-out prompts; the mix of them is `ALL`.
      warnings: what to know about single positions of `scaling`.

    Raises:
      ValueError: no temperature, one that is no positive finite number, or `platt` of another length.
    """

    temperatures: tuple[float, ...]
    platt: Scaling | None = None
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    objective: str = ""
    bins: int = BINS
    split: Split | None = None
    drafter: str = ""
    measures: Mapping[str, tuple[Measures, Measures]] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Scaling(self.temperatures)  # refuses what is none
        g = len(self.temperatures)
        if self.platt is not None and len(self.platt.temperatures) != g:
            raise ValueError(f"platt holds {len(self.platt.temperatures)} positions and temperatures {g}.")

    @property
    def scaling(self) -> Scaling:
        """What this library applies."""
        return Scaling(self.temperatures) if self.platt is None else self.platt

    def scaling_for(self, block_size: int, drafter: str = "") -> Scaling:
        """The scaling of the first `block_size` positions.

        Args:
          drafter: fingerprint of the drafter about to run; "" leaves it unchecked, as it is where the file names none.

        Raises:
          ValueError: fitted for another drafter, or for fewer positions.
        """
        if drafter and self.drafter and drafter != self.drafter:
            raise ValueError(
                f"these temperatures were fitted for drafter {self.drafter}, this one is {drafter}. Calibrate it: "
                "`dspark evaluate DATA --records FILE`, then `dspark calibrate FILE`."
            )
        return self.scaling.first(block_size)


def calibrate(
    records: Records,
    *,
    shifts: bool = True,
    objective: Objective = "ece",
    held_out: float = 0.5,
    seed: int = 0,
    bins: int = BINS,
    minimum: int = MINIMUM,
) -> Calibration:
    """Fits a scaling on some prompts and measures it on the others, for every domain and for the mix.

    See `fit_scaling` and `Records.split`.

    Raises:
      ValueError: a drafter without a confidence head, or too few prompts to split.
    """
    if len(records) and np.isposinf(records.confidence_logits).all():
        raise ValueError("every confidence is exactly 1: this drafter has no confidence head, nothing to calibrate.")
    fitted, measured = records.split(held_out, seed)
    fit = fit_scaling(fitted, objective=objective, bins=bins, minimum=minimum)
    platt = fit_scaling(fitted, shifts=True, minimum=minimum) if shifts else None
    for warning in (platt or fit).warnings:
        log.warning("%s.", warning)
    measures = measure_domains(measured, (platt or fit).scaling, bins)
    return Calibration(
        temperatures=fit.scaling.temperatures,
        platt=platt and platt.scaling,
        dataset="+".join(records.domains),
        num_samples=len(fitted),
        ece_before=_known(measures[ALL][0].ece),
        ece_after=_known(measure(measured, fit.scaling, bins).ece),
        objective=objective,
        bins=bins,
        split=Split(held_out, seed, len(np.unique(fitted.prompt)), len(np.unique(measured.prompt))),
        drafter=records.drafter,
        measures=measures,
        warnings=(platt or fit).warnings,
    )


def measure_domains(records: Records, scaling: Scaling, bins: int = BINS) -> dict[str, tuple[Measures, Measures]]:
    """{domain: (raw, under the scaling)}, the mix of all domains first."""
    measures = {}
    for name, part in {ALL: records, **{d: records.of_domain(d) for d in records.domains}}.items():
        before, after = measure(part, bins=bins), measure(part, scaling, bins)
        # A scaling keeps the order of confidences; anything else would be a bug.
        assert np.array_equal(before.confidence_auc, after.confidence_auc, equal_nan=True)
        measures[name] = before, after
    return measures


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """Writes JSON, whole or not at all: the keys that SGLang reads, and beside them what this library knows more."""
    value = dataclasses.asdict(calibration)
    value["measures"] = {
        domain: {when: _lists(m) for when, m in zip(("before", "after"), pair, strict=True)}
        for domain, pair in calibration.measures.items()
    }
    text = json.dumps(value, indent=1, allow_nan=False)
    with whole_file(path) as work:
        work.write_text(text + "\n", encoding="utf-8")


def read_calibration(path: str | Path) -> Calibration:
    """Reads a calibration of this library, of SGLang or of TensorRT-LLM; keys that nobody here knows are ignored.

    Raises:
      FileNotFoundError: no such file; ValueError: no temperatures in it, or values of another kind.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `dspark calibrate RECORDS --out {path}` writes it.")
    value = read_json(path)
    try:
        return Calibration(
            temperatures=_temperatures(value),
            platt=_platt(value.get("platt")),
            dataset=_of(value, "dataset", str, ""),
            num_samples=_of(value, "num_samples", int, 0),
            ece_before=_floats(value, "ece_before"),
            ece_after=_floats(value, "ece_after"),
            objective=_of(value, "objective", str, ""),
            bins=_of(value, "bins", int, BINS),
            split=None if value.get("split") is None else Split(**value["split"]),
            drafter=_of(value, "drafter", str, ""),
            measures={
                domain: (_measures(pair["before"]), _measures(pair["after"]))
                for domain, pair in (value.get("measures") or {}).items()
            },
            warnings=tuple(map(str, value.get("warnings") or ())),
        )
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a calibration: {error}") from error


def _temperatures(value: Mapping[str, Any]) -> tuple[float, ...]:
    found = [_floats(value, key) for key in KEYS if key in value]
    if not found:
        raise ValueError(f"it has none of {', '.join(KEYS)}; it holds {', '.join(sorted(value)) or 'nothing'}.")
    if any(other != found[0] for other in found):
        raise ValueError(f"{' and '.join(KEYS)} disagree.")
    return found[0]


def _platt(value: Mapping[str, Any] | None) -> Scaling | None:
    return None if value is None else Scaling(_floats(value, "temperatures"), _floats(value, "shifts"))


def _of(value: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    found = default if value.get(key) is None else value[key]
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ValueError(f"{key} must be {kind.__name__}, got {found!r:.60}.")
    return found


def _floats(value: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """A list of numbers; a single one, as some write for the mean, is a list of one."""
    found: Any = value.get(key)
    found = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in found):
        raise ValueError(f"{key} must be numbers, got {found!r:.60}.")
    return tuple(map(float, found))


def _known(ece: np.ndarray) -> tuple[float, ...]:
    """Positions are verified from the first on, so those without a value are the last."""
    return tuple(ece[~np.isnan(ece)].tolist())


def _lists(measures: Measures) -> dict[str, list[float | None]]:
    """Lists for JSON, where nan is null."""
    return {
        field.name: [None if x != x else x for x in getattr(measures, field.name).tolist()]
        for field in dataclasses.fields(Measures)
    }


def _measures(lists: Mapping[str, Sequence[float | None]]) -> Measures:
    fields = {
        f.name: np.array([np.nan if x is None else x for x in lists[f.name]]) for f in dataclasses.fields(Measures)
    }
    return Measures(**{n: x.astype(int) if n in ("rounds", "tested") else x for n, x in fields.items()})
