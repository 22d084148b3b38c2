"""`zerohvd report`: a page with the plots of a run."""

from zerohvd.tools.reporter.page import make_page
from zerohvd.tools.reporter.records import read_records

__all__ = ["make_page", "read_records"]
