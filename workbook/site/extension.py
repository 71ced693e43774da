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
    """Return a formula in LaTeX as MathML.

    ``display`` is "inline" or "block". If latex2mathml cannot convert the formula, a
    ValueError names the reason.

    >>> to_mathml("x < 1", "inline")
    '<math xmlns="" display="inline"><mrow><mi>x</mi><mo>&#x0003C;</mo><mn>1</mn></mrow></math>'
    """
    text = " ".join(formula.split())
    try:
        # MathML within HTML needs no namespace, so that its address is left out.
        mathml = str(converter.convert(text, xmlns="", display=display))
    except Exception as error:  # its exceptions have no common base
        raise ValueError(f"{text!r} ({type(error).__name__})") from error
    # latex2mathml does not refuse a command that it does not know, but writes it as an identifier
    # (<mi>) that begins with a backslash, a brace or an ampersand. "&#" begins a character's
    # number, which is no such command.
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
        The translator that writes the page. Its ``body`` is the HTML so far.
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
    # A wide formula scrolls by itself, so that the page does not.
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
    """Give a page the description and the title that search engines and messengers show.

    Sphinx calls this function on the event html-page-context, whose arguments it takes. The
    description and the title are added to the ``metatags`` of ``context``, the HTML for the
    head of the page.
    """
    # A page that Sphinx makes itself, such as the search, has no source.
    if doctree is None:
        return
    # The first title is that of the page. Without one, the name of the page takes its place.
    title = nodes.fully_normalize_name(pagename)
    for found in doctree.findall(nodes.title):
        title = found.astext()
        break
    words = _description(doctree)
    # The content of each tag, by the attribute that says what it is.
    tags = {
        'name="description"': words,
        'property="og:title"': title,
        'property="og:description"': words,
        'property="og:type"': "article",
        'property="og:site_name"': app.config.html_title,
    }
    for attribute, content in tags.items():
        # These two characters cannot stand in a quoted attribute.
        escaped = content.replace("&", "&amp;").replace('"', "&quot;")
        context["metatags"] += f'\n<meta {attribute} content="{escaped}">'


def _description(doctree: nodes.document) -> str:
    """Return the first paragraph of a page, or "" if it has none.

    The first paragraph of a notebook is its objective. If a paragraph is longer than LONGEST
    characters, it is cut after a word, and " ..." is added.
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

    A description may go on in indented lines. Without a list, reST takes all these lines for
    one paragraph. Everything from the first underlined heading on is left to numpydoc.

    Parameters
    ----------
    app, what, name, documented, options
        The arguments of the event autodoc-process-docstring.
    lines : list of str
        The docstring, which is changed in place.
    """
    end = _first_heading(lines)
    listed: list[str] = []
    # Whether the line before this one belongs to an item of the list. reST needs an empty line
    # before and after a list.
    is_item = False
    for line in lines[:end]:
        parameter = re.match(r"([\w, /]+?) : (.+)", line)
        if parameter:
            if not is_item:
                listed.append("")
            listed.append(f"* **{parameter[1]}**: {parameter[2]}")
            is_item = True
        elif is_item and line.startswith(" "):
            # The description of the parameter goes on.
            listed.append(f"  {line.strip()}")
        else:
            if is_item:
                listed.append("")
            listed.append(line)
            is_item = False
    lines[:end] = listed


def _first_heading(lines: list[str]) -> int:
    """Return the index of the first underlined heading of a docstring.

    Without a heading, it is the number of lines.
    """
    for index, line in enumerate(lines):
        if re.fullmatch("-{3,}", line):
            # The heading is the line above its underline.
            return index - 1
    return len(lines)


def link_to_repository(app: Sphinx, config: Config) -> None:
    """Show the launch buttons and "open an issue", which need the address of the repository.

    Sphinx calls this function on the event config-inited. The buttons are options of the theme,
    which are added to those of ``config``.
    """
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
    each process. Sphinx calls this function on the event env-before-read-docs, with the names of
    the pages that it is going to read.
    """
    # Only pages of the reference are read from docstrings.
    if any(name.startswith("reference/") for name in docnames):
        with mock(app.config.autodoc_mock_imports):
            # The use of a name imports its module.
            for name in ddlkit.__all__:
                getattr(ddlkit, name)


def _name_of(alias: TypeAliasForwardRef) -> str:
    return alias.name


def setup(app: Sphinx) -> dict[str, Any]:
    """Register everything of this module, when Sphinx calls this function.

    Returns
    -------
    dict
        What Sphinx needs to know of an extension: that pages can be read and written in
        several processes at once.
    """
    # `website.build` sets this value on the command line.
    app.add_config_value("repository_address", "", "html", types=(str,))
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(visit_inline, None),
        block_renderers=(visit_block, None),
    )
    # Diagrams in Mermaid are shown as plain text.
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
    # To look for unreachable objects takes time, and pages leave few of them.
    gc.set_threshold(OBJECTS)
    # The priority puts this before numpydoc, which rewrites docstrings on the same event.
    app.connect("autodoc-process-docstring", list_parameters, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
