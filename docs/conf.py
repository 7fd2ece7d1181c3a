"""The documentation site: Sphinx with MyST and Furo; `make docs` builds it, with warnings as errors.

The pages under reference/ are written anew at every build, from the fields of the classes; those under papers/ from the
README of each paper; the notebooks under tutorials/notebooks/ from the pages of the tutorials.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from narrowcast import __version__
from narrowcast.reference.reference_pages import write_pages

sys.path.insert(0, str(Path(__file__).parent))
from notebooks import write_notebooks
from pages import TUTORIALS
from paper_pages import write_papers

write_notebooks(TUTORIALS / "notebooks")
REFERENCE = Path(__file__).parent / "reference"
shutil.rmtree(REFERENCE, ignore_errors=True)
write_pages(REFERENCE)
PAPERS = Path(__file__).parent / "papers"
shutil.rmtree(PAPERS, ignore_errors=True)
write_papers(PAPERS)

project = "narrowcast"
author = "The narrowcast authors"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "examples", "results"]
root_doc = "index"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
suppress_warnings: list[str] = []

default_role = "code"  # single backticks are code in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"narrowcast {version}"
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

linkcheck_ignore = [".*"]  # the builder lists external links in output.txt; checking them needs the net
