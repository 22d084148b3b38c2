"""What the core's tools ask of this adapter; registered in setup.cfg as an entry point."""

from __future__ import annotations

from zerohvd.torch.checkpoint.plain_files import write_state_dict
from zerohvd.torch.communication import arrays
from zerohvd.torch.optimizer.plan import workload

__all__ = ["arrays", "weight_files", "workload"]

weight_files = dict.fromkeys((".pt", ".pth", ".bin"), write_state_dict)
