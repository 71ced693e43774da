"""Which columns each recorded table has."""

from __future__ import annotations

from ddlkit.core.case import CASE_TYPES, LATER
from ddlkit.core.errors import UserError
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.store.sheet import Check, Column, Kind, Schema


def _columns(kind: Kind, check: Check, names: str) -> tuple[Column, ...]:
    return tuple(Column(name, kind, check) for name in names.split())


_PLACE = (
    *_columns("str", "named", "network device"),
    *_columns("int", "positive", "batch"),
    Column("precision", "str", "named", default="fp32"),
    Column("ranks", "int", "positive", default="1"),
)
_COLLECTIVE = (
    *_columns("str", "named", "collective backend"),
    *_columns("str", "", "algorithm"),
    *_columns("str", "named", "link"),
    *_columns("float", "non_negative", "link_bits_per_s"),
    *_columns("int", "positive", "ranks messages_per_sample bytes"),
    Column("session", "int", "non_negative", default="0", later=True),
    *_columns("int", "non_negative", "sample"),
    *_columns("float", "positive", "seconds"),
    Column("stolen", "float", "non_negative", default="0", later=True),
    Column("in_flight", "int", "positive", default="1", later=True),
)
_COLLECTIVE_KEY = (
    *("collective", "backend", "algorithm", "link", "link_bits_per_s", "ranks"),
    *("in_flight", "messages_per_sample", "bytes", "session", "sample"),
)
_COLLECTIVE_ALIASES = (("in_flight", "messages_per_sample"), ("lanes", "in_flight"))
_CASE_KINDS: dict[type, Kind] = {str: "str", int: "int", float: "float", bool: "bool"}
_CASE_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("ends", "profile_sha256", "selection_sha256", "negotiated", "seed"), ""),
    "link_bits_per_s": "non_negative",
}
"""Of columns that hold a Case; all other texts have a name, all other numbers are above zero."""


def _case_column(name: str) -> Column:
    kind = _CASE_KINDS[CASE_TYPES[name]]
    check = _CASE_CHECKS.get(name, "named" if kind == "str" else "positive")
    if name not in LATER:
        return Column(name, kind, check)
    return Column(name, kind, check, default=str(LATER[name]), later=True)


_SPAN: dict[str, Column] = {
    column.name: column
    for column in (
        *_columns("str", "named", "task stream origin"),
        Column(
            *("kind", "str", "named"),
            aliases=(("allreduce", "all_reduce"), ("allgather", "all_gather")),
        ),
        *_columns("int", "non_negative", "rank iteration bytes"),
        *_columns("int", "", "group"),
        # Rank clocks differ a little: a span may start before the iteration does on rank 0.
        *_columns("float", "finite", "start_s end_s"),
    )
}

