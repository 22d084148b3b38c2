"""Which frameworks this machine has a Horovod for."""

from __future__ import annotations

import pytest

from zerohvd import versions


def has(framework: str) -> bool:
    return framework in versions.horovod_frameworks() and versions.find(framework) is not None


needs_torch = pytest.mark.skipif(not has("torch"), reason="needs Horovod for torch")
needs_keras = pytest.mark.skipif(not has("tensorflow"), reason="needs Horovod for TensorFlow")
