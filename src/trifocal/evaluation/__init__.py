"""What a trained model can do: loss by position, its choice, needles, recall, a grade (`trifocal evaluate`)."""

from trifocal.evaluation.grade import read_grade_set
from trifocal.evaluation.layers import layers_by_harm
from trifocal.evaluation.measure import OK, TASKS, USUAL_TASKS, Plan, ReportProgress, Task, evaluate_model, not_possible
from trifocal.evaluation.record import merge_rows, to_json, write_evaluation
from trifocal.evaluation.ruler import RULER_INSTALL, RULER_TASKS, RulerName, possible_tasks
from trifocal.evaluation.subject import Subject

__all__ = [
    "OK",
    "RULER_INSTALL",
    "RULER_TASKS",
    "TASKS",
    "USUAL_TASKS",
    "Plan",
    "ReportProgress",
    "RulerName",
    "Subject",
    "Task",
    "evaluate_model",
    "layers_by_harm",
    "merge_rows",
    "not_possible",
    "possible_tasks",
    "read_grade_set",
    "to_json",
    "write_evaluation",
]
