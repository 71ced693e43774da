"""The networks that are measured, and the pictures that they are shown."""
