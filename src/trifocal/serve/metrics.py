"""Figures of the server for Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Times in seconds, counted by their length."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        """Prometheus' text of it."""
        total, lines = 0, [f"# TYPE {name} histogram"]
        for bound, count in zip((*_SECONDS, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """What the server has done; requests have `ended` with a finish reason, "cancelled", "refused" or "error"."""

    def __init__(self) -> None:
        self.prompt_tokens = self.reused_tokens = self.new_tokens = self.guessed_tokens = self.right_tokens = 0
        self.ended: Counter[str] = Counter()
        self.first_token, self.between_tokens = Histogram(), Histogram()

    def text(self, gauges: Mapping[str, int]) -> str:
        """Prometheus' text of all figures and these gauges."""
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE trifocal_{name} gauge", f"trifocal_{name} {value}"]
        for name in ("prompt_tokens", "reused_tokens", "new_tokens", "guessed_tokens", "right_tokens"):
            value = getattr(self, name)
            lines += [f"# TYPE trifocal_{name}_total counter", f"trifocal_{name}_total {value}"]
        lines.append("# TYPE trifocal_requests_total counter")
        lines += [f'trifocal_requests_total{{end="{end}"}} {count}' for end, count in sorted(self.ended.items())]
        lines += self.first_token.lines("trifocal_time_to_first_token_seconds")
        lines += self.between_tokens.lines("trifocal_time_between_tokens_seconds")
        return "\n".join(lines) + "\n"
