"""Layer profiles in foreign files, and layer profiles written for a user.

The formats are listed in `ddlkit.formats.readers`. If a file lacks something, or if the
user must add something, a ``UserError`` says so in one line.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.formats import flop_counts, readers, transformer_shapes
from ddlkit.formats.contract import ImportOptions, ReadProfile
from ddlkit.store import files
from ddlkit.store.readers import profile_frame
from ddlkit.store.sheet import (
    SCHEMAS,
    advice_on_missing_column,
    kind_in_words,
    read_sheet,
    write_sheet,
)
from ddlkit.store.tables import own_output

_COLUMNS = (
    (flop_counts.FLOPS, flop_counts.REQUIRED),
    (transformer_shapes.SHAPES, ("name", *transformer_shapes.REQUIRED)),
)
"""The tables that can be imported, each with the columns that it needs."""
MOST_BATCH = 10**9
"""Samples of an iteration. No training set that is used here is as large."""


class Imported(NamedTuple):
    """A layer profile that was read from a foreign file.

    Attributes
    ----------
    kind : str
        The name of the format, as `ddlkit.formats.readers` names it.
    profile : LayerProfile
        The profile.
    findings : tuple of Finding
        What the user should know of the profile.
    """

    kind: str
    profile: LayerProfile
    findings: tuple[Finding, ...]


def import_file(
    path: Path | str, kind: str | None = None, options: ImportOptions | None = None
) -> Imported:
    """Return the layer profile in a foreign file.

    Parameters
    ----------
    path : Path or str
        The file.
    kind : str, optional
        The format, as `ddlkit.formats.readers` names it. By default the content
        decides.
    options : ImportOptions, optional
        Facts that the file does not state, and choices.

    Returns
    -------
    Imported
        The profile. The options replace the network and the device that the file names.
        A network that neither names is called like the file. The batch size is the option,
        or 1 without it.

    Raises
    ------
    UserError
        If the file is wrong or of no known format, or if an option is missing or wrong.
    """
    path = Path(path)
    return import_text(files.read_text(path), path, kind, options)


def import_text(
    text: str,
    path: Path,
    kind: str | None = None,
    options: ImportOptions | None = None,
) -> Imported:
    """Return the layer profile in the content of a foreign file, as `import_file` does.

    Parameters
    ----------
    text : str
        The content of the file.
    path : Path
        The file, after which a network without a name is called.
    kind : str, optional
        The format, as `import_file` takes it.
    options : ImportOptions, optional
        Facts that the file does not state, and choices.

    Returns
    -------
    Imported
        The profile.

    Raises
    ------
    UserError
        If the content is wrong or of no known format, or if an option is missing or wrong.
    """
    options = options or ImportOptions()
    if options.batch is not None and not 1 <= options.batch <= MOST_BATCH:
        raise UserError(
            f"--batch {options.batch}: a batch has 1 to {MOST_BATCH} samples"
        )
    file = str(path)
    kind = kind_of(text, file, kind)
    # Findings are remarks for the user.
    profile, findings = _reader_of_kind(kind).read(text, file, options)
    # The name up to the first dot, without all extensions.
    name_of_file, _, _ = path.name.partition(".")
    profile = replace(
        profile,
        network=options.network or profile.network or name_of_file,
        batch=options.batch or 1,
        device=options.device or profile.device,
    )
    # The user may send each element of a gradient in another number of bytes.
    if options.gradient_bytes is not None:
        profile = profile.sent_as(options.gradient_bytes)
    if options.batch is None:
        problem = "the file does not state the batch size, so that 1 is assumed: "
        problem += "give it with --batch"
        findings = (*findings, Finding("batch", text=problem))
    return Imported(kind, profile, findings)


def _reader_of_kind(kind: str) -> readers.Reader[ImportOptions, ReadProfile]:
    """Return the reader of a format, by the name of the format.

    Raises UserError, with a list of all formats, if no format has this name.
    """
    for reader in readers.LAYER_PROFILES:
        if reader.name == kind:
            return reader
    # `takes` is a phrase that says which files the format has.
    known = "; ".join(
        f"{reader.name}, {reader.takes}" for reader in readers.LAYER_PROFILES
    )
    raise UserError(f"unknown kind {kind!r}: use one of these: {known}")


def kind_of(text: str, file: str, kind: str | None = None) -> str:
    """Return the format of a file of layer times: the user's, or else that of its content.

    Parameters
    ----------
    text : str
        The content of the file.
    file : str
        The file, as errors name it.
    kind : str, optional
        The format that the user has named. By default the content decides.

    Returns
    -------
    str
        The name of one of `readers.LAYER_PROFILES`.

    Raises
    ------
    UserError
        If the user has named an unknown format, or if no reader takes the content.
    """
    if kind is None:
        return guess_kind(text, file)
    return _reader_of_kind(kind).name


def guess_kind(text: str, file: str) -> str:
    r"""Return the format of a file of layer times.

    Parameters
    ----------
    text : str
        The content of the file.
    file : str
        The file, as errors name it.

    Returns
    -------
    str
        The name of the first of `readers.LAYER_PROFILES` that takes the content.

    Raises
    ------
    UserError
        If no reader takes the content, or if the file is a layer profile already.

    Examples
    --------
    >>> guess_kind("tensor,parameters,flops\nconv,10,1e9\n", "mine.csv")
    'flops'
    """
    first_line, _, _ = text.partition("\n")
    names = {name.strip() for name in first_line.split(",")}
    # A layer profile also has the columns of FLOP counts, and would be taken for a table of
    # these.
    if "backward_s" in names:
        advice = "use it with --profile"
        if _has_flop_counts(text, file):
            advice += ", or say --kind flops to take its FLOP counts"
        raise UserError(f"{file}: a layer profile already: {advice}")
    reader = readers.first_match(readers.LAYER_PROFILES, text)
    if reader is None:
        _refuse_missing_columns(first_line, file)
        formats = readers.formats_tried(readers.LAYER_PROFILES, text)
        raise UserError(
            f"{file}: is in no format that can be imported: name its format with --kind, "
            f"or give times of messages to ddlkit fit; {formats}"
        )
    return reader.name


def _has_flop_counts(text: str, file: str) -> bool:
    """Return whether a table can be read as FLOP counts, and counts any.

    ``text`` is the content of the file. In layer profiles, 0 stands for FLOP that are not
    known.
    """
    try:
        tensors = flop_counts.read_flops(read_sheet(text, file))
    except UserError:
        return False
    return any(tensor.flops for tensor in tensors)


def _refuse_missing_columns(first_line: str, file: str) -> None:
    """Raise UserError if a CSV lacks few of the columns that one of the formats needs.

    ``first_line`` is the header of a file that matches no format. If it has more than
    half of the columns of a format, the file is most likely of that format, and the
    error names the columns that are missing.
    """
    names = [name.strip() for name in first_line.split(",")]
    # The schema of each format, and the columns that a file of this format must have.
    for schema, required in _COLUMNS:
        missing = [name for name in required if name not in names]
        has_most = 2 * len(missing) < len(required)
        if missing and has_most:
            noun = "column" if len(missing) == 1 else "columns"
            advice = f"add them (the columns of the file are {', '.join(names)})"
            if len(missing) == 1:
                advice = advice_on_missing_column(missing[0], names)
            raise UserError(
                f"{file}: has no {noun} {', '.join(missing)}, which "
                f"{kind_in_words(schema.name)} needs: {advice}"
            )


def save_profile(profile: LayerProfile, path: Path | str, *sources: Path | str) -> None:
    """Write a layer profile as a user's own CSV.

    Unlike a recorded table, it has no stamp, which would say where its rows come from.

    Parameters
    ----------
    profile : LayerProfile
        The profile.
    path : Path or str
        Where to write it.
    *sources : Path or str
        The files from which it was made, none of which is overwritten.

    Raises
    ------
    UserError
        If the path is one of the sources or of a recorded table, or cannot be written.
    """
    path = Path(path)
    text = write_sheet(profile_frame(profile), SCHEMAS["layers"], str(path))
    # This refuses a path that would overwrite a source or a recorded table.
    allowed_path = own_output(path, *sources)
    files.atomic_write_text(allowed_path, text)
