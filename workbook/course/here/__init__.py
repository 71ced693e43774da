"""What was measured on this machine, compared with the recording that the lessons are made from."""
