"""What the attention does during a run: gates, chosen blocks, and the attention picture."""

from trifocal.telemetry.attention_telemetry import AttentionTelemetry

__all__ = ["AttentionTelemetry"]
