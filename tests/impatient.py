"""Let a measurement that others disturb be repeated once, without a pause.

Tests run beside other tests, so nearly every measurement of a test is disturbed. To wait until the
machine is quiet would take most of the time, and no test needs a quiet machine unless it runs alone.

The process of the tests imports this module, and so does every rank of the jobs that it launches.
A command that a test starts is impatient, too, if it is started as

    python -m impatient ddlkit measure ...

with the directory of this module in PYTHONPATH.
"""

import runpy
import sys

from ddlkit.jobs import launch, vitals

vitals.RETRIES = 1
vitals.RETRY_S = 0.0
launch.IMPORTED.append("impatient")

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
