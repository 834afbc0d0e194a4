from accelerate_core.testing import BackendSuite


class TestDiLoCo(BackendSuite):
    plugin = "diloco"
