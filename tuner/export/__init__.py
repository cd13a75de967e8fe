"""Studies for other tools: as folders of plain files, or in a storage of Optuna's; and a configuration for trainers."""

from collections.abc import Mapping
from types import MappingProxyType

SUFFIXES: Mapping[str, str] = MappingProxyType({"csv": ".csv", "parquet": ".parquet", "json": ".jsonl"})
"""The formats of the tables, and how their files' names end."""
OPTUNA = "optuna"
FORMATS = (*SUFFIXES, OPTUNA)
TRAINERS = ("trl", "openrlhf", "verl", "yaml", "json")
"""What a configuration is written for; the last two are ours. See `tuner.export.trainers.TARGETS`."""
