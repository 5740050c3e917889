"""Errors of the studio: one sentence each, and the HTTP status of the response."""

from glassformer.errors import GlassformerError


class StudioError(GlassformerError):
    """Base class: invalid settings, or a request that cannot be served."""

    status = 400


class NotFoundError(StudioError):
    """A model, a training run or a claim with this name does not exist."""

    status = 404


class ConflictError(StudioError):
    """The state of a training run does not allow this action."""

    status = 409


class TooLargeError(StudioError):
    """A request body or a response exceeds its size limit."""

    status = 413


class BusyError(StudioError):
    """All workers are occupied and the queue is full, or a limit on concurrent work is reached."""

    status = 429


class LoadingError(StudioError):
    """torch is still being imported; the page repeats the request."""

    status = 503


class UnavailableError(StudioError):
    """This installation cannot serve the request at all."""

    status = 503


class TimeLimitError(StudioError):
    """A job exceeded its time limit."""

    status = 504
