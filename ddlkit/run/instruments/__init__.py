"""What reads a clock, a counter or a gauge."""
