"""Serve the dashboard so that the first visit waits for little: everything is imported, and the latest study read.

`python -m dashboard` takes the options of `streamlit run`.
"""

import gc
import importlib
import pkgutil
import sys
import threading
from contextlib import suppress
from pathlib import Path

import click
from streamlit.web import cli

from dashboard import data, views
from dashboard.views import curve_charts
from ppo_core.errors import PPOTunerError


def main() -> None:
    """Serve until Ctrl-C."""
    for module in pkgutil.iter_modules(views.__path__):
        importlib.import_module(f"{views.__name__}.{module.name}")
    gc.collect()
    gc.freeze()  # the libraries stay: the collector need not look through them at every visit
    # Beside the server, which a database that cannot be reached must not hold up.
    threading.Thread(target=read_ahead, daemon=True).start()
    app = Path(__file__).with_name("app.py")
    try:
        cli.main(["run", str(app), *sys.argv[1:]], prog_name="streamlit", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C is how it is meant to end
        sys.exit(0)


def read_ahead() -> None:
    """Read what the pages show first of the study that they show first; the pages show what is wrong with a store."""
    with suppress(PPOTunerError):
        store = data.open_store(data.storage())
        for study in data.studies(store)[:1]:
            curve_charts.read(store, data.snapshot(store, study.name))


if __name__ == "__main__":
    main()
