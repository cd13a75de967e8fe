"""Names a built folder by all that decides its weights. No torch."""

import hashlib
from importlib import metadata, resources

_SHARED = ("teaching.py",)
"""Files beside the tasks' packages whose code decides weights."""


def fingerprint(recipe: object, package: str) -> str:
    """Return a short hash of the recipe's `repr`, the code that trains by it, and the libraries' versions.

    The code is the package's files, `__init__.py` left out since it only declares, and what the tasks share.
    """
    digest = hashlib.sha256(repr(recipe).encode())
    files = [item for item in resources.files(package).iterdir() if item.name.endswith(".py")]
    sources = {item.name: item for item in files if item.name != "__init__.py"}
    shared = [resources.files(__package__) / name for name in _SHARED]
    for source in (*(sources[name] for name in sorted(sources)), *shared):
        digest.update(source.read_bytes())
    for library in ("torch", "transformers", "tokenizers"):
        digest.update(f"{library} {metadata.version(library)}".encode())
    return digest.hexdigest()[:16]
