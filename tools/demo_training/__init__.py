"""Training of the demo checkpoints, from text every Python carries: a Llama target and two EAGLE heads for it, a
DeepSeek-type target with its MTP module and an EAGLE-3 head.
"""
