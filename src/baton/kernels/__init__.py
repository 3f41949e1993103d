"""CPU and GPU kernels: tensors or addresses in, tensors out. They know nothing of models or requests."""
