"""Run the scripts of `accelerate.test_utils` on this rank, one after the other."""

import importlib

import worker

import accelerate_drop_in

accelerate_drop_in.install()
scripts = importlib.import_module("accelerate.test_utils.scripts")
ran = []
for name in ("ops", "sync", "distributed_data_loop", "ddp_comm_hook", "script"):
    importlib.import_module(f"{scripts.__name__}.test_{name}").main()
    ran.append(name)
worker.write_result(ran)
