"""Studies for other tools: as folders of plain files, or in a storage of Optuna's."""

from collections.abc import Mapping
from types import MappingProxyType

SUFFIXES: Mapping[str, str] = MappingProxyType({"csv": ".csv", "parquet": ".parquet", "json": ".jsonl"})
"""The formats of the tables, and how their files' names end."""
OPTUNA = "optuna"
FORMATS = (*SUFFIXES, OPTUNA)
