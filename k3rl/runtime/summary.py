"""What a run says when it is over: ``summary.json`` and three tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from k3rl.evaluation.report import EvaluationReport
from k3rl.observe.console import table
from k3rl.observe.tracker import to_jsonable, write_whole

if TYPE_CHECKING:
    from k3rl.buffer.ledger import LedgerCounts
    from k3rl.config import RunConfig
    from k3rl.runtime.controller import Progress


POLICIES = ("demonstrator", "after_sft", "after_rl", "sft_only")
"""Order of the table; a checkpoint keeps the reports in the order of their names."""


def write_summary(config: RunConfig, at: Progress, counts: LedgerCounts) -> dict[str, Any]:
    """Write ``summary.json`` into the run folder, print it as tables and return it."""
    seconds = {name: at.seconds.get(name, 0.0) for name in ("setup", "sft", "rl", "sft_only", "eval")}
    summary = {
        **{f"success_{name}": report["success"] for name, report in at.reports.items()},
        **{f"{name}_s": round(value, 2) for name, value in seconds.items()},
        "total_s": round(sum(seconds.values()), 2),
        "max_logprob_gap": at.max_logprob_gap,
        "trajectories": {
            "issued": counts.issued,
            "committed": counts.by_state.get("committed", 0),
            "dropped": counts.dropped,
        },
        "seed": config.seed,
        "sft_curve": at.sft_curve,
        "rl_curve": at.rl_curve,
        "reports": at.reports,
    }
    path = config.run_dir / "summary.json"
    write_whole(path, json.dumps(to_jsonable(summary), indent=1) + "\n")
    title = f"{config.evaluation.num_tasks} held-out tasks"
    reports = sorted(at.reports.items(), key=lambda item: POLICIES.index(item[0].removesuffix("_greedy")))
    table(title, [{"policy": name, **EvaluationReport(**report).row()} for name, report in reports])
    table("Seconds", [{**seconds, "total": summary["total_s"]}])
    states = {state: n for state, n in counts.by_state.items() if n and state not in ("issued", "dropped")}
    dropped = {f"dropped: {reason}": n for reason, n in counts.dropped.items()}
    table("Trajectories", [{"issued": counts.issued, **states, **dropped}])
    if at.max_logprob_gap is not None:
        print(f"max |rollout - learner logprob| {at.max_logprob_gap:.2e}, of {at.gap_steps} steps on fresh rollouts")
    print(f"run folder: {config.run_dir}\nsummary:    {path}\ncurves:     tensorboard --logdir {config.run_dir}")
    return summary
