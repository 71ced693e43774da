"""One module per measurement: what it does on a device or between ranks, and the rows it gives."""

from ddlkit.jobs import launch

# Importing these takes seconds of a processor, which every rank would spend again.
launch.PRELOADED += ["ddlkit.measure.layers", "ddlkit.measure.training"]
