"""docs/commands.md: a preface written by hand, and a section for each command of a parser."""

from __future__ import annotations

import argparse
from pathlib import Path

from ddlkit import store

PAGE = store.ROOT / "docs" / "commands.md"
HEAD = Path(__file__).with_name("commands.head.md")


def page(parser: argparse.ArgumentParser) -> str:
    """Return the manual of a parser whose commands are parsers of their own, as Markdown."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    sections = [_section(name, parser) for name, parser in commands.choices.items()]
    return "\n".join([HEAD.read_text(encoding="utf-8"), *sections])


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    arguments = [action for action in parser._actions if action.dest != "help"]
    needed = [_typed(action) for action in arguments if action.required]
    usage = " ".join(["ddlkit", name, *needed, *["[options]"] * (len(needed) < len(arguments))])
    text = parser.description or ""
    head = [f"## {name}", "", f"{text[:1].upper()}{text[1:]}.", "", f"    {usage}", ""]
    rows = []
    for action in arguments:
        words = (action.help or "").replace("%%", "%").replace("<", "&lt;").split()
        typed, text = (cell.replace("|", r"\|") for cell in (_typed(action), " ".join(words)))
        rows.append(f"| `{typed}` | {text} |")
    return "\n".join([*head, "| argument | what it is |", "|---|---|", *rows, ""])


def _typed(action: argparse.Action) -> str:
    """Return an argument as it is typed, with a name for its value."""
    if action.nargs == 0:
        return action.option_strings[0]
    value = str(action.metavar or "|".join(action.choices or ()) or action.dest.upper())
    return " ".join([*action.option_strings, value, *["..."] * (action.nargs == "+")])
