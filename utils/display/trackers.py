"""Accelerate's trackers: the numbers of metrics.jsonl on a dashboard."""

import os
from pathlib import Path


def tracker_problems(report_to: list[str]) -> list[str]:
    """A line for each tracker that is not installed, which accelerate would leave out silently, and if wandb
    cannot log in."""
    from accelerate.tracking import get_available_trackers

    installed = [*map(str, get_available_trackers())]
    problems = [f"report_to: {name!r} is no tracker that is installed here; `pip install` it, or give some "
                f"of {' '.join([*installed, 'none'])}, separated by spaces."
                for name in report_to if name not in [*installed, "all"]]  # fmt: skip
    if "wandb" in installed and {"wandb", "all"} & {*report_to} and os.environ.get("RANK", "0") == "0":
        import wandb

        try:
            wandb.login()  # on a terminal it asks for the key
        except Exception as error:  # of wandb's own kinds
            problems.append(f"report_to: {error} WANDB_MODE=offline needs no login.")
    return problems


def start_trackers(accelerator, project: str, output_dir, run_id: str, settings: dict, step: int) -> None:
    """accelerator.init_trackers, so that a resumed run (step > 0) continues its curves."""
    if not accelerator.log_with:
        return
    name = Path(output_dir).resolve().name
    options = {
        "wandb": {"id": run_id, "name": name, "resume": "allow"},
        "trackio": {"name": f"{name}-{run_id}", "resume": "allow"},
        "tensorboard": {"purge_step": step + 1 if step else None},
    }
    accelerator.init_trackers(project, init_kwargs=options)
    plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in settings.items()}
    for tracker in accelerator.trackers:
        if not step or tracker.name != "tensorboard":  # there it would make each start another run
            tracker.store_init_configuration(plain)


def log_to_trackers(accelerator, record: dict) -> None:
    """Send the numbers of a record of metrics.jsonl to the trackers, if any, at the record's step."""
    numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
    accelerator.log(numbers, step=record["step"])
