"""When to open: the engine's one conditional accumulator over frames, as a rule without contents.

Source: TensorFlow's conditional_accumulator_base.h. What was summed lies in the stores; the gate
counts frames, knows the step and decides what is stale.
"""

from __future__ import annotations

from penstock.errors import UsageError


class Gate:
    """Opens when ``num_required`` frames have arrived since it last opened; one for all tables.

    num_accumulated : frames admitted since the last opening
    global_step : openings so far
    num_stale : frames refused because their local_step was behind global_step
    """

    def __init__(self, num_required: int = 1, global_step: int = 0) -> None:
        if num_required < 1:
            raise UsageError(f"num_required: expected at least 1, got {num_required}")
        self.num_required = num_required
        self.global_step = global_step
        self.num_accumulated = 0
        self.num_stale = 0

    def is_stale(self, local_step: int | None) -> bool:
        """A frame from before the current step; one without a step never is."""
        return local_step is not None and local_step < self.global_step

    def admit(self, local_step: int | None) -> bool:
        """Count a frame in; False where it is stale, which is counted too."""
        if self.is_stale(local_step):
            self.num_stale += 1
            return False
        self.num_accumulated += 1
        return True

    @property
    def is_open(self) -> bool:
        return self.num_accumulated >= self.num_required

    def pass_through(self) -> None:
        """What was admitted has been taken: the next step begins."""
        self.num_accumulated = 0
        self.global_step += 1

    def __repr__(self) -> str:
        return (
            f"Gate({self.num_accumulated} of {self.num_required} frames, global_step={self.global_step}, "
            f"{self.num_stale} stale)"
        )
