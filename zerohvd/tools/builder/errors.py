"""The builder's one error."""

from zerohvd.errors import ZeroError


class BuilderError(ZeroError):
    """Horovod cannot be built or installed here; the message says why and what to do."""
