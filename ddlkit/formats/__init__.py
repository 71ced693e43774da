"""Files of other programs, read into ddlkit's own types.

These are layer profiles, message times and plans. Each format is a module, and
`ddlkit.formats.readers` lists them.
"""

from ddlkit.formats.contract import ImportOptions
from ddlkit.formats.plans import read_plan
from ddlkit.formats.profiles import (
    Imported,
    guess_kind,
    import_file,
    import_text,
    kind_of,
    save_profile,
)

__all__ = [
    "ImportOptions",
    "Imported",
    "guess_kind",
    "import_file",
    "import_text",
    "kind_of",
    "read_plan",
    "save_profile",
]
