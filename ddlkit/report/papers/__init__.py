"""The papers, computed anew: per paper, its tables beside print, and one check for each claim that can be."""
