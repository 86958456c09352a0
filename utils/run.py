"""One run in one folder: what is logged, shown, saved, published and resumed, and how it ends.

It never touches the model's update: gradients and steps stay in the script, and a test sees to it.
"""

import json
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import set_seed
from torch import nn

from utils import xla
from utils.display.curves import draw_curves
from utils.display.doctor import check_launch, counted, report
from utils.display.metrics import MetricsLog, write_json
from utils.display.plan import peak_memory
from utils.display.progress import Progress, bar, duration, summarize
from utils.display.throughput import Throughput, device_name, flops_per_token, peak_flops, timed
from utils.display.trackers import log_to_trackers, start_trackers
from utils.entry import ALIVE
from utils.learning.evaluation import sums_over_dataset
from utils.learning.optim import UpdateGuard, skipped_updates, stable_steps
from utils.publishing.export import export_model
from utils.publishing.hub_client import check_hub, tell_milestones
from utils.publishing.milestones import keep_milestone, list_milestones, milestone_steps
from utils.publishing.model_card import write_model_card
from utils.publishing.push import NOT_THE_MODEL, Pusher
from utils.publishing.secrets import without_secrets
from utils.publishing.stores import fetch_checkpoint, open_store, refuse_another
from utils.settings import as_list, changed_settings, code_version, save_args
from utils.state.checkpoint import (
    Checkpoints,
    disk_space,
    list_checkpoints,
    outdate,
    restore_modules,
    step_of,
    thing_bytes,
)
from utils.state.files import retire
from utils.state.preemption import StopSignals, exit_status, lock_output_dir
from utils.state.rehearsal import Watch, rehearsal
from utils.state.training_state import bare_optimizer
from utils.tasks import Task


