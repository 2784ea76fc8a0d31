"""What a trained model can do: loss by position, its choice, needles, recall (`trifocal evaluate`)."""

from trifocal.evaluation.layers import layers_by_harm
from trifocal.evaluation.measure import TASKS, Plan, ReportProgress, Task, evaluate_model, not_possible
from trifocal.evaluation.record import merge_rows, to_json, write_evaluation
from trifocal.evaluation.subject import Subject

__all__ = [
    "TASKS",
    "Plan",
    "ReportProgress",
    "Subject",
    "Task",
    "evaluate_model",
    "layers_by_harm",
    "merge_rows",
    "not_possible",
    "to_json",
    "write_evaluation",
]
