"""The launcher `kubernetes`: it describes a launch as a job, and lets kubectl submit it."""

from __future__ import annotations

import shutil
import sys

from accelerate_core.plugin import ConfigurationError
from accelerate_kubernetes.job import describe
from accelerate_kubernetes.manifests import manifests
from accelerate_kubernetes.settings import KubernetesLaunch
from accelerate_launch import LaunchPlan, as_yaml

_SUBMIT = "accelerate_kubernetes.submit"


class KubernetesLauncher:
    """Submits a launch as a job to a Kubernetes cluster.

    Args:
        settings: the image, the resources and the other settings of the job.
    """

    name = "kubernetes"
    api_version = (1, 0)
    #: The pods run in the cluster, not here.
    elsewhere = True
    Settings = KubernetesLaunch

    def __init__(self, settings: KubernetesLaunch) -> None:
        self.settings = settings

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher can start the plan. It is only used if it is named."""
        return plan.launcher == self.name and plan.target.kind != "function"

    def preview(self, plan: LaunchPlan) -> str:
        """Return the manifests as YAML.

        Raises:
            ConfigurationError: a setting is missing or invalid.
        """
        return as_yaml(manifests(describe(plan, self.settings)))

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that submits the job, or that writes it to a file.

        Raises:
            ConfigurationError: a setting is missing or invalid, or there is no kubectl.
        """
        text = self.preview(plan)
        command = [sys.executable, "-m", _SUBMIT]
        if self.settings.output is not None:
            return [*command, "--output", self.settings.output, text]
        if shutil.which("kubectl") is None:
            raise ConfigurationError(
                "There is no kubectl on the PATH of this machine, so the job cannot be submitted. "
                "Install kubectl, or write the job to a file with --kubernetes_output job.yaml and "
                "submit it elsewhere: kubectl apply -f job.yaml."
            )
        context = self.settings.context
        return [*command, *(["--context", context] if context is not None else []), text]
