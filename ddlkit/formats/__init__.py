"""Files of other programs, read into the workbook's own types."""
