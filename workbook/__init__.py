"""The workbook: four papers, their figures and verdicts, recordings, and the site.

It imports ddlkit, and ddlkit never imports it. Importing any part of it registers the planners
of the papers.
"""

from workbook.omgs import planners as planners
