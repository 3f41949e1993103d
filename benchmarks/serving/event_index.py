"""Memory and speed of the router's index of KV events.

    python -m benchmarks.serving.event_index [BLOCKS]

Prompts come in batches. Each has 128 blocks of 16 tokens, and begins with one of 64 shared prefixes of 32 blocks.
Then prompts are looked up, and some blocks are removed.
"""

from __future__ import annotations

import argparse
import random
import resource
import time

from baton.kvevents.messages import BlockRemoved, BlockStored, EventBatch, decode_batch, encode_batch
from baton.router.index.blocks import BlockIndex
from baton.router.prefixes import PromptBlocks

_SIZE, _BLOCKS, _SHARED = 16, 128, 32


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _stored(hashes: list[bytes], tokens: list[int], parent: bytes | None) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=_SIZE,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", type=int, nargs="?", default=1_000_000)
    most = parser.parse_args().blocks
    if most <= 64 * _SHARED:
        parser.error(f"BLOCKS must be above {64 * _SHARED}, which shared prefixes take")
    rng = random.Random(0)
    index = BlockIndex(max_blocks=2 * most)
    beginnings = [[rng.randrange(1 << 17) for _ in range(_SIZE * _SHARED)] for _ in range(64)]
    heads = [[rng.randbytes(16) for _ in range(_SHARED)] for _ in beginnings]
    asked: list[list[int]] = []
    samples: list[bytes] = []
    applied = 0.0
    before = _rss_bytes()
    for tokens, hashes in zip(beginnings, heads, strict=True):
        index.apply(_stored(hashes, tokens, None))
    while index.num_blocks < most:
        which = rng.randrange(len(beginnings))
        own = [rng.randrange(1 << 17) for _ in range(_SIZE * (_BLOCKS - _SHARED))]
        hashes = [rng.randbytes(16) for _ in range(_BLOCKS - _SHARED)]
        payload = encode_batch(EventBatch(0.0, [_stored(hashes, own, heads[which][-1])]))
        began = time.perf_counter()
        index.apply(*decode_batch(payload).events)
        applied += time.perf_counter() - began
        if len(asked) < 200:
            asked.append(beginnings[which] + own + [1])
        samples += hashes[:1]
    num, used = index.num_blocks, _rss_bytes() - before
    found = []
    for tokens in asked:
        began = time.perf_counter()
        assert index.num_tokens(PromptBlocks(tokens)) == _SIZE * _BLOCKS
        found.append(time.perf_counter() - began)
    misses = []
    for _ in range(200):
        prompt = PromptBlocks([rng.randrange(1 << 17) for _ in range(_SIZE * _BLOCKS)])
        began = time.perf_counter()
        assert index.num_tokens(prompt) == 0
        misses.append(time.perf_counter() - began)
    began = time.perf_counter()
    for sample in samples:
        index.apply(BlockRemoved(block_hashes=[sample], medium="GPU", group_idx=0))
    removed = (time.perf_counter() - began) / len(samples)
    hit, miss = (sorted(times)[len(times) // 2] * 1e6 for times in (found, misses))
    print(f"{num} blocks: {used / 2**20:.0f} MiB, {used / num:.0f} bytes a block")
    print(f"stored, decoded first: {num / applied / 1e3:.0f} thousand blocks a second; removed: {removed * 1e6:.1f} us")
    print(f"look-up of {_SIZE * _BLOCKS} tokens (medians): held {hit:.0f} us, not held {miss:.1f} us")


if __name__ == "__main__":
    main()
