"""The configuration of a run: sections, how files and flags make them, presets, and what is checked before a run."""
