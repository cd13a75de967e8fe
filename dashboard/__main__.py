"""Serve the dashboard with everything it imports loaded first, so that the first visit does not wait for it.

`python -m dashboard` takes the options of `streamlit run`.
"""

import importlib
import pkgutil
import sys
from pathlib import Path

from streamlit.web import cli

from dashboard import views


def main() -> None:
    """Serve until Ctrl-C."""
    for module in pkgutil.iter_modules(views.__path__):
        importlib.import_module(f"{views.__name__}.{module.name}")
    app = Path(__file__).with_name("app.py")
    cli.main(["run", str(app), *sys.argv[1:]], prog_name="streamlit")


if __name__ == "__main__":
    main()
