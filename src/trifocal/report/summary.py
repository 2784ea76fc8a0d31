"""The report in words: did it learn, is it healthy, is it fast for its hardware, what to change.

Every threshold is here, with a name.

Speed for the hardware is the median of the metrics' `executed_mfu`: the FLOPs of a token (`flops_per_token`, of the
documents of a step) times tokens/s, divided by the peak of the GPUs, the dense bf16 speed of their data sheet, in any
precision. For other devices no peak is known.
"""

import math
import statistics
from dataclasses import dataclass, field
from typing import Literal

from trifocal.paths import shell_path
from trifocal.report.attention_charts import BRANCHES
from trifocal.runlog.jsonl import is_number
from trifocal.runlog.run import Run
from trifocal.runlog.stalls.verdict import verdicts
from trifocal.train.checkpoint.folders import list_checkpoints
from trifocal.train.config.sections import ParallelSection

Mark = Literal["good", "watch", "bad", "unknown"]

OVERFIT_RISE = 0.02
"""The run overfits if its last validation loss is above its best by this share."""
STILL_FALLING = 0.01
"""The run should be longer if its validation loss fell by this share in its last quarter."""
SPIKE_FACTOR = 10.0
"""A gradient norm this many times its median is a spike."""
SPIKE_SHARE = 0.01
"""A greater share of logged steps with a spike is reported."""
GOOD_MFU, FAIR_MFU = 0.4, 0.2
"""Executed model FLOPs utilisation of a GPU, as a share of its data sheet's peak."""
TELLING_RECALL = 0.15
"""Recall of the choice says something if it is this share of the way from chance to all."""
DATA_SHARE = 0.1
"""A greater share of the time spent waiting for data is reported."""
OVERHEAD_SHARE = 0.2
"""The same for checkpoints, evaluation and samples."""
TELEMETRY_SHARE = 0.02
"""The same for telemetry."""
_USE = {"good": "well used", "watch": "used fairly", "bad": "mostly idle"}


@dataclass
class Finding:
    """The answer to one question."""

    question: str
    mark: Mark
    text: str
    changes: list[str] = field(default_factory=list)
    """Advice that follows from it, one sentence each."""


def summarise(run: Run) -> list[Finding]:
    """Four findings about a run: learned, healthy, fast, and what to change; in this order."""
    findings = [_learned(run), _healthy(run), _fast(run)]
    # Findings that need action come first.
    order = sorted(findings, key=lambda finding: finding.mark != "bad")
    changes = [change for finding in order for change in finding.changes]
    text = " ".join(changes) if changes else "Nothing stands out in these figures."
    bad = any(finding.mark == "bad" and finding.changes for finding in findings)
    return [*findings, Finding("What to change?", "bad" if bad else "watch" if changes else "good", text)]


