"""CPU and GPU kernels: tensors or addresses in, tensors out. Independent of models and requests."""
