"""The four papers as numbered functions and transcribed claims."""
