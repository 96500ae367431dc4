"""A plan as configuration for the programs that run it: DeepSpeed, accelerate, torchtitan, vLLM, ..."""
