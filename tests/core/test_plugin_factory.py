"""One factory and one selection for all kinds of plugins, including a third party's own kind."""

from __future__ import annotations

from pathlib import Path

import dummies

STORES = """
from accelerate_core.plugin import Claim, KwargsHandler, option, settings

@settings
class Settings(KwargsHandler):
    bucket: str = option(default="local", help="where")

class Base:
    api_version = (1, 0)
    Settings = Settings
    def __init__(self, folder, settings):
        self.received = [type(self).__name__, folder, settings.bucket]

class Disk(Base): ...
class Cloud(Base):
    @classmethod
    def detect(cls, request): return Claim(1, "CLOUD is set") if request.env_flag("CLOUD") else None
class Old(Base):
    api_version = (0, 9)
class Faulty(Base):
    def __init__(self, folder, settings): raise ValueError("no disk")
"""


def test_extension_can_define_its_own_kind_of_plugin(tmp_path: Path) -> None:
    package = dummies.distribution(tmp_path, "stores", STORES, {"triggers": {"CLOUD": "Cloud"}})
    points = tmp_path / f"{package}-1.0.dist-info" / "entry_points.txt"
    classes = {"disk": "Disk", "cloud": "Cloud", "old": "Old", "faulty": "Faulty"}
    lines = [f"{name} = {package}:{cls}" for name, cls in classes.items()]
    kinds = ["[accelerate_core.kinds]", "store = acme.stores", "[acme.stores]", *lines]
    points.write_text(points.read_text() + "\n".join(kinds) + "\n")
    code = """
    from accelerate_core.config.provenance import SourcedValue
    from accelerate_core.plugin import PluginFactory, Request, Rule, Sources, Topology, select
    rule = Rule("disk", claims=True, by_name="--store {name}")
    def make(name=None, **environ):
        environ = {**os.environ, **environ}
        try:
            chosen = select(
                "store", Request({}, environ, Topology()), SourcedValue(name, "the test"), rule)
            record = chosen.or_raise().record
            return PluginFactory(Sources.of(environ)).create(record, "here").received
        except Exception as error:
            return [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
    from accelerate_launch.explain.planned_run import planned_run
    from accelerate_launch.explain.why import why
    (store,) = why("disk", planned_run(os.environ))
    out([make(), make(CLOUD="1", ACCELERATE_CLOUD_BUCKET="b"), make("old"), make("faulty"), make("dsk"),
         [store.kind, store.state, store.advice]])
    """
    usual, claimed, old, faulty, misspelt, store = dummies.run(tmp_path, code)
    assert usual == ["Disk", "here", "local"]
    assert claimed == ["Cloud", "here", "b"]
    assert old[0] == "PluginVersionError"
    assert "The store plugin old (dummy-stores 1.0) was written for an older contract" in old[1]
    note = "accelerate-core: hook '__init__' of plugin faulty (dummy-stores 1.0)"
    assert faulty == ["ValueError", "no disk", note]
    assert misspelt[0] == "MissingPluginError"
    assert "Did you mean 'disk'?" in misspelt[1]
    assert store == ["store", "available", "see the package that defines plugins of kind 'store'"]


LAUNCHERS = """
class Left:
    name = "left"
    api_version = (1, 0)
    def accepts(self, plan): return True
    def launch_command(self, plan): raise OSError("no hosts")
class Right(Left):
    name = "right"
    def launch_command(self, plan): return ["right"]
class Faulty(Left):
    name = "faulty"
    def __init__(self): raise OSError("no licence")
"""


def test_launchers_are_selected_and_named_in_errors_like_other_plugins(tmp_path: Path) -> None:
    groups = {
        "launchers": {"left": "Left", "right": "Right", "faulty": "Faulty"},
        "triggers": {"START_LEFT": "Left", "START_RIGHT": "Right", "START_FAULTY": "Faulty"},
    }
    dummies.distribution(tmp_path, "two", LAUNCHERS, groups)
    code = """
    from accelerate_core.config.provenance import SourcedValue
    from accelerate_launch import LaunchPlan, Target
    from accelerate_launch.starting import command_of
    def attempt(*triggers, launcher=None):
        triggered = {f"START_{name}": SourcedValue("1", "the test") for name in triggers}
        try:
            return command_of(LaunchPlan(Target("x"), launcher=launcher, contributed=triggered))
        except Exception as error:
            return [type(error).__name__, str(error)]
    out([attempt("LEFT", "RIGHT"), attempt("RIGHT"), attempt("RIGHT", "FAULTY"),
         attempt(launcher="faulty"), attempt("LEFT")])
    """
    tie, right, without_faulty, named, failing = dummies.run(tmp_path, code)
    assert tie[0] == "PluginConflictError"
    assert "The launchers 'left', 'right' claim this run with equal priority 100" in tie[1]
    assert "Choose one: --launcher left, or disable one with" in tie[1]
    assert right == without_faulty == ["right"]
    assert named[0] == failing[0] == "PluginError"
    assert "faulty (dummy-two 1.0) is broken: its __init__() raised OSError: no licence" in named[1]
    assert "left (dummy-two 1.0) is broken: its launch_command() raised OSError" in failing[1]


TRACKER = """
from accelerate_core.plugin import KwargsHandler, option, settings
from accelerate_tracking import GeneralTracker

@settings
class Settings(KwargsHandler):
    server: str = option(default="none", help="where")

class Acme(GeneralTracker):
    name = "acme"
    api_version = (1, 0)
    requires_logging_directory = False
    Settings = Settings
    tracker = None
    def __init__(self, project, settings, colour="red"):
        super().__init__()
        self.received = [project, settings.server, colour]
    def store_init_configuration(self, values): ...
    def log(self, values, step=None, **kwargs): ...
"""


def test_tracker_settings_are_read_from_the_environment(tmp_path: Path) -> None:
    dummies.distribution(tmp_path, "acme", TRACKER, {"trackers": {"acme": "Acme"}})
    code = """
    from accelerate_tracking import TrackerHub
    hub = TrackerHub("acme")
    hub.init_trackers("p", init_kwargs={"acme": {"colour": "blue"}})
    out(hub.trackers[0].received)
    hub.finish()
    """
    environ = {"ACCELERATE_ACME_SERVER": "there"}
    assert dummies.run(tmp_path, code, environ) == ["p", "there", "blue"]
