"""Settings: flags win over the preset, the preset over defaults; --help; what a resumed run may change."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields

import pytest
import torch
from accelerate import Accelerator

import train_clm
import train_mlm
from tests.runs import PROJECT
from utils.flags import ELSEWHERE, named_values, parse_args
from utils.io.mistakes import user_mistakes
from utils.learning.optim import build_schedule
from utils.settings import number_problems, use_saved_model
from utils.state.resume import changed_settings, check_experiment, describe_experiment
from utils.steps import Steps


@dataclass
class Args:
    preset: str = "small"  # which experiment
    learning_rate: float = 0.1  # peak, 100 % of it
    keywords: list[str] = field(default_factory=lambda: ["a", "b"])  # none: off
    name: str | None = "x"  # none: off
    push: bool = False


PRESETS = {"small": {}, "large": {"learning_rate": 0.5, "keywords": ["c"]}}


def test_flags_win_over_the_preset_and_the_preset_over_defaults():
    assert parse_args(Args, PRESETS, argv=[]).learning_rate == 0.1
    assert parse_args(Args, PRESETS, argv=["--preset", "large"]).learning_rate == 0.5
    args = parse_args(Args, PRESETS, argv=["--learning_rate", "3e-4", "--preset=large", "--push", "true"])
    assert (args.learning_rate, args.keywords, args.preset, args.push) == (3e-4, ["c"], "large", True)
    args = parse_args(Args, PRESETS, argv=["--keywords", "none", "--name", "none"])
    assert args.keywords == [] and args.name is None


SIZES = train_clm.TrainArgs().config_overrides
LAPTOP, HOUR, GPT2 = (train_clm.PRESETS[name] for name in ("laptop", "hour", "gpt2"))
TEXT = {"preset": None, "keywords": [], "prompts": ["rows"], "config_overrides": SIZES}
# script, its arguments, the settings that follow from them
PARSED = [
    (train_clm, "", {
        "preset": "laptop", "dataset_name": ["installed-python"], "keywords": LAPTOP["keywords"],
        "prompts": LAPTOP["prompts"], "config_overrides": SIZES, "tokenizer_name": None}),
    (train_mlm, "", {"dataset_name": ["installed-docs"]}),
    # The keywords, prompts and sizes of the default belong to its data and its model type.
    (train_clm, "--dataset_name a", TEXT | {"dataset_name": ["a"]}),
    (train_clm, "--preset hour --dataset_name a", TEXT | {
        "preset": "hour", "dataset_name": ["a"], "config_overrides": HOUR["config_overrides"]}),
    (train_clm, "--model_type opt", {"config_overrides": SIZES}),
    (train_clm, "--preset gpt2 --model_type llama", {"config_overrides": SIZES}),
    (train_clm, "--config_overrides none", {"config_overrides": ""}),
    (train_clm, "--config_overrides hidden_size=256",
     {"config_overrides": SIZES.replace("hidden_size=128", "hidden_size=256")}),
    (train_clm, "--preset gpt2 --config_overrides n_layer=2",
     {"config_overrides": GPT2["config_overrides"].replace("n_layer=4", "n_layer=2")}),
    (train_clm, "--model_type opt --config_overrides ffn_dim=9", {"config_overrides": f"{SIZES},ffn_dim=9"}),
    (train_clm, """--config_overrides '{"rope_parameters": {"rope_theta": 5}, "head_dim": 8'""",
     {"config_overrides": '{"rope_parameters": {"rope_theta": 5}, "head_dim": 8'}),
    # Weights come with their tokenizer and configuration.
    (train_clm, "--model_name_or_path none", {"tokenizer_name": None, "config_overrides": SIZES}),
    (train_clm, "--model_name_or_path b", {
        "preset": None, "dataset_name": [], "keywords": [], "prompts": ["rows"], "tokenizer_name": "b"}),
    (train_clm, "--model_name_or_path runs/a --preset codeparrot",
     {"tokenizer_name": "runs/a", "config_overrides": ""}),
    (train_clm, "--model_name_or_path=a --tokenizer_name b --config_overrides n_layer=2",
     {"tokenizer_name": "b", "config_overrides": "n_layer=2"}),
    # Passes over the data, if they are given, take the place of steps.
    (train_clm, "", {"num_train_epochs": 1, "max_train_steps": train_clm.TrainArgs().max_train_steps}),
    (train_clm, "--num_train_epochs 1", {"num_train_epochs": 1, "max_train_steps": 0}),
    (train_clm, "--preset=gpt2-124m --num_train_epochs=2", {"num_train_epochs": 2, "max_train_steps": 0}),
    (train_clm, "--num_train_epochs 2 --max_train_steps 7", {"num_train_epochs": 2, "max_train_steps": 7}),
]  # fmt: skip


@pytest.mark.parametrize("script, words, expected", PARSED)
def test_a_setting_changes_the_defaults_that_depend_on_it(script, words, expected):
    args = parse_args(script.TrainArgs, script.PRESETS, argv=shlex.split(words))
    assert {name: getattr(args, name) for name in expected} == expected


def test_nested_overrides_are_merged_with_the_default_sizes():
    words = ["--config_overrides", '{"rope_parameters": {"rope_theta": 5}}']
    args = parse_args(train_clm.TrainArgs, train_clm.PRESETS, argv=words)
    expected = named_values(SIZES) | {"rope_parameters": {"rope_theta": 5}}
    assert json.loads(args.config_overrides) == expected


def test_eval_only_takes_the_settings_of_the_run(tmp_path):
    settings = asdict(train_clm.TrainArgs("laptop", ["texts"], block_size=64, prompts=["a"]))
    known = {"settings": settings | {"not_known_any_more": 1}, "run_id": "x", "starts": []}
    (tmp_path / "args.json").write_text(json.dumps(known))

    def parsed(*words):
        words = ["--output_dir", str(tmp_path), *words]
        args = parse_args(train_clm.TrainArgs, train_clm.PRESETS, words)
        return args.dataset_name, args.keywords, args.block_size, args.prompts

    of_the_run, usual = (["texts"], [], 64, ["a"]), parsed()
    assert usual[2] == 128 and usual[0] != of_the_run[0]
    assert parsed("--eval_only", "false") == usual
    assert parsed("--eval_only") == parsed("--eval_only=True", "--preset", "laptop") == of_the_run
    other = parsed("--eval_only", "true", "--dataset_name", "other")
    assert other == (["other"], [], 64, ["rows"])
    weights = parsed("--eval_only", "true", "--model_name_or_path", "weights")
    assert weights == ([], [], 128, ["rows"])
    assert parsed("--eval_only", "true", "--preset", "codeparrot")[0] != of_the_run[0]
    (tmp_path / "args.json").write_text("[1]")
    assert parsed("--eval_only", "true") == usual


def test_eval_only_refuses_a_run_of_the_other_script(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    known = {"settings": asdict(train_mlm.TrainArgs()), "run_id": "x", "starts": []}
    (tmp_path / "args.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match="a run of the other script"):
        use_saved_model(train_clm.TrainArgs(eval_only=True, output_dir=str(tmp_path)))
    use_saved_model(train_mlm.TrainArgs(eval_only=True, output_dir=str(tmp_path)))


def test_settings_of_other_projects_name_our_setting():
    """Each replacement that a message names is a setting, a flag of the launcher or a file."""
    for script in (train_clm, train_mlm):
        for name, replacement in ELSEWHERE.items():
            assert not hasattr(script.TrainArgs(), name)
            with pytest.raises(ValueError) as error:
                parse_args(script.TrainArgs, script.PRESETS, argv=[f"--{name}", "3"])
            message = str(error.value).splitlines()
            assert message == [
                f"--{name}: no such setting; {replacement}.", "`--help` lists every setting."]
            for flag in re.findall(r"--(\w+)", replacement):
                launcher = flag in ("mixed_precision", "dynamo_backend", "config_file")
                assert launcher or hasattr(script.TrainArgs(), flag), flag
            for file in re.findall(r"accelerate_configs/\w+\.yaml", replacement):
                assert (PROJECT / file).exists()
    with pytest.raises(ValueError, match="--EPOCHS: no such setting; use --num_train_epochs"):
        parse_args(Args, PRESETS, argv=["--EPOCHS", "5"])
    with pytest.raises(ValueError, match="(?s)--warmup-steps=5: .*--lost=1: .*stray: "):
        parse_args(Args, PRESETS, argv=["--warmup-steps=5", "--lost=1", "stray"])


def test_help_may_hold_a_percent_sign(capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(Args, PRESETS, argv=["--help"])
    assert end.value.code == 0 and "peak, 100 % of it" in capsys.readouterr().out


@pytest.mark.parametrize("script", [train_clm, train_mlm])
def test_help_lists_every_setting_with_default_and_explanation(script, capsys):
    with pytest.raises(SystemExit):
        parse_args(script.TrainArgs, script.PRESETS, argv=["--help", "--preset", list(script.PRESETS)[1]])
    out = capsys.readouterr().out
    for setting in fields(script.TrainArgs):
        assert re.search(rf"^  --{setting.name} \S.*  \S", out, re.M), setting.name
    assert out.index("\nModel\n") < out.index("--model_type") < out.index("\nOptimization\n")
    assert " | ".join(script.PRESETS) in out
    for name in script.PRESETS:
        assert re.search(rf"^  {name} +\S.{{20}}", out, re.M), name
    assert f"--output_dir {script.PRESETS[list(script.PRESETS)[1]]['output_dir']} " in out


@pytest.mark.parametrize("script", ["train_clm.py", "train_mlm.py"])
def test_help_does_not_import_torch(script):
    command = [sys.executable, "-X", "importtime", script, "--help", "--preset", "laptop"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "--per_device_train_batch_size" in done.stdout
    assert "utils.flags" in done.stderr and not re.search(r"\| +torch$", done.stderr, re.M)


def test_a_file_beside_the_script_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "script.args").write_text("--learning_rate 9")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py")])
    assert parse_args(Args, PRESETS).learning_rate == 0.1


def test_all_numbers_out_of_range_are_named_at_once():
    @dataclass
    class More(Args):
        seed: int = 1
        adam_beta2: float = 1.0
        my_rate: float = float("inf")
        my_bias: float = -3.0  # a setting of an edit with a negative default

    problems = number_problems(More(learning_rate=0.0, seed=-1))
    assert problems == [
        "learning_rate: must be greater than 0, is 0.0.", "seed: must be 0 (off) or greater, is -1.",
        "adam_beta2: must be less than 1, is 1.0.", "my_rate: must be a finite number, is inf.",
    ]  # fmt: skip


def test_changed_settings_are_named_and_new_ones_do_not_stop_a_resume():
    """A setting that the saved run did not have counts as its default; 'x' equals ['x']."""

    @dataclass
    class Now:
        learning_rate: float = 1e-3
        seed: int = 1
        output_dir: str = "b"
        eval_dataset_name: list[str] = field(default_factory=list)
        z_loss: float = 0.0

    saved = {"learning_rate": 1e-3, "seed": 1, "output_dir": "a", "eval_dataset_name": None, "gone": 7}
    assert changed_settings(saved, Now(), {"output_dir"}) == []
    single = saved | {"eval_dataset_name": "x"}
    assert changed_settings(single, Now(eval_dataset_name=["x"]), {"output_dir"}) == []
    assert changed_settings(saved, Now(seed=2, z_loss=1e-4, eval_dataset_name=["x", "y"]), set()) == [
        "eval_dataset_name: none in the run, x y now", "output_dir: a in the run, b now",
        "seed: 1 in the run, 2 now", "z_loss: 0.0 in the run, 0.0001 now",
    ]  # fmt: skip


@pytest.mark.parametrize("script", [train_clm, train_mlm])
def test_settings_that_shape_the_result_may_not_change(script):
    """Folders, the division of a batch and logging may change, but nothing that changes the model."""
    names = {setting.name for setting in fields(script.TrainArgs)}
    assert set(script.MAY_CHANGE) <= names and len(script.MAY_CHANGE) == len(set(script.MAY_CHANGE))
    learnt = """dataset_name mixture keywords validation_fraction tokenizer_name vocab_size block_size
        max_train_samples model_type config_overrides model_name_or_path optimizer_type learning_rate
        weight_decay adam_beta2 lr_scheduler_type num_warmup_steps max_train_steps seed""".split()
    assert set(learnt) <= names - set(script.MAY_CHANGE)


@pytest.mark.parametrize(
    ("schedule", "warmup", "was", "now", "step", "goes_on"),
    [
        ("constant", 0.04, 1000, 10_000, 250, True),
        ("constant_with_warmup", 400, 1000, 10_000, 250, True),
        ("constant_with_warmup", 0.04, 1000, 2000, 90, True),  # both are at the peak
        ("constant_with_warmup", 0.04, 1000, 2000, 60, False),
        ("warmup_stable_decay", 10, 100, 110, 80, True),
        ("warmup_stable_decay", 10, 100, 110, 90, False),
        ("cosine", 10, 100, 110, 50, False),
        ("cosine", 10, 100, 100, 50, True),
    ],
)
def test_a_run_may_grow_if_its_current_learning_rate_stays_the_same(
    schedule, warmup, was, now, step, goes_on
):
    runs = []
    for last in (was, now):
        args = train_clm.TrainArgs(lr_scheduler_type=schedule, max_train_steps=last, num_warmup_steps=warmup)
        args.lr_scheduler_kwargs = "num_decay_steps=0.2" if schedule == "warmup_stable_decay" else None
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
        runs.append((args, Steps(args, Accelerator(cpu=True), range(10**6)), optimizer))
    (args, steps, optimizer), (now_args, now_steps, another) = runs
    rates = build_schedule(optimizer, args, steps.last)
    for _ in range(step):
        optimizer.step()
        rates.step()
    state = describe_experiment(args, steps, step, "rows") | {"step": step}
    state |= {"things": {"schedule": {"state": rates.state_dict()}}}

    def check(fingerprint="rows"):
        after = build_schedule(another, now_args, now_steps.last)
        check_experiment(state, now_args, now_steps, fingerprint, set(), after)

    refused = pytest.raises(ValueError, match="(?s)learning rate of step .* --model_name")
    with nullcontext() if goes_on else refused:
        check()
    with pytest.raises(ValueError, match="rows have other content" if goes_on else "learning rate of step"):
        check("other rows")


def test_only_value_errors_of_this_project_are_messages_to_the_user(capsys):
    with pytest.raises(SystemExit) as end, user_mistakes():
        raise ValueError("block_size: 0")
    assert end.value.code == 2 and capsys.readouterr().err == "error: block_size: 0\n"
    with pytest.raises(ValueError), user_mistakes():
        json.loads("{")
