"""What can be measured on a device or between ranks: a module per measurement."""

from ddlkit.jobs import launch

# Importing these takes seconds of a processor, which every rank would spend again.
launch.PRELOADED += ["ddlkit.measure.layers", "ddlkit.measure.training"]
