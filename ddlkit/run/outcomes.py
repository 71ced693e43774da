"""What can become of a point of a recording, in the words of its table."""

MEASURED, PARTIAL = "measured", "measured in part"
STARTED, PENDING = "started", "not reached"
OUT_OF_MEMORY, UNAVAILABLE, IN_USE = "out of memory", "unavailable", "in use by others"
FAILED, KILLED, NO_TIME = "failed", "killed", "no time left"
