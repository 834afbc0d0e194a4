"""Settings of launches on TPUs. In a config file, they are top-level keys."""

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
        help="function of the script to call in each process",
        key="",
        cli=(),
        yaml="main_training_function",
        ask="Function of the script to call in each process (empty: run the script as a program)?",
    )


_POD = "tpu_use_cluster=True"


@settings(env_prefix="ACCELERATE_", section=None, yaml_prefix="tpu_")
class TPUPod:
    """The hosts of a TPU pod, and how to start the script on them."""

    tpu_use_cluster: bool = option(
        default=False,
        help="start the script on every host of a pod",
        cli="tpu_cluster",
        ask="Start the script on every host of a TPU pod?",
    )
    no_tpu_cluster: bool = option(
        default=False,
        help="start the script only on this host, even if the config file says otherwise",
        key="",
        cli="no_tpu_cluster",
    )
    tpu_vm: list[str] | None = option(
        default=None,
        help="host to reach with ssh instead of gcloud (repeatable)",
        cli="vm",
        ask="Hosts to reach with ssh (empty: gcloud finds them)?",
        ask_if=_POD,
    )
    tpu_name: str | None = option(
        default=None,
        help="name of the TPU in gcloud",
        ask="Name of the TPU in gcloud?",
        ask_if="tpu_vm=None",
    )
    tpu_zone: str | None = option(
        default=None, help="zone of the TPU", ask="Zone of the TPU?", ask_if="tpu_vm=None"
    )
    tpu_env: list[str] | None = option(
        default=None,
        help="environment variable for the hosts of a pod, as NAME=VALUE (repeatable)",
        cli="env",
        ask="Environment variables for the hosts, as NAME=VALUE?",
        ask_if=_POD,
    )
    tpu_use_sudo: bool = option(
        default=False,
        help="run the script on the hosts as root",
        ask="Run the script on the hosts as root (sudo)?",
        ask_if=_POD,
    )
    command_file: str | None = option(
        default=None,
        help="file with commands for tpu-config",
        key="",
        cli=(),
        yaml="command_file",
        ask="File with commands for tpu-config, which sets up hosts (empty: none)?",
        ask_if=_POD,
    )
    commands: list[str] | None = option(
        default=None,
        help="commands for tpu-config",
        key="",
        cli=(),
        yaml="commands",
        ask="Commands instead of a file?",
        ask_if="command_file=None",
    )
