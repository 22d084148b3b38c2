"""What the core's tools ask of this adapter; registered in setup.cfg as an entry point."""

from __future__ import annotations

from zerohvd.keras.communication import arrays

__all__ = ["arrays"]
