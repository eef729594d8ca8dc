"""How far the rows of a reduced precision are from full precision, and which precisions may be used.

Owns `Deviation` and the rule. Whoever measures fills a deviation in; see `train.precision`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headwater.core import form
from headwater.core.form import Number, Text, formed

FULL = "fp32"
TOLERANCE = 0.99  # of samples on which the model's first choice must stay the same, unless the user says otherwise
MIN_COSINE = 0.9  # below, rows are other rows, whatever a head that has not learned yet makes of them


@dataclass(frozen=True)
class Deviation:
    """Rows of a reduced precision against those of fp32, on samples of the job's own data; measured.

    cosine       between the two rows of a sample, mean over samples
    max_abs      the largest difference of two values
    agreement    the part of samples for which the rest of the model has the same first choice (top-1)
    num_samples  how many samples this is from
    cut          where the model was cut
    """

    cosine: float = field(metadata=formed(Number(-1.001, 1.001)))
    max_abs: float = field(metadata=formed(Number(0.0, 1e38)))
    agreement: float = field(metadata=formed(Number(0.0, 1.0)))
    num_samples: int = field(metadata=formed(Number(1, 1e9, whole=True)))
    cut: str = field(metadata=formed(Text()))

    def __post_init__(self) -> None:
        form.check_record(self, "deviation")

    def __str__(self) -> str:
        return (f"cosine {self.cosine:.5f} to fp32, largest difference {self.max_abs:.3g}, same first choice for "
                f"{100 * self.agreement:.3g} % of {self.num_samples} samples (measured at {self.cut})")  # fmt: skip


def allowed(
    wanted: Sequence[str], deviations: Mapping[str, Deviation], tolerance: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The precisions of `wanted` that may be used, fp32 always; and a sentence for each that may not."""
    usable, reasons = [FULL], []
    for precision in wanted:
        if precision == FULL:
            continue
        found = deviations.get(precision)
        if found is None:
            reasons.append(f"{precision} is not used: its error was not measured")
        elif not found.agreement >= tolerance:
            reasons.append(f"{precision} is not used: {found}; at least {100 * tolerance:.3g} % are wanted (tolerance)")
        elif not found.cosine >= MIN_COSINE:
            reasons.append(f"{precision} is not used: {found}; a cosine of at least {MIN_COSINE} is wanted")
        else:
            usable.append(precision)
    return tuple(usable), tuple(reasons)
