"""Liu et al., WWW 2022: the overlapping scaling factor (OSF)."""
