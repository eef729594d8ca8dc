"""Every exception a user of Headwater can meet.

HeadwaterError
├── ConfigError          an argument, a job file or a state that makes no sense
├── PlanError            an illegal plan; carries every fault at once
├── ModelError           the model can't do what was asked
│   ├── CaptureError     torch.export could not capture it
│   └── ImpureError      a part that would run near the data is trainable or depends on its batch
├── DataError            the data can't be used as it is
│   ├── EmptyDataError   no sample found
│   ├── LabelError       a sample without a label, or a label without a sample
│   ├── BadSampleError   one sample can't be read or decoded
│   ├── ChangedError     a sample is not the one that was listed
│   ├── StoreError       the store said no, or did not answer
│   └── TransformError   a transform that is unknown, misplaced or out of range
├── NodeError            a storage node
│   ├── UnreachableError does not answer
│   ├── VersionError     speaks another version of the protocol
│   ├── RefusedError     answers, and says no
│   └── DamagedError     sent a reply that is not what was asked for
└── ReduceError          sums in the network
    ├── AggregatorGoneError  the aggregator does not answer, or no longer
    ├── WorkerGoneError  another worker of the job is gone, or does not come
    └── JoinRefusedError the aggregator answers, and says no

A message says where, what was found, the limit, and the way out; it never has a secret in it. This module imports
nothing of ours but `core.redact`.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.core.redact import redact


class HeadwaterError(Exception):
    """The root of all errors that Headwater raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(each) if isinstance(each, str) else each for each in args))


class ConfigError(HeadwaterError):
    """An argument, a job file or a saved state makes no sense."""


class PlanError(HeadwaterError):
    """A plan that can't be carried out. `faults` has one sentence for each thing wrong."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        count = f"{len(self.faults)} faults" if len(self.faults) != 1 else "1 fault"
        super().__init__("\n".join([f"the plan has {count}:", *(f"  - {fault}" for fault in self.faults)]))


class ModelError(HeadwaterError):
    """The model can't be captured, cut or shipped as asked."""


class CaptureError(ModelError):
    """torch.export could not turn the model into a graph."""


class ImpureError(ModelError):
    """The part in front of the cut is trainable, or its result depends on the batch it runs in."""


class DataError(HeadwaterError):
    """The data can't be used as it is."""


class EmptyDataError(DataError):
    """No sample was found."""


class LabelError(DataError):
    """A sample without a label, or a label without a sample."""


class BadSampleError(DataError):
    """One sample can't be read or decoded."""

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        self.reason = redact(reason)
        super().__init__(f"{key}: {reason}")


class ChangedError(DataError):
    """A sample is not the one that was listed when the job began."""


class StoreError(DataError):
    """The store refused a request or did not answer."""


class TransformError(DataError):
    """A transform that is unknown, misplaced or out of range."""


class NodeError(HeadwaterError):
    """A storage node could not do its part."""


class UnreachableError(NodeError):
    """No answer from a node."""


class VersionError(NodeError):
    """The node speaks another version of the protocol."""


class RefusedError(NodeError):
    """The node answered, and said no."""


class DamagedError(NodeError):
    """A reply that is not what was asked for."""


class ReduceError(HeadwaterError):
    """Numbers could not be added in the network."""


class AggregatorGoneError(ReduceError):
    """No answer from the aggregator, or no longer."""


class WorkerGoneError(ReduceError):
    """Another worker of the job is gone, or did not come."""


class JoinRefusedError(ReduceError):
    """The aggregator answered, and said no."""
