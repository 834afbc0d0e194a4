"""DeepSpeed configs, commands and the launcher in one process."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pool
import pytest
import torch
from click.testing import CliRunner
from support import clean_environment
from warm_python import MORE, warm_python

from accelerate_core import GradScalerKwargs
from accelerate_core.config.files import read_config
from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.contract.capabilities import lacking
from accelerate_core.errors import CheckpointError, ConfigurationError
from accelerate_deepspeed import (
    DeepSpeedBackend,
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    HfDeepSpeedConfig,
)
from accelerate_deepspeed import automatic as steps
from accelerate_deepspeed.checkpoint_files import merge
from accelerate_deepspeed.cli import command
from accelerate_deepspeed.optimizers import check_compiler, needs_build
from accelerate_deepspeed.settings import get_active_deepspeed_plugin

RUN = steps.RunSizes(data_ranks=2, all_ranks=2, accumulation=4, micro_batch=8)


def resolved(config=None, **fields) -> HfDeepSpeedConfig:
    plugin = DeepSpeedPlugin(hf_ds_config=config, **fields)
    steps.resolve_fields(plugin)
    return plugin.hf_ds_config


def test_default_is_stage_2_without_clipping():
    config = resolved()
    assert config.config == {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0}
    assert resolved({"steps_per_print": 5}).stage == 0  # DeepSpeed's own default in a config


def test_config_can_be_filled_in_later():
    """Transformers' Trainer does this. It counts micro-batches itself, with a plugin of one step."""
    config = HfDeepSpeedConfig({"gradient_accumulation_steps": 3})
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    assert plugin.hf_ds_config is config
    plugin.deepspeed_config = {"gradient_accumulation_steps": 3, "steps_per_print": 5}
    assert config.get_value("steps_per_print") == 5
    one = SimpleNamespace(value=1, origin="constructor argument gradient_accumulation_plugin")
    assert steps.check_accumulation(config, one) == 3
    one.origin = "constructor argument gradient_accumulation_steps"
    with pytest.raises(ConfigurationError, match="contradicts 3"):
        steps.check_accumulation(config, one)


def test_every_auto_is_resolved_with_its_reason():
    config = resolved(
        {
            "zero_optimization": {
                "stage": "auto",
                "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_gather_16bit_weights_on_model_save": "auto",
            },
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "gradient_accumulation_steps": "auto",
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_max_lr": "auto", "total_num_steps": "auto", "warmup_num_steps": "auto"
                },
            },
        },
        zero_stage=3,
    )  # fmt: skip
    assert not steps.resolve_precision(config, "bf16", "the test")
    steps.resolve_batches(config, RUN)
    steps.resolve_sizes(config, SimpleNamespace(config=SimpleNamespace(hidden_sizes=[8, 16])))
    optimizer = DummyOptim([], lr=0.5, weight_decay=0.25)
    steps.resolve_optimizer(config, optimizer, DummyScheduler(optimizer, 11, 3), 2, split=False)
    steps.resolve_rest(config)
    assert config.autos() == []
    zero = config.config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]) == (3, {"device": "none"})
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (256, 230)
    assert zero["stage3_param_persistence_threshold"] == 160
    assert config.get_value("train_batch_size") == 64
    assert config.get_value("optimizer.params") == {"lr": 0.5, "weight_decay": 0.25}
    # Both numbers are divided, so that the warm-up is the same fraction of the schedule.
    assert config.get_value("scheduler.params.total_num_steps") == 6
    assert config.get_value("scheduler.params.warmup_num_steps") == 2
    assert "zero_stage" in config.where("zero_optimization.stage")


def test_scheduler_of_the_config_uses_the_learning_rate_of_torchs_optimizer():
    given = {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    config = resolved({"scheduler": {"type": "WarmupLR", "params": given}})
    sgd = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.3)
    steps.resolve_optimizer(config, sgd, DummyScheduler(sgd), 2, split=False)
    assert config.get_value("scheduler.params") == {"warmup_max_lr": 0.3, "warmup_num_steps": 1}