SCHEMAS: dict[str, Schema] = {
    schema.name: schema
    for schema in (
        Schema(
            "layers",
            (
                *_PLACE,
                Column("threads", "int", "non_negative", default="0"),
                *_columns("str", "named", "tensor layer"),
                *_columns("int", "positive", "parameters gradient_bytes"),
                *_columns("float", "non_negative", "forward_s backward_s flops"),
                Column("update_s", "float", "non_negative", default="0"),
            ),
            key=("network", "device", "batch", "precision", "ranks", "threads", "tensor"),
        ),
        Schema(
            "samples",
            (
                *_PLACE,
                *_columns("str", "named", "quantity"),
                *_columns("int", "non_negative", "sample"),
                *_columns("float", "positive", "seconds"),
            ),
            key=("network", "device", "batch", "precision", "ranks", "quantity", "sample"),
        ),
        Schema("collectives", _COLLECTIVE, key=_COLLECTIVE_KEY, aliases=_COLLECTIVE_ALIASES),
        Schema(
            "tensors",  # collectives of each size that a network's tensors have: no fit may see them
            (*_columns("str", "named", "network"), *_COLLECTIVE),
            key=("network", *_COLLECTIVE_KEY),
            aliases=_COLLECTIVE_ALIASES,
        ),
        Schema(
            "runs",
            (
                *map(_case_column, CASE_TYPES),
                *_columns("str", "named", "case origin"),
                *_columns("int", "non_negative", "repeat iteration"),
                *_columns("float", "positive", "iteration_s compute_s"),
                # Measured as a difference: noise may put it a little below zero.
                *_columns("float", "finite", "exposed_communication_s"),
                *_columns("float", "non_negative", "processor_load"),
                *_columns("bool", "", "processor_limited"),
                Column("stolen", "float", "non_negative", default="0", later=True),
                Column("copy_s_per_byte", "float", "non_negative", default="0", later=True),
            ),
            key=("case", "origin", "repeat", "iteration"),
        ),
        Schema(
            "timeline",
            (
                *_columns("str", "named", "case"),
                *_columns("int", "non_negative", "repeat"),
                *(_SPAN[name] for name in TIMELINE_COLUMNS),
            ),
        ),
        Schema(
            "buckets",
            (
                *_columns("str", "named", "case"),
                *_columns("int", "non_negative", "bucket"),
                *_columns("int", "positive", "bytes"),
                *_columns("str", "named", "source"),
            ),
            key=("case", "source", "bucket"),
        ),
        Schema(
            "peaks",  # products of square matrices, 2 side^3 FLOP each
            (
                *_columns("str", "named", "device precision kernel"),
                *_columns("int", "positive", "side"),
                *_columns("int", "non_negative", "sample"),
                *_columns("float", "positive", "seconds"),
            ),
            key=("device", "precision", "kernel", "side", "sample"),
        ),
        Schema(
            "efficiency",  # derived from layers and peaks; 0 where a peak is unknown
            (
                *_PLACE,
                *_columns("float", "positive", "forward_flops compute_s achieved_flops_per_s"),
                *_columns("float", "non_negative", "measured_flops_per_s measured_c"),
                *_columns("float", "non_negative", "datasheet_flops_per_s datasheet_c"),
            ),
            key=("network", "device", "batch", "precision", "ranks"),
        ),
        Schema(
            "throughput",  # seconds: of one iteration, the mean of ``iterations`` in a row
            (
                *_PLACE,
                *_columns("int", "positive", "iterations"),
                *_columns("int", "non_negative", "sample"),
                *_columns("float", "positive", "seconds"),
            ),
            key=("network", "device", "batch", "precision", "ranks", "sample"),
        ),
        Schema(
            "copies",  # seconds: of one copy, the mean of ``copies_per_sample``
            (
                *_columns("str", "named", "copy device"),
                *_columns("int", "positive", "bytes copies_per_sample"),
                *_columns("int", "non_negative", "sample"),
                *_columns("float", "positive", "seconds"),
            ),
            key=("copy", "device", "bytes", "sample"),
            aliases=(("in_a_row", "copies_per_sample"),),
        ),
        Schema(
            "drift",  # the same work at the start and at the end of a session
            (
                *_columns("str", "named", "moment work device"),
                *_columns("int", "non_negative", "sample"),
                *_columns("float", "positive", "seconds"),
            ),
            key=("moment", "work", "device", "sample"),
        ),
        Schema(
            "channels",  # collectives by blocks and threads; 0: left to NCCL (asked), not seen (taken)
            (
                *_columns("str", "named", "collective backend link"),
                *_columns("int", "positive", "ranks bytes"),
                *_columns("int", "non_negative", "asked_blocks asked_threads"),
                *_columns("int", "non_negative", "taken_channels taken_blocks taken_threads"),
                *_columns("int", "non_negative", "sample"),
                *_columns("float", "positive", "seconds"),
                Column("stolen", "float", "non_negative", default="0", later=True),
            ),
            key=(
                *("collective", "backend", "link", "ranks", "bytes"),
                *("asked_blocks", "asked_threads", "sample"),
            ),
        ),
        Schema(
            "selection",  # threads: of the CPU, 0 on a GPU; seconds: mean over tensors in turn
            (
                *_columns("str", "named", "operation device dtype"),
                *_columns("int", "non_negative", "threads"),
                *_columns("int", "positive", "elements"),
                *_columns("float", "positive", "density"),
                *_columns("str", "named", "distribution"),
                *_columns("int", "non_negative", "sample"),
                *_columns("float", "positive", "seconds"),
            ),
            key=(
                *("operation", "device", "dtype", "threads", "elements", "density"),
                *("distribution", "sample"),
            ),
        ),
        Schema(
            # A kernel beside communication of so many blocks and threads: as asked for (0: none, or
            # left to NCCL) and as taken. Bytes: of sums written (stand-in), or sent by each rank
            # (nccl, gloo); asked 0: unlimited. 0 where there is no such thing, or it is not told.
            "contention",
            (
                *_columns("str", "named", "kernel shape dtype device communication"),
                *_columns("int", "positive", "ranks"),
                *_columns("int", "non_negative", "blocks threads taken_blocks taken_threads"),
                *_columns("int", "non_negative", "registers shared_bytes cluster"),
                *_columns("float", "non_negative", "bytes_per_s_asked bytes_per_s overlap_share"),
                *_columns("int", "non_negative", "sample"),
                *_columns("float", "positive", "seconds"),
            ),
            key=(
                *("kernel", "shape", "dtype", "device", "communication", "ranks"),
                *("blocks", "threads", "bytes_per_s_asked", "sample"),
            ),
        ),
        Schema(
            # Training to convergence. Epoch 0: before the first step; seconds: of training the epoch.
            "convergence",
            (
                *_columns("str", "named", "network device"),
                *_columns("int", "non_negative", "seed threads"),
                *_columns("int", "positive", "parameters"),
                *_columns("int", "non_negative", "dense_parameters"),
                *_columns("int", "positive", "classes images"),
                *_columns("str", "named", "data_sha256"),
                *_columns("int", "positive", "batch"),
                *_columns("float", "positive", "learning_rate"),
                *_columns("int", "positive", "epochs"),
                *_columns("int", "non_negative", "epoch"),
                *_columns("str", "named", "measured_on"),
                *_columns("float", "non_negative", "loss accuracy seconds"),
            ),
            key=(
                *("network", "device", "seed", "data_sha256", "batch", "learning_rate", "epochs"),
                *("epoch", "measured_on"),
            ),
        ),
        Schema(
            "vitals",  # time_s: since the session began
            (
                *_columns("float", "non_negative", "time_s"),
                *_columns("str", "named", "device quantity"),
                *_columns("float", "finite", "value"),
            ),
        ),
        Schema("facts", _columns("str", "named", "subject fact value"), key=("subject", "fact")),
        Schema(
            "outcomes",  # every point of a recording; seconds 0: not measured
            (
                *_columns("str", "named", "what point outcome"),
                *_columns("str", "", "reason"),
                *_columns("float", "non_negative", "estimate_s seconds"),
            ),
            key=("what", "point"),
        ),
    )
}


def schema_named(name: str) -> Schema:
    """The schema of that name. Raises UserError listing the known ones."""
    if name not in SCHEMAS:
        raise UserError(f"unknown schema {name!r}: use one of {', '.join(SCHEMAS)}")
    return SCHEMAS[name]
