"""Exports: studies as folders of plain files or Optuna storages, and configurations for other trainers."""

from collections.abc import Mapping
from types import MappingProxyType

SUFFIXES: Mapping[str, str] = MappingProxyType({"csv": ".csv", "parquet": ".parquet", "json": ".jsonl"})
"""Formats of the tables, with their file suffixes."""
OPTUNA = "optuna"
FORMATS = (*SUFFIXES, OPTUNA)
TRAINERS = ("trl", "openrlhf", "verl", "yaml", "json")
"""Targets of a configuration; the last two are ours. See `tuner.exchange.trainers.TARGETS`."""
