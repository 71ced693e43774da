"""Every path, file, schema, stamp and hash: what is recorded and how it is read back."""

from ddlkit.store.files import BUILD as BUILD
from ddlkit.store.files import DATA as DATA
from ddlkit.store.files import NOTEBOOKS as NOTEBOOKS
from ddlkit.store.files import RECORDED as RECORDED
from ddlkit.store.files import REPORTS as REPORTS
from ddlkit.store.files import ROOT as ROOT
from ddlkit.store.files import atomic_write_text as atomic_write_text
from ddlkit.store.files import list_recorded as list_recorded
from ddlkit.store.files import lock as lock
from ddlkit.store.files import recorded_dir as recorded_dir
from ddlkit.store.files import sha256_file as sha256_file
from ddlkit.store.readers import profile_frame as profile_frame
from ddlkit.store.readers import read_profile as read_profile
from ddlkit.store.readers import read_selection_times as read_selection_times
from ddlkit.store.readers import read_timeline as read_timeline
from ddlkit.store.sheet import SCHEMAS as SCHEMAS
from ddlkit.store.sheet import Column as Column
from ddlkit.store.sheet import Schema as Schema
from ddlkit.store.specs import datasheet as datasheet
from ddlkit.store.specs import measured_peaks as measured_peaks
from ddlkit.store.specs import network_named as network_named
from ddlkit.store.specs import published_networks as published_networks
from ddlkit.store.tables import BENCHMARK_VERSION as BENCHMARK_VERSION
from ddlkit.store.tables import load_stamp as load_stamp
from ddlkit.store.tables import load_table as load_table
from ddlkit.store.tables import save_table as save_table
