"""`baton generate`: generate from one prompt in this process, streamed to stdout."""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import Annotated

import typer

from baton.cli.options import EngineOptions, ModelArgument, with_options
from baton.imports import without_gc
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest


@with_options
def generate_command(
    options: EngineOptions,
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="Text to continue, or with --chat to answer.")],
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among this many tokens; 0: all.")] = 0,
) -> None:
    """Generate offline, in this process. --seed seeds the sampling too."""
    config = options.to_config(model)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=options.seed
    ).check()
    with without_gc():
        from baton.engine.async_engine import AsyncEngine
        from baton.openai.output import ChoiceOutput
        from baton.text import Tokenizer

    tokenizer = Tokenizer.load(config.model)
    if chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt)
    request = GenerateRequest(request_id=secrets.token_hex(8), prompt_token_ids=ids, sampling_params=params)
    output = ChoiceOutput(tokenizer, request)

    async def run() -> None:
        async for chunk in engine.generate(request):
            sys.stdout.write(output.push(chunk).text)
            sys.stdout.flush()

    engine = AsyncEngine(config, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        engine.start()
        asyncio.run(run())
        print()
    finally:
        engine.close()
    if output.accepted:
        rate = sum(output.accepted) / len(output.accepted)
        print(f"{len(output.token_ids)} tokens, {rate:.2f} drafts accepted per round", file=sys.stderr)
