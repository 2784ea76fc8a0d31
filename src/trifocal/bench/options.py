"""The flags that several benches share."""

from dataclasses import dataclass, field
from typing import Literal

from trifocal.errors import UserError
from trifocal.models import ModelConfig


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The flags of every bench that measures."""

    seconds: float = 600.0
    """Time limit of the whole; rows that it leaves out are listed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; "auto" takes a GPU if there is one."""
    name: str = ""
    """Of the result files; the bench's own unless given."""
    output: str = ""
    """Folder of the result files; benchmarks/results in a checkout, else the current folder."""
    commit: str = ""
    """The commit to write down, for a tree without its history."""

    def __post_init__(self) -> None:
        self.check_positive("seconds")

    def check_positive(self, *names: str) -> None:
        """Refuse a number that is not above 0; of an integer, one under 1.

        Raises:
            UserError: Names the flag and its value.
        """
        for name in names:
            value = getattr(self, name)
            if not value > 0:
                wanted = "at least 1" if isinstance(value, int) else "positive"
                raise UserError(f"--{name.replace('_', '-')} must be {wanted}, got {value}")


@dataclass(frozen=True, kw_only=True)
class TwinOptions(BenchOptions):
    """The flags of a bench that measures the sparse model beside its dense twin."""

    attention: tuple[Literal["nsa", "dense"], ...] = ("nsa", "dense")
    """Which of the twins."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of the matrix products, and of the caches of decoding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.attention != "nsa":
            raise UserError("--model.attention is set row by row; choose the rows with --attention")
        if self.model.layer_types or self.model.from_:
            name = "layer_types" if self.model.layer_types else "from"
            raise UserError(
                f"--model.{name} does not go with a bench: its models have one attention and random weights"
            )


def parse_size(size: str, instead: str = "") -> tuple[int, int]:
    """Sequences and tokens of a size like 4x8192.

    Args:
        size: The text.
        instead: A word that would do too, for the message.

    Raises:
        UserError: If it is not two numbers from 1 on.
    """
    sequences, cross, tokens = size.partition("x")
    if not (cross and sequences.isdecimal() and tokens.isdecimal() and int(sequences) and int(tokens)):
        also = f", or {instead}" if instead else ""
        raise UserError(f'a size is sequences x tokens, like 4x8192{also}; got "{size}"')
    return int(sequences), int(tokens)
