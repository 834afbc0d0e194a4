"""What users may say about a launch on TPUs. The keys stand at the top of a config file."""

from __future__ import annotations

from accelerate_core.plugin import option, settings


@settings(env_prefix="ACCELERATE_", section=None, yaml_prefix="tpu_")
class TPULaunch:
    """How the processes of one host run."""

    downcast_bf16: bool = option(
        default=False,
        help="with bf16, convert both floats and doubles to bfloat16; otherwise doubles to float32",
        key="",
        cli="downcast_bf16",
        yaml="downcast_bf16",
    )
    main_training_function: str | None = option(
        default=None,
        help="function of the script to call",
        key="",
        cli=(),
        yaml="main_training_function",
        ask="Function of the script that each process calls (empty: run it as a program)?",
    )


_POD = "tpu_use_cluster=True"


@settings(env_prefix="ACCELERATE_", section=None, yaml_prefix="tpu_")
class TPUPod:
    """The hosts of a pod and what to run on each."""

    tpu_use_cluster: bool = option(
        default=False,
        help="start the script on every host of a pod",
        cli="tpu_cluster",
        ask="Is it a pod, on every host of which the script starts?",
    )
    no_tpu_cluster: bool = option(
        default=False,
        help="start it only on this host, even if the config file says otherwise",
        key="",
        cli="no_tpu_cluster",
    )
    tpu_vm: list[str] | None = option(
        default=None,
        help="host to start on by ssh instead of gcloud (repeatable)",
        cli="vm",
        ask="Hosts to start on by ssh (empty: gcloud finds them)?",
        ask_if=_POD,
    )
    tpu_name: str | None = option(
        default=None,
        help="name of the TPU, as gcloud knows it",
        ask="Name of the TPU, as gcloud knows it?",
        ask_if="tpu_vm=None",
    )
    tpu_zone: str | None = option(
        default=None, help="zone of the TPU", ask="Its zone?", ask_if="tpu_vm=None"
    )
    tpu_env: list[str] | None = option(
        default=None,
        help="NAME=VALUE for the hosts of a pod (repeatable)",
        cli="env",
        ask="Variables for the hosts, NAME=VALUE?",
        ask_if=_POD,
    )
    tpu_use_sudo: bool = option(
        default=False,
        help="run the script on the hosts as root",
        ask="Run it on the hosts as root (sudo)?",
        ask_if=_POD,
    )
    command_file: str | None = option(
        default=None,
        help="file of commands for tpu-config",
        key="",
        cli=(),
        yaml="command_file",
        ask="File of commands by which tpu-config sets hosts up (empty: none)?",
        ask_if=_POD,
    )
    commands: list[str] | None = option(
        default=None,
        help="commands of tpu-config",
        key="",
        cli=(),
        yaml="commands",
        ask="Commands instead of a file?",
        ask_if="command_file=None",
    )
