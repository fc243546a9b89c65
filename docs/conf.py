"""The documentation as a site: `make docs` writes build/docs/index.html.

Sphinx with MyST reads the pages in this folder, which a forge shows as they are, and docstrings
through autodoc. MkDocs was the other choice; docs/reference/site.md says why it was not taken.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

import d5suite

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "d5suite"
author = copyright = "The d5suite authors"
release = version = d5suite.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinxarg.ext",
    "from_code",
]
exclude_patterns = ["_*"]
templates_path = ["_templates"]
default_role = "py:obj"  # what docstrings put between backticks; a link where it is documented
smartquotes = False  # an option has two hyphens
add_module_names = False
highlight_language = "text"  # most code blocks are lines of a shell

myst_heading_anchors = 4  # named as a forge names them
myst_ref_domains = ("std", "py")
suppress_warnings = ["misc.highlighting_failure"]  # an ellipsis in C++ is meant

autodoc_default_options = {
    "members": True,
    "ignore-module-all": True,
    "show-inheritance": True,
    "member-order": "bysource",
}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = True
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # fields of a class, not objects that autodoc describes once more
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"d5suite {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}

FRAMEWORKS = {"torch", "tensorflow", "keras", "mxnet", "jax", "deep500"}


def check_frameworks(app: Sphinx, error: Exception | None) -> None:
    """Fail the build if reading docstrings has imported a framework."""
    imported = FRAMEWORKS & set(sys.modules)
    if imported and error is None:
        raise RuntimeError(f"the documentation imports {', '.join(sorted(imported))}")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", check_frameworks)
