"""Figures of the attention during a run: gates, selected blocks, and the attention picture."""

from trifocal.telemetry.attention_telemetry import AttentionTelemetry

__all__ = ["AttentionTelemetry"]
