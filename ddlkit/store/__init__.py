"""Files, tables with schemas, and stamps, for everything that is recorded."""

from ddlkit.store.files import atomic_write_text as atomic_write_text
from ddlkit.store.files import lock as lock
from ddlkit.store.files import sha256_file as sha256_file
from ddlkit.store.readers import profile_frame as profile_frame
from ddlkit.store.readers import read_profile as read_profile
from ddlkit.store.readers import read_selection_times as read_selection_times
from ddlkit.store.readers import read_timeline as read_timeline
from ddlkit.store.sheet import SCHEMAS as SCHEMAS
from ddlkit.store.tables import BENCHMARK_VERSION as BENCHMARK_VERSION
from ddlkit.store.tables import expand_tables as expand_tables
from ddlkit.store.tables import has_table as has_table
from ddlkit.store.tables import list_tables as list_tables
from ddlkit.store.tables import load_stamp as load_stamp
from ddlkit.store.tables import load_table as load_table
from ddlkit.store.tables import machines_in as machines_in
from ddlkit.store.tables import own_output as own_output
from ddlkit.store.tables import save_table as save_table
