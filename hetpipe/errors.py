"""The errors that hetpipe raises: `HetpipeError` and its children. Messages name fault and cure."""


class HetpipeError(Exception):
    """Root of every error that a user of hetpipe sees."""


class CaptureError(HetpipeError):
    """The model cannot be captured; the message names the line or the operator."""


class UnsupportedOperatorError(HetpipeError):
    """A device lacks an operator; the message names the device, the operator and the layer."""


class ClusterError(HetpipeError):
    """A cluster description is wrong; the message names the file and the line."""


class CostError(HetpipeError):
    """A profile, a board or a table of costs is missing or damaged, or does not fit the request."""


class PlanError(HetpipeError):
    """No plan exists for the given options and limits."""


class ScheduleError(HetpipeError):
    """A schedule is invalid or unknown, or does not fit the costs or devices."""


class BackendError(HetpipeError):
    """A backend or one of its devices failed to load, compile or run."""


class BundleError(HetpipeError):
    """A bundle of kernels is damaged, out of date, incomplete or for another device."""


class WorkerError(HetpipeError):
    """A worker failed, died or stopped answering; the run has ended and no process is left."""


class NotFiniteError(HetpipeError):
    """A loss is infinite or not a number; `Pipeline.diagnose` finds the first such value.

    `fact` is the message without `advice`, and `index` the number of the mini-batch.
    """

    def __init__(self, fact: str, index: int, advice: str = "") -> None:
        super().__init__(fact + advice)
        self.fact, self.index, self.advice = fact, index, advice


class NoMeanError(NotFiniteError):
    """A loss of the form (sum, count) has a count of zero, so it has no mean.

    The mini-batch changes no gradient: gradients of the sum are scaled by 0 instead of 1 / count.
    """


class CheckpointError(HetpipeError):
    """A checkpoint is missing, damaged or of another version, or cannot be saved."""


class UserCodeError(HetpipeError):
    """The user's code raised an error; the message ends with the traceback of the user's frames."""
