"""Calibration: confidences become probabilities one can do arithmetic with."""

from dspark_jax.calibration.calibration import Calibration, calibrate, read_calibration, write_calibration
from dspark_jax.calibration.diagrams import plot_reliability
from dspark_jax.calibration.drift import Drift, Scheduler, measure_drift
from dspark_jax.calibration.fingerprint import drafter_fingerprint
from dspark_jax.calibration.metrics import Measures, measure
from dspark_jax.calibration.records import Records, join, read_records, record_rounds, write_records
from dspark_jax.calibration.scaling import fit_scaling
from dspark_jax.calibration.survival import Scaling, to_survival

__all__ = [
    "Calibration",
    "Drift",
    "Measures",
    "Records",
    "Scaling",
    "Scheduler",
    "calibrate",
    "drafter_fingerprint",
    "fit_scaling",
    "join",
    "measure",
    "measure_drift",
    "plot_reliability",
    "read_calibration",
    "read_records",
    "record_rounds",
    "to_survival",
    "write_calibration",
    "write_records",
]
