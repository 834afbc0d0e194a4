"""Where backend names may occur, what modules may import, and how long files may be."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import accelerate_testing
from accelerate_core.plugins.discovery import installed

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "accelerate_core"
DISTRIBUTIONS = [ROOT / "core", *sorted(p.parent for p in ROOT.glob("backends/*/pyproject.toml"))]
DISTRIBUTIONS += sorted(p.parent for p in ROOT.glob("trackers/*/pyproject.toml"))
DISTRIBUTIONS += sorted(p.parent for p in ROOT.glob("extensions/*/pyproject.toml"))

WORDS = re.compile(
    r"deepspeed|megatron|fsdp|\bddp\b|DistributedDataParallel|torch_xla|\bxla\b|transformer_engine|torchao"
    r"|\bmsamp|wandb|tensorboard|mlflow|comet_ml|clearml|dvclive|swanlab|trackio",
    re.IGNORECASE,
)
HEAVY = ("torchvision", "transformers", "datasets", "pandas", "scipy", "sklearn", "matplotlib")


def modules_after(code: str) -> set[str]:
    show = f"import sys; {code}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", show], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


def test_backend_and_tracker_names_occur_only_in_the_catalog() -> None:
    found = [
        f"{path.relative_to(CORE)}:{number}: {line.strip()}"
        for path in sorted(CORE.rglob("*.py"))
        if path.name != "catalog.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if WORDS.search(line)
    ]
    assert found == []


def test_search_for_backend_names_finds_them() -> None:
    names = ("catalog.py", "known_packages.json")
    catalog = " ".join((CORE / "plugins" / name).read_text() for name in names)
    assert len(set(map(str.lower, WORDS.findall(catalog)))) > 10


@pytest.mark.parametrize(
    "code",
    [
        "import accelerate_core",
        "from accelerate_core.plugins.discovery import installed; installed()",
        "import accelerate_core.cli",
        "import accelerate_core.utils",
        "from accelerate_launch import LaunchPlan, Launcher, Target, target_command",
    ],
)
def test_modules_that_do_not_need_torch_do_not_import_it(code: str) -> None:
    assert "torch" not in modules_after(code)


def test_importing_a_plugin_loads_nothing_heavier_than_torch() -> None:
    plain = modules_after("import torch")
    assert not {*HEAVY} & (modules_after("import accelerate_ddp") - plain)


def test_accelerator_on_one_process_imports_no_plugin() -> None:
    code = "from accelerate_core import Accelerator; Accelerator(cpu=True)"
    assert "accelerate_ddp" not in modules_after(code)


#: The modules that plugins can import: one of the core, and those of the extensions.
PUBLIC = (
    "accelerate_core.plugin",
    "accelerate_checkpoint",
    "accelerate_compile",
    "accelerate_launch",
    "accelerate_testing",
    "accelerate_tracking",
)
_PACKAGES = "accelerate_(?:core|launch|testing|checkpoint|tracking|compile)"
IMPORT = re.compile(
    rf"^\s*from ({_PACKAGES}[\w.]*) import (\([^)]*\)|.+)$|^\s*import ({_PACKAGES}\S*)", re.M
)
#: Distributions of this repository that are plugins like those of third parties.
PLUGINS = (
    "backends/*",
    "trackers/*",
    "extensions/checkpoint",
    "extensions/tracking",
    "extensions/compile",
    "extensions/dispatch",
    "extensions/big_model",
    "extensions/kubernetes",
    "extensions/object_store",
    "extensions/watch",
)


def test_plugins_import_only_public_names() -> None:
    policy = (ROOT / "docs" / "contract.md").read_text()
    assert all(f"`{module}`" in policy for module in PUBLIC)
    names = {module: set(import_module(module).__all__) for module in PUBLIC}
    templates = Path(accelerate_testing.__file__).parent.glob("scaffold/templates/**/*.py.in")
    examples = (ROOT / "examples").glob("*/**/src/**/*.py")
    ours = [path for folder in PLUGINS for path in ROOT.glob(f"{folder}/src/**/*.py")]
    pages = (
        ROOT / "docs" / f"{name}.md"
        for name in (
            "plugins",
            "write_a_backend",
            "write_a_tracker",
            "write_a_checkpointer",
            "write_a_loader",
        )
    )
    exported = set(installed().exports)  # public names of these plugins
    found = set()
    for path in (*templates, *examples, *pages, *ours):
        for module, imported, whole in IMPORT.findall(path.read_text()):
            if module.partition(".")[0] in path.parts:
                continue  # from the same package
            assert not whole, f"{path}: import {whole}"
            imported = re.sub(r"#.*", "", imported)
            for name in filter(None, map(str.strip, imported.strip("() ").split(","))):
                name = name.split(" as ")[0]
                found.add((module, name))
                known = "@" in name or (
                    module == "accelerate_core" and (name in exported or name.startswith("DiLoCo"))
                )
                assert known or name in names.get(module, ()), f"{path}: {name} of {module!r}"
    assert {
        ("accelerate_launch", "LaunchPlan"),
        ("accelerate_launch", "target_command"),
        ("accelerate_core.plugin", "Backend"),
        ("accelerate_tracking", "GeneralTracker"),
    } <= found


#: Extensions that work on the core itself, and the modules behind `accelerate_core.plugin` that they import:
#: accelerate-launch resolves settings and selects launchers, accelerate-testing checks what the core selects
#: and calls, and accelerate-drop-in serves the core's objects under Accelerate's names.
INSIDERS = {
    "launch": (
        "accelerator.compatibility",
        "accelerator.construction",
        "backend",
        "booleans",
        "builtin.no_checkpointer",
        "config.core",
        "config.files",
        "config.lookup",
        "config.provenance",
        "contract.capabilities",
        "contract.hooks",
        "distributed.collectives",
        "errors",
        "plugins",
        "plugins.discovery",
        "plugins.factory",
        "plugins.selection",
    ),
    "testing": (
        "backend.precision",
        "config.handlers",
        "config.provenance",
        "config.schema",
        "contract.capabilities",
        "contract.hooks",
        "distributed",
        "distributed.collectives",
        "plugins",
        "plugins.discovery",
        "plugins.manager",
        "plugins.selection",
    ),
    "drop_in": (
        "accelerator.signature",
        "booleans",
        "builtin.compiled",
        "config",
        "config.enums",
        "config.files",
        "config.lookup",
        "data",
        "data.loader",
        "data.order",
        "data.resumable",
        "data.rng",
        "data.shard",
        "data.sources",
        "distributed",
        "distributed.process",
        "distributed.tree",
        "errors",
        "plugins",
        "prepare.prepared",
        "state",
        "training",
        "training.forward",
        "training.metric",
    ),
}


@pytest.mark.parametrize("extension", INSIDERS)
def test_extensions_import_no_other_modules_of_the_core(extension: str) -> None:
    found = set()
    for path in ROOT.glob(f"extensions/{extension}/src/**/*.py"):
        for module in re.findall(
            r"^\s*(?:from|import) accelerate_core\.([\w.]+)", path.read_text(), re.M
        ):
            found.add(module)
    assert len(found) > 5
    assert found - {"plugin", "utils"} - set(INSIDERS[extension]) == set()


def test_every_name_in_the_plugin_module_is_documented() -> None:
    from accelerate_core import plugin

    page = (ROOT / "docs" / "plugin_module.md").read_text()
    page = page.partition("\n## Members of the first argument")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(plugin.__all__)
    assert all(hasattr(plugin, name) for name in plugin.__all__)
    with pytest.raises(AttributeError, match="Did you mean 'Backend'"):
        plugin.Backends  # noqa: B018


def test_modules_import_only_from_lower_layers() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_every_distribution_has_the_required_files(folder: Path) -> None:
    for name in ("README.md", "CHANGELOG.md", "pyproject.toml"):
        assert (folder / name).read_text().strip(), name
    assert list(folder.glob("src/*/py.typed"))


def test_no_file_is_too_long() -> None:
    paths = [path for folder in DISTRIBUTIONS for path in folder.glob("src/**/*.py")]
    assert {str(p): n for p in paths if (n := len(p.read_text().splitlines())) > 700} == {}
