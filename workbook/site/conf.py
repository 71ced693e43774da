"""Settings of Sphinx. The directory of sources is written by `workbook.site.sources`."""

project = "ddlkit"
author = "The ddlkit authors"
copyright = "the ddlkit authors, MIT licence"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "numpydoc",
    "sphinx_copybutton",
    "workbook.site.extension",
]
exclude_patterns = ["_extra", "solutions"]

# Broken links are warnings, and warnings fail the build. Types in signatures may be of other
# projects.
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]

# Code for Colab has lines that are not Python; it is highlighted as far as it is.
suppress_warnings = ["misc.highlighting_failure"]

# Notebooks were run before: here they are only read.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}

myst_enable_extensions = [
    "amsmath",
    "attrs_block",
    "attrs_inline",
    "colon_fence",
    "dollarmath",
]
myst_heading_anchors = 6

# The reference is read from docstrings; of what measures, without importing PyTorch.
autodoc_mock_imports = ["torch", "torchvision"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"Floats": "Floats", "Ints": "Ints", "ArrayLike": "ArrayLike"}
default_role = "code"
numpydoc_show_class_members = False

html_theme = "sphinx_book_theme"
html_title = "What communication costs"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "navbar-logo.html",
        "search-button-field.html",
        "buckets-link.html",
        "sbt-sidebar-nav.html",
    ]
}
html_theme_options = {
    "navbar_persistent": [],  # the sidebar has the search already
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "use_download_button": True,
    "use_fullscreen_button": False,
}
html_copy_source = True
html_sourcelink_suffix = ""
html_last_updated_fmt = None
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
