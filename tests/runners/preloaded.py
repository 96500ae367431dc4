"""What the processes of `forks` begin with. It may start no thread and ask no GPU: they are forked."""

import os
from importlib import import_module

os.environ["OMP_NUM_THREADS"] = "1"
# Counts GPUs by their driver's list: CUDA, once begun, cannot be used by a forked process.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

for name in (
    "torch.distributed.fsdp",
    "torch.profiler",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "runners.engines.ddp",
    "runners.engines.fsdp2",
    "runners.engines.zero_redundancy",
    "runners.jobs.harness",
    "runners.worlds",
    "runners.zero.engine",
):
    import_module(name)