def test_error_names_an_auto_that_cannot_be_resolved():
    config = resolved({"zero_optimization": {"stage": 2, "sub_group_size": "auto"}})
    with pytest.raises(ConfigurationError, match=r"zero_optimization\.sub_group_size"):
        steps.resolve_rest(config)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"zero_optimisation": {}}, "Did you mean 'zero_optimization'"),
        ('{"fp16": {}, "fp16": {}}', "the key 'fp16' twice"),
        ('{"fp16": ', "line 1, column"),
        ("[1]", "is not an existing file, JSON"),
        (3, "not int"),
        ({"zero_optimization": 3}, "must be an object"),
        ({"msamp": {"enabled": True}}, "msamp .in the config dict. is not supported"),
    ],
)
def test_invalid_config_is_rejected(given, text):
    with pytest.raises(ConfigurationError, match=text):
        resolved(given)


def test_no_plugin_is_active_without_an_accelerator():
    with pytest.raises(ValueError, match="no Accelerator with the backend deepspeed"):
        get_active_deepspeed_plugin()


def test_base64_config_can_be_longer_than_a_file_name():
    config = {"zero_optimization": {"stage": 1}, "tensorboard": {"output_path": "x" * 300}}
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert resolved(encoded).stage == 1
    twice = base64.urlsafe_b64encode(b'{"fp16": {}, "fp16": {}}').decode()
    with pytest.raises(ConfigurationError, match="base64 text has the key 'fp16' twice"):
        resolved(twice)


def test_other_precisions_with_loss_scaling_are_not_supported():
    """DeepSpeed only scales losses for its own fp16."""
    needs = {"autocast", "loss_scaling"}
    assert lacking(DeepSpeedBackend.supports, "other", needs) == ["loss_scaling"]
    assert lacking(DeepSpeedBackend.supports, "fp16", needs) == []


def test_invalid_config_file_is_rejected(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="not a list"):
        resolved(tmp_path / "list.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        resolved(str(tmp_path / "bytes.json"))
    with pytest.raises(ConfigurationError, match=r"Did you mean 'list\.json'"):
        resolved(str(tmp_path / "lits.json"))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"zero_stage": 4}, r"zero_stage=4\): .*less than or equal to 3"),
        ({"offload_optimizer_device": "gpu"}, "should be 'none', 'cpu' or 'nvme'"),
        ({"gradient_clipping": "much"}, r"gradient_clipping.*'much'.*a valid number"),
        ({"gradient_clipping": -1.0}, "at least 0"),
        ({"gradient_accumulation_steps": 0}, "at least 1"),
        ({"enable_msamp": True}, "enable_msamp is not supported.*needs DeepSpeed 0.13.*torchao"),
        ({"multinode_launcher": "pdhs"}, "Did you mean 'pdsh'"),
        (
            {"offload_param_device": "nvme", "zero_stage": 3},
            r"\(offload_param_nvme_path\): offload to nvme needs",
        ),
        (
            {
                "offload_param_device": "nvme",
                "offload_param_nvme_path": "/no/such",
                "zero_stage": 3,
            },
            "is not a directory",
        ),
        ({"offload_optimizer_device": "cpu", "zero_stage": 0}, "stage 1, 2 or 3"),
    ],
)
def test_invalid_field_is_rejected(fields, text):
    with pytest.raises(ConfigurationError, match=text):
        resolved(**fields)


def test_unset_fields_come_from_environment_and_config_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
        "  gradient_accumulation_steps: 5\n  deepspeed_moe_layer_cls_names: A, B\n"
    )
    sources = Sources({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, read_config(str(file)))
    plugin, provenance = resolve_settings(DeepSpeedPlugin, None, sources, owner="deepspeed")
    assert plugin.zero_stage == 1
    assert plugin.gradient_accumulation_steps == 5
    assert plugin.transformer_moe_cls_names == ["A", "B"]
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" in provenance["zero_stage"].origin
    asked = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}})
    plugin, _ = resolve_settings(DeepSpeedPlugin, asked, sources, owner="deepspeed")
    with pytest.raises(ConfigurationError, match=r"ACCELERATE_DEEPSPEED_ZERO_STAGE.*stage=2"):
        steps.resolve_fields(plugin)


@pytest.mark.parametrize(
    ("config", "wanted", "text"),
    [
        ({"bf16": {"enabled": True}}, "fp16", "contradicts bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16", "both true"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"},
          "zero_optimization": {"stage": 1}}, "fp16", "still scaled"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "bf16", "must be bfloat16 or float16"),
        ({"fp16": {"enabled": False}}, "fp16", "contradicts fp16"),
    ],
)  # fmt: skip
def test_conflicting_precision_is_rejected(config, wanted, text):
    with pytest.raises(ConfigurationError, match=text):
        steps.resolve_precision(resolved(config), wanted, "the test")


