#!/usr/bin/env bash
# SGLang on a host with two GPUs: a prefill server on the first, a decode server on the second, Baton's router on port 8000.
# With one GPU, both on it: GPUS="0 0" gpu_host.sh MODEL --mem-fraction-static 0.4. Not run on GPUs yet.
# In SGLang's own environment:  pip install nixl baton-serve
# Then:                         gpu_host.sh MODEL [flags for both servers, such as --speculative-algorithm EAGLE3 ...]
set -euo pipefail
MODEL=$1
shift
read -r FIRST SECOND <<< "${GPUS:-0 1}"
KEYS=${KEYS:-$PWD/keys}
export SGLANG_HOST_IP=127.0.0.1 # without it SGLang needs a route to the internet

baton keys --output "$KEYS" --engines P,D
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT

engine() { # gpu name role port flags...
    CUDA_VISIBLE_DEVICES=$1 BATON_SGLANG_CONFIG='{"engine_id": "'"$2"'", "keys": "'"$KEYS"'"}' \
        sglang serve --model-path "$MODEL" --served-model-name model --host 127.0.0.1 --port "$4" \
        --disaggregation-mode "$3" --disaggregation-transfer-backend baton "${@:5}" &
}
engine "$FIRST" P prefill 8101 "$@"
engine "$SECOND" D decode 8102 "$@"
for port in 8101 8102; do
    until curl -sf "http://127.0.0.1:$port/server_info" > /dev/null; do
        [ "$(jobs -rp | wc -l)" = 2 ] # a server that did not start has said why
        sleep 1
    done
done
baton router --engine sglang --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8102 \
    --keys "$KEYS" --tokenizer "$MODEL" --port 8000
