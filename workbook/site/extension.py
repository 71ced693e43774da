"""What the site adds to Sphinx.

It adds formulas as MathML, descriptions of pages, lists of parameters, and links to a
repository. It also makes the build faster: the pages are the same without it.
"""

from __future__ import annotations

import functools
import gc
import re
from typing import Any

from docutils import nodes
from latex2mathml import converter
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc import mock
from sphinx.search.en import SearchEnglish
from sphinx.util import logging
from sphinx.util.inspect import TypeAliasForwardRef
from sphinx.writers.html5 import HTML5Translator

import ddlkit

LOGGER = logging.getLogger(__name__)
LONGEST = 200
"""Characters of a description, at most: what search engines and messengers show."""
OBJECTS = 200_000
"""How many objects are made before Python looks for unreachable ones.

A page is a tree of many thousand objects that all stay reachable."""


def to_mathml(formula: str, display: str) -> str:
    """Return a formula as MathML. Raises ValueError for what latex2mathml does not know.

    >>> to_mathml("x < 1", "inline")
    '<math xmlns="" display="inline"><mrow><mi>x</mi><mo>&#x0003C;</mo><mn>1</mn></mrow></math>'
    """
    text = " ".join(formula.split())
    try:
        # MathML within HTML needs no namespace, so that its address is left out.
        mathml = str(converter.convert(text, xmlns="", display=display))
    except Exception as error:  # its exceptions have no common base
        raise ValueError(f"{text!r} ({type(error).__name__})") from error
    # latex2mathml does not refuse a command that it does not know, but writes it as an identifier.
    unknown = re.search(r"<mi>([\\{}&](?!#)[^<]*)", mathml)
    if unknown:
        raise ValueError(f"{text!r} (unknown: {unknown[1]})")
    return mathml


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    _write_math(translator, node, "inline")


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    _write_math(translator, node, "block")


def _write_math(translator: HTML5Translator, node: nodes.Element, display: str) -> None:
    """Write a formula as MathML.

    If the formula cannot be shown, a warning that names its page lets the build fail.

    Parameters
    ----------
    translator : HTML5Translator
        The translator that writes the page.
    node : Element
        The formula.
    display : str
        "inline" or "block".

    Raises
    ------
    SkipNode
        Always, so that docutils does not write the text of the formula, too.
    """
    try:
        mathml = to_mathml(node.astext(), display)
    except ValueError as error:
        LOGGER.warning("cannot show the formula %s", error, location=node)
        raise nodes.SkipNode from error
    if display == "block":
        mathml = f'<div class="math scroll">{mathml}</div>'
    translator.body.append(mathml)
    raise nodes.SkipNode


def describe(
    app: Sphinx,
    pagename: str,
    templatename: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    """Give a page the description and the title that search engines and messengers show."""
    # A page that Sphinx makes itself, such as the search, has no source.
    if doctree is None:
        return
    # The name stands in for a title that a page does not have.
    title = nodes.fully_normalize_name(pagename)
    for found in doctree.findall(nodes.title):
        title = found.astext()
        break
    words = _description(doctree)
    tags = {
        'name="description"': words,
        'property="og:title"': title,
        'property="og:description"': words,
        'property="og:type"': "article",
        'property="og:site_name"': app.config.html_title,
    }
    for name, content in tags.items():
        escaped = content.replace("&", "&amp;").replace('"', "&quot;")
        context["metatags"] += f'\n<meta {name} content="{escaped}">'


def _description(doctree: nodes.document) -> str:
    """Return the first paragraph of a page, cut after a word to at most LONGEST characters.

    The first paragraph of a notebook is its objective.
    """
    for paragraph in doctree.findall(nodes.paragraph):
        words = " ".join(paragraph.astext().split()).removeprefix("Objective: ")
        if len(words) <= LONGEST:
            return words
        return words[:LONGEST].rpartition(" ")[0] + " ..."
    return ""


def list_parameters(
    app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]
) -> None:
    """Turn the lines ``name : description`` at the top of a docstring into a list of reST.

    Without this, reST takes these lines for one paragraph. Everything from the first underlined
    heading on is left to numpydoc.

    Parameters
    ----------
    app, what, name, documented, options
        The arguments of the event autodoc-process-docstring.
    lines : list of str
        The docstring, which is changed in place.
    """
    # The first section begins at its heading, which is the line above the underline.
    end = len(lines)
    for index, line in enumerate(lines):
        if re.fullmatch("-{3,}", line):
            end = index - 1
            break
    listed: list[str] = []
    is_item = False
    for line in lines[:end]:
        parameter = re.match(r"([\w, /]+?) : (.+)", line)
        if parameter:
            if not is_item:
                listed.append("")
            listed.append(f"* **{parameter[1]}**: {parameter[2]}")
            is_item = True
        elif is_item and line.startswith(" "):
            listed.append(f"  {line.strip()}")
        else:
            if is_item:
                listed.append("")
            listed.append(line)
            is_item = False
    lines[:end] = listed


def link_to_repository(app: Sphinx, config: Config) -> None:
    """Show the launch buttons and "open an issue", which need the address of the repository."""
    address = config.repository_address
    # CITATION.cff may have no address.
    if not address:
        return
    # Binder takes any repository, Colab only those on GitHub.
    launch = {"binderhub_url": "https://mybinder.org"}
    if address.startswith("https://github.com/"):
        launch["colab_url"] = "https://colab.research.google.com"
    config.html_theme_options |= {
        "repository_url": address,
        "repository_branch": "main",
        "use_repository_button": True,
        "use_issues_button": True,
        "launch_buttons": launch,
    }


def import_library(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Import all modules of the library before the reference is read.

    The library imports a module when one of its names is first used. If autodoc were the first
    to use a name, it would do so without the mock of PyTorch, and import PyTorch for seconds in
    each process.
    """
    if any(name.startswith("reference/") for name in docnames):
        with mock(app.config.autodoc_mock_imports):
            for name in ddlkit.__all__:
                getattr(ddlkit, name)


def _name_of(alias: TypeAliasForwardRef) -> str:
    return alias.name


def setup(app: Sphinx) -> dict[str, Any]:
    """Register everything of this module, when Sphinx calls this function."""
    app.add_config_value("repository_address", "", "html", types=(str,))
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(visit_inline, None),
        block_renderers=(visit_block, None),
    )
    app.add_lexer("mermaid", TextLexer)
    # The priority puts this before the theme, which reads its options on the same event.
    app.connect("config-inited", link_to_repository, priority=1)
    app.connect("html-page-context", describe)
    # Autodoc shows an alias of a type within tuple[...] by its repr, which is longer than its
    # name.
    TypeAliasForwardRef.__repr__ = _name_of  # type: ignore[method-assign]
    app.connect("env-before-read-docs", import_library)
    # The search index needs the stem of every word. Only 6,000 of the 30,000 words on the pages
    # are different, so that a cache saves most of the work.
    SearchEnglish.stem = functools.cache(SearchEnglish.stem)  # type: ignore[method-assign]
    gc.set_threshold(OBJECTS)
    # The priority puts this before numpydoc, which rewrites docstrings on the same event.
    app.connect("autodoc-process-docstring", list_parameters, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
