"""Start the dashboard's server with all modules imported and the latest study read, so that the first visit is fast.

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

READ_AHEAD_SECONDS = 1.0
"""Longest time that the server's start waits for the latest study to be read."""


def main() -> None:
    """Serve until Ctrl-C."""
    for module in pkgutil.iter_modules(views.__path__):
        importlib.import_module(f"{views.__name__}.{module.name}")
    gc.collect()
    gc.freeze()  # libraries stay loaded: keep the garbage collector from scanning them at every visit
    # In a thread, and waited for briefly: an unreachable database must not delay the server.
    reading = threading.Thread(target=read_ahead, daemon=True)
    reading.start()
    reading.join(READ_AHEAD_SECONDS)
    app = Path(__file__).with_name("app.py")
    try:
        cli.main(["run", str(app), *sys.argv[1:]], prog_name="streamlit", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C is the normal way to stop it
        sys.exit(0)


def read_ahead() -> None:
    """Fill the caches for the study that the pages open with; the pages themselves report a broken store."""
    with suppress(PPOTunerError):
        store = data.open_store(data.storage())
        for study in data.studies(store)[:1]:
            curve_charts.ChartData.read(store, data.snapshot(store, study.name))


if __name__ == "__main__":
    main()
