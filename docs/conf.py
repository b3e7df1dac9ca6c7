"""Configuration of the documentation site, which `scripts/docs` builds with Sphinx."""

from h5pack.version import __version__

project = "h5pack"
author = copyright = "The h5pack developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
myst_heading_anchors = 3
default_role = "py:obj"

autodoc_default_options = {
    "members": True,
    "special-members": "__call__",
    "inherited-members": "BaseException,OSError,Dataset,Sampler",
}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
numpydoc_show_class_members = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_theme_options = {"light_css_variables": {"code-font-size": "75%"}}
html_title = f"h5pack {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