SCALES = [
    # config, GradScalerKwargs, the resulting section fp16
    ({}, None, {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2000,
                "hysteresis": 1, "loss_scale": 0}),
    ({}, {"init_scale": 8.0, "growth_interval": 3},
     {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 3, "hysteresis": 1,
      "loss_scale": 0}),
    ({"enabled": True}, None, {"enabled": True}),
    ({"enabled": True, "hysteresis": 4}, {"init_scale": 8.0},
     {"enabled": True, "hysteresis": 4, "initial_scale_power": 3}),
    ({"enabled": "auto", "hysteresis": 2, "loss_scale_window": "auto", "auto_cast": "auto"}, None,
     {"enabled": True, "hysteresis": 2, "loss_scale_window": 2000, "auto_cast": True,
      "initial_scale_power": 16, "loss_scale": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("section", "scaling", "expected"), SCALES)
def test_loss_scale_combines_grad_scaler_kwargs_and_the_config(section, scaling, expected):
    config = resolved({"fp16": section} if section else {})
    given = None if scaling is None else GradScalerKwargs(**scaling)
    for _ in range(2):  # a plugin can be used by a second Accelerator
        assert steps.resolve_precision(config, "fp16", "the test", given)
        assert config.config["fp16"] == expected


@pytest.mark.parametrize(
    ("section", "scaling", "text"),
    [
        ({}, {"growth_factor": 4.0}, r"growth_factor=4\.0.*factor of 2"),
        ({}, {"backoff_factor": 0.25}, r"backoff_factor=0\.25.*value is 0\.5"),
        ({}, {"init_scale": 100.0}, r"init_scale=100\.0.*power of 2"),
        ({"initial_scale_power": 8}, {"init_scale": 8.0}, "init_scale=8.0.*initial_scale_power=8"),
        ({"loss_scale": 128}, {"init_scale": 8.0}, r"static scale fp16\.loss_scale=128"),
        ({"loss_scale": 128}, {"enabled": False}, r"enabled=False.*fp16\.loss_scale=128"),
    ],
)
def test_unsupported_loss_scale_is_rejected(section, scaling, text):
    config = resolved({"fp16": {"enabled": True, **section}})
    with pytest.raises(ConfigurationError, match=text):
        steps.resolve_precision(config, "fp16", "the test", GradScalerKwargs(**scaling))


def test_error_for_an_op_that_cannot_be_compiled_says_what_to_install_or_set(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match=r"g\+\+.*zero_force_ds_cpu_optimizer"):
        check_compiler("cpu_adam")
    adam = {"optimizer": {"type": "AdamW", "params": {}}}
    assert needs_build(resolved(adam)) == "fused_adam"
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert needs_build(resolved(adam | offload)) == "cpu_adam"
    adam["optimizer"]["params"]["torch_adam"] = True
    assert needs_build(resolved(adam)) is None


def test_lock_that_a_killed_build_left_behind_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    with pytest.warns(UserWarning, match="no process on this machine holds the lock"):
        check_compiler("cpu_adam")
    with lock.open(), warnings.catch_warnings():
        warnings.simplefilter("error")
        check_compiler("cpu_adam")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_cpu_adam_is_compiled_once_with_a_message(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, warnings\n"
        "from accelerate_core import Accelerator, DeepSpeedPlugin\n"
        "plugin = DeepSpeedPlugin(zero_stage=2, offload_optimizer_device='cpu')\n"
        "a = Accelerator(cpu=True, deepspeed_plugin=plugin)\n"
        "torch.manual_seed(0)\n"
        "m, plain = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)\n"
        "plain.load_state_dict(m.state_dict())\n"
        "groups = lambda m: [{'params': [m.weight], 'lr': 0.1, 'betas': (0.5, 0.6)},\n"
        "                    {'params': [m.bias], 'weight_decay': 0.3}]\n"
        "o, adam = (torch.optim.AdamW(groups(one), lr=0.01) for one in (m, plain))\n"
        "rates = torch.optim.lr_scheduler\n"
        "made = lambda o: rates.SequentialLR(\n"
        "    o, [rates.ConstantLR(o, 0.5), rates.ExponentialLR(o, 0.5)], milestones=[1])\n"
        "s, falls = made(o), made(adam)\n"
        "m, o, s = a.prepare(m, o, s)\n"
        "warnings.filterwarnings('error', '.*lr_scheduler.*')\n"
        "for _ in range(3):\n"
        "    a.backward(m(torch.ones(1, 3)).sum())\n"
        "    o.step(), s.step()\n"
        "    plain(torch.ones(1, 3)).sum().backward()\n"
        "    adam.step(), adam.zero_grad(), falls.step()\n"
        "    assert [g['lr'] for g in o.param_groups] == [g['lr'] for g in adam.param_groups]\n"
        "found = a.get_state_dict(m)\n"
        "for name, value in plain.state_dict().items():\n"
        "    torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)\n"
        "a.end_training()\n"
    )
    outputs = []
    for _ in range(2):
        environment = clean_environment(TORCH_EXTENSIONS_DIR=str(tmp_path / "built"))
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append(done.stdout)
    assert "compiling DeepSpeed's op cpu_adam" in outputs[0]
    assert "is ready after" in outputs[0]
    assert "compiling" not in outputs[1]


# --- the command ----------------------------------------------------------------------------------


def test_show_config_shows_each_value_and_its_reason(tmp_path):
    file = tmp_path / "ds.json"
    config = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
    file.write_text(json.dumps(config))
    arguments = ["show-config", str(file), "--num_processes", "2", "--micro_batch", "4"]
    shown = CliRunner().invoke(command, arguments, terminal_width=200, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "train_batch_size" in shown.output
    assert "micro-batch x steps x ranks" in shown.output
    plain = CliRunner().invoke(command, [*arguments, "--json"])
    assert json.loads(plain.output)["train_batch_size"] == 8
    wrong = CliRunner().invoke(command, ["show-config", str(file), "--zero_stage", "3"])
    assert wrong.exit_code == 1
    assert "contradicts" in wrong.output
    assert "Traceback" not in wrong.output


def test_consolidate_rejects_a_folder_without_a_checkpoint(tmp_path):
    result = CliRunner().invoke(command, ["consolidate", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "contains no files of a DeepSpeed engine" in result.output
    with pytest.raises(CheckpointError, match="not a checkpoint of a DeepSpeed engine"):
        merge(tmp_path)


def test_importing_the_package_imports_neither_deepspeed_nor_transformers():
    code = (
        "import sys, accelerate_deepspeed, accelerate_deepspeed.cli, accelerate_deepspeed.launching;"
        "print([m for m in ('deepspeed', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_consolidate_works_without_deepspeed(tmp_path):
    """Reading only needs torch. DeepSpeed's classes in the files are replaced."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from accelerate_core import Accelerator, DeepSpeedPlugin\n"
        "a = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))\n"
        "torch.manual_seed(0)\n"
        "m = torch.nn.Linear(3, 2)\n"
        "m, o = a.prepare(m, torch.optim.AdamW(m.parameters()))\n"
        "a.backward(m(torch.ones(1, 3)).sum())\n"
        "o.step()\n"
        "a.save_state('state')\n"
        "torch.save(a.get_state_dict(m), 'weights.pt')\n"
        "a.end_training()\n"
    )
    reader = tmp_path / "reader.py"
    reader.write_text(
        "import sys\n"
        "sys.modules['deepspeed'] = None\n"
        "from accelerate_deepspeed.cli import command\n"
        "command(['consolidate', 'state', 'out'])\n"
    )
    for program, more in ((script, ["deepspeed"]), (reader, [])):
        environment = clean_environment(OMP_NUM_THREADS="1")
        done = pool.run([program], environment, 120, cwd=tmp_path, more=more)
        assert done.returncode == 0, done.stderr[-3000:]
    import torch
    from safetensors.torch import load_file

    expected = torch.load(tmp_path / "weights.pt")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


# --- launching ------------------------------------------------------------------------------------

TRAIN = """
import os, torch
from accelerate_core import Accelerator, DeepSpeedPlugin
a = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), process_group_timeout=60)
m = torch.nn.Linear(4, 1)
m, o = a.prepare(m, torch.optim.AdamW(m.parameters()))
a.backward(m(torch.ones(2, 4)).sum())
o.step()
open(f"{a.process_index}.txt", "w").write(f"{a.num_processes} {os.environ.get('OF_THE_USER')}")
a.end_training()
"""


def launched(tmp_path: Path, hosts: str, port: int, **variables: str) -> list[str]:
    from accelerate_deepspeed.launching import DeepSpeedLauncher
    from accelerate_launch import LaunchPlan, Target

    (tmp_path / "hosts").write_text(hosts)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / ".deepspeed_env").write_text("OF_THE_USER=yes\n")
    plan = LaunchPlan(
        target=Target(str(tmp_path / "train.py")),
        num_processes=2,
        main_process_ip="127.0.0.1",
        main_process_port=port,
        environment={"ACCELERATE_DEEPSPEED_HOSTFILE": str(tmp_path / "hosts"), **variables},
    )
    launcher = DeepSpeedLauncher()
    assert launcher.accepts(plan)
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        environment = launcher.launch_environment(plan)
        done = subprocess.run(
            [warm_python(), *_without_ssh(launcher.launch_command(plan))[1:]],
            cwd=tmp_path,
            env=clean_environment(
                OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", **{MORE: "deepspeed"}, **environment
            ),
            capture_output=True,
            text=True,
            timeout=150,
        )
    finally:
        os.chdir(before)
    assert done.returncode == 0, done.stderr[-3000:]
    sent = Path(environment["DS_ENV_FILE"]).read_text()
    assert "OF_THE_USER=yes" in sent
    assert "ACCELERATE_DEEPSPEED_HOSTFILE" in sent
    return [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]


def _without_ssh(arguments: list[str]) -> list[str]:
    """Skip DeepSpeed's check for an ssh server, because all hosts are this machine."""
    at = arguments.index("deepspeed.launcher.runner") + 1
    return [*arguments[:at], "--no_ssh_check", *arguments[at:]]


def test_mpi_launchers_pass_on_the_address_but_not_the_network_interface(tmp_path):
    from accelerate_deepspeed.launching import DeepSpeedLauncher
    from accelerate_launch import LaunchPlan, Target

    (tmp_path / "hosts").write_text("# ours\nn1 slots=1\nn2 slots=1\n")
    environment = {
        "ACCELERATE_DEEPSPEED_HOSTFILE": str(tmp_path / "hosts"),
        "ACCELERATE_DEEPSPEED_MULTINODE_LAUNCHER": "openmpi",
        "GLOO_SOCKET_IFNAME": "br0",
    }
    plan = LaunchPlan(target=Target("train.py"), num_processes=2, environment=environment)
    sent = Path(DeepSpeedLauncher().launch_environment(plan)["DS_ENV_FILE"]).read_text()
    assert "MASTER_ADDR=n1\nMASTER_PORT=29500\n" in sent
    assert "GLOO_SOCKET_IFNAME" not in sent


@pytest.mark.dist
def test_host_file_starts_one_process_per_slot(tmp_path):
    assert launched(tmp_path, "localhost slots=2\n", 29713) == ["2 None", "2 None"]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"ACCELERATE_DEEPSPEED_HOSTFILE": "/no/such"}, "does not exist"),
        ({"ACCELERATE_DEEPSPEED_MULTINODE_LAUNCHER": "pdsh"}, "needs a host file"),
    ],
)
def test_missing_host_file_is_rejected(variables, text):
    from accelerate_deepspeed.launching import DeepSpeedLauncher
    from accelerate_launch import LaunchPlan, Target

    plan = LaunchPlan(target=Target("x.py"), environment=variables)
    with pytest.raises(ConfigurationError, match=text):
        DeepSpeedLauncher().launch_command(plan)


