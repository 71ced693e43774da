"""What can become of a point of a recording, in the words of its table."""

MEASURED, PARTIAL = "measured", "measured in part"
STARTED, PENDING = "started", "not reached"
OUT_OF_MEMORY, UNAVAILABLE, IN_USE = "out of memory", "unavailable", "in use by others"
FAILED, KILLED, NO_TIME = "failed", "killed", "no time left"


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this is how Python, torch on the CPU or CUDA say that memory is used up."""
    signs = ("out of memory", "can't allocate memory", "size calculation overflowed")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)
