"""One mistake per line. Type checkers must flag each line that ends in `# mistake`, and no other."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from accelerate_core import Acelerator  # mistake
from accelerate_core import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    PartialState,
)

Accelerator(mixed_precison="bf16")  # mistake
Accelerator(mixed_precision=16)  # mistake
Accelerator(gradient_accumulation_steps="two")  # mistake
Accelerator(deepspeed_plugin=3)  # mistake
Accelerator(deepspeed_plugin=DeepSpeedPlugin(zerostage=2))  # mistake
Accelerator(fsdp_plugins=None)  # mistake
Accelerator(dataloader_config=AutocastKwargs())  # mistake
Accelerator(dataloader_config=DataLoaderConfiguration(split_batch=True))  # mistake
Accelerator(project_dir=3)  # mistake

accelerator = Accelerator(cpu=True)
model = nn.Linear(2, 1)
loss = torch.zeros(())

accelerator.bakward(loss)  # mistake
accelerator.backward(1)  # mistake
accelerator.backward()  # mistake
accelerator.save_state(3)  # mistake
accelerator.save_state("here", safe=True, blocking="no")  # mistake
accelerator.load_state(output_dir=3, input_dir=3)  # mistake
accelerator.save_model(model)  # mistake
accelerator.clip_grad_norm_(model.parameters(), "1.0")  # mistake
accelerator.clip_grad_norm_(model, 1.0)  # mistake
accelerator.clip_grad_value_(model.parameters())  # mistake
accelerator.accumulate(3)  # mistake
accelerator.accumulate(model, items=3)  # mistake
accelerator.no_sync("model")  # mistake
accelerator.autocast(True)  # mistake
accelerator.gather()  # mistake
accelerator.gather(loss).bakward()  # mistake
accelerator.reduce(loss, 3)  # mistake
accelerator.pad_across_processes(loss, dims=1)  # mistake
accelerator.log(3)  # mistake
accelerator.log({"loss": 1}, "first")  # mistake
accelerator.init_trackers()  # mistake
accelerator.init_trackers("name", config=3)  # mistake
accelerator.prepare_model(3)  # mistake
accelerator.unwrap_model("model")  # mistake
accelerator.get_state_dict()  # mistake
accelerator.is_main_proces  # mistake
accelerator.gradient_accumulation_steps = "two"  # mistake
accelerator.gradient_accumulation_step = 2  # mistake
accelerator.state.devise  # mistake
accelerator.print_(3)  # mistake
accelerator.wait_for_everyone(1)  # mistake
accelerator.prepare(model, device_placment=[True])  # mistake
accelerator.prepare(model, device_placement=True)  # mistake
accelerator.prepare(SGD(model.parameters())).steps  # mistake
PartialState().num_proceses  # mistake
PartialState().debugs = True  # mistake

first, optimizer = accelerator.prepare(model, SGD(model.parameters()))
print(first)
optimizer.stepp()  # mistake
one, two, three = accelerator.prepare(model, optimizer)  # mistake
text: str = accelerator.num_processes  # mistake
number: int = accelerator.save_state("here")  # mistake
