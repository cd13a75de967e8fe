"""The dashboard's server: `streamlit run dashboard/app.py`, or `ppo-tuner dashboard`. `dashboard/pages.py` draws."""

import sys
from pathlib import Path

from starlette.middleware import Middleware
from streamlit.starlette import App

if (root := str(Path(__file__).resolve().parent.parent)) not in sys.path:
    sys.path.insert(0, root)  # Streamlit puts this file's folder there, not the checkout's

from dashboard.access import TokenKeeper

app = App(Path(__file__).with_name("pages.py"), middleware=[Middleware(TokenKeeper)])
