"""Studies as folders of plain files, to be kept, sent to someone, or read by other tools, and taken in again."""

from collections.abc import Mapping
from types import MappingProxyType

SUFFIXES: Mapping[str, str] = MappingProxyType({"csv": ".csv", "parquet": ".parquet", "json": ".jsonl"})
"""The formats of the tables, and how their files' names end."""
