"""`zerohvd report`: a page with the plots of a run."""

from zerohvd.tools.reporter.page import make_page
from zerohvd.tools.reporter.records import read_records
from zerohvd.tools.reporter.trace_picture import draw_trace

__all__ = ["draw_trace", "make_page", "read_records"]
