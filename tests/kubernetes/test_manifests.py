"""The manifests, checked with the operators' own models and the schemas of Kubernetes."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import run_cli

from accelerate_core.errors import ConfigurationError
from accelerate_kubernetes import KubernetesLaunch, KubernetesLauncher
from accelerate_kubernetes.settings import KINDS
from accelerate_launch import LaunchPlan, make_plan

#: The version of Kubernetes whose schemas are used.
KUBERNETES = "1.33"
IMAGE = "registry.example/train:1"
EVERYTHING: dict[str, Any] = {
    "namespace": "team",
    "resources": ["nvidia.com/gpu=8", "cpu=16", "memory=64Gi"],
    "node_selector": ["cloud.example/gpu=h100"],
    "tolerations": ["nvidia.com/gpu:NoSchedule", "team=vision"],
    "shm_size": "16Gi",
    "env": ["NCCL_DEBUG=INFO", "FORMULA=$(HOME)"],
    "secrets": ["hub", "WANDB_API_KEY=wandb/key"],
    "pull_secrets": ["registry"],
    "volumes": ["checkpoints:/checkpoints", "data:/data:ro"],
    "working_dir": "/app",
    "service_account": "trainer",
    "priority_class": "low",
    "queue": "research",
}


def planned(*arguments: str, script: str = "train.py", **given: Any) -> LaunchPlan:
    given = {"launcher": "kubernetes", "num_machines": 2, **given}
    return make_plan(script, arguments, given, {})


def manifests_of(plan: LaunchPlan, **chosen: Any) -> list[dict[str, Any]]:
    launcher = KubernetesLauncher(KubernetesLaunch(**{"image": IMAGE, **chosen}))
    return list(yaml.safe_load_all(launcher.preview(plan)))


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spec of the pods, wherever the kind of job has it."""

    def find(value: Any) -> dict[str, Any] | None:
        if isinstance(value, dict):
            if "containers" in value:
                return value
            value = list(value.values())
        if isinstance(value, list):
            return next(filter(None, map(find, value)), None)
        return None

    found = find(documents)
    assert found is not None
    return found


# --- schemas ----------------------------------------------------------------------------------------


def check_with_kubernetes(document: dict[str, Any]) -> None:
    validate = importlib.import_module("kubernetes_validate").validate
    validate(document, KUBERNETES, strict=True)


def check_with_trainer(document: dict[str, Any]) -> None:
    models = importlib.import_module("kubeflow_trainer_api.models")
    model = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }[document["kind"]]
    # The model drops fields that it does not have.
    assert model.from_dict(document).to_dict() == document