@pytest.mark.parametrize("kind", ["pdsh", "openmpi", "mvapich", "mpich", "impi", "slurm", "nossh"])
def test_command_of_each_launcher_is_accepted_by_deepspeed(tmp_path, kind):
    """The command is parsed by DeepSpeed but not run, because most launchers need other programs."""
    from accelerate_deepspeed.launching import DeepSpeedLauncher
    from accelerate_launch import LaunchPlan, Target

    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=2\ntwo slots=2\n")
    plan = LaunchPlan(
        target=Target("x.py", ("--a", "1")),
        machine_rank=1,
        environment={
            "ACCELERATE_DEEPSPEED_HOSTFILE": str(hosts),
            "ACCELERATE_DEEPSPEED_MULTINODE_LAUNCHER": kind,
            "ACCELERATE_DEEPSPEED_INCLUSION_FILTER": "one:0@two:1",
        },
    )
    made = DeepSpeedLauncher().launch_command(plan)
    assert made[-3:] == ["x.py", "--a", "1"]
    at = made.index("deepspeed.launcher.runner")
    from deepspeed.launcher.runner import parse_args

    read = parse_args(made[at + 1 :])
    assert (read.hostfile, read.include) == (str(hosts), "one:0@two:1")
    if kind == "nossh":
        assert read.no_ssh
        assert read.node_rank == 1
    else:
        assert read.launcher == kind
