"""The launcher `kubernetes`, which turns a launch into a job for a Kubernetes cluster.

The manifests are plain dictionaries, so neither a Kubernetes client nor the operators' packages are
imported. `kubectl` submits them.
"""

from accelerate_kubernetes.launcher import KubernetesLauncher
from accelerate_kubernetes.settings import KubernetesLaunch

__all__ = ["KubernetesLaunch", "KubernetesLauncher"]
