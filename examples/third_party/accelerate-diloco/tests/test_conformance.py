from accelerate_testing import BackendSuite


class TestDiLoCo(BackendSuite):
    plugin = "diloco"
