"""Which columns each recorded table has."""

from __future__ import annotations

from dataclasses import fields

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.store.sheet import Check, Column, Kind, Schema


def _columns(kind: Kind, check: Check, names: str) -> tuple[Column, ...]:
    return tuple(Column(name, kind, check) for name in names.split())


_COLUMNS = (
    *_columns("str", "named", "network device precision kernel shape dtype operation distribution"),
    *_columns("str", "named", "collective backend link communication tensor layer quantity copy"),
    *_columns("str", "named", "case origin source task stream data_sha256 measured_on moment work"),
    *_columns("str", "named", "subject fact value what point outcome name aliases"),
    *_columns("str", "", "algorithm reason"),
    Column(
        "kind", "str", "named", aliases=(("allreduce", "all_reduce"), ("allgather", "all_gather"))
    ),
    *_columns(
        "int", "positive", "batch ranks bytes parameters gradient_bytes elements side classes"
    ),
    *_columns("int", "positive", "images epochs iterations messages_per_sample copies_per_sample"),
    *_columns("int", "positive", "tensors flops_per_op"),
    *_columns(
        "int", "non_negative", "sample threads repeat iteration rank bucket seed epoch blocks"
    ),
    *_columns("int", "non_negative", "taken_channels taken_blocks taken_threads asked_blocks"),
    *_columns(
        "int", "non_negative", "asked_threads registers shared_bytes cluster dense_parameters"
    ),
    *_columns("int", "non_negative", "parameters_within"),
    *_columns("int", "", "group"),
    *_columns("float", "positive", "seconds iteration_s compute_s density learning_rate"),
    *_columns("float", "positive", "forward_flops achieved_flops_per_s"),
    *_columns(
        "float", "non_negative", "link_bits_per_s forward_s backward_s flops update_s time_s"
    ),
    *_columns("float", "non_negative", "processor_load estimate_s loss accuracy overlap_share"),
    *_columns("float", "non_negative", "bytes_per_s bytes_per_s_asked measured_flops_per_s"),
    *_columns("float", "non_negative", "measured_c datasheet_flops_per_s datasheet_c"),
    *_columns("float", "non_negative", "printed_gops forward_gflops"),
    # Measured as a difference: noise may put it a little below zero.
    *_columns("float", "finite", "exposed_communication_s"),
    # Rank clocks differ a little: a span may start before the iteration does on rank 0.
    *_columns("float", "finite", "start_s end_s"),
    *_columns("bool", "", "processor_limited"),
    Column("session", "int", "non_negative", default="0", later=True),
    Column("stolen", "float", "non_negative", default="0", later=True),
    Column("copy_s_per_byte", "float", "non_negative", default="0", later=True),
    Column("in_flight", "int", "positive", default="1", later=True),
)
_CASE = tuple(
    Column(
        axis.name,
        axis.type,  # type: ignore[arg-type]
        axis.metadata.get("check", ""),
        default=str(axis.default) if axis.metadata.get("later") else None,
        later=axis.metadata.get("later", False),
    )
    for axis in fields(Case)
)


def _schema(
    name: str,
    names: str,
    key: str = "",
    *,
    others: tuple[Column, ...] = (),
    aliases: tuple[tuple[str, str], ...] = (),
) -> Schema:
    """A table of the columns of those names; ``others`` are not what _COLUMNS has under their name."""
    known = {column.name: column for column in (*_COLUMNS, *others)}
    columns = tuple(known[column] for column in names.split())
    return Schema(name, columns, tuple(key.split()), aliases)


_PLACE = "network device batch precision ranks"
_COLLECTIVE = (
    "collective backend algorithm link link_bits_per_s ranks messages_per_sample bytes session sample "
    "seconds stolen in_flight"
)
_COLLECTIVE_KEY = (
    "collective backend algorithm link link_bits_per_s ranks in_flight messages_per_sample bytes "
    "session sample"
)
_COLLECTIVE_ALIASES = (("in_flight", "messages_per_sample"), ("lanes", "in_flight"))
_SECONDS_OR_NONE = _columns("float", "non_negative", "seconds")