def _learned(run: Run) -> Finding:
    question = "Did it learn?"
    if taught := _taught(run):
        return taught
    eval_steps, evaluations = run.series("evaluation", "validation_loss")
    losses = run.series("train", "loss")[1]
    if len(losses) < 2 and len(evaluations) < 2:
        return Finding(question, "unknown", "Too few rows to tell yet.")
    if len(evaluations) < 2:
        first, last = _ends(losses)
        evidence = f"the training loss went from {first:.3f} to {last:.3f} nats per token"
    else:
        first, last = evaluations[0], evaluations[-1]
        best = min(evaluations)
        evidence = (
            f"the validation loss went from {first:.3f} at step {eval_steps[0]:,} "
            f"to {last:.3f} nats per token at step {eval_steps[-1]:,}"
        )
        bits = run.series("evaluation", "bits_per_byte")[1]
        if bits:
            evidence += f", {bits[-1]:.3f} bits per byte"
        if last > best * (1 + OVERFIT_RISE):
            best_step = eval_steps[evaluations.index(best)]
            return Finding(
                question,
                "watch",
                f"It did, and then lost some of it: {evidence}, but the best was {best:.3f} at step {best_step:,}.",
                [f"Stop near step {best_step:,}, or train on more text: the model overfits after it."],
            )
    vocabulary = run.setting("model", "vocab_size")
    chance = math.log(vocabulary) if vocabulary and vocabulary > 1 else None
    if run.config.get("data", {}).get("source") == "synthetic":
        text = f"There was nothing to learn: the tokens are random. {_sentence(evidence)}"
        return Finding(question, "unknown", text)
    if chance is not None:
        evidence += f"; guessing every token alike gives {chance:.3f}"
    if chance is not None and last >= chance:
        text = f"No: {evidence}."
        return Finding(question, "bad", text, ["Look for a learning rate far too high or labels that are wrong."])
    if last >= first:
        return Finding(question, "bad", f"No: {evidence}.", ["Lower the learning rate, or check the data."])
    if len(evaluations) >= 5:
        quarter = evaluations[-max(2, len(evaluations) // 4)]
        if last < quarter * (1 - STILL_FALLING):
            if run.total_steps is not None and run.last_step < run.total_steps:
                return Finding(question, "good", f"Yes: {evidence}. It is still falling.")
            text = f"Yes: {evidence}. It was still falling at the end."
            return Finding(question, "good", text, ["Train longer: the validation loss had not settled."])
    return Finding(question, "good", f"Yes: {evidence}.")


def _taught(run: Run) -> Finding | None:
    """Whether a run learned whose goal is not the loss on text: one that follows a frozen model, or an index alone."""
    question = "Did it learn?"
    if run.config.get("train", {}).get("only") == "chooser":
        of_layers = [[*filter(is_number, row.get("choice_recall") or [])] for row in run.of_kind("train")]
        what, values = "the recall of the choice", [statistics.fmean(recalls) for recalls in of_layers if recalls]
        falls = False
    else:
        what, values = "the divergence from the frozen model, in nats per token,", run.series("train", "divergence")[1]
        falls = True
    if len(values) < 2:
        return None
    first, last = _ends(values)
    evidence = f"{what} went from {first:.4g} to {last:.4g}"
    if last < first if falls else last > first:
        return Finding(question, "good", f"Yes: {evidence}.")
    return Finding(question, "watch", f"No: {evidence}.", ["Try another learning rate, or check the data."])


def _healthy(run: Run) -> Finding:
    question = "Is it healthy?"
    worries: list[tuple[Mark, str]] = []
    changes: list[str] = []
    folder = shell_path(run.directory)
    found = verdicts(run)
    states = {verdict.state for verdict in found.values()}
    dumps = sorted(run.directory.glob("dumps/*/summary.md"), key=lambda path: path.stat().st_mtime)
    if dumps and states & {"failed", "dead", "stalled"}:
        changes.append(f"Read {dumps[-1]}: it says where each rank was.")
    if states & {"failed", "dead"}:
        if list_checkpoints(run.directory / "checkpoints"):
            change = f"trifocal train --resume {folder} continues from the last checkpoint."
        else:
            config = shell_path(run.directory / "config.toml")
            change = f"it has no checkpoint: trifocal train {config} --overwrite begins again."
        changes.append(f"Fix the cause; {change}")
    if "stopped" in states:
        worries.append(("watch", f"it was stopped at step {run.last_step:,}"))
        changes.append(f"trifocal train --resume {folder} continues to its last step.")
    for rank, verdict in found.items():
        if verdict.mark == "bad":
            state = "has failed" if verdict.state == "failed" else f"is {verdict.state}:"
            worries.append(("bad", f"rank {rank} {state} {verdict.reason}"))
            if verdict.state == "dead" and (stacks := run.crash_stacks(rank)):
                changes.append(f"Read {stacks}: the last stacks of rank {rank}.")
        elif verdict.state == "slow":
            worries.append(("watch", f"rank {rank} is slow: {verdict.reason}"))
    events = run.of_kind("event")
    marks: dict[str, Mark] = {"error": "bad", "warning": "watch"}
    for severity, mark in marks.items():
        messages = [event["message"] for event in events if event.get("severity") == severity]
        if messages:
            number = f"{len(messages):,} {severity}{'s'[: len(messages) != 1]}"
            worries.append((mark, f"{number}, the last one: {messages[-1]}"))
    worries += [("watch", note) for note in run.left_out_notes()]
    steps, norms = run.series("train", "gradient_norm")
    # During the warm-up and the first tenth, gradients are large in every run.
    warm = max(run.setting("schedule", "warmup_steps") or 0, run.last_step / 10)
    norms = [norm for step, norm in zip(steps, norms, strict=True) if step > warm]
    if len(norms) >= 20:
        median = statistics.median(norms)
        spikes = sum(norm > SPIKE_FACTOR * median for norm in norms)
        if spikes > SPIKE_SHARE * len(norms):
            share = f"{spikes / len(norms):.0%} of the logged steps (median {median:.2g})"
            worries.append(("watch", f"the gradient norm spikes in {share}"))
            changes.append("Lengthen the warm-up, or lower the peak learning rate: gradients spike.")
    for kind, name, what in (("train", "loss", "loss"), ("evaluation", "validation_loss", "validation loss")):
        values = [(row["step"], row[name]) for row in run.of_kind(kind) if row.get(name) is not None]
        if lost := [step for step, value in values if not is_number(value)]:
            worries.append(("bad", f"the {what} is not a number at step {lost[0]:,}"))
    if worries:
        text = _sentence("; ".join(worry for _, worry in worries))
        return Finding(question, "bad" if any(mark == "bad" for mark, _ in worries) else "watch", text, changes)
    if not run.heartbeats and not run.of_kind("train"):
        return Finding(question, "unknown", "No heartbeat and no training rows.")
    return Finding(question, "good", f"Yes: no warnings, no spikes in the gradient, nothing stalled.{_branches(run)}")


def _branches(run: Run) -> str:
    """The use of the branches, from the last telemetry; empty without telemetry."""
    means = run.telemetry_means()
    gates = {label: means.get(f"gate_mean_{branch}") for branch, label in BRANCHES.items()}
    shown = ", ".join(f"{label} {gate:.2f}" for label, gate in gates.items() if gate is not None)
    text = f" The gates are open ({shown})." if shown else ""
    recall, chance = means.get("choice_recall"), means.get("recall_by_chance")
    if recall is not None and chance is not None:
        text += f" The choice finds {recall:.0%} of what the exact choice would; chance would find {chance:.0%}"
        text += ": too early to tell." if recall - chance < TELLING_RECALL * (1 - chance) else "."
    return text


def _fast(run: Run) -> Finding:
    question = "Is it fast for its hardware?"
    rates = run.series("train", "tokens_per_second")[1]
    if not rates:
        return Finding(question, "unknown", "No throughput was logged yet.")
    rate = statistics.median(rates)
    text = [f"{rate:,.0f} tokens/s (median)"]
    changes: list[str] = []
    mark: Mark = "good"
    executed = run.series("train", "executed_mfu")[1]
    if executed:
        share = statistics.median(executed)
        mark = "good" if share >= GOOD_MFU else "watch" if share >= FAIR_MFU else "bad"
        text.append(f"{share:.1%} of the GPU's peak (executed FLOPs): it is {_USE[mark]}")
        if mark != "good":
            changes.append(_speed_advice(run))
    else:
        mark = "unknown"
        text.append("no data sheet of this device is known, so no utilisation is claimed")
    phases = run.phase_seconds()
    total = sum(seconds for phase, seconds in phases.items() if phase not in ("start", "compile"))
    for phase, limit, advice in (
        ("data", DATA_SHARE, "Raise data.prefetch_batches, or bring the data closer: training waits for it."),
        ("checkpoint", OVERHEAD_SHARE, "Save less often: checkpoints take a good part of the time."),
        ("evaluate", OVERHEAD_SHARE, "Evaluate less often or on fewer batches: it takes a good part of the time."),
        ("sample", OVERHEAD_SHARE, "Sample less often or fewer tokens: it takes a good part of the time."),
        ("telemetry", TELEMETRY_SHARE, "Raise log.telemetry_interval_steps: the attention's figures take time."),
    ):
        share = phases.get(phase, 0.0) / total if total > 0 else 0.0
        if share > limit:
            mark = "watch" if mark in ("good", "unknown") else mark
            text.append(f"{share:.0%} of the time goes to {phase}")
            changes.append(advice)
    return Finding(question, mark, _sentence("; ".join(text)), changes)


def _speed_advice(run: Run) -> str:
    """The settings for faster steps that this run does not have."""
    train = run.config.get("train", {})
    missing = []
    # Processes that share rows are one group. It accumulates if its share is more than it may take at once.
    context = int(run.setting("parallel", "context") or 1)
    groups = max(1, ParallelSection(context=context).groups(len(run.heartbeats)))
    share = (run.setting("train", "global_batch_size") or 0) // groups
    if share > (run.setting("train", "micro_batch_size") or 1):
        missing.append("a larger train.micro_batch_size")
    if train.get("precision") != "bf16":
        missing.append('train.precision "bf16"')
    missing += [f"train.{name}" for name in ("compile", "cuda_graphs") if not train.get(name)]
    if not missing:
        return "Find what takes the time of a step with --trace.what profiler: the GPU has room."
    return f"Try {', '.join(missing[:-1])}{' and ' if missing[1:] else ''}{missing[-1]}: the GPU has room."


def _ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and the last twentieth, as single batches are noisy."""
    share = max(1, len(values) // 20)
    return statistics.fmean(values[:share]), statistics.fmean(values[-share:])


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
