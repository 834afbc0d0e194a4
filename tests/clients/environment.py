"""Make an environment for clients: `environment.py FOLDER accelerate==1.15.0` (or a project's folder).

`requirements.txt` names the clients. A folder that ends in `-4.57` gets those in `requirements-4.57.txt`.

It lies over the environment that runs this, so torch and our packages, which are installed to be edited,
are not installed twice; in its own site-packages are the clients, and what they import as `accelerate`.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
#: The older transformers that some libraries still require.
OLD = "4.57"


def make(folder: Path, accelerate: str) -> None:
    """Make the environment anew, with this distribution under the name `accelerate`."""
    venv.create(folder, clear=True)
    below = sysconfig.get_path("purelib")
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "below.pth").write_text(f"{below}\nimport site; site.addsitedir({below!r})\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    how = ["install", "--no-compile", "--no-warn-conflicts", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *how, "--no-deps", "--no-build-isolation", accelerate], check=True)
    variant = f"-{OLD}" if folder.name.endswith(f"-{OLD}") else ""
    subprocess.run([*pip, *how, "-r", str(HERE / f"requirements{variant}.txt")], check=True)
    if not variant:
        # It depends on torchvision, which cannot be imported here: the case loads a module without it.
        subprocess.run([*pip, *how, "--no-deps", "denoising-diffusion-pytorch==2.3.*"], check=True)
    # fastai brings torchvision, whose build on PyPI fits one build of torch; where it does not load,
    # transformers does not either.
    if subprocess.run([pip[0], "-c", "import torchvision"], stderr=subprocess.DEVNULL).returncode:
        subprocess.run([*pip, "uninstall", "-y", "torchvision"], check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]).absolute(), sys.argv[2])
