"""A small stand-in for the API server of a cluster, for the real kubectl.

It lists its resources, stores what is created and returns it. It checks nothing: the manifests are
checked with the operators' models in `test_manifests.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: Group and version -> plural -> kind.
RESOURCES: dict[str, dict[str, str]] = {
    "v1": {"configmaps": "ConfigMap", "services": "Service", "pods": "Pod"},
    "batch/v1": {"jobs": "Job"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
    "trainer.kubeflow.org/v1alpha1": {
        "trainjobs": "TrainJob",
        "trainingruntimes": "TrainingRuntime",
    },
    "kubeflow.org/v1": {"pytorchjobs": "PyTorchJob"},
}


class Cluster:
    """What the stand-in has stored: (kind, namespace, name) -> object."""

    def __init__(self, resources: Mapping[str, Mapping[str, str]]) -> None:
        self.resources = resources
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.asked: list[str] = []


@contextmanager
def api_server(
    folder: Path, resources: Mapping[str, Mapping[str, str]] = RESOURCES, context: str = "here"
) -> Iterator[tuple[Cluster, str]]:
    """Serve a cluster, and yield it with the path of a kubectl configuration."""
    cluster = Cluster(resources)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cluster))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}
        ],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "current-context": context,
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    try:
        yield cluster, str(path)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].rstrip("/")
            found = _discovery(cluster.resources, path)
            if found is not None:
                return self._answer(200, found)
            place = _place(cluster.resources, path)
            if place in cluster.objects:
                return self._answer(200, cluster.objects[place])
            return self._answer(404, _status("NotFound", 404, path))

        def do_POST(self) -> None:
            made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = self.path.partition("?")[0]
            cluster.asked.append(self.path)
            place = _place(cluster.resources, f"{path}/{made['metadata']['name']}")
            assert place is not None, path
            if place in cluster.objects:
                return self._answer(409, _status("AlreadyExists", 409, path))
            made["metadata"]["namespace"] = place[1]
            cluster.objects[place] = made
            return self._answer(201, made)

        def _answer(self, status: int, value: Any) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


def _discovery(resources: Mapping[str, Mapping[str, str]], path: str) -> dict[str, Any] | None:
    if path.startswith("/openapi/v3"):
        return _schemas(resources, path.removeprefix("/openapi/v3").strip("/"))
    groups = [one.split("/") for one in resources if "/" in one]
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        made = []
        for name, version in groups:
            one = {"groupVersion": f"{name}/{version}", "version": version}
            made.append({"name": name, "versions": [one], "preferredVersion": one})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": made}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version not in resources:
        return None
    listed = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "namespaced": True,
            "kind": kind,
            "verbs": ["create", "delete", "get", "list", "patch"],
        }
        for plural, kind in resources[version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


def _schemas(resources: Mapping[str, Mapping[str, str]], path: str) -> dict[str, Any]:
    """Say that the server checks fields itself, so that kubectl leaves it to the server."""
    roots = {f"apis/{one}" if "/" in one else f"api/{one}": one for one in resources}
    if not path:
        return {"paths": {r: {"serverRelativeURL": f"/openapi/v3/{r}"} for r in roots}}
    version = roots[path]
    group, _, number = version.rpartition("/")
    paths = {
        f"/{path}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "x-kubernetes-group-version-kind": {
                    "group": group,
                    "version": number,
                    "kind": kind,
                },
            }
        }
        for plural, kind in {**resources[version], "namespaces": "Namespace"}.items()
    }
    return {"openapi": "3.0.0", "info": {"title": "a cluster", "version": "1"}, "paths": paths}


def _place(resources: Mapping[str, Mapping[str, str]], path: str) -> tuple[str, str, str] | None:
    version, found, rest = path.partition("/namespaces/")
    version = version.removeprefix("/apis/").removeprefix("/api/")
    parts = rest.split("/")
    if not found or len(parts) != 3 or version not in resources:
        return None
    namespace, plural, name = parts
    return resources[version][plural], namespace, name


def _status(reason: str, code: int, path: str) -> dict[str, Any]:
    name = path.rpartition("/")[2]
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": f"{name}: {reason}",
        "reason": reason,
        "code": code,
    }
