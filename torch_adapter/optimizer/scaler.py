"""Loss scaling in which all ranks skip the same steps."""

from __future__ import annotations

from typing import Any

import torch

from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded optimizers: use it in the place of torch's.

        scaler = zero.GradScaler("cuda")
        ...
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    torch's own looks at this rank's gradients alone. Here an overflow on any rank is agreed by all
    ranks before anyone decides, so all of them skip the step and lower the scale together. Other
    optimizers are handled as torch does. All ranks must make the same calls.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide by the scale; first reduce sharded gradients and agree on an overflow."""
        if isinstance(optimizer, ZeroOptimizer) and self.is_enabled():
            optimizer.agree_on_overflow()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()`, unless a rank has seen an overflow."""
        if not isinstance(optimizer, ZeroOptimizer) or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        watcher = optimizer.watcher
        if watcher is not None:
            watcher.scaled_by(self)
        with optimizer.scaled_by_caller():
            result = super().step(optimizer, *args, **kwargs)
        if optimizer.gradients.end_skipped() and watcher is not None:
            watcher.skipped()
        return result