def check_with_training_operator(document: dict[str, Any]) -> None:
    training = importlib.import_module("kubeflow.training")
    client = importlib.import_module("kubernetes.client").ApiClient()
    # The client of Kubernetes looks for a model in its own module.
    pod = client._ApiClient__deserialize

    def read(data: Any, cls: Any) -> Any:
        return pod(data, getattr(training, cls, cls) if isinstance(cls, str) else cls)

    client._ApiClient__deserialize = read
    made = read(document, "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(made) == document


CHECKS = {
    "ConfigMap": check_with_kubernetes,
    "Service": check_with_kubernetes,
    "Job": check_with_kubernetes,
    "Pod": check_with_kubernetes,
    "JobSet": check_with_trainer,
    "TrainingRuntime": check_with_trainer,
    "TrainJob": check_with_trainer,
    "PyTorchJob": check_with_training_operator,
}


def check_all(documents: list[dict[str, Any]]) -> None:
    for document in documents:
        CHECKS[document["kind"]](document)
    pod = {**pod_of(documents)}
    pod.setdefault("restartPolicy", "Never")  # the Training Operator sets it
    CHECKS["Pod"]({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod})


@pytest.mark.needs("kubernetes_validate")
@pytest.mark.needs("kubeflow_trainer_api")
@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("chosen", [{}, EVERYTHING], ids=["minimal", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_operators_accept_the_manifests(
    tmp_path: Path, kind: str, chosen: dict[str, Any], machines: int
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("mixed_precision: bf16\n")
    run = run_cli(
        *("launch", "--dry_run", "--launcher", "kubernetes", "--config_file", config),
        *("--num_machines", str(machines), "--preemption_signals", "SIGTERM"),
        *("--kubernetes_kind", kind, "--kubernetes_image", IMAGE, *options(chosen), "train.py"),
        forked=True,
    )
    assert run.returncode == 0, run.stderr
    documents = list(yaml.safe_load_all(run.stdout))
    check_all(documents)
    kinds = {"jobset": "JobSet", "trainjob": "TrainJob", "pytorchjob": "PyTorchJob", "job": "Job"}
    assert documents[-1]["kind"] == kinds[kind]


def options(chosen: dict[str, Any]) -> list[str]:
    made = []
    for name, value in chosen.items():
        for one in value if isinstance(value, list) else [value]:
            made += [f"--kubernetes_{name}", str(one)]
    return made


@pytest.mark.needs("kubernetes_validate")
@pytest.mark.needs("kubeflow_trainer_api")
@pytest.mark.parametrize("kind", KINDS)
def test_models_notice_a_misspelt_field_anywhere(kind: str) -> None:
    """Every library has its own exception."""
    documents = manifests_of(planned(), kind=kind, **EVERYTHING)
    check_all(documents)
    for number, document in enumerate(documents):
        for path in mappings(document):
            damaged = copy.deepcopy(documents)
            place: Any = damaged[number]
            for step in path:
                place = place[step]
            place["misspelt"] = 1
            with pytest.raises(Exception):  # noqa: B017
                check_all(damaged)


def mappings(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all objects in a manifest whose keys are fields."""
    free = (
        "labels",
        "data",
        "nodeSelector",
        "requests",
        "limits",
        "matchLabels",
        "selector",
        "torch",
    )
    if isinstance(value, list):
        return [one for index, each in enumerate(value) for one in mappings(each, (*path, index))]
    if not isinstance(value, dict):
        return []
    inner = [
        one
        for key, each in value.items()
        if key not in free
        for one in mappings(each, (*path, key))
    ]
    # The names of replicas are keys of an object.
    return inner if path and path[-1] == "pytorchReplicaSpecs" else [path, *inner]


# --- content ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_options_reach_the_pods(kind: str) -> None:
    documents = manifests_of(planned("--lr", "0.1"), kind=kind, **EVERYTHING)
    pod, job = pod_of(documents), documents[-1]
    (container,) = pod["containers"]
    launch = ["accelerate-core", "launch", "--num_machines", "2", "--num_processes", "16"]
    assert container["command"] == [*launch, "train.py", "--lr", "0.1"]
    assert (container["image"], container["workingDir"]) == (IMAGE, "/app")
    wanted = {"nvidia.com/gpu": "8", "cpu": "16", "memory": "64Gi"}
    assert container["resources"] == {"requests": wanted, "limits": wanted}
    variables = {one["name"]: one for one in container["env"]}
    assert variables["NCCL_DEBUG"]["value"] == "INFO"
    assert variables["FORMULA"]["value"] == "$$(HOME)"  # Kubernetes would expand $(HOME)
    key = variables["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert key == {"name": "wandb", "key": "key"}
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    mounted = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert set(mounted) == {"/dev/shm", "/checkpoints", "/data"}
    assert mounted["/data"]["readOnly"] is True
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    claim = volumes[mounted["/checkpoints"]["name"]]["persistentVolumeClaim"]["claimName"]
    assert claim == "checkpoints"
    assert pod["nodeSelector"] == {"cloud.example/gpu": "h100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "vision"},
    ]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("trainer", "low")
    assert {one["metadata"]["namespace"] for one in documents} == {"team"}
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"


def test_processes_follow_from_the_requested_accelerators() -> None:
    def processes(plan: LaunchPlan, **chosen: Any) -> str:
        command = pod_of(manifests_of(plan, **chosen))["containers"][0]["command"]
        return command[command.index("--num_processes") + 1]

    assert processes(planned()) == "2"
    assert processes(planned(), resources=["amd.com/gpu=4", "cpu=64"]) == "8"
    assert processes(planned(num_processes=6), resources=["nvidia.com/gpu=8"]) == "6"


def test_settings_reach_the_pods_as_variables_and_as_a_config_file(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "num_machines: 2\nnum_processes: 4\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n"
        "launcher: kubernetes\nmixed_precision: bf16\nfsdp_config:\n  fsdp_offload_params: false\n"
        f"kubernetes_config:\n  image: {IMAGE}\n  env: [A=1]\n"
    )
    options = ("--config_file", config, "--gradient_accumulation_steps", "4", "--max_restarts", "3")
    run = run_cli("launch", "--dry_run", *options, "--module", "package.train", forked=True)
    assert run.returncode == 0, run.stderr
    documents = list(yaml.safe_load_all(run.stdout))
    assert [one["kind"] for one in documents] == ["ConfigMap", "JobSet"]
    kept = yaml.safe_load(documents[0]["data"]["config.yaml"])
    assert kept == {"mixed_precision": "bf16", "fsdp_config": {"fsdp_offload_params": False}}
    (container,) = pod_of(documents)["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["ACCELERATE_CONFIG_FILE"] == "/etc/accelerate-core/config.yaml"
    assert variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert variables["A"] == "1"
    assert not [name for name in variables if name.startswith("ACCELERATE_KUBERNETES")]
    assert "OMP_NUM_THREADS" not in variables  # the pods have other cores
    assert documents[1]["metadata"]["name"] == "train"
    words = " ".join(container["command"])
    assert "--num_processes 4 --max_restarts 3 --module package.train" in words


@pytest.mark.parametrize(
    ("given", "chosen", "seconds"),
    [
        ({}, {}, None),
        ({}, {"grace_period": 60}, 60),
        ({"preemption_signals": "SIGTERM"}, {}, 300),
        ({"preemption_signals": "USR1,TERM"}, {"grace_period": 900}, 900),
    ],
)
def test_grace_period_matches_the_preemption_signals(
    given: dict[str, Any], chosen: dict[str, Any], seconds: int | None
) -> None:
    pod = pod_of(manifests_of(planned(**given), **chosen))
    assert pod.get("terminationGracePeriodSeconds") == seconds


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_preempted_run_starts_again_without_counting_as_a_restart(kind: str) -> None:
    documents = manifests_of(planned(), kind=kind, restarts=2)
    spec = documents[0]["spec"]
    jobset = spec["template"]["spec"] if kind == "trainjob" else spec
    (rule,) = jobset["failurePolicy"]["rules"]
    assert jobset["failurePolicy"]["maxRestarts"] == 2
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = jobset["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]["name"]
    by_status, by_eviction = job["podFailurePolicy"]["rules"]
    assert by_status["onExitCodes"]["values"] == [75]
    assert by_status["onExitCodes"]["containerName"] == container
    assert by_eviction["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # as podFailurePolicy requires


def test_restart_policy_of_a_pytorchjob_follows_from_restarts() -> None:
    for restarts, policy in ((0, "Never"), (3, "OnFailure")):
        (job,) = manifests_of(planned(), kind="pytorchjob", restarts=restarts)
        replicas = job["spec"]["pytorchReplicaSpecs"]
        assert {one["restartPolicy"] for one in replicas.values()} == {policy}
        assert job["spec"]["runPolicy"]["backoffLimit"] == restarts


def test_plain_job_has_a_headless_service() -> None:
    service, job = manifests_of(planned(), kind="job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    template = job["spec"]["template"]
    assert template["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    variables = {one["name"]: one["value"] for one in template["spec"]["containers"][0]["env"]}
    assert variables["MASTER_ADDR"] == "train-0.train"
    assert [one["kind"] for one in manifests_of(planned(num_machines=1), kind="job")] == ["Job"]


@pytest.mark.parametrize(
    ("script", "kind", "name"),
    [
        ("src/Train_GPT2.py", "script", "train-gpt2"),
        ("3d.py", "script", "job-3d"),
        ("package.train", "module", "train"),
        ("a" * 80 + ".py", "script", "a" * 45),
    ],
)
def test_name_comes_from_the_script(script: str, kind: str, name: str) -> None:
    plan = planned(script=script, module=kind == "module")
    assert manifests_of(plan)[-1]["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("given", "chosen", "said"),
    [
        ({}, {"image": None}, "needs a container image.*--kubernetes_image"),
        ({"main_process_ip": "10.0.0.1"}, {}, "main_process_ip='10.0.0.1' .*name of its pod"),
        ({"machine_rank": 1}, {}, "machine_rank=1 .*The cluster numbers the pods"),
        ({"preemption_signals": "USR1"}, {}, "preemption_signals='USR1' .*does not have SIGTERM"),
        ({}, {"kind": "job", "restarts": 1}, "--kubernetes_restarts 1 does not work with"),
        ({}, {"name": "Train_1"}, "--kubernetes_name Train_1 must begin with a lowercase"),
        ({}, {"resources": ["gpu"]}, "--kubernetes_resources gpu must have the form NAME=QUANTITY"),
        ({}, {"resources": ["memory=64 GB"]}, "must have the form NAME=QUANTITY"),
        ({}, {"resources": ["nvidia.com/gpu=1.5"]}, "only accepts whole numbers of nvidia.com/gpu"),
        ({}, {"resources": ["cpu=8", "cpu=9"]}, "cpu is used twice, for 8 and 9"),
        ({}, {"volumes": ["a:/data", "b:/data"]}, "/data is used twice, for a and b"),
        ({}, {"volumes": ["a:/dev/shm"]}, "/dev/shm is used twice"),
        ({}, {"node_selector": ["a b=c"]}, "--kubernetes_node_selector a b=c must have the form"),
        ({}, {"env": ["MASTER_ADDR=x"]}, "the job sets MASTER_ADDR for each pod"),
        ({}, {"node_selector": ["gpu"]}, "--kubernetes_node_selector gpu must have .*KEY=VALUE"),
        ({}, {"tolerations": ["gpu:Never"]}, "EFFECT NoSchedule, PreferNoSchedule, NoExecute"),
        ({}, {"volumes": ["data"]}, "--kubernetes_volumes data must have the form CLAIM:/PATH"),
        ({}, {"secrets": ["A=b"]}, "must have the form SECRET or VARIABLE=SECRET/KEY"),
        ({}, {"shm_size": "big"}, "--kubernetes_shm_size big must be a size such as 16Gi"),
        (
            {},
            {"env": ["NOT_SET_HERE"]},
            "copies this variable from this machine, where it is not set",
        ),
    ],
)
def test_error_says_what_is_missing_or_wrong(
    given: dict[str, Any], chosen: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        manifests_of(planned(**given), **chosen)


def test_variable_without_a_value_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "value")
    (container,) = pod_of(manifests_of(planned(), env=["HERE"], shm_size="no"))["containers"]
    assert {"name": "HERE", "value": "value"} in container["env"]
    assert "volumeMounts" not in container


def test_lists_in_environment_variables_are_json() -> None:
    command = ("launch", "--dry_run", "--launcher", "kubernetes", "train.py")
    environ = {"ACCELERATE_KUBERNETES_IMAGE": IMAGE, "ACCELERATE_KUBERNETES_ENV": '["A=1"]'}
    run = run_cli(*command, env=environ, forked=True)
    (container,) = pod_of(list(yaml.safe_load_all(run.stdout)))["containers"]
    assert {"name": "A", "value": "1"} in container["env"]
    run = run_cli(*command, env={**environ, "ACCELERATE_KUBERNETES_ENV": "A=1"}, forked=True)
    assert run.returncode == 2
    assert (
        "ACCELERATE_KUBERNETES_ENV): Input should be a valid list, written as JSON." in run.stderr
    )
