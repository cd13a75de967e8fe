"""How Sphinx builds these pages: `make docs`."""

from ppo_core import __version__

project = "PPO Tuner"
release = __version__
extensions = ["myst_parser"]
myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = project
html_show_copyright = False
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_missing"]  # files beside docs/ are not pages; tests/test_reference.py holds links
