"""Exports: studies as folders of plain files or Optuna storages, and configurations for other trainers."""

from collections.abc import Mapping
from types import MappingProxyType

SUFFIXES: Mapping[str, str] = MappingProxyType({"csv": ".csv", "parquet": ".parquet"})
"""Formats of the tables, with their file suffixes."""
OPTUNA = "optuna"
FORMATS = (*SUFFIXES, OPTUNA)
TRAINERS = ("trl", "openrlhf", "verl", "yaml")
"""Targets of a configuration; the last is ours. See `tuner.exchange.trainers.TARGETS`."""
