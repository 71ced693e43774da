"""One module per measurement: what it does on a device or between ranks, and the rows it gives."""