class Run:
    """Made after the Accelerator; `start` gives it what is trained. All processes make the same calls."""

    def __init__(self, args, accelerator, task: Task):
        """ValueError where processes form no group, or a push could not work."""
        check_launch(accelerator)
        if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
            accelerator.wait_for_everyone = dist.barrier  # accelerate's wants a GPU for each, if there is one
        self.args, self.accelerator, self.task = args, accelerator, task
        self.is_main = accelerator.is_main_process
        if accelerator.num_processes > 1:
            ALIVE.append(self)  # with the accelerator, and the model in it
        self.name = args.hub_model_id or Path(args.output_dir).resolve().name
        self.repo_id = self.store = self.pusher = self.failure = None
        self.settings = settings = without_secrets(asdict(args))
        self.dataset = ", ".join(as_list(settings["dataset_name"]))
        if self.is_main and not args.eval_only and not args.show:
            if args.push_to_hub:
                self.repo_id = check_hub(self.name, args.hub_private_repo)
            if args.checkpoint_url:
                self.store = open_store(args.checkpoint_url, args.hub_private_repo, args.save_total_limit)
            model = settings["model_name_or_path"] or f"a {settings['model_type']} from scratch"
            steps, epochs = args.max_train_steps, args.num_train_epochs
            length = counted(steps, "step") if steps else counted(epochs, "epoch")
            made = list_checkpoints(Path(args.output_dir, "checkpoints"))
            if made and args.resume_from_checkpoint == "auto":
                length += f" ({counted(step_of(made[-1]), 'step')} done)"
            print(f"run        trains {model} on {self.dataset} for {length}, in "
                  f"{args.output_dir}; stop it, and the same command goes on", flush=True)  # fmt: skip
        self.state = {"step": 0, "seconds": 0.0, "skipped_updates": 0, "eval": {}, "evaluation_due": False,
                      "seen": []}  # data sets of a mixture, once
        self.evaluated = lambda record: False  # yours: takes each evaluation's numbers, True ends the run

    # ---- Before the first step

    def plan(self, lm, kind: str, predicted: float = 1.0) -> None:
        """What the model will need; before it is prepared, which may cut it up. predicted: the share of
        positions that pass the head."""
        self.config, self.parameters = lm.config, lm.num_parameters()
        self.kind, self.predicted = kind, predicted
        self.flops = flops_per_token(lm, self.args.block_size, head_share=predicted)

    def evaluate_only(self, model, evaluate, data, keep: dict) -> None:
        """Prints the numbers of the evaluation sets as JSON; writes nothing. Modules in keep, such as an
        average of the weights, are put back from the newest checkpoint where the model is output_dir's."""
        self.model, self.evaluate_batch, self.data, self.keep = model, evaluate, data, keep
        there = self.args.output_dir if self.args.model_name_or_path == self.args.output_dir else None
        if new := restore_modules(there, model, keep):
            self.accelerator.print(f"warning: no checkpoint here has {', '.join(new)}: evaluated as new",
                                   file=sys.stderr)  # fmt: skip
        self.accelerator.print(json.dumps(self._evaluation()))

    def start(self, model, update, evaluate, data, steps, keep: dict) -> bool:
        """Begin, or continue where the newest checkpoint is. False: nothing is left to do.

        keep: {name: what has state_dict and load_state_dict} beside the model is saved, put back, rehearsed.
        ValueError where the checkpoint does not fit, and where update changes what nobody keeps."""
        args, accelerator, is_main = self.args, self.accelerator, self.is_main
        for name in [name for name, thing in keep.items() if isinstance(thing, AcceleratedScheduler)]:
            raise ValueError(f"{name}: went through accelerator.prepare, which makes it step once for each "
                             "process; leave it out there.")  # fmt: skip
        self.model, self.evaluate_batch, self.data, self.steps, self.keep = model, evaluate, data, steps, keep
        stable, every = stable_steps(args, steps), steps.every(args.save_steps)
        saves = [*range(every, steps.last, every), stable[1], steps.last]
        self.milestones = milestone_steps(args.milestones, steps.last, saves)
        ahead = self.milestones.difference(map(step_of, list_milestones(args.output_dir)))
        limit, models = args.save_total_limit, 1 + args.keep_best + len(ahead)
        disk = disk_space(args.output_dir, model, keep, limit, models)
        self.lock = lock_output_dir(args.output_dir) if is_main else None  # until the end
        if self.store and args.resume_from_checkpoint == "auto":
            if fetched := fetch_checkpoint(self.store, args.output_dir):  # where this folder has none as new
                print(f"continues  step {step_of(fetched)}, from {self.store.name}")
        accelerator.wait_for_everyone()
        self.counts = {
            "rows_per_step": steps.rows_before(1), "max_steps": steps.last, "training_rows": data.length,
            "stable": stable,
        }  # fmt: skip
        self.code = code_version(args)
        self.checkpoints = Checkpoints(accelerator, args.output_dir, limit)
        self.checkpoints.kept_step = stable[1]  # runs of other lengths may begin there
        saved = self.checkpoints.load(args.resume_from_checkpoint, model, keep, self._check_saved)
        origin = without_secrets(self.checkpoints.origin)
        if saved:
            self.state = saved["state"] | ({"origin": origin, "ended": None} if origin else {})
            data.load_state_dict(saved["stream"])
        begins = 0 if origin else self.step
        if is_main:
            if self.repo_id and (origin or not saved):
                tell_milestones(self.repo_id, self.milestones)
            outdate(list_milestones(args.output_dir), begins)
        if self.store:
            auto = args.resume_from_checkpoint == "auto"
            refuse_another(self.store, args.output_dir, math.inf if auto else begins)
        if self.repo_id or self.store:
            self.pusher = Pusher(self.repo_id, args.output_dir, self.store)
        if self._done:
            accelerator.print(f"{args.output_dir}: this run is finished, {self.step} steps; nothing to do.")
            self._push()  # the last one may have been cut off; nothing is sent that the Hub has
            if self.pusher and not self.pusher.finish(args.hub_timeout):
                raise SystemExit(1)
            return False
        self._open_log(saved)
        accelerator.print(self._report(disk))
        self._tell_changes(saved)
        self._tell_optimizers()
        self.watch = Watch(update, model, keep, known=(data, steps, args, self), collate=data.collate)
        self.begun, self.begun_with = self.step, asdict(args)
        if args.preflight and not saved:
            self._rehearse(update)
        self._keep_milestone()  # wanted only now, or lost with another machine
        if args.eval_at_start and not saved:
            self.state["evaluation_due"] = True  # the origin of the curves
        return self._evaluation_caught_up()

    def _check_saved(self, saved: dict) -> None:
        """ValueError where the checkpoint is of another experiment."""
        problems = changed_settings(saved["settings"], self.args, self.counts)
        step = saved["state"]["step"]
        if not problems and saved["rows"] != (rows := self.steps.rows_before(step)):
            problems.append(f"rows of the first {step} steps: {saved['rows']} in the run, {rows} now")
        now = self.counts["stable"]
        was = saved["settings"].get("stable") or now
        first, last = max(was[0], now[0]), min(was[1], now[1])
        if not problems and was != now and not first <= step <= last:
            problems.append(
                f"max_train_steps: the learning rate of step {step} was another; go on from one of the steps "
                f"{first} to {last} (--resume_from_checkpoint), in an --output_dir of its own"
            )
        named = {"tokenizer": "tokenizer_name: the tokenizer", "train": "dataset_name: the training rows"}
        for name, told in named.items():
            if not problems and saved["data"][name] != self.data.fingerprints[name]:
                problems.append(
                    f"{told} of the run in {self.args.output_dir} had other content; restore it, or name "
                    "another output_dir"
                )
        if problems:
            raise ValueError("\n".join(problems))

    def _open_log(self, saved: dict | None) -> None:
        args, accelerator, steps = self.args, self.accelerator, self.steps
        if self.is_main:
            save_args(args, self.code, self.state.get("origin"), attention=self.config._attn_implementation)
        lines = Path(args.output_dir, "metrics.jsonl")
        if self.is_main and args.resume_from_checkpoint == "none" and lines.exists():
            retire(lines)
            print(f"run        begins anew: the lines of the one before are in replaced-{lines.name}")
        offset = saved["metrics_offset"] if saved and not self.checkpoints.origin else 0
        self.metrics = MetricsLog(args.output_dir, offset, self.is_main, self.state.get("origin"))
        project = Path(sys.modules[type(args).__module__].__file__).stem
        self.lacks = start_trackers(accelerator, project, args.output_dir, self.settings, self.step)
        name = device_name(accelerator.device)
        self.hardware, peak = f"{accelerator.num_processes} x {name}", peak_flops(name)
        self.throughput = Throughput(
            steps, self.flops, peak and peak * accelerator.num_processes, step=self.step,
            seconds=self.state["seconds"],
        )  # fmt: skip
        self.progress = Progress(steps.last, self.step, self.is_main)
        if self.pusher:
            self.pusher.say = self.progress.write  # above the bar
        self.stop = StopSignals(accelerator)

    def _report(self, disk: str) -> str:
        args, rows = self.args, self.args.per_device_train_batch_size
        others = (thing for thing in self.keep.values() if not bare_optimizer(thing))
        kept = sum(thing_bytes(thing, self.model) for thing in others)
        names = "optimizer_type", "gradient_checkpointing"  # an edit may have neither
        more = {name: getattr(args, name) for name in names if hasattr(args, name)}
        more |= {"kind": self.kind, "predicted": self.predicted, "kept_bytes": kept}
        block = report(
            self.accelerator, self.steps, self.step, model=args.model_name_or_path or args.model_type,
            parameters=self.parameters, attention=self.config._attn_implementation,
            memory=peak_memory(self.accelerator, self.config, rows, args.block_size, **more),
        )  # fmt: skip
        return f"{block}\ndisk       {disk}"

    def _tell_changes(self, saved: dict | None) -> None:
        """What may differ from the run so far, and does."""
        if saved and saved["code"]["script"] != self.code["script"]:
            self.accelerator.print("code       the script has changed since the last save")
        if saved and saved["data"]["eval"] != self.data.fingerprints["eval"]:
            self.metrics.write({"step": self.step, "event": "evaluation_data_changed"})
            self.accelerator.print("data       evaluated on other rows than the run so far")

    def _tell_optimizers(self) -> None:
        """Those that a guard among the kept things would not hold back, or that move the same weights."""
        guards = [thing for thing in self.keep.values() if isinstance(thing, UpdateGuard)]
        guarded = [optimizer for guard in guards for optimizer in guard.optimizers]
        for name, thing in self.keep.items() if guarded else ():
            if bare_optimizer(thing) not in [None, *guarded]:
                self.accelerator.print(
                    f"guard      of {name}: none, what is not finite would reach its weights; "
                    f"UpdateGuard(accelerator, optimizer, {name}) mends it"
                )
        movers = {}  # of each weight: names, by optimizer
        for name, thing in self.keep.items():
            if optimizer := bare_optimizer(thing):
                for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
                    movers.setdefault(weight, {}).setdefault(optimizer, name)
        for names in sorted({tuple(of.values()) for of in movers.values() if len(of) > 1}):
            told = f"optimizers {' and '.join(names)} move some weights twice; take these out of one's groups"
            self.accelerator.print(told)

    def _rehearse(self, update) -> None:
        accelerator, data = self.accelerator, self.data
        with rehearsal(accelerator, self.model, self.keep, self.checkpoints, self.watch) as folder:
            export_model(accelerator, self.model, data.tokenizer, folder)
            if not xla.is_xla():  # there it would be graphs of its own, and the first step comes at once
                first = next(data.batches(self.steps, self.step))
                # The first compiles and takes memory. As many on all processes, which exchange gradients.
                _, *seconds = (timed(update, first) for _ in range(3))
                self.watch.check_optimizers(accelerator)
                seconds, tokens = min(seconds), self.steps.tokens_before
                left = duration(seconds * tokens(self.steps.last) / tokens(1))
                accelerator.print(f"time       about {left} here, at {1000 * seconds:,.0f} ms a step; "
                                  "evaluations and saves come on top")
            for name in data.evals:
                first = [next(iter(data.evaluation(name)))]
                totals = sums_over_dataset(accelerator, self._modules, first, self.evaluate_batch)
                self.task.metrics(totals, data.evals[name].bytes_per_token)
            self.task.samples(accelerator, self.model, data.tokenizer, self.args.prompts, quick=True)

    def _evaluation_caught_up(self) -> bool:
        """The evaluation at the start, or one that a stop interrupted. False: nothing is left after it."""
        if not self.state["evaluation_due"]:
            return True
        self.evaluate()
        if self.state["evaluation_due"]:  # and another signal: all is saved, or not yet begun
            raise SystemExit(exit_status(self.stopping))
        if self._done:
            self.save()
            self.finish()
        return not self._done

    # ---- In the loop

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state["step"]

    @property
    def stopping(self) -> int:
        """The stop signal that all processes have agreed on, or 0; the step at which `evaluated` ends it."""
        return self.stop.answer or self.state.get("ended") or 0

    @property
    def _done(self) -> bool:
        ended = self.step >= self.steps.last or self.state.get("ended")
        return bool(ended) and not self.state["evaluation_due"]

    def seed_step(self) -> None:
        """Random numbers are a function of (seed, step, process): evaluating or saving leaves no trace."""
        set_seed((self.args.seed * 1_000_003 + self.step * 4099 + self.accelerator.process_index) % 2**32)

    def next_step(self) -> None:
        """One more step is done: counted, shown, a milestone kept, and all processes agree about stopping."""
        self.state["step"] += 1
        if self.step == self.begun + 1:
            self.watch.check()
        self.progress.update(self.step)
        self._keep_milestone()
        self.stop.agreed()

    def due(self, steps: int) -> bool:
        """Every so many steps (0: every epoch), after the last one, and before the learning rate falls."""
        ends = self.steps.last, self.checkpoints.kept_step
        return self.step in ends or self.step % self.steps.every(steps) == 0

    def log(self, record: dict, skipped=()) -> None:
        """A line of training. skipped: for each update since the last line 1 if it was skipped, else 0."""
        step, steps = self.step, self.steps
        if changed := [name for name, value in asdict(self.args).items() if value != self.begun_with[name]]:
            raise ValueError(f"{changed[0]}: changed in the loop, but read before it. What changes with the "
                             "step is a function of it, as in docs/edits/growing-batch.diff.")  # fmt: skip
        for event in skipped_updates(skipped, step, steps.rows_before):
            self.metrics.write(event)
            self.state["skipped_updates"] += 1
        epochs = self.data.epochs(steps.rows_before(step))
        for name in [name for name, epoch in epochs.items() if epoch >= 1 and name not in self.state["seen"]]:
            self.metrics.write({"step": step, "event": "repeats", "source": name})
            self.progress.write(f"data       every row of {name} has been seen once: they repeat")
            self.state["seen"].append(name)
        self._log({
            "epoch": steps.epoch(step), **{f"epoch/{name}": epoch for name, epoch in epochs.items()},
            "samples": steps.rows_before(step), "tokens": steps.tokens_before(step), **record,
            "skipped_updates": self.state["skipped_updates"], **self.throughput.measure(step),
        })  # fmt: skip

    def evaluate(self) -> None:
        """All evaluation sets, samples, curves. A stop signal ends it early, still due."""
        with self.throughput.aside("evaluation"):
            record = self._evaluation(self.stop.agreed)
            self.state["evaluation_due"] = record is None
            if record is None:
                return
            self.state["eval"] = record
            if self.evaluated(record):
                self.state["ended"] = self.step
            self._log({"tokens": self.steps.tokens_before(self.step), **record})  # for dashboards, as an axis
            if self.args.keep_best:
                self._keep_best(record)
            prompts, tokenizer = self.args.prompts, self.data.tokenizer
            for text in self.task.samples(self.accelerator, self.model, tokenizer, prompts):
                self.progress.write(text)
            if self.is_main:
                draw_curves(self.args.output_dir)

    def save(self) -> None:
        """A checkpoint to continue from, the model for from_pretrained, and their push."""
        tokenizer, rows = self.data.tokenizer, self.steps.rows_before(self.step)
        if told := self.watch.changed():  # only now, or the first step would have ended the run
            self.progress.write(f"warning: {told}")
        with self.throughput.aside("save"):
            self.state["seconds"] = self.throughput.seconds
            export_model(self.accelerator, self.model, tokenizer, self.args.output_dir)
            self.checkpoints.save(
                self.step, self.model, self.keep, final=bool(self.step == self.steps.last or self.stopping),
                beside=[("tokenizer.json", tokenizer.backend_tokenizer.to_str().encode())],
                extra={
                    "state": self.state, "settings": self.settings | self.counts, "rows": rows,
                    "data": self.data.fingerprints, "stream": self.data.state_dict(rows), "code": self.code,
                    "metrics_offset": self.metrics.offset,
                },
            )  # fmt: skip
            if self.is_main:
                self._write_card()
            self._push()

    def give_up(self, skipped: int) -> None:
        """So many updates in a row were skipped that the run cannot go on: `finish` raises RuntimeError."""
        self.failure = (
            f"{skipped} updates in a row were skipped, as their gradients are not finite. Lower "
            f"learning_rate, or look at the samples that {self.args.output_dir}/metrics.jsonl names."
        )

    # ---- The end

    def finish(self) -> None:
        """Nothing is left in flight; the summary, or the exit status of a stop."""
        args, steps, last = self.args, self.steps, self.step == self.steps.last
        self.progress.close()
        self.checkpoints.wait()
        arrived = self.pusher.finish(20 if self.stop.requested else args.hub_timeout) if self.pusher else True
        self._log_pushes()
        if self.failure:
            raise RuntimeError(self.failure)
        stopped_by = 0 if self._done else self.stopping  # too late to stop anything
        if not (last or self._done or stopped_by):
            raise RuntimeError(f"the loop ended at step {self.step} of {steps.last}: its data did, or a "
                               "break of yours; docs/edits/early-stopping.diff ends a run early")
        self.accelerator.end_training()
        self.stop.close()
        if self.state.get("ended"):
            self.accelerator.print(f"Ended at step {self.step} of {steps.last}, by its last evaluation.")
        if stopped_by:
            told = f"Stopped at step {self.step} of {steps.last} and saved; run it again to go on."
            self.accelerator.print(told)
            raise SystemExit(exit_status(stopped_by))
        if self.is_main:
            print(self._summary())
        if not arrived:
            raise SystemExit(1)

    def _summary(self) -> str:
        steps, folder, settings = self.steps, self.args.output_dir, self.settings
        results = {
            "steps": self.step, "tokens": steps.tokens_before(self.step),
            "time": duration(self.throughput.seconds),
            **({"compiled graphs": xla.compiled_graphs()} if xla.is_xla() else {}),
            **self.state["eval"], "model": folder, "curves": f"{folder}/curves.png",
        }  # fmt: skip
        if best := self.state.get("best"):
            results["best model"] = f"{folder}/best, of step {best['step']}"
        generate = ["python", "-m", "utils.generate", folder, "--prompt", self._prompt(self.task.prompt)]
        evaluate = ["python", *sys.argv, "--eval_only", "true", "--max_eval_samples", "0"]
        if settings["model_name_or_path"]:  # or the one that it began with would be evaluated
            evaluate += ["--model_name_or_path", folder, "--tokenizer_name", folder]
        commands = {
            self.task.label: shlex.join(generate),
            "evaluate": shlex.join(evaluate),
            "publish": shlex.join(["hf", "upload", self.name, folder, ".", *NOT_THE_MODEL]),
        }
        title = f"{settings['model_type']} on {self.dataset}"
        return summarize(folder, title, results, without_secrets(commands))

    def _write_card(self) -> None:
        settings, step, steps = self.settings, self.step, self.steps
        write_model_card(
            self.args.output_dir, pipeline_tag=self.task.pipeline_tag, model_name=self.name.split("/")[-1],
            model_type=self.config.model_type, parameters=self.parameters, dataset=self.dataset,
            step=step, max_steps=steps.last, tokens=steps.tokens_before(step), seconds=self.state["seconds"],
            hardware=self.hardware, settings=settings, results=self.state["eval"],
            example=self._prompt((settings["prompts"] or [self.task.prompt])[0]), repo_id=self.repo_id,
            base_model=settings["model_name_or_path"], branch=self.state.get("origin"),
        )  # fmt: skip

    def _prompt(self, text: str) -> str:
        """A prompt as the saved model takes it: with its own mask token."""
        return text.replace("[MASK]", self.data.tokenizer.mask_token or "[MASK]")

    # ---- Below

    def _evaluation(self, stopped=lambda: 0) -> dict | None:
        """What is logged of each evaluation set; None where a stop signal came."""
        record = {}
        for name, rows in self.data.evals.items():
            batches = bar(self.data.evaluation(name), "evaluating", is_main_process=self.is_main)
            totals = sums_over_dataset(self.accelerator, self._modules, batches, self.evaluate_batch, stopped)
            if totals is None:
                return None
            metrics = self.task.metrics(totals, rows.bytes_per_token)
            record |= {f"{key}/{name}" if name else key: value for key, value in metrics.items()}
        return record

    @property
    def _modules(self) -> list[nn.Module]:
        return [thing for thing in (self.model, *self.keep.values()) if isinstance(thing, nn.Module)]

    def _keep_milestone(self) -> None:
        if self.step not in self.milestones:
            return
        with self.throughput.aside("milestone"):
            keep_milestone(self.accelerator, self.model, self.data.tokenizer, self.args.output_dir, self.step)
            if self.pusher:
                self.pusher.push_milestones()

    def _keep_best(self, record: dict) -> None:
        """The model of the lowest loss of the first evaluation set; losses of the same rows are compared."""
        loss = next(value for key, value in record.items() if f"{key}/".startswith("loss/eval/"))
        rows = [next(iter(self.data.fingerprints["eval"].values())), self.args.max_eval_samples]
        folder, best = Path(self.args.output_dir) / "best", self.state.get("best")
        same = best and best["rows"] == rows and (folder / "best.json").exists()  # not of a fresh machine
        if loss < (best["loss"] if same else math.inf):
            export_model(self.accelerator, self.model, self.data.tokenizer, folder)
            self.state["best"] = {"step": self.step, "loss": loss, "rows": rows}
            if self.is_main:
                write_json(folder / "best.json", {"step": self.step, **record})

    def _log(self, record: dict) -> None:
        self._log_pushes()
        scalars = {key: value.item() for key, value in record.items() if getattr(value, "ndim", 1) == 0}
        record = {"step": self.step, **record, **scalars}
        self.metrics.write(record)
        log_to_trackers(self.accelerator, record, self.lacks)
        status = self.pusher.status if self.pusher else ""
        self.progress.update(self.step, record, self.throughput.eta, status)

    def _push(self) -> None:
        if self.pusher:
            results = self.state["eval"].items()
            told = {k: v for k, v in results if k.startswith(self.task.headline) and "_stderr" not in k}
            self.pusher.push(self.step, told)

    def _log_pushes(self) -> None:
        for event in self.pusher.poll() if self.pusher else []:
            self.metrics.write({"step": self.step, **event})
