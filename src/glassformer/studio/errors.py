"""What a request can be refused for: one sentence, and the status it is told with."""


class StudioError(ValueError):
    """A studio that cannot be set up, or a request it cannot serve. One sentence."""

    status = 400


class UnknownError(StudioError):
    """A model, a run or a claim that is not here."""

    status = 404


class ConflictError(StudioError):
    """Something that cannot be done to a run as it is now."""

    status = 409


class TooLargeError(StudioError):
    """A body, or an answer, over its limit."""

    status = 413


class BusyError(StudioError):
    """All workers are taken and the queue is full, or too much runs already."""

    status = 429


class LoadingError(StudioError):
    """torch is not there yet; the page asks again."""

    status = 503


class UnavailableError(StudioError):
    """Something this installation cannot do at all."""

    status = 503


class TooLongError(StudioError):
    """A job that passed its deadline."""

    status = 504