SCHEMAS: dict[str, Schema] = {
    schema.name: schema
    for schema in (
        _schema(
            "layers",
            f"{_PLACE} threads tensor layer parameters gradient_bytes forward_s backward_s flops update_s",
            key=f"{_PLACE} threads tensor",
        ),
        _schema("samples", f"{_PLACE} quantity sample seconds", key=f"{_PLACE} quantity sample"),
        _schema("collectives", _COLLECTIVE, key=_COLLECTIVE_KEY, aliases=_COLLECTIVE_ALIASES),
        _schema(
            "tensors",  # collectives of each size that a network's tensors have: no fit may see them
            f"network {_COLLECTIVE}",
            key=f"network {_COLLECTIVE_KEY}",
            aliases=_COLLECTIVE_ALIASES,
        ),
        _schema(
            "runs",
            " ".join(column.name for column in _CASE) + " case origin repeat iteration iteration_s "
            "compute_s exposed_communication_s processor_load processor_limited stolen copy_s_per_byte",
            key="case origin repeat iteration",
            others=_CASE,
        ),
        _schema(
            "timeline",
            "case repeat " + " ".join(TIMELINE_COLUMNS),
            others=_columns("int", "non_negative", "bytes"),
        ),
        _schema("buckets", "case bucket bytes source", key="case source bucket"),
        _schema(
            "peaks",  # products of square matrices, 2 side^3 FLOP each
            "device precision kernel side sample seconds",
            key="device precision kernel side sample",
        ),
        _schema(
            "efficiency",  # derived from layers and peaks; 0 where a peak is unknown
            f"{_PLACE} forward_flops compute_s achieved_flops_per_s measured_flops_per_s measured_c "
            "datasheet_flops_per_s datasheet_c",
            key=_PLACE,
        ),
        _schema(
            "throughput",  # seconds: of one iteration, the mean of ``iterations`` in a row
            f"{_PLACE} iterations sample seconds",
            key=f"{_PLACE} sample",
        ),
        _schema(
            "copies",  # seconds: of one copy, the mean of ``copies_per_sample``
            "copy device bytes copies_per_sample sample seconds",
            key="copy device bytes sample",
            aliases=(("in_a_row", "copies_per_sample"),),
        ),
        _schema(
            "drift",  # the same work at the start and at the end of a session
            "moment work device sample seconds",
            key="moment work device sample",
        ),
        _schema(
            "channels",  # collectives by blocks and threads; 0: left to NCCL (asked), not seen (taken)
            "collective backend link ranks bytes asked_blocks asked_threads taken_channels taken_blocks "
            "taken_threads sample seconds stolen",
            key="collective backend link ranks bytes asked_blocks asked_threads sample",
        ),
        _schema(
            "selection",  # threads: of the CPU, 0 on a GPU; seconds: mean over tensors in turn
            "operation device dtype threads elements density distribution sample seconds",
            key="operation device dtype threads elements density distribution sample",
        ),
        _schema(
            # A kernel beside communication of some blocks and threads: as asked for (0: none, or
            # left to NCCL) and as taken. Bytes: of sums written (stand-in), or sent by each rank
            # (nccl, gloo); asked 0: unlimited. 0 where there is no such thing, or it is not known.
            "contention",
            "kernel shape dtype device communication ranks blocks threads taken_blocks taken_threads "
            "registers shared_bytes cluster bytes_per_s_asked bytes_per_s overlap_share sample seconds",
            key="kernel shape dtype device communication ranks blocks threads bytes_per_s_asked sample",
        ),
        _schema(
            # Training to convergence. Epoch 0: before the first step; seconds: of training the epoch.
            "convergence",
            "network device seed threads parameters dense_parameters classes images data_sha256 batch "
            "learning_rate epochs epoch measured_on loss accuracy seconds",
            key="network device seed data_sha256 batch learning_rate epochs epoch measured_on",
            others=_SECONDS_OR_NONE,
        ),
        _schema(
            "vitals",  # time_s: since the session began
            "time_s device quantity value",
            others=_columns("float", "finite", "value"),
        ),
        _schema(
            "devices",  # as their makers print them (data/specs)
            "device quantity value source",
            key="device quantity",
            others=_columns("float", "positive", "value"),
        ),
        _schema(
            "networks",  # as their authors print them (data/specs)
            "name aliases parameters parameters_within tensors printed_gops flops_per_op forward_gflops "
            "sample source",
            key="name",
            others=_columns("str", "named", "sample"),
        ),
        _schema("facts", "subject fact value", key="subject fact"),
        _schema(
            "outcomes",  # every point of a recording; seconds 0: not measured
            "what point outcome reason estimate_s seconds",
            key="what point",
            others=_SECONDS_OR_NONE,
        ),
    )
}


def schema_named(name: str) -> Schema:
    """The schema of that name. Raises UserError listing the known ones."""
    if name not in SCHEMAS:
        raise UserError(f"unknown schema {name!r}: use one of {', '.join(SCHEMAS)}")
    return SCHEMAS[name]
