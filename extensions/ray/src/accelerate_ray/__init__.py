"""Launch training on a Ray cluster: `accelerate-core launch --launcher ray train.py`.

`launcher.py` is the plugin and imports no Ray. It starts `driver.py`, which connects to the cluster,
reserves a placement group (`cluster.py`) and starts one actor per rank (`rank_actor.py`). `run.py`
watches the ranks, and starts them again if one fails or its node dies.
"""
