"""Every error Sidestep raises on purpose. One base: a host can catch ours and nothing else.

The command line turns them into exit codes: a `UsageError` is 2 (wrong use or input, nothing was
started), any other `SidestepError` is 1 (the run failed), `Interrupted` is 130 (stopped on request,
checkpoint written). Library functions (control/, losses/) raise plain `ValueError` for wrong
arguments: they have no run to speak of.
"""


class SidestepError(Exception):
    """Base of all errors raised on purpose. One line: what, where, the value, the fix."""


class UsageError(SidestepError):
    """Wrong config, command line or input file. Raised before any work starts."""


class EngineError(SidestepError):
    """A rollout engine raised, died or answered something that breaks its contract."""


class RewardError(SidestepError):
    """A reward function raised, returned the wrong count or a value that is not a finite number."""


class LagError(SidestepError):
    """A group reached the trainer with more lag than the run allows: a broken bound, a bug."""


class StalledError(SidestepError):
    """A loop waited longer than its deadline. The message says who waited for whom."""


class CheckpointError(SidestepError):
    """A checkpoint is missing, incomplete or belongs to another run."""


class Interrupted(SidestepError):
    """The run stopped on request (Ctrl-C or SIGTERM) after writing a checkpoint."""
