"""Every path, file, schema, stamp and hash: what is recorded and how it is read back."""

from ddlkit.store.files import Lock, atomic_write_text, sha256_file
from ddlkit.store.paths import (
    BUILD,
    DATA,
    NOTEBOOKS,
    RECORDED,
    REPORTS,
    ROOT,
    list_recorded,
    recorded_dir,
)
from ddlkit.store.readers import (
    profile_frame,
    read_profile,
    read_selection_times,
    read_timeline,
)
from ddlkit.store.schema import SCHEMAS
from ddlkit.store.sheet import Column, Schema
from ddlkit.store.specs import datasheet, measured_peaks, network_named, published_networks
from ddlkit.store.tables import BENCHMARK_VERSION, load_stamp, load_table, save_table

__all__ = [
    "BENCHMARK_VERSION",
    "BUILD",
    "Column",
    "DATA",
    "Lock",
    "NOTEBOOKS",
    "RECORDED",
    "REPORTS",
    "ROOT",
    "SCHEMAS",
    "Schema",
    "atomic_write_text",
    "datasheet",
    "list_recorded",
    "load_stamp",
    "load_table",
    "measured_peaks",
    "network_named",
    "profile_frame",
    "published_networks",
    "read_profile",
    "read_selection_times",
    "read_timeline",
    "recorded_dir",
    "save_table",
    "sha256_file",
]
