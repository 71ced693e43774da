"""What was measured on this machine, compared with the recording of the lessons."""
