"""Offline generation with speculative decoding, in one process. Run it from the root of the repository."""

from baton import LLM, SamplingParams

with LLM(
    "models/baton-demo-llama",
    speculative_config={"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3},
) as llm:
    prompts = ["The with statement is used to", "An import statement"]
    for result in llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0.0)):
        output = result.outputs[0]
        print(repr(output.text), "accepted drafts per round:", output.accepted)
