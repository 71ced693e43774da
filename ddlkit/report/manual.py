"""docs/commands.md: a preface written by hand, and a section for each command of a parser."""

from __future__ import annotations

import argparse
from pathlib import Path

from ddlkit import store

PAGE = store.ROOT / "docs" / "commands.md"
HEAD = Path(__file__).with_name("commands.head.md")


def page(parser: argparse.ArgumentParser) -> str:
    """The manual of a parser whose commands are parsers of their own, as Markdown."""
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    sections = [_section(name, own) for name, own in commands.choices.items()]
    return "\n".join([HEAD.read_text(encoding="utf-8"), *sections])


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    arguments = [action for action in parser._actions if action.dest != "help"]
    needed = [_typed(action) for action in arguments if action.required]
    usage = " ".join(["ddlkit", name, *needed, *["[options]"] * (len(needed) < len(arguments))])
    text = parser.description or ""
    rows = [f"| `{_cell(_typed(action))}` | {_cell(_said(action))} |" for action in arguments]
    head = [f"## {name}", "", f"{text[:1].upper()}{text[1:]}.", "", f"    {usage}", ""]
    return "\n".join([*head, "| argument | what it is |", "|---|---|", *rows, ""])


def _typed(action: argparse.Action) -> str:
    """An argument as it is typed, with a name for its value."""
    if action.nargs == 0:
        return action.option_strings[0]
    value = str(action.metavar or "|".join(action.choices or ()) or action.dest.upper())
    return " ".join([*action.option_strings, value, *["..."] * (action.nargs == "+")])


def _said(action: argparse.Action) -> str:
    """Its help in one line, as a terminal shows it; what looks like a tag is none."""
    return " ".join((action.help or "").replace("%%", "%").replace("<", "&lt;").split())


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
