"""The machine and what a decode step costs on it: calibration, stage fits, the cost model."""

from __future__ import annotations

from kvtune.hardware.break_even import BreakEven, break_even
from kvtune.hardware.calibrate import Sizes, calibrate, time_probe
from kvtune.hardware.cost import (
    TERMS,
    Features,
    LayerCost,
    StepCost,
    Term,
    layer_cost,
    stage_features,
    step_cost,
)
from kvtune.hardware.demand import Demand, measure_demand
from kvtune.hardware.files import parse_hardware, read_hardware, save_hardware, to_yaml
from kvtune.hardware.fit import Sample, fit_stage, fit_stages
from kvtune.hardware.machine import Hardware, Stage, Stages
from kvtune.hardware.memory import (
    SequenceMemory,
    full_memory,
    max_batch,
    wave_memory,
)
from kvtune.hardware.prediction import predict
from kvtune.hardware.probes import Probe, stage_probes
from kvtune.hardware.step_fit import StepSample, fit_steps
from kvtune.hardware.step_settings import StepSetting, settings_for
from kvtune.hardware.traffic import LayerTraffic, Traffic, full_traffic, wave_traffic
from kvtune.hardware.weights import estimated_parameters, weights_bytes

__all__ = [
    "TERMS",
    "BreakEven",
    "Demand",
    "Features",
    "Hardware",
    "LayerCost",
    "LayerTraffic",
    "Probe",
    "Sample",
    "SequenceMemory",
    "Sizes",
    "Stage",
    "Stages",
    "StepCost",
    "StepSample",
    "StepSetting",
    "Term",
    "Traffic",
    "break_even",
    "calibrate",
    "estimated_parameters",
    "fit_stage",
    "fit_stages",
    "fit_steps",
    "full_memory",
    "full_traffic",
    "layer_cost",
    "max_batch",
    "measure_demand",
    "parse_hardware",
    "predict",
    "read_hardware",
    "save_hardware",
    "settings_for",
    "stage_features",
    "stage_probes",
    "step_cost",
    "time_probe",
    "to_yaml",
    "wave_memory",
    "wave_traffic",
    "weights_bytes",
]
