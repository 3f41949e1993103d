"""Training of the demo checkpoints, from text that every Python contains: a Llama target and two EAGLE heads for it, a
DeepSeek-type target with its MTP module and an EAGLE-3 head.
"""
