"""A pass's fields and the columns of its layers: int64 numbers and addresses of arrays.

Shapes: T rows, H query heads, G key-value heads, D head size, E hidden size, I inner width, N sampled rows.
"""

from __future__ import annotations

# A weight is three addresses: its own, that of its scales (0: not int8), that of its bias (0: none).
NUM_FIELDS = 55
(
    FAULT,
    NUM_ROWS,
    NUM_REQUESTS,
    NUM_LAYERS,
    HIDDEN,
    HEADS,
    KV_HEADS,
    SIZE,
    INNER,
    EPS,
    SCALE,
    TILES,  # whether they may be used
    POSITIONS,  # int64 [T], which are slots
    ANGLES,  # int64 [T], by which heads are rotated
    QUERY_START,
    LAYERS,  # [layers, NUM_COLUMNS]
    PLACES,  # [layers, 3]: a layer's region, its index there, its window (0: none)
    REGIONS,  # [regions, NUM_REGION_COLUMNS]
    ROTARIES,  # [rotaries, NUM_ROTARY_COLUMNS]
    FEATURES,  # [layers]: where a layer's input [T, E] is copied (0: nowhere)
    STAGES,
    SCRATCH,  # SCRATCH_BYTES per thread and row
    X,  # [T, E]: the residual stream, in and out
    NORMED,  # [T, E], or [T, 2 E] for a drafter
    MERGED,  # [T, (H + 2 G) D]
    ATTENDED,  # [T, H D]
    INNERS,  # [T, I]
    OPERAND,  # rows as products read them, where that is not as they are
    # Drafters: row t continues from id and state SOURCES[t], or t if SOURCES is 0.
    EMBEDDING,
    IDS,  # int64
    FEATURES_IN,  # [T, FEATURES_WIDTH], for FC; 0: STATES are given
    FEATURES_WIDTH,
    FC, _, _,
    STATES,  # [., E]
    SOURCES,
    NUM_SAMPLED,
    SAMPLED,  # int64 [N] (0: all rows)
    FINAL_NORM,  # 0: OUTPUTS are given
    FEEDS_NORMED,  # whether FEEDBACK is the norm's output
    OUTPUTS,  # [N, E]
    FEEDBACK,  # [N, E]: the next STATES
    VOCAB,
    HEAD, _, _,
    TARGET_IDS,  # int64 [VOCAB] (0: the same)
    NOISES,  # [N]: addresses of float64 noise by target id (0: none)
    TEMPERATURES,  # float64 [N]
    BESTS,  # BEST_BYTES per thread and row
    CHECKS,  # whether -1 is chosen where a logit is not finite
    CHOSEN,  # int64 [N]
    MARGINS,  # float64 [N]: the best score less the second (0: not wanted)
    LOGITS,  # [N]: addresses of float32 [VOCAB] for a row's logits (0: not wanted)
) = range(NUM_FIELDS)  # fmt: skip
NUM_COLUMNS = 19
(
    INPUT_NORM, QKV, _, _, Q_NORM, K_NORM, OUT, _, _, POST_NORM, GATE_UP, _, _, DOWN, _, _,
    ROTARY,
    HIDDEN_NORM,  # of an EAGLE-3 head's first layer
    ADDS_NORMED,  # whether its residual stream begins with the norm's output
) = range(NUM_COLUMNS)  # fmt: skip
NUM_REGION_COLUMNS = 6
KV, PAGES, KV_LAYERS, PAGE_SIZE, PAGE_TABLE, PAGE_COLUMNS = range(NUM_REGION_COLUMNS)
NUM_ROTARY_COLUMNS = 4
# Tables [rows, half].
COS, SIN, HALF, ROTARY_ROWS = range(NUM_ROTARY_COLUMNS)

STAGES_PER_LAYER, STAGES_OF_DRAFTS = 12, 6
# The kernel's arguments.
NUM_ARGUMENTS = 3
NUM_PASSES, PASSES = 1, 2
